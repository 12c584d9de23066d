"""Sentences of plans: the reasons for their choices, and for refusals."""

from __future__ import annotations

from ..devices.compiling import Compiling
from ..devices.disk import ASSUMED
from ..devices.disk import described as described_disk
from ..devices.performance import THIS
from ..errors import BudgetError
from ..hooks.compiled import is_compiled
from ..models.calls import TEXT_STAGE
from ..settings import Settings
from ..units import GIB, LONG, format_least, format_size, format_time
from .plan import Candidate, StagePlan
from .request import Request

_WORTH_TELLING = 0.95
"""Part of the time from which on down it is worth telling what more memory would buy."""
_TOLD_WAIT = 0.02
"""Part of a step from which on up it is said to wait for the disk."""


def budget_error(request: Request, smallest: Candidate, leanest: Candidate | None) -> BudgetError:
    """Why nothing fits, with the smallest budget that would work and the stage that needs it.

    Args:
        smallest: the candidate that needs least of the device.
        leanest: of those that the device holds, the one that needs least of the host.
    """
    worst = smallest.worst
    needed = smallest.needed_bytes
    if leanest is None:
        overhead = f" ({format_size(smallest.overhead_bytes)} of it for the driver)" if smallest.overhead_bytes else ""
        by_size = worst.name != TEXT_STAGE and worst.weights_bytes + smallest.overhead_bytes < request.vram
        return BudgetError(
            f"{format_size(request.vram)} cannot hold {_work(request, (worst,))}: {worst.name} needs at least "
            f"{format_least(needed)}{overhead}. {remedy(by_size)}",
            needed_bytes=needed,
            stage=worst.name,
            by_size=by_size,
        )
    work = _work(request, leanest.stages)
    return BudgetError(
        f"{format_size(request.ram)} of host memory cannot hold what waits there for {work} with "
        f"{format_size(request.vram)} on the device: at least {format_least(leanest.host_bytes)} is needed",
        needed_bytes=leanest.host_bytes,
        stage="host",
        limit="ram",
    )


def _work(request: Request, stages: tuple[StagePlan, ...]) -> str:
    """The work of ``stages``, for people: the text encoders by name, or a picture by its size."""
    if all(stage.name == TEXT_STAGE for stage in stages):
        return ", ".join(stage.component for stage in stages)
    return f"{request.width}x{request.height}" + (f", batch {request.batch}" if request.batch > 1 else "")


def remedy(by_size: bool) -> str:
    """The remedy for a budget that is too small; ``by_size``: a smaller picture may help too."""
    return "Give that much" + (", or a smaller picture" if by_size else "")


def too_large(limit: int, stage: StagePlan) -> BudgetError:
    """The error that no settings keep every allocation within ``limit``, with the smallest limit that works."""
    mebibytes, by_size = -(-stage.largest_bytes // (1 << 20)), stage.name != TEXT_STAGE
    return BudgetError(
        f"largest_mib {limit >> 20}: {stage.name} makes a single allocation of at least {mebibytes} MiB. "
        f"{remedy(by_size)}",
        needed_bytes=stage.largest_bytes,
        stage=stage.name,
        limit="largest_mib",
        by_size=by_size,
    )


def why_not(stage: StagePlan, others: list[StagePlan], request: Request, largest: float) -> str:
    """The reason why the smallest of the faster ways (``others``) to run a stage was rejected; "": none is faster.

    Args:
        largest: limit for a single allocation in bytes.
    """
    faster = [one for one in others if one.choice != stage.choice and one.seconds < stage.seconds]
    if not faster:
        return ""
    nearest = min(faster, key=lambda one: one.reserved_bytes)
    name, needed = described(nearest), nearest.reserved_bytes + request.overhead_bytes
    if nearest.largest_bytes > largest:
        return f"{name} makes a single allocation of {format_size(nearest.largest_bytes)}"
    if needed > request.vram:
        return f"{name} needs {format_size(needed)}"
    if nearest.host_bytes > request.ram:
        return f"{name} needs {format_size(nearest.host_bytes)} of host memory"
    return f"{name} is faster here and slower in the stages that share its settings"


def described(stage: StagePlan) -> str:
    """Words for the way in which a stage runs."""
    chosen = (f"{name} {value}" for name, value in stage.choice.items() if value not in (False, "off"))
    return ", ".join(chosen) or "plain"


def reasons(
    request: Request,
    best: Candidate,
    following: Candidate | None,
    compiling: Compiling | None = None,
    unlocked_seconds: float = 0.0,
    disk: float = ASSUMED,
) -> tuple[str, ...]:
    """Sentences on what was chosen, what it costs, and what the next larger budget would buy.

    Args:
        unlocked_seconds: what it takes longer as not all weights that wait are page-locked.
        disk: bytes a second of the disk under the weights.
    """
    worst, chosen = best.worst, best.settings
    budget = format_size(request.vram)
    sentences = [f"peak {format_size(best.needed_bytes)} of {budget}, reached in {worst.name}"]
    if chosen.offload == "component":
        sentences.append("one component's weights on the device at a time")
    streamed = next((stage for stage in best.stages if stage.slowdown != 1.0), None)
    if chosen.offload in ("blocks", "halves") and streamed is not None:
        sentences.append(
            f"{format_size(streamed.weights_bytes)} of weights on the device at a time, the rest streamed under the "
            f"compute: a step takes {streamed.slowdown:.2f} times as long"
        )
    if chosen.offload == "layer":
        slower = f": a step takes {streamed.slowdown:.2f} times as long" if streamed is not None else ""
        sentences.append(f"the weights of one layer and the next on the device at a time, the least memory{slower}")
    if best.locked_bytes:
        sentences.append(_locked(best, unlocked_seconds))
    sentences += [_from_disk(request, stage, disk) for stage in best.stages if stage.disk_bytes]
    if chosen.vae_tiles == "exact":
        kept = f", the feature map {chosen.vae_map}" if chosen.vae_map else ""  # a causal autoencoder has no such map
        sentences.append(f"decoding by exact strips{kept}")
    if any(stage.choice.get("decoder_device") == "cpu" for stage in best.stages):
        sentences.append("decoding on the CPU: the device cannot hold the decoder")
    left = format_size(request.vram - best.needed_bytes)
    if is_compiled(chosen) and compiling is not None:
        sentences.append(
            f"{left} left: compiled, expected to be {compiling.gain:.1f} times as fast from the second run on"
        )
    if chosen.cuda_graphs:
        sentences.append(f"{left} left: the denoiser's passes are recorded once and replayed")
    sentences += [*_by_the_model(request, chosen), *_half_products(chosen)]
    if chosen.packed_weights:
        sentences.append(f"{left} left beside large weights that are kept in the order of the CPU's kernels, too")
    sentences += _unknown(request, chosen)
    if best.seconds >= LONG:
        longest = max(best.stages, key=lambda stage: stage.seconds)
        share = round(100 * longest.seconds / best.seconds)
        sentences.append(
            f"slow: {format_time(best.seconds)} on {request.rates.title}, {share} % of it in {longest.name}"
        )
    if following is not None and following.seconds <= _WORTH_TELLING * best.seconds:
        sentences.append(
            f"with {format_least(following.needed_bytes)} it would take {format_time(following.seconds)} "
            f"instead of {format_time(best.seconds)}"
        )
    return tuple(sentences)


def not_planned(weights_bytes: int, chosen: Settings) -> str:
    """Reason for models whose call signature is unknown: only weights are counted."""
    places = {"none": "on the device", "component": "one model's at a time on the device"}
    where = places.get(chosen.offload or "", "streamed")
    return (
        f"weights {format_size(weights_bytes)}, {where}; activations of this model are traced when a call is given "
        "(sd_lowvram.trace): they are not in the peak, nor its compute in the time"
    )


def _unknown(request: Request, chosen: Settings) -> list[str]:
    """The sentence on bytes that the plan does not know."""
    if chosen.attention != "cudnn" or request.overhead.attention_share is not None:
        return []
    return ["what cuDNN's attention holds beside tensors is not in the peak: `doctor --calibrate` on the card tells"]


def _by_the_model(request: Request, chosen: Settings) -> list[str]:
    if request.rates.name == THIS or not (chosen.cuda_graphs or chosen.fused_kernels):
        return []
    return [
        "by the time model: on the card itself fused kernels and recorded passes are taken once `sd-lowvram doctor "
        "--calibrate` has measured them to be faster there"
    ]


def _half_products(chosen: Settings) -> list[str]:
    if chosen.precision != "fp16-products":
        return []
    return [
        "products in fp16, all else in float32: another picture; what overflows is found in the first step and made in "
        "float32, and in the time is what earlier runs have found"
    ]


def _locked(best: Candidate, seconds: float) -> str:
    """The sentence on page-locked host memory, and the cost of the rest."""
    told = f"{format_size(best.locked_bytes)} of host memory page-locked for copies"
    if not best.unlocked_bytes:
        return told
    rest = f"{format_size(best.unlocked_bytes)} of weights are not and are read when they are copied"
    return f"{told}; {rest}" + (f", {format_time(seconds)} of the run" if seconds > 0 else ", at no cost in time")


def _from_disk(request: Request, stage: StagePlan, disk: float) -> str:
    """The sentence on the wait for the disk in a step, and the memory that would avoid it."""
    step, calls = stage.seconds / request.steps, request.calls
    waits = f", {format_time(stage.disk_wait)} of it waiting for" if stage.disk_wait > _TOLD_WAIT * step else " under"
    told = (
        f"{format_size(request.ram)} of host memory and {described_disk(disk)}: {format_time(step)} a step{waits} the "
        f"{format_size(stage.disk_bytes)} that it reads from the disk"
    )
    if stage.disk_wait <= _TOLD_WAIT * step:
        return told
    enough = format_least(-(-(request.ram + stage.disk_bytes // calls) // GIB) * GIB)
    return f"{told}; {enough} would make it {format_time(step - stage.disk_wait)}"
