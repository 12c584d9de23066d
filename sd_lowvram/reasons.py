"""What a plan says to people: why it is as it is, or why there is none."""

from __future__ import annotations

from .candidates import Candidate
from .errors import BudgetError
from .plans import Request
from .sizes import format_size


def refusal(request: Request, smallest: Candidate) -> BudgetError:
    """Why nothing fits, with the smallest budget that would work and the stage that needs it."""
    worst = smallest.worst
    needed = smallest.needed_bytes
    size = f"{request.width}x{request.height}" + (f", batch {request.batch}" if request.batch > 1 else "")
    if needed > request.vram:
        overhead = f" ({format_size(smallest.overhead_bytes)} of it for the driver)" if smallest.overhead_bytes else ""
        return BudgetError(
            f"{format_size(request.vram)} cannot hold {size}: {worst.name} needs at least "
            f"{format_size(needed)}{overhead}. Give that much, or a smaller picture",
            needed_bytes=needed,
            stage=worst.name,
        )
    return BudgetError(
        f"{format_size(request.ram)} of host memory cannot hold what waits there for {size} with "
        f"{format_size(request.vram)} on the device: at least {format_size(smallest.host_bytes)} is needed",
        needed_bytes=smallest.host_bytes,
        stage="host",
    )


def reasons(request: Request, best: Candidate) -> tuple[str, ...]:
    """Sentences on what was chosen."""
    worst, chosen = best.worst, best.settings
    told = [f"peak {format_size(best.needed_bytes)} of {format_size(request.vram)}, reached in {worst.name}"]
    if chosen.offload == "component":
        told.append("one component's weights on the device at a time")
    if chosen.offload == "layer":
        told.append("one layer's weights on the device at a time: much slower, and the least memory")
    if chosen.vae_tiles == "exact":
        told.append(f"decoding by exact strips, the feature map {chosen.vae_map}")
    if chosen.decoder_device == "cpu":
        told.append("decoding on the CPU: the device cannot hold the decoder")
    return tuple(told)
