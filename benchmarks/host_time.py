"""Host time, counts and predictions of two checkouts, both loaded by one process and called alternately.

    python benchmarks/host_time.py replays OLD NEW
    python benchmarks/host_time.py predictions OLD NEW
    python benchmarks/host_time.py stages OLD NEW
    GPU_PYTHON benchmarks/host_time.py steps OLD NEW
    GPU_PYTHON benchmarks/host_time.py decodes OLD NEW

OLD and NEW are folders of checkouts. GPU_PYTHON is the Python of the simulated GPU's environment. There all operators
are launched and nothing is computed. Times are the processor's for the thread, without those of simulated kernels.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parents[1]
SIMULATED = str(HERE / "tests" / "simulated_gpu")
NO_KERNELS = {"empty", "empty_like", "empty_strided", "is_pinned", "_pin_memory", "result_type", "set_", "resize_"}
NO_KERNELS |= {"_has_compatible_shallow_copy_type", "new_empty", "new_empty_strided", "is_same_size", "can_cast"}
CARD_BYTES = 80 << 30
MIB = 1 << 20
ROUNDS = int(sys.argv[4]) if len(sys.argv) > 4 else 31


class Version:
    """The package of one checkout: its modules are those of ``sd_lowvram`` within ``use()``."""

    def __init__(self, name: str, tree: str) -> None:
        self.name, self.tree, self._modules = name, str(Path(tree).resolve()), dict[str, Any]()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Put the modules of this version in place."""
        before = _taken()
        sys.modules.update(self._modules)
        sys.path.insert(0, self.tree)
        try:
            yield
        finally:
            sys.path.remove(self.tree)
            self._modules = _taken()
            assert all(self.tree in (getattr(one, "__file__", "") or self.tree) for one in self._modules.values())
            sys.modules.update(before)


def _taken() -> dict[str, Any]:
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "sd_lowvram"}


VERSIONS = [Version(name, tree) for name, tree in zip(("old", "new"), sys.argv[2:4], strict=True)]
OLD, NEW = VERSIONS


def show(**row: Any) -> None:
    """Print a row."""
    print(json.dumps(row), flush=True)


def in_pairs(calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, list[Any]]:
    """Results of the calls, each round all of them one after the other."""
    found: dict[str, list[Any]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in [*calls][:: 1 if number % 2 else -1]:
            found[name].append(calls[name]())
    return found


def ms(seconds: list[float]) -> float:
    """Median in milliseconds."""
    return 1000 * statistics.median(seconds)


def empty(name: str, kind: Any, device: str) -> Any:
    """A part of a built-in model, without contents."""
    with NEW.use():
        from sd_lowvram.checkpoints.architectures import build_components

        only = ("unet", "transformer") if kind == "denoiser" else (kind,)
        import torch

        (part,) = build_components(name, torch.float16, "meta", only=only).values()
    return part.eval().requires_grad_(False) if device == "meta" else part.to_empty(device=device).eval()


# Replays


def replays() -> None:
    """Time before the launch of a replay and of the whole call, without the launch, for denoisers on meta tensors."""
    import torch

    def tensor(*shape: int) -> Any:
        return torch.empty(shape, device="meta", dtype=torch.float16)

    text = tensor(1, 512, 4096)
    flux = {
        "hidden_states": tensor(1, 4096, 64), "timestep": tensor(1), "guidance": tensor(1),
        "pooled_projections": tensor(1, 768), "encoder_hidden_states": text, "txt_ids": tensor(512, 3),
        "img_ids": tensor(4096, 3), "joint_attention_kwargs": {},
    }  # fmt: skip
    none = {"timestep_cond": None, "cross_attention_kwargs": None, "return_dict": False}
    added = {"text_embeds": tensor(2, 1280), "time_ids": tensor(2, 6)}
    sd15 = {"sample": tensor(2, 4, 64, 64), "timestep": tensor(), "encoder_hidden_states": tensor(2, 77, 768)}
    sdxl = {"sample": tensor(2, 4, 128, 128), "timestep": tensor(), "encoder_hidden_states": tensor(2, 77, 2048)}
    given: dict[str, dict[str, Any]] = {
        "sd15": {**sd15, **none, "added_cond_kwargs": None},
        "sdxl": {**sdxl, **none, "added_cond_kwargs": added},
        "flux1-dev": {**flux, "return_dict": False},
    }
    for name, kwargs in given.items():
        model = empty(name, "denoiser", "meta")
        calls = {version.name: _replayed(version, model, kwargs) for version in VERSIONS}
        gc.collect()
        found = in_pairs(calls)
        modules, tensors = len([*model.modules()]), len([*model.parameters(), *model.buffers()])
        for version in VERSIONS:
            before, whole = (list(some) for some in zip(*found[version.name], strict=True))
            show(
                model=name, version=version.name, modules=modules, tensors=tensors, before=ms(before), whole=ms(whole),
                calls=_calls_of(version, calls[version.name]),
            )  # fmt: skip


def _replayed(version: Version, model: Any, kwargs: dict[str, Any]) -> Callable[[], tuple[float, float]]:
    import torch

    moments: list[float] = []
    with version.use():
        try:
            from sd_lowvram.hooks.replay.cuda_graphs import Recordings
        except ImportError:
            from sd_lowvram.hooks.cuda_graphs import _Recordings as Recordings  # type: ignore[no-redef]

        class Stub(Recordings):
            def takes(self, tensors: Any) -> bool:
                return True

            def capture(self, call: Any) -> Any:
                return lambda tensors: moments.append(time.thread_time())

        recordings = Stub(model)

    def call() -> tuple[float, float]:
        with version.use(), torch.no_grad():
            moments.clear()
            gc.disable()
            start = time.thread_time()
            recordings.called(lambda **_: None, **kwargs)
            end = time.thread_time()
            gc.enable()
        return (moments[0] if moments else end) - start, end - start

    for _ in range(3):
        call()
    assert len(moments) == 1
    return call


# Steps and decodes on the simulated GPU


def on_card() -> Any:
    """Put the simulated GPU in place and return its kernels, which compute nothing."""
    sys.path.insert(0, SIMULATED)
    from simulated_card.card import card

    gpu = card()
    import diffusers  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from simulated_card.kernels import Kernels

    torch.set_num_threads(1)
    kernels = Kernels(gpu)
    kernels.computes = False
    kernels.of_size = gpu.of_size(CARD_BYTES)  # held: it ends with its last reference
    kernels.of_size.__enter__()
    return kernels


def _calls_of(version: Version, call: Callable[[], Any], own: bool = True) -> tuple[int, int]:
    """Calls of Python functions, and of functions in C from there, while ``call`` runs.

    Simulated kernels are left out. With ``own`` only calls within the package's files count.
    """
    counts, inside = [0, 0], [0]

    def look(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if file.startswith(SIMULATED) and frame.f_code.co_name == "_timed":
            inside[0] += (event == "call") - (event == "return")
        elif not inside[0] and (not own or file.startswith(version.tree + "/sd_lowvram")):
            counts[0] += event == "call"
            counts[1] += event == "c_call"

    with version.use():
        gc.collect()
        sys.setprofile(look)
        try:
            call()
        finally:
            sys.setprofile(None)
    return counts[0], counts[1]


def steps() -> None:
    """Host time and calls of a step of SD1.5 at 512x512 with guidance, whose weights are on the GPU or streamed."""
    kernels = on_card()
    import torch

    def tensor(*shape: int) -> Any:
        return torch.empty(shape, device="cuda", dtype=torch.float16)

    given = tensor(2, 4, 64, 64), torch.tensor(5, device="cuda"), tensor(2, 77, 768)
    units = {version.name: empty("sd15", "denoiser", "cpu") for version in VERSIONS}
    plain = empty("sd15", "denoiser", "cuda")
    weights = sum(one.nbytes for one in plain.parameters())

    def step(version: Version, model: Any) -> Callable[[], float]:
        def call() -> float:
            with version.use(), torch.no_grad():
                gc.collect()
                gc.disable()
                start, simulated = time.thread_time(), kernels.seconds
                model(*given, return_dict=False)
                spent: float = time.thread_time() - start - (kernels.seconds - simulated)
                gc.enable()
            return spent

        return call

    gc.collect()
    gc.freeze()  # collections look through what is made from here on
    for share in (50, 25, 10, None):
        knobs: dict[str, Any] = {"offload": "component", "inference_mode": True}
        if share is not None:
            knobs |= {"offload": "blocks", "weights_mib": weights * share // 100 // MIB}
        with contextlib.ExitStack() as stack:
            for version in VERSIONS:
                with version.use():
                    from sd_lowvram import Settings, attached

                    held = attached(units[version.name], Settings(**knobs), device="cuda")
                    held.__enter__()
                    stack.callback(_leave, version, held)
            calls = {version.name: step(version, units[version.name]) for version in VERSIONS}
            calls["resident"] = step(NEW, plain)
            in_pairs(calls, 4)
            brought, copied = {}, kernels.brought
            for name, call in calls.items():
                call()
                brought[name], copied = kernels.brought - copied, kernels.brought
            found = in_pairs(calls)
            for name, call in calls.items():
                version = OLD if name == "old" else NEW
                with torch.no_grad():
                    every, own = (_calls_of(version, call, own) for own in (False, True))
                show(
                    share=share, version=name, host=ms(found[name]), calls=every, own_calls=own, brought=brought[name],
                    ratio=statistics.median(a / b for a, b in zip(found[name], found["old"], strict=True)),
                )  # fmt: skip


def _leave(version: Version, held: Any) -> None:
    with version.use():
        held.__exit__(None, None, None)


def decodes() -> None:
    """Operators and host time of an exact decode in strips of 4 MiB whose maps are parked."""
    kernels = on_card()
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.found = dict[str, int]()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if not func.is_view and name not in NO_KERNELS:
                self.found[name] = self.found.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    for model, side in (("sd15", 512), ("sdxl", 1024)):
        knobs: dict[str, Any] = {
            "vae_tiles": "exact",
            "vae_map": "parked",
            "vae_strip_mib": 4,
            "offload": "layer",
            "inference_mode": True,
        }
        latents = torch.zeros(1, 4, side // 8, side // 8, device="cuda", dtype=torch.float16)
        calls: dict[str, Callable[[], float]] = {}
        with contextlib.ExitStack() as stack:
            for version in VERSIONS:
                vae = empty(model, "vae", "cpu")
                vae.register_to_config(force_upcast=False)
                with version.use():
                    from sd_lowvram import Settings, attached

                    own: dict[str, Any] = {"vae_fused_kernels": False} if version is NEW else {"fused_kernels": False}
                    held = attached(vae, Settings(**knobs, **own), device="cuda")
                    held.__enter__()
                    stack.callback(_leave, version, held)
                    _all_finite(stack)
                calls[version.name] = _decode(version, vae, latents, kernels)
            in_pairs(calls, 2)
            for version in VERSIONS:
                with Count() as count:
                    calls[version.name]()
                often = sorted(count.found.items(), key=lambda one: -one[1])
                show(model=model, version=version.name, operators=sum(count.found.values()), most=dict(often))
            found = in_pairs(calls, max(5, ROUNDS // 4))
            for version in VERSIONS:
                pairs = zip(found[version.name], found["old"], strict=True)
                show(
                    model=model, version=version.name, host=ms(found[version.name]),
                    calls=_calls_of(version, calls[version.name], False),
                    own_calls=_calls_of(version, calls[version.name]), ratio=statistics.median(a / b for a, b in pairs),
                )  # fmt: skip


def _decode(version: Version, vae: Any, latents: Any, kernels: Any) -> Callable[[], float]:
    import torch

    def call() -> float:
        with version.use(), torch.no_grad():
            start, simulated = time.thread_time(), kernels.seconds
            vae.decode(latents, return_dict=False)
            spent: float = time.thread_time() - start - (kernels.seconds - simulated)
        return spent

    return call


def _all_finite(stack: contextlib.ExitStack) -> None:
    """Contents are whatever the memory held: no decode is repeated in float32 for them."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("sd_lowvram.hooks") and hasattr(module, "is_finite"):
            stack.enter_context(mock.patch.object(module, "is_finite", lambda _: True))


# Predictions


def predictions() -> None:
    """Steps and decodes of an H100 as both versions predict them, with the settings of ``h100_steps.py``."""
    rows = json.loads((HERE / "benchmarks" / "h100_steps.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        of = {name: row[name] for name in ("model", "side", "way")}
        for version in VERSIONS:
            with version.use():
                show(**of, version=version.name, predicted=_predicted(**of))


def _predicted(model: str, side: int, way: str) -> Any:
    import torch

    from sd_lowvram.checkpoints.architectures import architecture, build_components
    from sd_lowvram.checkpoints.meta_model import meta_anatomy
    from sd_lowvram.session import anatomy_of
    from sd_lowvram.settings import Settings
    from sd_lowvram.weights import weight_bytes

    if "decode" in way:
        vae: Any = build_components(architecture(model), torch.float16, "meta", only=("vae",))["vae"]
        vae.register_to_config(force_upcast=False)
        anatomy = anatomy_of(vae, None)
    else:
        anatomy = meta_anatomy(model, torch.float16 if model == "sd15" else torch.bfloat16)
    knobs: dict[str, Any] = {}
    off = "vae_fused_kernels" if "vae_fused_kernels" in Settings().as_dict() else "fused_kernels"
    if way.endswith("strips"):
        knobs = {
            "vae_tiles": "exact",
            "vae_map": "parked",
            "vae_strip_mib": 4,
            "offload": "layer",
            "inference_mode": True,
        }
        knobs[off] = False
    elif way.startswith("all"):
        knobs = {"offload": "none", "cuda_graphs": way.endswith("graphs")} | ({off: False} if "decode" in way else {})
    elif way.endswith("%"):
        share = weight_bytes(anatomy.components["unet"]) * int(way.split(maxsplit=1)[0]) // 100
        knobs = {"offload": "blocks", "weights_mib": share // MIB}
    vram = int(way.split(maxsplit=1)[0]) << 30 if way.endswith("GiB") else 72 << 30
    return seconds_of(anatomy, side, vram, knobs)["decode" if "decode" in way else "step"]


def seconds_of(anatomy: Any, side: int, vram: int, knobs: dict[str, Any]) -> dict[str, float]:
    """Predicted milliseconds of a step and of a decode on an H100."""
    from sd_lowvram.planning.as_others import request_by
    from sd_lowvram.planning.search import PlanSearch
    from sd_lowvram.settings import Settings

    stated: dict[str, Any] = {"width": side, "height": side, "steps": 20, "ram": 64 << 30, "vram": vram}
    plan = PlanSearch(anatomy, request_by("ours", anatomy, gpu="h100", **stated), Settings(**knobs), False).fastest()
    assert plan is not None
    found = {}
    for stage in plan.stages:
        if stage.component == anatomy.denoiser:
            found["step"] = 1000 * stage.seconds / 20
        elif stage.component == anatomy.autoencoder and stage.name != "encode":
            found["decode"] = 1000 * stage.seconds
    return found


def stages() -> None:
    """Steps and decodes of an H100 as planned with one knob for fused kernels in both models, and with two."""
    import torch

    one = {"fused_kernels": False, "vae_fused_kernels": False}, {"fused_kernels": True, "vae_fused_kernels": True}
    for model, side in (("sd15", 512), ("sdxl", 1024)):
        with NEW.use():
            from sd_lowvram.checkpoints.meta_model import meta_anatomy

            anatomy = meta_anatomy(model, torch.float16)
            for knobs in (*one, {}):
                for graphs in ({"cuda_graphs": False}, {}):
                    given: dict[str, Any] = knobs | graphs
                    show(model=model, side=side, knobs=given, **seconds_of(anatomy, side, 72 << 30, given))
        with OLD.use():
            from sd_lowvram.checkpoints.meta_model import meta_anatomy as old_anatomy

            found = seconds_of(old_anatomy(model, torch.float16), side, 72 << 30, {})
            show(model=model, side=side, knobs="as planned by the old version", **found)


if __name__ == "__main__":
    parts = {"replays": replays, "steps": steps, "decodes": decodes, "predictions": predictions, "stages": stages}
    parts[sys.argv[1]]()
