"""ComfyUI's contract in small: imports the pack as the host does, and stands in for the doors that our nodes use."""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


def import_pack(folder: Path) -> types.ModuleType:
    """Import ``folder`` by its location, under its path for a name: it is on no search path."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Interrupted(BaseException):
    """The user has pressed cancel."""


class OutOfMemory(Exception):
    """The device's memory is full."""


class Bar:
    """The running node's bar."""

    shown: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, total: int) -> None:
        self.total = total

    def update_absolute(self, value: int, total: int) -> None:
        self.shown.append((value, total))


def attention_pytorch(q: Tensor, k: Tensor, v: Tensor, heads: int, **kwargs: Any) -> Tensor:
    """The host's kernel, by the name by which it is known."""
    q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def host_modules(cancelled: Callable[[], bool] = lambda: False) -> dict[str, types.ModuleType]:
    """Stand-ins for the modules of the host that our nodes import."""

    def check() -> None:
        if cancelled():
            raise Interrupted

    management = types.SimpleNamespace(
        current_loaded_models=[],
        VRAMState=types.SimpleNamespace(DISABLED=0, NO_VRAM=1, LOW_VRAM=2, NORMAL_VRAM=3, HIGH_VRAM=4, SHARED=5),
        vram_state=0,
        minimum_inference_memory=lambda: 1 << 30,
        extra_reserved_memory=lambda: 1 << 28,
        get_free_memory=lambda device: 8 << 30,
        throw_exception_if_processing_interrupted=check,
        OOM_EXCEPTION=OutOfMemory,
    )
    doors = types.SimpleNamespace(
        OUTER_SAMPLE="outer_sample", PREPARE_SAMPLING="prepare_sampling", APPLY_MODEL="apply_model"
    )
    contents = {
        "comfy": {},
        "comfy.model_management": vars(management),
        "comfy.utils": {"ProgressBar": Bar},
        "comfy.patcher_extension": {"WrappersMP": doors, "CallbacksMP": types.SimpleNamespace(ON_LOAD="on_load")},
        "comfy.sd": {"CLIP": CLIP, "VAE": VAE},
        "comfy.model_base": {"BaseModel": Model},
        "comfy.ldm": {},
        "comfy.ldm.modules": {},
        "comfy.ldm.modules.attention": {"wrap_attn": None, "optimized_attention": attention_pytorch},
    }
    modules = {}
    for name, content in contents.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(content)
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


class CLIP:
    """What reads prompts."""

    def __init__(self, model: Any) -> None:
        self.cond_stage_model = model


class Executor:
    """Calls the wrappers one inside the other, then the original."""

    def __init__(self, original: Callable[..., Any], owner: Any, wrappers: list[Callable[..., Any]]) -> None:
        self.original, self.class_obj, self.wrappers = original, owner, wrappers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wrappers:
            return self.original(*args, **kwargs)
        rest = Executor(self.original, self.class_obj, self.wrappers[1:])
        return self.wrappers[0](rest, *args, **kwargs)


class Model:
    """What clones share: the UNet, and the estimate of its activations."""

    def __init__(self, unet: Any) -> None:
        self.diffusion_model = unet
        self.memory_usage_factor = 2.0
        self.manual_cast_dtype = None

    def memory_required(self, shape: Any, cond_shapes: Any = None) -> float:
        return shape[0] * shape[2] * shape[3] * self.memory_usage_factor * (1 << 20)

    def apply(self, x: Tensor, t: Tensor, c_concat: Any, text: Tensor, control: Any, options: dict[str, Any]) -> Tensor:
        return self.diffusion_model(x, t, encoder_hidden_states=text.expand(len(x), -1, -1), return_dict=False)[0]


class Patcher:
    """A MODEL: clones share the model and differ in options and wrappers."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[str, dict[str, list[Any]]] = {}
        self.load_device = torch.device("cpu")

    def clone(self) -> Patcher:
        made = Patcher(self.model)
        made.model_options = copy.deepcopy(self.model_options)
        made.wrappers = {door: {key: list(all_) for key, all_ in keys.items()} for door, keys in self.wrappers.items()}
        return made

    def loaded_size(self) -> int:
        return 7

    def get_model_object(self, name: str) -> Any:
        return getattr(self.model, name)

    def add_wrapper_with_key(self, door: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(door, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, door: str, key: str) -> None:
        self.wrappers.get(door, {}).pop(key, None)

    def through(self, door: str, original: Callable[..., Any], owner: Any) -> Executor:
        return Executor(original, owner, [one for all_ in self.wrappers.get(door, {}).values() for one in all_])


class Range:
    """As aimdo's ModelVBAR from 0.6.0 on: a call that the library answers with no is an error."""

    max_size, offset = 1 << 50, 1 << 20

    def __init__(self, refuses: Callable[[int], bool]) -> None:
        self.refuses, self.watermark = refuses, self.max_size

    def set_watermark(self, size: int) -> None:
        if self.refuses(size):
            raise RuntimeError("VBAR set_watermark failed")
        self.watermark = size

    def prioritize(self) -> None:
        self.watermark = self.max_size

    def loaded_size(self) -> int:
        return 3


class DynamicPatcher(Patcher):
    """A MODEL under dynamic VRAM: its weights are in a range of addresses, whose bound every load takes away."""

    def __init__(self, model: Model, weights: Range) -> None:
        super().__init__(model)
        self.weights = weights
        self.callbacks: dict[str, dict[str, list[Any]]] = {}
        model.model_loaded_weight_memory = 0  # type: ignore[attr-defined]

    def clone(self) -> DynamicPatcher:
        made = DynamicPatcher(self.model, self.weights)
        vars(made).update(vars(super().clone()))
        return made

    def is_dynamic(self) -> bool:
        return True

    def _vbar_get(self) -> Range:
        return self.weights

    def model_size(self) -> int:
        return self.weights.offset

    def add_callback_with_key(self, door: str, key: str, callback: Any) -> None:
        self.callbacks.setdefault(door, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, door: str, key: str) -> None:
        self.callbacks.get(door, {}).pop(key, None)

    def load(self) -> None:
        self.weights.prioritize()
        for callback in (one for all_ in self.callbacks.get("on_load", {}).values() for one in all_):
            callback(self, self.load_device, 0, False, False)


class Guider:
    """Samples with a MODEL as the host does: load within the sampling, all prompts in one call where the model's
    estimate has memory for them, at a scale of 1 only the positive ones, two steps.

    Attributes:
        rows: of the calls of the latest sampling.
    """

    def __init__(
        self,
        patcher: Patcher,
        text: Tensor,
        seen: Callable[[Patcher], None] = lambda patcher: None,
        cfg: float = 7.0,
        positive: int = 1,
    ) -> None:
        self.model_patcher, self.text, self.seen, self.cfg = patcher, text, seen, cfg
        self.model_options = patcher.model_options
        self.conds: dict[str, list[dict[str, Any]]] = {"positive": [{}] * positive, "negative": [{}]}
        self.rows: list[int] = []

    def sample(self, noise: Tensor, sampler: Any = None) -> Tensor:
        sigmas = torch.tensor([9.0, 3.0, 0.0])
        self.rows.clear()
        return self.model_patcher.through("outer_sample", self._sample, self)(noise, None, sampler, sigmas)

    def _sample(
        self, noise: Tensor, latents: Any, sampler: Any, sigmas: Tensor, mask: Any = None, callback: Any = None
    ) -> Tensor:
        patcher = self.model_patcher
        load = functools.partial(self.load, noise=noise)
        patcher.through("prepare_sampling", load, None)(patcher, noise.shape, {}, model_options={})
        x = noise
        for step in (9, 3):
            predicted = self._predict(x, step)
            if sampler is not None and step == 9:  # as heun does, behind the callback
                x = x - 0.01 * self._predict_after(callback, x, predicted, step)
            elif callback is not None:
                callback(step, x, x, 2)
            x = x - 0.1 * predicted
        return x

    def _predict_after(self, callback: Any, x: Tensor, predicted: Tensor, step: int) -> Tensor:
        if callback is not None:
            callback(step, x, x, 2)
        return self._predict(x - 0.1 * predicted, step)

    def _predict(self, x: Tensor, step: int) -> Tensor:
        patcher, found = self.model_patcher, x
        left = len(self.conds["positive"]) + (0 if self.cfg == 1.0 else len(self.conds["negative"]))
        while left:
            options = dict(patcher.model_options["transformer_options"])
            call = patcher.through("apply_model", patcher.model.apply, patcher.model)
            self.seen(patcher)
            together = next((n for n in (left // part for part in range(1, left)) if self._has_room(x, n)), 1)
            rows = torch.cat([x] * together)
            self.rows.append(len(rows))
            found = call(rows, torch.tensor(step), None, self.text, None, options).chunk(together)[0]
            left -= together
        return found

    def _has_room(self, x: Tensor, together: int) -> bool:
        shape = [together * len(x), *x.shape[1:]]
        return self.model_patcher.model.memory_required(shape, cond_shapes={}) * 1.5 < 8 << 30

    def load(self, patcher: Patcher, shape: Any, conds: Any, model_options: Any, noise: Tensor) -> None:
        if isinstance(patcher, DynamicPatcher):
            patcher.load()
        self.asked_to_load = patcher.model.memory_required([2 * len(noise), *noise.shape[1:]])


class VAE:
    """A VAE object: the host's decode and encode, which take to tiles when memory runs out."""

    def __init__(self, model: Any) -> None:
        self.first_stage_model = model
        self.device = torch.device("cpu")
        self.vae_dtype = torch.float32
        self.memory_used_decode = lambda shape, dtype: 2178 * shape[2] * shape[3] * 64 * 4
        self.memory_used_encode = lambda shape, dtype: 1767 * shape[2] * shape[3] * 4
        self.short: list[int] = []
        self.asked: list[int] = []

    def throw_exception_if_invalid(self) -> None:
        assert self.first_stage_model is not None

    def decode(self, samples: Tensor) -> Tensor:
        self.asked.append(self.memory_used_decode(samples.shape, self.vae_dtype))
        try:
            if self.short and self.short.pop():
                raise OutOfMemory
            return self.first_stage_model.decode(samples, return_dict=False)[0].movedim(1, -1)
        except OutOfMemory:
            pass
        return self.decode_tiled_(samples)

    def encode(self, pixels: Tensor) -> Tensor:
        pixels = pixels.movedim(-1, 1)
        self.asked.append(self.memory_used_encode(pixels.shape, self.vae_dtype))
        return self.first_stage_model.encode(pixels).latent_dist.mode()

    def decode_tiled(self, samples: Tensor, tile_x: int = 64, tile_y: int = 64, overlap: int = 16) -> Tensor:
        self.asked.append(self.memory_used_decode(samples.shape, self.vae_dtype))
        return self.decode_tiled_(samples)

    def encode_tiled(self, pixels: Tensor, tile_x: int = 512, tile_y: int = 512, overlap: int = 64) -> Tensor:
        self.asked.append(self.memory_used_encode(pixels.movedim(-1, 1).shape, self.vae_dtype))
        return torch.zeros(len(pixels), 4, pixels.shape[1] // 8, pixels.shape[2] // 8)

    def decode_tiled_(self, samples: Tensor) -> Tensor:
        return torch.zeros(len(samples), samples.shape[2] * 8, samples.shape[3] * 8, 3)
