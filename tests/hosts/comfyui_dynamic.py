"""What our nodes ask of ComfyUI's dynamic VRAM, in a ComfyUI process without a card, as one JSON object.

Its own ModelPatcherDynamic and model management run for "cuda:0"; a stand-in for the library below them keeps account
of pages and host buffers, and what would be put on the card stays where it is.

COMFYUI_PYTHON tests/hosts/comfyui_dynamic.py COMFYUI_DIR [the folder of another comfy_aimdo]
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import comfyui_inside as inside
import torch
from torch.overrides import TorchFunctionMode

PAGE = 1 << 20
"""As the models are narrow: the library's own are 32 times as large."""
CARD = torch.device("cuda", 0)
BUDGET, DECODES, CLIP = "540MiB", "640MiB", "1000MiB"


class Entry:
    """A function of the library, which takes its signature as ctypes gives it."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


class Range:
    """Pages of a model's addresses."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.pages = -(-size // PAGE)
        self.watermark = self.pages
        self.resident: set[int] = set()


class Library:
    """The functions of comfy_aimdo's library that a load and our bound come to."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self.calls: list[list[Any]] = []
        self.refuses = ""
        self.buffers: dict[int, Any] = {}
        self.freed: list[int] = []

    def __getattr__(self, name: str) -> Entry:
        call = getattr(type(self), f"on_{name}", None)
        entry = Entry((lambda *args: 1) if call is None else functools.partial(call, self))
        vars(self)[name] = entry
        return entry

    def of(self, pointer: int) -> Range:
        return self.ranges[pointer - 1]

    def on_hostbuf_allocate(self, *given: Any) -> int:
        number = len(self.buffers) + 1
        self.buffers[number] = (ctypes.c_uint8 * (1 << 20))()
        return number

    def on_hostbuf_free(self, number: int) -> None:
        self.freed.append(number)

    def on_hostbuf_get_raw_address(self, number: int) -> int:
        return ctypes.addressof(self.buffers[number])

    def on_hostbuf_extend(self, number: int, size: int, reallocate: bool, register: bool, grown: Any) -> int:
        grown._obj.value = size
        return self.on_hostbuf_get_raw_address(number)

    def on_vbar_allocate(self, context: Any, size: int, device: int, *others: Any) -> int:
        self.ranges.append(Range(len(self.ranges), size))
        return len(self.ranges)

    def on_vbar_get(self, context: Any, pointer: int) -> int:
        return pointer << 40

    def on_vbar_prioritize(self, context: Any, pointer: int, clamp: int) -> None:
        one = self.of(pointer)
        one.watermark = one.pages
        self.calls.append(["load", one.number])

    def on_vbar_set_watermark(self, context: Any, pointer: int, size: int) -> bool:
        one = self.of(pointer)
        if self.refuses == ("bound" if -(-size // PAGE) < one.pages else "opening"):
            return False
        one.watermark = min(one.pages, -(-size // PAGE))
        one.resident &= set(range(one.watermark))
        self.calls.append(["all" if one.watermark == one.pages else one.watermark, one.number])
        return True

    def on_vbar_free_memory(self, context: Any, pointer: int, size: int) -> int:
        one, freed = self.of(pointer), 0
        while freed < size and one.watermark:
            one.watermark -= 1
            if one.watermark in one.resident:
                one.resident.remove(one.watermark)
                freed += PAGE
        self.calls.append(["freed", one.number])
        return freed

    def on_vbar_loaded_size(self, context: Any, pointer: int) -> int:
        return PAGE * len(self.of(pointer).resident)

    def on_vbar_fault(self, context: Any, pointer: int, offset: int, size: int, signature: Any) -> int:
        one, pages = self.of(pointer), range(offset // PAGE, -(-(offset + size) // PAGE))
        if pages.stop > one.watermark:
            return 1
        one.resident |= set(pages)
        return 0


class StaysHere(TorchFunctionMode):
    """What is sent to the card stays in host memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args = [torch.device("cpu") if one == CARD else one for one in args]
        named = {name: torch.device("cpu") if one == CARD else one for name, one in (kwargs or {}).items()}
        return func(*args, **named)


def main(host: str, *aimdo: str) -> None:
    os.environ["SD_LOWVRAM_CACHE"] = tempfile.mkdtemp()  # a plan that is cached copies no model
    inside.enter(Path(host))
    sys.path[:0] = aimdo
    try:
        from comfy_aimdo import control
    except ImportError:  # a ComfyUI without dynamic VRAM
        print(json.dumps({"absent": True}))
        return
    library = control.lib = Library()
    control.devctxs = [1]
    import comfy.memory_management
    import comfy.model_management as management

    options = sys.modules["comfy.cli_args"].args
    options.disable_comfy_compiler = options.disable_cuda_graphs = options.disable_pinned_memory = False
    models = [inside.model("sd15", seed=seed).model for seed in range(3)]
    with_loras = {kind: inside.model(kind).model for kind in ("sd15", "flux")}
    vae = inside.autoencoder("sd15")
    comfy.memory_management.aimdo_enabled = True  # from here on layers are made without weights, which files assign
    management.vram_state = management.VRAMState.NORMAL_VRAM
    management.get_free_memory = lambda *args, **kwargs: (8 << 30, 0) if kwargs.get("torch_free_too") else 8 << 30
    management.cuda_device_context = contextlib.nullcontext
    for name in ("synchronize", "empty_cache", "ipc_collect"):
        setattr(torch.cuda, name, lambda *args: None)
    nodes = inside.our_nodes()
    _on_a_named_card()
    with StaysHere(), torch.inference_mode():
        found = _runs(library, nodes, models, vae)
        found["buffers"] = {kind: _buffers(library, nodes, base, vae) for kind, base in with_loras.items()}
        print(json.dumps(found))


def _on_a_named_card() -> None:
    """Plans are made for a card that is not here, each size when it comes, and what runs is not measured."""
    pack = inside.pack_name()
    loading = importlib.import_module(".nodes.loading", pack)
    loading._PAGE = loading._CHUNK = PAGE
    importlib.import_module(".nodes.optimising", pack).foresee_sampling = lambda model: None
    request, host = (importlib.import_module(f".nodes.{name}", pack) for name in ("node_request", "host"))
    rates = importlib.import_module(".sd_lowvram.devices.performance", pack).profile("rtx3060")
    request.request_for = functools.partial(request.request_for, rates=rates)
    host.is_watched, host.budget_of = (lambda device: False), (lambda device, free: free)


def dynamic(base: Any) -> Any:
    """The host's ModelPatcherDynamic of a model."""
    import comfy.model_patcher

    return comfy.model_patcher.ModelPatcherDynamic(base, load_device=CARD, offload_device=torch.device("cpu"))


def touch(library: Library, patcher: Any) -> None:
    """Fault in what the model's layers fault in when they are called."""
    import comfy_aimdo.model_vbar as vbar

    for module in patcher.model.modules():
        if hasattr(module, "_v") and vbar.vbar_fault(module._v) is not None:
            vbar.vbar_unpin(module._v)


class Guider:
    """Samples no more than the host's own load and the calls around it."""

    def __init__(self, patcher: Any) -> None:
        self.model_patcher = patcher
        self.model_options = patcher.model_options
        self.cfg = 5.0
        self.conds: dict[str, Any] = {}

    def sample(self, run: Any, side: int = 16, channels: int = 4) -> None:
        from comfy.patcher_extension import WrapperExecutor, WrappersMP

        def sampling(noise: Any, *args: Any, **kwargs: Any) -> None:
            import comfy.sampler_helpers as helpers

            options = {"transformer_options": {"wrappers": self.model_patcher.wrappers}}
            helpers.prepare_sampling(self.model_patcher, noise.shape, self.conds, options)
            run(self.model_patcher)

        wrappers = self.model_patcher.wrappers.get(WrappersMP.OUTER_SAMPLE, {}).values()
        executor = WrapperExecutor.new_class_executor(sampling, self, [one for all_ in wrappers for one in all_])
        executor.execute(torch.zeros(1, channels, side, side), None, None, torch.tensor([9.0, 3.0, 0.0]))


def _runs(library: Library, nodes: dict[str, Any], models: list[Any], vae: Any) -> dict[str, Any]:
    import comfy.model_management as management
    from comfy.patcher_extension import CallbacksMP

    model, other, clip = map(dynamic, models)
    vae.device, vae.patcher = CARD, dynamic(vae.first_stage_model)
    low = nodes["LowVRAM"]()
    made, _, record, _ = low.optimize(model, vae, BUDGET)["result"]
    _, made_vae, decoding, _ = low.optimize(model, vae, DECODES)["result"]
    second = low.optimize(other, vae, BUDGET)["result"][0]
    found: dict[str, Any] = {"calls": {}}

    def told(name: str, work: Any) -> None:
        library.calls.clear()
        with contextlib.suppress(management.InterruptProcessingException):
            work()
        found["calls"][name] = list(library.calls)

    run = functools.partial(touch, library)
    management.load_models_gpu([clip])  # what reads the prompt, and waits from then on
    run(clip)
    told("sampling", lambda: Guider(made).sample(run))
    found["kept"] = record.kept["denoise"], record.paged["denoise"], record.bounds["denoise"]
    found["report"] = nodes["LowVRAMReport"]().report(torch.zeros(1, 8, 8, 3), record)["result"][0]
    told("decode", lambda: _decode(made_vae, run))
    found["decode kept"] = decoding.paged["decode"], decoding.bounds["decode"]
    told("sampling again", lambda: Guider(made).sample(run))
    told("another model", lambda: Guider(second).sample(run))

    def cancelled(patcher: Any) -> None:
        raise management.InterruptProcessingException

    for refused in ("bound", "opening"):
        library.refuses = refused
        told(f"{refused} refused", lambda: Guider(made).sample(run))
        found[f"{refused} refused"] = list(record.notes)
    library.refuses = ""
    told("interrupt", lambda: Guider(made).sample(cancelled))
    told("without our node", lambda: Guider(model).sample(run))
    found["renamed"] = importlib.import_module(".nodes.dynamic_vram", inside.pack_name()).renamed()
    found["left"] = [one.pages - one.watermark for one in library.ranges]
    reader = types.SimpleNamespace(patcher=clip)
    reader.clone = lambda: types.SimpleNamespace(patcher=clip.clone())
    limited = low.optimize(model, vae, CLIP, clip=reader)["result"][3].patcher
    for name, one in (("encode", limited), ("encode of a clone", limited.clone()), ("encode as ever", clip)):
        told(name, functools.partial(management.load_models_gpu, [one]))
    patchers = (model, made, other, second, vae.patcher, clip)
    found["callbacks"] = [key for one in patchers for key in one.callbacks.get(CallbacksMP.ON_LOAD, {})]
    found["pages"] = {
        one.model.dynamic_vbars[CARD]._ptr - 1: -(-one.model.dynamic_vbars[CARD].offset // PAGE)
        for one in (clip, model, other, vae.patcher)
    }
    return found


def _buffers(library: Library, nodes: dict[str, Any], base: Any, vae: Any) -> dict[str, Any]:
    """Host buffers that two plans free of a loaded model with LoRAs and pinned weights, bytes that they clone, and
    ComfyUI's options for its compiler in a sampling and behind it."""
    import comfy.model_management as management
    import comfy.pinned_memory as pinned
    from comfy.cli_args import args
    from comfy.weight_adapter.lora import LoRAAdapter

    patcher = dynamic(base)
    for name, weight in base.diffusion_model.named_parameters():
        if weight.dim() == 2:
            parts = torch.ones(len(weight), 2), torch.ones(2, weight.shape[1]), 1.0, None, None, None
            patcher.add_patches({f"diffusion_model.{name}": LoRAAdapter(set(), parts)}, 0.5)
    made = nodes["LowVRAM"]().optimize(patcher, vae, "8GB")["result"][0]
    management.load_models_gpu([patcher])
    management.ensure_pin_budget = management.ensure_pin_registerable = lambda *given, **named: True
    torch.cuda.cudart = lambda: types.SimpleNamespace(cudaHostRegister=lambda *given: 0)
    layers = [one for one in base.diffusion_model.modules() if hasattr(one, "_v")]
    for layer in layers[:8]:
        pinned.pin_memory(layer, size=1 << 10)
    found: dict[str, Any] = {
        "layers": len(layers),
        "pinned": sum("pin" in one._pins["weights"] for one in layers if hasattr(one, "_pins")),
        "loras": sum(getattr(one, "weight_lowvram_function", None) is not None for one in layers),
    }
    cloned: list[int] = []
    clone, own = torch.UntypedStorage.clone, {one[0]._ptr for one in _subsets(base)}
    library.freed.clear()
    torch.UntypedStorage.clone = lambda one: cloned.append(one.nbytes()) or clone(one)
    sampling = importlib.import_module(".nodes.sampling", inside.pack_name())
    try:
        for side in (128, 192):
            sampling.foresee_sampling(made, side, side)
            gc.collect()
    finally:
        torch.UntypedStorage.clone = clone
    found |= {"freed": len([one for one in library.freed if one in own]), "cloned": sum(cloned), "during": []}

    def during(patcher: Any) -> None:
        found["during"] += [args.disable_comfy_compiler, args.disable_cuda_graphs]

    Guider(made).sample(during, channels=base.latent_format.latent_channels)
    return {**found, "after": [args.disable_comfy_compiler, args.disable_cuda_graphs]}


def _subsets(base: Any) -> list[Any]:
    """A model's host buffers, each with what is pinned in it."""
    return [one for one in base.dynamic_pins[CARD].values() if isinstance(one, tuple)]


def _decode(vae: Any, run: Any) -> None:
    """A decode by the stock node, whose own call of the autoencoder faults in its weights and computes nothing."""

    def decoded(z: Any, **options: Any) -> Any:
        run(vae.patcher)
        return torch.zeros(len(z), 3, 8 * z.shape[2], 8 * z.shape[3])

    vae.first_stage_model.decode = decoded
    try:
        vae.decode(torch.zeros(1, 4, 16, 16))
    finally:
        del vae.first_stage_model.decode


if __name__ == "__main__":
    main(*sys.argv[1:])
