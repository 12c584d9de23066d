"""From a model, a picture size and a budget to the settings that fit, by simple rules over a stated memory model.

The memory model, all in bytes of the type that computes. A *map* is one feature map; ``largest`` is the largest input
of a residual block of the decoder (256 channels at full resolution for the SD autoencoder).

- UNet: ``26 x first width x latent pixels x pictures`` (two a picture with guidance), as a trace of SD1.5, SD2.1 and
  SDXL shows it; kernels that slice add their block of scores.
- decoder: plain 3 x largest; exact tiles held 1.5 x largest, recomputed 0.75 x largest, parked none of it (1.5 x
  largest in host memory); each exact mode adds six strips, and the keys and values of the attention over all pixels.
- weights: those of every component, of the largest component, or of the largest layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .errors import BadInputError, BudgetError
from .hooks.precision import precision_fidelity
from .models.anatomy import Anatomy
from .settings import Fidelity, Settings
from .sizes import MIB, format_size
from .weights import all_tensors, own_tensors

CUDA_OVERHEAD_BYTES = 600 * MIB
"""Context (300 to 450 MiB), library workspaces and allocator rounding on CUDA, a stated default until calibrated."""

_UNET_MAPS = 26
_PLAIN_MAPS, _HELD_MAPS, _RECOMPUTED_MAPS, _STRIPS = 3.0, 1.5, 0.75, 6


@dataclass(frozen=True)
class Request:
    """What is asked for: picture size in pixels, pictures, bytes of device and host memory, the device."""

    width: int
    height: int
    batch: int
    vram: int
    ram: int
    device: torch.device


@dataclass(frozen=True)
class Predicted:
    """Bytes at the peak. ``host_bytes`` are weights and maps that wait in host memory; ``seconds`` None: not known."""

    peak_bytes: int
    overhead_bytes: int
    weights_bytes: int
    activation_bytes: int
    host_bytes: int
    seconds: float | None = None
    stage: str = ""


@dataclass(frozen=True)
class Plan:
    """Settings with what they are predicted to need, and why they were chosen.

    Attributes:
        settings: every knob as it is attached.
        fits: the peak and the overhead together stay within the budget, and the host's share within its own.
        predicted: bytes at the peak, and the stage that has it.
        minimum_peak_bytes: the least peak that any allowed settings reach; ``minimum_vram_bytes`` adds the overhead.
        minimum_ram_bytes: host memory that those smallest settings need.
        fidelity: the farthest from the baseline that any chosen setting goes.
        reasons: sentences for people.
    """

    settings: Settings
    request: Request
    fits: bool
    predicted: Predicted
    minimum_peak_bytes: int
    minimum_vram_bytes: int
    minimum_ram_bytes: int
    fidelity: Fidelity
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are those of the command line's ``plan --json``."""
        request = {**dataclasses.asdict(self.request), "device": str(self.request.device)}
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return plain | {
            "settings": self.settings.as_dict(),
            "request": request,
            "predicted": dataclasses.asdict(self.predicted),
            "fidelity": str(self.fidelity),
            "reasons": list(self.reasons),
        }


def make_plan(anatomy: Anatomy, request: Request, settings: Settings, approximate: bool = False) -> Plan:
    """The fastest settings that fit, by rule: the first of :func:`_candidates` whose estimate is within the budgets.

    Raises:
        BudgetError: none fits; it tells the smallest budget that works and the stage that needs it.
    """
    estimates = [
        (candidate, estimate(anatomy, request, candidate))
        for candidate in _candidates(anatomy, request, settings, approximate)
    ]
    smallest = min((predicted for _, predicted in estimates), key=lambda predicted: predicted.peak_bytes)
    fitting = [pair for pair in estimates if _fits(pair[1], request)]
    if not fitting:
        raise _refusal(request, smallest, min(predicted.host_bytes for _, predicted in estimates))
    chosen, predicted = fitting[0]
    return Plan(
        settings=chosen,
        request=request,
        fits=True,
        predicted=predicted,
        minimum_peak_bytes=smallest.peak_bytes,
        minimum_vram_bytes=smallest.peak_bytes + smallest.overhead_bytes,
        minimum_ram_bytes=smallest.host_bytes,
        fidelity=_fidelity(anatomy, chosen),
        reasons=_reasons(request, chosen, predicted, estimates[0][1]),
    )


def _candidates(anatomy: Anatomy, request: Request, settings: Settings, approximate: bool) -> Iterator[Settings]:
    """Settings from the fastest to the smallest. Moving weights costs at every step, the decoder's ways only once."""
    on_gpu = request.device.type != "cpu"
    base = settings.filled(
        attention="sdpa" if anatomy.attentions and not settings.deterministic else None,
        inference_mode=True,
        vae_slices=True if request.batch > 1 and anatomy.vae is not None else None,
        channels_last=True if on_gpu and anatomy.denoiser else None,
    )
    precisions = [None] if not approximate else ["fp16", None] if on_gpu else [None, "bf16"]
    decoders: list[dict[str, Any]] = [{}]
    if anatomy.vae is not None:
        exact = [
            {"vae_tiles": "exact", "vae_map": kind, "decoder_device": "gpu"}
            for kind in ("held", "parked", "recomputed")
        ]
        decoders = [{"vae_tiles": "off", "decoder_device": "gpu"}, *exact]
        if on_gpu and settings.decoder_device in (None, "auto", "cpu"):
            decoders.append({"vae_tiles": "off", "decoder_device": "cpu"})
        if settings.decoder_device == "auto":
            base = dataclasses.replace(base, decoder_device=None)
    seen = set()
    for offload in ("none", "component", "layer"):
        for decoder in decoders:
            for precision in precisions:
                candidate = base.filled(offload=offload, precision=precision, **decoder)
                if candidate not in seen:
                    seen.add(candidate)
                    yield candidate


def estimate(anatomy: Anatomy, request: Request, settings: Settings) -> Predicted:
    """What ``settings`` need for ``request`` by the memory model at the top of this file."""
    weights = {name: _weights(anatomy, name, settings) for name in anatomy.components}
    decoder_on_cpu = settings.decoder_device == "cpu" and request.device.type != "cpu"
    on_device = {name: w for name, w in weights.items() if not (decoder_on_cpu and name == anatomy.autoencoder)}
    host = sum(w.total for w in weights.values()) - sum(w.total for w in on_device.values())
    if settings.offload in ("component", "layer"):
        host += sum(w.total for w in on_device.values())
    stages = []
    for name in on_device:
        held = {"component": weights[name].total, "layer": weights[name].largest_layer}.get(
            settings.offload or "none", sum(w.total for w in on_device.values())
        )
        activations, parked = _activations(anatomy, name, request, settings)
        stages.append((held + activations, held, activations, parked, name))
    peak, held, activations, _, stage = max(stages, default=(0, 0, 0, 0, ""))
    host += max((parked for *_, parked, _ in stages), default=0)
    if decoder_on_cpu:
        host += _decode_bytes(anatomy, request, settings, 4)[0]
    overhead = CUDA_OVERHEAD_BYTES if request.device.type == "cuda" else 0
    return Predicted(peak, overhead, held, activations, host, None, stage)


@dataclass(frozen=True)
class _Weights:
    total: int
    largest_layer: int


def _weights(anatomy: Anatomy, name: str, settings: Settings) -> _Weights:
    component = anatomy.components[name]
    stored = _stored_bytes(anatomy, name, settings)
    layers = (sum(stored(t) for t in own_tensors(module)) for module in component.modules())
    widened = 3 if settings.precision == "fp16-storage" else 1  # the stored layer and its copy of twice the size
    return _Weights(sum(map(stored, all_tensors(component))), max(layers, default=0) * widened)


def _stored_bytes(anatomy: Anatomy, name: str, settings: Settings) -> Any:
    sizes = {"fp32": 4, "fp16": 2, "bf16": 2, "fp16-storage": 2}
    size = sizes.get(settings.precision or "")
    if name == anatomy.autoencoder and anatomy.config(name).get("force_upcast") and size == 2:
        size = 4
    return lambda t: t.numel() * (size if size and t.is_floating_point() else t.element_size())


def _compute_size(anatomy: Anatomy, name: str, settings: Settings) -> int:
    """Bytes of one activation value of a component."""
    sizes = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp16-storage": 4, "autocast-fp16": 4, "autocast-bf16": 4}
    upcast = name == anatomy.autoencoder and anatomy.config(name).get("force_upcast")
    own = max((t.element_size() for t in anatomy.components[name].parameters() if t.is_floating_point()), default=4)
    size = sizes.get(settings.precision or "", own)
    return 4 if upcast else size


def _activations(anatomy: Anatomy, name: str, request: Request, settings: Settings) -> tuple[int, int]:
    """Device bytes and parked host bytes of one component's activations."""
    size = _compute_size(anatomy, name, settings)
    if name == anatomy.denoiser:
        pictures = 2 * request.batch
        width = _first_width(anatomy, name)
        scores = (settings.attention_mib or 64) * MIB if settings.attention in ("sliced", "fused-softmax") else 0
        return _UNET_MAPS * width * _latent_pixels(anatomy, request) * pictures * size + scores, 0
    if name == anatomy.autoencoder:
        return _decode_bytes(anatomy, request, settings, size)
    hidden = int(anatomy.config(name).get("hidden_size", 768) or 768)
    return 16 * 77 * hidden * 2 * request.batch * size, 0


def _decode_bytes(anatomy: Anatomy, request: Request, settings: Settings, size: int) -> tuple[int, int]:
    widths = list(anatomy.config(anatomy.autoencoder or "").get("block_out_channels", (128, 256, 512, 512)))
    pictures = 1 if settings.vae_slices else request.batch
    pixels = request.width * request.height * pictures
    largest = (
        max(widths[min(level + 1, len(widths) - 1)] * (pixels >> 2 * level) for level in range(len(widths))) * size
    )
    output = 3 * pixels * size
    keys_and_values = 2 * widths[-1] * (pixels >> 2 * (len(widths) - 1)) * size
    strip = (settings.vae_strip_mib or 16) * MIB
    if settings.vae_tiles == "exact":
        maps = {"parked": 0.0, "recomputed": _RECOMPUTED_MAPS}.get(settings.vae_map or "held", _HELD_MAPS)
        working = min(_STRIPS * strip, int(_PLAIN_MAPS * largest)) + output
        parked = int(_HELD_MAPS * largest) if settings.vae_map == "parked" else 0
        return max(int(maps * largest), keys_and_values) + working, parked
    if settings.vae_tiles == "fast":
        tile = 64 * 64 * 4 ** (len(widths) - 1)
        return int(_PLAIN_MAPS * largest * min(1.0, tile / (pixels / pictures))) + 2 * output, 0
    return int(_PLAIN_MAPS * largest) + output, 0


def _first_width(anatomy: Anatomy, name: str) -> int:
    return int(anatomy.config(name).get("block_out_channels", (320,))[0])


def scale_factor(anatomy: Anatomy) -> int:
    """Pixels a latent pixel stands for in one direction: 8 for Stable Diffusion."""
    if anatomy.autoencoder is None:
        return 8
    return 2 ** (len(anatomy.config(anatomy.autoencoder).get("block_out_channels", (0,) * 4)) - 1)


def _latent_pixels(anatomy: Anatomy, request: Request) -> int:
    factor = scale_factor(anatomy)
    return (request.width // factor) * (request.height // factor)


def native_size(anatomy: Anatomy) -> int:
    """The picture's side in pixels for which the model was made."""
    if anatomy.denoiser is not None:
        sample = anatomy.config(anatomy.denoiser).get("sample_size") or 64
        return int(sample if isinstance(sample, int) else sample[0]) * scale_factor(anatomy)
    return int(anatomy.config(anatomy.autoencoder).get("sample_size") or 512) if anatomy.autoencoder else 512


def check_size(width: int, height: int, batch: int = 1, factor: int = 8) -> None:
    """Raise BadInputError unless the picture's sides are positive multiples of ``factor``; says what is nearest."""
    for name, pixels in (("width", width), ("height", height)):
        if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < factor or pixels % factor:
            near = f": the nearest is {max(factor, factor * round(pixels / factor))}" if isinstance(pixels, int) else ""
            raise BadInputError(f"{name} {pixels!r} must be a positive multiple of {factor}{near}")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise BadInputError(f"batch {batch!r} must be a whole number of at least 1")


def _fits(predicted: Predicted, request: Request) -> bool:
    return predicted.peak_bytes + predicted.overhead_bytes <= request.vram and predicted.host_bytes <= request.ram


def _refusal(request: Request, smallest: Predicted, least_host: int) -> BudgetError:
    needed = smallest.peak_bytes + smallest.overhead_bytes
    size = f"{request.width}x{request.height}" + (f", batch {request.batch}" if request.batch > 1 else "")
    if needed > request.vram:
        overhead = f" ({format_size(smallest.overhead_bytes)} of it for the driver)" if smallest.overhead_bytes else ""
        return BudgetError(
            f"{format_size(request.vram)} cannot hold {size}: the {smallest.stage} needs at least "
            f"{format_size(needed)}{overhead}. Give that much, or a smaller picture",
            needed_bytes=needed,
            stage=smallest.stage,
        )
    return BudgetError(
        f"{format_size(request.ram)} of host memory cannot hold what waits there for {size}: "
        f"at least {format_size(max(least_host, 1))} is needed with {format_size(request.vram)} on the device",
        needed_bytes=least_host,
        stage="host",
    )


def _fidelity(anatomy: Anatomy, settings: Settings) -> Fidelity:
    others = [knob.fidelity_of(value) for name, knob, value in settings.decided() if name != "precision" and value]
    return max([precision_fidelity(anatomy, settings), *others])


def _reasons(request: Request, chosen: Settings, predicted: Predicted, fastest: Predicted) -> tuple[str, ...]:
    total = predicted.peak_bytes + predicted.overhead_bytes
    reasons = [f"peak {format_size(total)} of {format_size(request.vram)}, reached in {predicted.stage}"]
    if chosen.offload != "none" or chosen.vae_tiles == "exact":
        all_resident = fastest.peak_bytes + fastest.overhead_bytes
        reasons.append(f"everything resident and untiled would take {format_size(all_resident)}")
    if chosen.offload == "component":
        reasons.append("one component's weights on the device at a time")
    if chosen.offload == "layer":
        reasons.append("one layer's weights on the device at a time: much slower, and the least memory")
    if chosen.vae_tiles == "exact":
        reasons.append(f"decoding by exact strips, the feature map {chosen.vae_map}")
    if chosen.decoder_device == "cpu":
        reasons.append("decoding on the CPU: the device cannot hold the decoder")
    return tuple(reasons)
