"""Reasons for the choices of plans, and refusals."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..devices.performance import MEASURED_GAINS, THIS
from ..errors import BudgetError
from ..hooks.numbers.fused_kernels import kernels_in
from ..hooks.replay.compiled import is_compiled
from ..knob import Act
from ..memory.limit import limits_reserved
from ..models.calls import TEXT_STAGE
from ..policies import OURS
from ..settings import Settings, acts
from ..units import LONG, format_least, format_size
from .cost_model import About
from .plan import Candidate, StagePlan
from .request import Request
from .wording import Kind, Reason, describe_choice

_PUBLISHED_FIRST = ("rtx2060", "rtx2070", "rtx2080", "rtx2080-ti")
"""The GPU on which first pictures of other programs were published, and those of its generation."""

_WORTH_TELLING = 0.95
"""Largest part of the time for which the reason names the larger budget."""


def budget_error(request: Request, smallest: Candidate, leanest: Candidate | None) -> BudgetError:
    """Return the error that nothing fits, with the smallest budget that works and the stage that needs it.

    Args:
        request: picture and budgets.
        smallest: the candidate that needs least of the device.
        leanest: the candidate that needs least of the host, among those that fit the device; None: none fits the
            device.
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
        f"{format_size(request.ram)} of RAM cannot hold what waits there for {work} with "
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


def allocation_error(limit: int, stage: StagePlan) -> BudgetError:
    """The error that no settings keep every allocation within ``limit``, with the smallest limit that works.

    Args:
        limit: largest allowed allocation in bytes.
        stage: the stage with the largest allocation.
    """
    mebibytes, by_size = -(-stage.largest_bytes // (1 << 20)), stage.name != TEXT_STAGE
    return BudgetError(
        f"largest_mib {limit >> 20}: {stage.name} makes a single allocation of at least {mebibytes} MiB. "
        f"{remedy(by_size)}",
        needed_bytes=stage.largest_bytes,
        stage=stage.name,
        limit="largest_mib",
        by_size=by_size,
    )


def rejection_reason(stage: StagePlan, others: list[StagePlan], request: Request, largest: float) -> str:
    """Return the reason why the smallest of the faster ways to run a stage was rejected.

    Args:
        stage: the stage as it was chosen.
        others: all ways to run it that were priced.
        request: picture and budgets.
        largest: limit for a single allocation in bytes.

    Returns:
        A few words for people; "" if no way is faster.
    """
    faster = [one for one in others if one.choice != stage.choice and one.seconds < stage.seconds]
    if not faster:
        return ""
    nearest = min(faster, key=lambda one: one.reserved_bytes)
    name, needed = describe_choice(nearest.choice), nearest.reserved_bytes + request.overhead_bytes
    if nearest.largest_bytes > largest:
        return f"{name} makes a single allocation of {format_size(nearest.largest_bytes)}"
    if needed > request.vram:
        return f"{name} needs {format_size(needed)}"
    if nearest.host_bytes > request.ram:
        return f"{name} needs {format_size(nearest.host_bytes)} of RAM"
    return f"{name} is faster here and slower in the stages that share its settings"


def reasons(request: Request, best: Candidate, following: Candidate | None, about: About) -> Iterator[Reason]:
    """Reasons for what was chosen, what it costs, and what the next larger budget would buy.

    Args:
        request: picture, budgets and rates.
        best: the chosen candidate.
        following: the nearest faster candidate beyond the budget; None: there is none.
        about: facts on ``best``.
    """
    record = request.rehearsal
    if record is not None and record.waiting:
        yield Reason(Kind.AT_FIRST_CALL, models=list(record.waiting), why=record.why)
        yield from _limit_reason(request)
        return
    yield Reason(Kind.PEAK, **_budget(request, best), stage=best.worst.name)
    yield from _weight_reasons(request, best, about)
    yield from _speed_reasons(request, best, about)
    if request.device.type != "cpu":
        published = request.pace.first_seconds if request.rates.name in _PUBLISHED_FIRST else None
        yield Reason(Kind.FIRST_PICTURE, more_seconds=published, loading_seconds=request.rates.loading_seconds)
    yield from _limit_reason(request)
    if best.seconds >= LONG:
        longest = max(best.stages, key=lambda stage: stage.seconds)
        share = round(100 * longest.seconds / best.seconds)
        slow = {"seconds": best.seconds, "card": request.rates.title}
        yield Reason(Kind.SLOW, **slow, percent=share, stage=longest.name)
    if following is not None and following.seconds <= _WORTH_TELLING * best.seconds:
        faster = {"needed_bytes": following.needed_bytes, "faster_seconds": following.seconds}
        yield Reason(Kind.MORE_MEMORY, **faster, seconds=best.seconds)
    if about.unknown_bytes is not None:
        yield unplanned_reason(about.unknown_bytes, best.settings)


def _limit_reason(request: Request) -> Iterator[Reason]:
    """The reason why reserved bytes may exceed the budget, where torch's limit does not count them."""
    ours = request.device.type == "cuda" and request.rates.name == THIS and request.pace is OURS
    if ours and torch.cuda.is_available() and not limits_reserved():
        yield Reason(Kind.RESERVED_UNLIMITED, backend=torch.cuda.get_allocator_backend())


def _budget(request: Request, best: Candidate) -> dict[str, int]:
    return {"needed_bytes": best.needed_bytes, "vram": request.vram}


def _weight_reasons(request: Request, best: Candidate, about: About) -> Iterator[Reason]:
    """Reasons on the places of the weights, and of the maps of a decode."""
    acting = acts(best.settings)
    yield from _offload_reason(acting, best, about)
    if best.locked_bytes:
        waiting = {"locked_bytes": best.locked_bytes, "unlocked_bytes": best.unlocked_bytes}
        yield Reason(Kind.PAGE_LOCKED, **waiting, seconds=about.unlocked_seconds)
    yield from (_disk_reason(request, stage, about.disk) for stage in best.stages if stage.disk_bytes)
    if Act.MAKES_STRIPS in acting:
        yield Reason(Kind.EXACT_STRIPS, vae_map=best.settings.vae_map)  # a causal autoencoder has no such map
    if any(Act.ON_PROCESSOR in acts(Settings(**stage.choice)) for stage in best.stages):
        yield Reason(Kind.DECODER_ON_CPU)


def _offload_reason(acting: frozenset[Act], best: Candidate, about: About) -> Iterator[Reason]:
    """The reason on the weights that wait in host memory."""
    slower = next((stage for stage in best.stages if stage.slowdown != 1.0), None)
    streams = Act.STREAMS_WEIGHTS in acting
    if Act.MOVES_MODELS in acting or (streams and about.streamed_bytes == 0):
        yield Reason(Kind.ONE_COMPONENT)
    elif Act.STREAMS_LAYERS in acting:
        yield Reason(Kind.ONE_LAYER, slowdown=None if slower is None else slower.slowdown)
    elif streams and slower is not None:
        yield Reason(Kind.STREAMED, weights_bytes=slower.weights_bytes, slowdown=slower.slowdown)


def _speed_reasons(request: Request, best: Candidate, about: About) -> Iterator[Reason]:
    """Reasons on settings that are taken because they are faster, and on figures that are unknown."""
    chosen, acting, budget = best.settings, acts(best.settings), _budget(request, best)
    named, measured = request.rates.name != THIS, request.rates.name in MEASURED_GAINS
    if is_compiled(chosen) and about.compiling is not None:
        yield Reason(Kind.COMPILED, **budget, gain=about.compiling.gain)
    if Act.RECORDS in acting:
        yield Reason(Kind.RECORDED, **budget)
        if named:
            yield Reason(Kind.BY_TIME_MODEL)
    if named and (kernels_in(chosen, autoencoder=False) or (kernels_in(chosen, autoencoder=True) and not measured)):
        yield Reason(Kind.FUSED_NOT_FASTER)
    if Act.HALVES_PRODUCTS in acting:
        yield Reason(Kind.HALF_PRODUCTS)
    if Act.COPIES_WEIGHTS in acting:
        yield Reason(Kind.PACKED, **budget)
    if Act.OWN_WORKSPACE in acting and request.overhead.attention_share is None:
        yield Reason(Kind.ATTENTION_UNKNOWN)


def unplanned_reason(weights_bytes: int, settings: Settings) -> Reason:
    """The reason on models whose call signature is unknown: only weights are counted."""
    return Reason(Kind.NOT_PLANNED, weights_bytes=weights_bytes, offload=settings.offload or "")


def _disk_reason(request: Request, stage: StagePlan, disk: float) -> Reason:
    """The reason on the wait for the disk in a step, and the memory that would avoid it."""
    read = {"ram": request.ram, "disk": disk, "disk_bytes": stage.disk_bytes, "calls": request.calls}
    return Reason(Kind.FROM_DISK, **read, step_seconds=stage.seconds / request.steps, wait_seconds=stage.disk_wait)
