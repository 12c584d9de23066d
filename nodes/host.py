"""Our calls of ComfyUI: its device, the memory that it can have there, its bar and its cancel button.

ComfyUI's modules are imported where they are used, so that the node contract can be read without them.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..sd_lowvram.devices.info import free_vram
from ..sd_lowvram.devices.this_machine import budget_of
from ..sd_lowvram.errors import LowVRAMError
from ..sd_lowvram.progress import listen
from ..sd_lowvram.units import parse_size
from ..sd_lowvram.weights import weight_bytes
from .interfaces import ModelPatcher
from .loading import InRange, Loading

REPORT = "LowVRAMReport"
"""The id of the node for which runs are measured."""


def budget(written: str, device: torch.device) -> int:
    """Bytes in a node's budget; when it is empty, what this process can have once the host has unloaded its models.

    Raises:
        BadInputError: it is not a size.
    """
    if written.strip():
        return parse_size(written, "budget")
    return budget_of(device, room(device))


def room(device: torch.device) -> int:
    """Bytes for tensors on ``device``: free, or held by the host's own models, which it would give up."""
    from comfy import model_management as host

    loaded = [model for model in host.current_loaded_models if model.device == device and model.model is not None]
    held = sum(model.model_loaded_memory() for model in loaded)
    return int(free_vram(device) if device.type == "cpu" else host.get_free_memory(device)) + int(held)


def loading(device: torch.device) -> Loading:
    """Share of a model's weights that the host keeps on ``device``, by its own rules and command line."""
    from comfy import model_management as host

    state = host.VRAMState
    if device.type != "cpu" and loads_freely():
        return InRange(most=room(device))
    if device.type == "cpu" or host.vram_state not in (state.NO_VRAM, state.LOW_VRAM, state.NORMAL_VRAM):
        return Loading()
    if host.vram_state == state.NO_VRAM:
        return Loading(whole=False)
    most = max(_LEAST_KEPT, room(device) - int(host.minimum_inference_memory()))
    return Loading(whole=False, least=_LEAST_KEPT, most=most, reserve=int(host.extra_reserved_memory()))


_LEAST_KEPT = 128 << 20
"""Bytes of weights that the host loads however little is free."""


def loads_freely() -> bool:
    """True if the host keeps weights on a GPU wherever they fit, whatever is requested: its dynamic VRAM."""
    return bool(getattr(sys.modules.get("comfy.memory_management"), "aimdo_enabled", False))


def other_model_bytes(module: nn.Module) -> dict[str, int]:
    """Bytes of the weights of all models that there are besides ``module``, by what they are called for people.

    They are looked for among all objects: ComfyUI has a list of the models that it has loaded, and none of what its
    loaders have given, which lies in memory on a CPU, too.
    """
    from comfy import model_base, sd

    kinds = {sd.CLIP: ("CLIP", "cond_stage_model"), sd.VAE: ("VAE", "first_stage_model")}
    models: dict[str, dict[int, nn.Module]] = {"CLIP": {}, "VAE": {}, "model": {}}
    for candidate in gc.get_objects():
        kind = type(candidate)
        if kind in kinds:
            name, attribute = kinds[kind]
            model = getattr(candidate, attribute, None)
        elif issubclass(kind, model_base.BaseModel):
            name, model = "model", getattr(candidate, "diffusion_model", None)
        else:
            continue
        if isinstance(model, nn.Module) and model is not module:
            models[name][id(model)] = model
    return {name: weight_bytes(*models.values()) for name, models in models.items() if models}


def _page() -> Any:
    """The server of the page; None where there is none."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def tell(node: str | None, text: str) -> None:
    """Show ``text`` in a node of the page that has run already, like the output of a running node."""
    page = _page()
    if node is not None and hasattr(page, "send_sync"):
        output = {"node": node, "display_node": node, "output": {"text": [text]}, "prompt_id": page.last_prompt_id}
        page.send_sync("executed", output, page.client_id)


@contextlib.contextmanager
def refusals_in(node: str | None) -> Iterator[None]:
    """Show a refusal that the block raises in ``node`` of the page too, in place of its earlier text."""
    try:
        yield
    except LowVRAMError as error:
        tell(node, str(error))
        raise


def is_watched(device: torch.device) -> bool:
    """True if the memory of the run on ``device`` is recorded; on a CPU only for a Report, because it takes time."""
    queue = getattr(_page(), "prompt_queue", None)
    if device.type != "cpu" or queue is None:
        return True
    running, _ = queue.get_current_queue()
    return any(node.get("class_type") == REPORT for _, _, prompt, *_ in running for node in prompt.values())


def loaded_bytes(patcher: Any) -> int:
    """Bytes of a model's weights that the host has on the device it computes on."""
    return int(patcher.loaded_size()) if hasattr(patcher, "loaded_size") else 0


def show(text: str) -> None:
    """Show ``text`` on the running node, if there is a page."""
    page = _page()
    with contextlib.suppress(ImportError):  # an older ComfyUI
        from comfy_execution.utils import get_executing_context

        running = get_executing_context()
        if running is not None and hasattr(page, "send_progress_text"):
            page.send_progress_text(text, running.node_id)


def has_override() -> bool:
    """True if a model's options can override attention in this ComfyUI; older ones lack that."""
    from comfy.ldm.modules import attention

    return hasattr(attention, "wrap_attn")


_FUSED = {"attention_pytorch", "attention_xformers", "attention_sage", "attention_flash"}


def attends_fused() -> bool:
    """True if the kernel that the host has chosen for this machine holds no score matrix."""
    from comfy.ldm.modules import attention

    return getattr(attention.optimized_attention, "__name__", "") in _FUSED


def facts() -> dict[str, str]:
    """Facts that the host's own models depend on in addition to their weights."""
    import comfyui_version
    from comfy.ldm.modules import attention

    kernel = getattr(attention.optimized_attention, "__name__", "")
    return {"version": comfyui_version.__version__, "attention": kernel}


def computes(model: ModelPatcher) -> torch.dtype | None:
    """The type that the host casts a UNet's weights to while it computes; None: it computes in their own."""
    return getattr(model.model, "manual_cast_dtype", None)


def prompts(guider: Any, model_options: Mapping[str, Any]) -> int:
    """The most prompts for the whole picture that the host may put into one call of the model.

    At a scale of 1 the host leaves the negative ones out, unless the guider guides in a way of its own.
    """
    conds: Mapping[str, Any] = getattr(guider, "conds", None) or {}
    unguided = _is_unguided(guider, model_options)
    if not conds:
        return 1 if unguided else GUIDED
    asked = [cond for name, some in conds.items() for cond in some or () if not (unguided and name == "negative")]
    alike = Counter(_joining_key(cond) for cond in asked if isinstance(cond, Mapping) and cond.get("area") is None)
    return max(alike.values(), default=1)


GUIDED = 2
"""Prompts for the whole picture, as long as nobody has said otherwise."""


def _is_unguided(guider: Any, model_options: Mapping[str, Any]) -> bool:
    scale, predicts = getattr(guider, "cfg", None), getattr(type(guider), "predict_noise", None)
    own_way = predicts is not None and not _is_the_hosts(predicts)
    left_out = not own_way and not model_options.get("disable_cfg1_optimization", False)
    return scale is not None and math.isclose(scale, 1.0) and left_out


def _is_the_hosts(predicts: Any) -> bool:
    from comfy import samplers

    return bool(predicts is samplers.CFGGuider.predict_noise)


def _joining_key(cond: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Key that must be equal, in addition to sizes, for two conds that the host runs together."""
    return tuple(None if cond.get(name) is None else id(cond[name]) for name in ("control", "gligen", "hooks"))


def calls(prompts: int, most: int) -> list[int]:
    """Numbers of ``prompts`` in the host's calls, if at most ``most`` fit in one.

    The host tries all remaining prompts, then a half, a third and so on."""
    sizes = []
    while prompts > 0:
        sizes.append(next((prompts // part for part in range(1, prompts) if prompts // part <= most), 1))
        prompts -= sizes[-1]
    return sizes


_EVALUATIONS = {
    "dpm_2": (2, 1),
    "dpm_2_ancestral": (2, 1),
    "dpm_fast_function": (1, 0),
    "dpmpp_2s_ancestral": (2, 1),
    "dpmpp_2s_ancestral_cfg_pp": (2, 1),
    "dpmpp_sde": (2, 1),
    "dpmpp_sde_gpu": (2, 1),
    "exp_heun_2_x0": (2, 1),
    "exp_heun_2_x0_sde": (2, 1),
    "heun": (2, 1),
    "heunpp2": (3, 3),
    "sa_solver_pece": (2, 1),
    "seeds_2": (2, 1),
    "seeds_3": (3, 2),
}
"""Calls of the model in a step, and how many fewer in the last steps (to a sigma of 0), by the names of the host's
sampler functions. For other samplers the first steps show it."""


def evaluations(sampler: Any, sigmas: Any) -> float | None:
    """Average calls of the model in each step of the host's ``sampler``; None if unknown beforehand."""
    name = getattr(getattr(sampler, "sampler_function", None), "__name__", "").removeprefix("sample_")
    if name not in _EVALUATIONS:
        return None
    in_a_step, less = _EVALUATIONS[name]
    if sigmas is None or len(sigmas) < 2 or float(sigmas[-1]) != 0:
        return in_a_step
    return max(1.0, in_a_step - less / (len(sigmas) - 1))


def window_shape(shape: Sequence[int], model_options: Mapping[str, Any]) -> Sequence[int]:
    """The ``shape`` of latents, or that of a window of them where a node has set context windows."""
    windows = model_options.get("context_handler")
    place, length = getattr(windows, "dim", None), getattr(windows, "context_length", None)
    if not isinstance(place, int) or not isinstance(length, int) or place >= len(shape):
        return shape
    length = max(1, length + bool(getattr(windows, "causal_window_fix", False)))  # a frame before all but the first
    return [min(side, length) if number == place else side for number, side in enumerate(shape)]


@contextlib.contextmanager
def bar() -> Iterator[None]:
    """Connect long loops of the core, within the block, to the running node's bar and to the cancel button."""
    from comfy.model_management import throw_exception_if_processing_interrupted
    from comfy.utils import ProgressBar

    bars: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        throw_exception_if_processing_interrupted()
        bars.setdefault(stage, ProgressBar(total)).update_absolute(done, total)

    with listen(show):
        yield


_COMPILER = ("disable_comfy_compiler", "disable_cuda_graphs")
"""ComfyUI's options that turn off what records a forward: its allocations, and its blocks as CUDA graphs."""

_OPENS = {"malloc_graph_begin", "malloc_graph_scope"}
"""Functions of ComfyUI's compiler with which a model's forward opens its allocation graph."""


def compiles(model: nn.Module | None, device: torch.device) -> bool:
    """True if ComfyUI's compiler records the allocations of ``model`` on ``device``, for what the forward's code says.

    Previews are recorded in the same graph, so they need no memory of their own."""
    enabled = getattr(sys.modules.get("comfy.model_prefetch"), "malloc_graph_enabled", None)
    if enabled is None or not enabled(device):
        return False
    methods = (value for kind in type(model).__mro__ for value in vars(kind).values())
    return any(_OPENS & {*method.__code__.co_names} for method in methods if isinstance(method, types.FunctionType))


_lock = threading.Lock()
_uncompiled: list[dict[str, Any]] = []
"""The user's values of these options, once for each block of :func:`disable_compiler` that runs."""


@contextlib.contextmanager
def disable_compiler() -> Iterator[None]:
    """Turn ComfyUI's compiler off within the block, because hooks in layers allocate differently from call to call.

    Its options are process-wide, so the first of several blocks sets them and the last restores the user's values."""
    options = vars(getattr(sys.modules.get("comfy.cli_args"), "args", types.SimpleNamespace()))
    with _lock:
        before = _uncompiled[0] if _uncompiled else {name: options[name] for name in _COMPILER if name in options}
        _uncompiled.append(before)
        options.update(dict.fromkeys(before, True))
    try:
        yield
    finally:
        with _lock:
            _uncompiled.pop()
            if not _uncompiled:
                options.update(before)


@contextlib.contextmanager
def replace_attribute(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """Set ``value`` as an attribute of ``owner`` within the block, and restore the earlier state afterwards."""
    here = vars(owner)
    before = here.get(attribute, here)
    here[attribute] = value
    try:
        yield
    finally:
        if before is here:
            here.pop(attribute, None)
        else:
            here[attribute] = before
