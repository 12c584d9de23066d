"""Models that our hooks do not know, traced plain: a fake copy of the host's own model, called as its sampler does.

What a step is called with the host's model itself says (``extra_conds``), of conditions that stand for a prompt: of the
prompt that is sampled once there is one, before that of texts of the width that the model's layers take.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..sd_lowvram.compat.private import disable_fakes
from ..sd_lowvram.errors import BadInputError, PlanningError, ran_out
from ..sd_lowvram.models import anatomy_of_components, compvis
from ..sd_lowvram.models.anatomy import HOST, Anatomy, Family
from ..sd_lowvram.models.calls import Shape, StepInputs
from ..sd_lowvram.models.calls_compvis import POOLED, TEXT, input_widths
from ..sd_lowvram.models.latents import latent_size
from ..sd_lowvram.weights import map_tensors
from . import host
from .interfaces import ModelPatcher

COMPONENT = "transformer"

_NAMES = {
    "ACEStep": "ACE-Step",
    "AuraFlow": "AuraFlow",
    "ChromaRadiance": "Chroma Radiance",
    "CogVideoX": "CogVideoX",
    "Cosmos": "Cosmos",
    "ErnieImage": "ERNIE-Image",
    "Flux2": "FLUX.2",
    "Flux": "FLUX.1",
    "GenmoMochi": "Mochi",
    "HiDream": "HiDream",
    "Hunyuan3D": "Hunyuan3D",
    "HunyuanDiT": "HunyuanDiT",
    "HunyuanImage21": "HunyuanImage 2.1",
    "HunyuanVideo15": "HunyuanVideo 1.5",
    "HunyuanVideo": "HunyuanVideo",
    "Ideogram4": "Ideogram 4",
    "Kandinsky5": "Kandinsky 5",
    "Krea2": "Krea 2",
    "LTX": "LTX-Video",
    "LongCatImage": "LongCat-Image",
    "Lumina2": "Lumina 2",
    "MiniMaxH3": "MiniMax-H3",
    "Omnigen2": "OmniGen2",
    "PixArt": "PixArt",
    "QwenImage": "Qwen-Image",
    "SVD_img2vid": "Stable Video Diffusion",
    "Stable_Cascade": "Stable Cascade",
    "Stable_Zero123": "Stable Zero123",
    "StableAudio": "Stable Audio",
    "WAN21": "Wan 2.1",
    "WAN22": "Wan 2.2",
    "ZImage": "Z-Image",
}
"""Names that people know, by how the host's configurations begin."""


def name_of(model: Any) -> str:
    """Common name of the host's BaseModel ``model``."""
    kinds = (type(getattr(model, "model_config", None)).__name__, type(model).__name__)
    starts = sorted(_NAMES, key=len, reverse=True)
    names_found = (_NAMES[start] for kind in kinds for start in starts if kind.startswith(start))
    return next(names_found, kinds[-1])


@dataclass(frozen=True)
class Like:
    """A tensor without its values: its shape behind the first dimension, which is 1, and its type."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Conditions:
    """Conditions of a prompt, without their values.

    Attributes:
        text: tokens and width of the text.
        others: further arguments by the host's names: shapes of tensors, of several tensors, and plain values.
    """

    text: tuple[int, int]
    others: tuple[tuple[str, Any], ...] = ()


_TOKENS = 512
"""Tokens of an assumed prompt: the length to which most of these models pad or cut."""


def foreseen(unet: nn.Module) -> Iterator[Conditions]:
    """Conditions that ``unet`` may be made for, likely ones first: of widths that its layers take."""
    texts = input_widths(unet, TEXT)[:_MOST] or [_POOLED_WIDTH]
    for number in input_widths(unet, POOLED)[:2] or [_POOLED_WIDTH]:
        for mask in ((), (("attention_mask", Like((_TOKENS,), torch.int64)),)):
            for text in texts:
                yield Conditions((_TOKENS, text), (("pooled_output", Like((number,))), *mask))


_MOST = 4
"""Widths of texts that are tried."""
_POOLED_WIDTH = 768
"""Width of the pooled text, which most models do not use."""


def longest_conditions(conditionings: Mapping[str, Any]) -> Conditions | None:
    """Conditions with the longest text of a sampling; None if there are none.

    Args:
        conditionings: a guider's conditionings, each a list of the host's conds.
    """
    conds = [cond for some in conditionings.values() for cond in some or () if isinstance(cond, Mapping)]
    texts = [cond for cond in conds if isinstance(cond.get("cross_attn"), Tensor) and cond["cross_attn"].dim() == 3]
    if not texts:
        return None
    longest = max(texts, key=lambda cond: cond["cross_attn"].shape[1])
    extras = {name: _strip_values(value) for name, value in longest.items() if name not in _NOT_ASKED}
    text = longest["cross_attn"].shape[1:]
    return Conditions((text[0], text[1]), tuple((name, value) for name, value in extras.items() if value is not None))


_NOT_ASKED = {"cross_attn", "model_conds", "uuid", "control", "hooks", "area", "mask"}
"""Keys of a cond that do not concern the model."""


def _strip_values(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Like(tuple(value.shape[1:]), value.dtype)
    if isinstance(value, (list, tuple)) and value and all(isinstance(tensor, Tensor) for tensor in value):
        return tuple(map(_strip_values, value))
    return value if isinstance(value, (int, float, str)) else None


def anatomy_of_hosted(model: ModelPatcher, conditions: Conditions) -> Anatomy:
    """The anatomy of a MODEL of any kind, of which a step is called with ``conditions``; hooks find no sites in it.

    Raises:
        BadInputError: it is not a model that a sampler of the host's can run.
    """
    base, unet = model.model, model.get_model_object("diffusion_model")
    latents = getattr(base, "latent_format", None)
    if latents is None or not hasattr(base, "extra_conds"):
        raise BadInputError(f"{name_of(base)} is not a model that ComfyUI's samplers run")
    scale = _scale(latents)
    config = {
        "latent_scale": scale,
        "sample_size": max(1, _SIDE // scale),
        "out_channels": int(latents.latent_channels),
    }
    family = Family(
        components_of=lambda target: {},
        denoiser=COMPONENT,
        step_inputs=functools.partial(_step_inputs, conditions, _dimensions(base) == 3),
        predict=functools.partial(_predict, base),
        decode=_calls,
        encode=_calls,
        configs=lambda components: {COMPONENT: config, HOST: host.facts()},
        left_out=compvis.RANGES,
        hosted=True,
    )
    return anatomy_of_components(family, {COMPONENT: unet})


def _dimensions(base: Any) -> int:
    """Number of dimensions of latents: rows and columns, and frames; 1 for sound."""
    return int(getattr(base.latent_format, "latent_dimensions", 2))


_SIDE = 1024
"""Pixels of the side of the pictures that today's models are made for."""

_SCALES = {"Wan22": 16, "LTXV": 32, "HunyuanImage21": 32, "ChromaRadiance": 1, "SC_B": 4}
"""Pixels that a latent pixel stands for, of formats that do not say it in an older ComfyUI."""


def _scale(latents: Any) -> int:
    ratio = getattr(latents, "spacial_downscale_ratio", None)
    return int(_SCALES.get(type(latents).__name__, 8) if ratio is None else ratio)


def _calls(*inputs: Any) -> Any:
    raise NotImplementedError("of these models only the denoiser is planned")


def _step_inputs(conditions: Conditions, has_frames: bool, anatomy: Anatomy, shape: Shape) -> StepInputs:
    height, width = latent_size(anatomy, shape)
    frames = (shape.frames,) if has_frames else ()
    channels = int(anatomy.config(anatomy.denoiser)["out_channels"])
    return StepInputs(
        latents=torch.empty(shape.batch, channels, *frames, height, width),
        timestep=torch.empty(()),
        text=torch.empty(shape.rows, *conditions.text),
        added={name: _empty_values(value) for name, value in conditions.others},
    )


def _empty_values(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_empty_values(item) for item in value]
    return torch.empty(1, *value.shape, dtype=value.dtype) if isinstance(value, Like) else value


def _predict(base: Any, unet: nn.Module, x: Tensor, inputs: StepInputs) -> Tensor:
    """Prediction of the host's model ``base`` for ``x`` (rows, C, [frames,] h, w), with ``unet`` as its UNet."""
    model = _copy_with(base, unet)
    conditions = {
        "cross_attn": inputs.text[:1],
        "noise": inputs.latents,
        "latent_image": inputs.latents,
        **inputs.added,
    }
    try:
        extra = _model_inputs(model, conditions)
    except Exception as error:  # it reads values, as those of a mask
        if ran_out(error):
            raise
        with disable_fakes():
            extra = _model_inputs(
                model, map_tensors(conditions, lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype))
            )
    arguments = {name: condition.process_cond(batch_size=len(x), area=None).cond for name, condition in extra.items()}
    sigmas = inputs.timestep.expand(len(x))
    options = {"sigmas": sigmas, "sample_sigmas": sigmas, "cond_or_uncond": [*range(len(x) // len(inputs.latents))]}
    predicted: Tensor = model.apply_model(x, sigmas, transformer_options=options, **arguments)
    return predicted


def _model_inputs(model: Any, conditions: dict[str, Any]) -> dict[str, Any]:
    """Inputs that the model makes of conditions, called like the host's sampler."""
    latents, scale = conditions["noise"], _scale(model.latent_format)
    extra: dict[str, Any] = model.extra_conds(
        device=latents.device,
        latent_shapes=[latents.shape],
        denoise_mask=None,
        width=latents.shape[-1] * scale,
        height=latents.shape[-2] * scale,
        prompt_type="positive",
        seed=0,
        **conditions,
    )
    return extra


def _copy_with(base: Any, unet: nn.Module) -> Any:
    """The host's model with another in its denoiser's place, and without the patcher that moves its weights."""
    result = copy.copy(base)
    vars(result).update(_modules={**base._modules, "diffusion_model": unet}, current_patcher=None)
    return result


class Traced:
    """Plans of one MODEL, each made with conditions under which its trace goes through."""

    def __init__(self, model: ModelPatcher) -> None:
        """
        Raises:
            BadInputError: as :func:`anatomy_of_hosted`.
        """
        self._model = model
        self.name = name_of(model.model)
        self.unet: nn.Module = model.get_model_object("diffusion_model")
        self._foreseen = [*foreseen(self.unet)] or [Conditions((_TOKENS, _POOLED_WIDTH))]
        self.given: Conditions | None = None
        self._anatomies: dict[Conditions, Anatomy] = {}
        self.anatomy = self._anatomy_for(self._foreseen[0])

    def _anatomy_for(self, conditions: Conditions) -> Anatomy:
        if conditions not in self._anatomies:
            self._anatomies[conditions] = anatomy_of_hosted(self._model, conditions)
        return self._anatomies[conditions]

    def plan(self, make: Callable[[Anatomy], Any]) -> Any:
        """Result of ``make`` for the first anatomy whose conditions raise no PlanningError; it is tried first from then
        on.

        Raises:
            PlanningError: all conditions failed.
        """
        if _dimensions(self._model.model) not in (2, 3):
            raise PlanningError("it makes no pictures")
        failed: PlanningError | None = None
        for conditions in self._candidates():
            try:
                plan = make(self._anatomy_for(conditions))
            except PlanningError as error:
                failed = failed or error
                continue
            if conditions in self._foreseen:
                self._foreseen.remove(conditions)
                self._foreseen.insert(0, conditions)
            self.anatomy = self._anatomy_for(conditions)
            return plan
        assert failed is not None
        raise failed

    def _candidates(self) -> list[Conditions]:
        if self.given is None:
            return list(self._foreseen)
        plain = dataclasses.replace(self.given, others=_pooled_output(self.given))
        return [self.given, plain, *self._foreseen]


def _pooled_output(conditions: Conditions) -> tuple[tuple[str, Any], ...]:
    return tuple(pair for pair in conditions.others if pair[0] == "pooled_output")
