"""The wording of plans' reasons, for command line, panel, nodes and notebooks; torch is not imported here.

Code that asks for a reason compares its kind and reads its values; a sentence can be reworded without any other change.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

from ..devices.disk import describe_rate as described_disk
from ..units import GIB, format_least, format_size, format_time

_SHOWN_WAIT = 0.02
"""Least part of a step that waits for the disk and is shown."""

BRIEFLY: dict[str, dict[Any, str]] = {
    "offload": {
        "component": "one part of the model in VRAM at a time",
        "halves": "half of the model in VRAM at a time",
        "blocks": "part of the model stays in VRAM, the rest is loaded when needed",
        "layer": "one layer of the model in VRAM at a time, the slowest way",
    },
    "vae_tiles": {"exact": "decoded in exact strips"},
    "decoder_device": {"cpu": "decoded on the processor"},
}
"""Words for unusual values of settings, where there is one line for all of a plan."""


class Kind(str, enum.Enum):
    """Kind of a reason; the values are those of ``plan --json``."""

    PEAK = "peak"
    ONE_COMPONENT = "one component"
    STREAMED = "streamed"
    ONE_LAYER = "one layer"
    PAGE_LOCKED = "page-locked"
    FROM_DISK = "from disk"
    EXACT_STRIPS = "exact strips"
    DECODER_ON_CPU = "decoder on the CPU"
    COMPILED = "compiled"
    RECORDED = "recorded passes"
    BY_TIME_MODEL = "by the time model"
    FUSED_NOT_FASTER = "fused kernels, no time saved"
    HALF_PRODUCTS = "products in fp16"
    PACKED = "packed weights"
    ATTENTION_UNKNOWN = "attention's workspace unknown"
    FIRST_PICTURE = "first picture"
    SLOW = "slow"
    MORE_MEMORY = "more memory"
    NOT_PLANNED = "not planned"
    AT_FIRST_CALL = "at first call"
    RESERVED_UNLIMITED = "reserved bytes not limited"
    SMALLEST = "smallest budget"
    RAN_AGAIN = "ran out, runs again"
    RAN_LEANER = "ran out, needs less"
    HOST_FETCHES = "host fetches layers"
    HOST_DECIDES = "host decides on weights"
    DECODE_ONLY = "decode only"
    STEPS_PLAIN = "steps as in the host"
    TILES_UNUSED = "other tiles unused"
    TILES_DECODE = "other tiles decode"


class Reason(str):
    """A sentence of a plan, with what it says as values.

    Attributes:
        kind: the kind of the reason.
        values: plain values in the sentence, by name. Sizes are in bytes; ``vram`` and ``ram`` are the budgets.
    """

    kind: Kind
    values: dict[str, Any]

    def __new__(cls, kind: Kind | str, **values: Any) -> Reason:
        kind = Kind(kind)
        reason = super().__new__(cls, _SENTENCES[kind](**values))
        reason.kind, reason.values = kind, values
        return reason

    def __getnewargs_ex__(self) -> tuple[tuple[Kind], dict[str, Any]]:
        return (self.kind,), self.values

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, from which ``Reason(kind, **values)`` makes the sentence again."""
        return {"kind": self.kind.value, "values": dict(self.values)}


def select_kinds(reasons: Iterable[Reason], *kinds: Kind) -> list[Reason]:
    """The ``reasons`` of some ``kinds``, in the order in which the kinds are given."""
    return [reason for kind in kinds for reason in reasons if reason.kind is kind]


def drop_peak(reasons: Iterable[Reason]) -> list[Reason]:
    """The ``reasons`` without the peak, which is printed elsewhere."""
    return [reason for reason in reasons if reason.kind is not Kind.PEAK]


def describe_choice(choice: dict[str, Any]) -> str:
    """Words for the way in which a stage runs."""
    return ", ".join(f"{name} {value}" for name, value in choice.items() if value not in (False, "off")) or "plain"


def shortage_text(where: str, of_host: bool, device: str, needed_bytes: int) -> str:
    """Return the beginning of a sentence on a call that ran out of memory.

    Args:
        where: the component.
        of_host: True if host memory is short.
        device: name of the device.
        needed_bytes: planned bytes of that memory.
    """
    kind = "RAM" if of_host else "memory"
    return f"{where} ran out of {kind} on {device} with a plan of {format_size(needed_bytes)}"


def _peak(needed_bytes: int, vram: int, stage: str) -> str:
    return f"needs {format_size(needed_bytes)} of {format_size(vram)}, most of it in {stage}"


def _streamed_text(weights_bytes: int, slowdown: float) -> str:
    return (
        f"{format_size(weights_bytes)} of weights on the device at a time, the rest streamed while it "
        f"computes: a step takes {slowdown:.2f} times as long"
    )


def _one_layer_text(slowdown: float | None) -> str:
    slower = "" if slowdown is None else f": a step takes {slowdown:.2f} times as long"
    return f"the weights of one layer and the next on the device at a time, the least memory{slower}"


def _page_locked(locked_bytes: int, unlocked_bytes: int, seconds: float) -> str:
    locked = f"{format_size(locked_bytes)} of RAM page-locked for copies"
    if not unlocked_bytes:
        return locked
    rest = f"{format_size(unlocked_bytes)} of weights are not, and are read when they are copied"
    return f"{locked}; {rest}" + (f", {format_time(seconds)} of the run" if seconds > 0 else ", at no cost in time")


def _disk_text(ram: int, disk: float, disk_bytes: int, calls: int, step_seconds: float, wait_seconds: float) -> str:
    waits = wait_seconds > _SHOWN_WAIT * step_seconds
    read = (
        f"{format_size(ram)} of RAM and {described_disk(disk)}: {format_time(step_seconds)} a step"
        f"{f', {format_time(wait_seconds)} of it waiting for' if waits else ' under'} the "
        f"{format_size(disk_bytes)} that it reads from the disk"
    )
    enough = format_least(-(-(ram + disk_bytes // calls) // GIB) * GIB)
    return f"{read}; {enough} would make it {format_time(step_seconds - wait_seconds)}" if waits else read


def _exact_strips(vae_map: str | None) -> str:
    return "decoding in exact strips" + (f", the unfinished picture {vae_map}" if vae_map else "")


def _compiled_text(needed_bytes: int, vram: int, gain: float) -> str:
    left = format_size(vram - needed_bytes)
    return f"{left} left: compiled, expected to be {gain:.1f} times as fast from the second run on"


def _recorded_text(needed_bytes: int, vram: int) -> str:
    return f"{format_size(vram - needed_bytes)} left: the denoiser's passes are recorded once and replayed"


def _packed_text(needed_bytes: int, vram: int) -> str:
    left = format_size(vram - needed_bytes)
    return f"{left} left: large weights are also stored in the order of the CPU's kernels"


def _first_picture(more_seconds: float | None, loading_seconds: float) -> str:
    longer = "" if more_seconds is None else f", by {format_time(more_seconds)} in published runs on an RTX 2070"
    if loading_seconds:
        longer = f": loading libraries and kernels took {format_time(loading_seconds)} here"
    return f"the time is that of a picture after the first; the first after loading takes longer{longer}"


def _slow(seconds: float, card: str, percent: int, stage: str) -> str:
    return f"slow: {format_time(seconds)} on {card}, {percent} % of it in {stage}"


def _more_memory(needed_bytes: int, faster_seconds: float, seconds: float) -> str:
    return (
        f"with {format_least(needed_bytes)} it would take {format_time(faster_seconds)} "
        f"instead of {format_time(seconds)}"
    )


def _unplanned_text(weights_bytes: int, offload: str) -> str:
    places = {"none": "on the device", "component": "one model's at a time on the device"}
    return (
        f"weights {format_size(weights_bytes)}, {places.get(offload, 'streamed')}; the calls of this model are "
        "unknown: only weights are counted, no activations and no time; sd_lowvram.trace() counts those of a call"
    )


def _at_first_call(models: list[str], why: str) -> str:
    named = f"{models[0]} is" if len(models) == 1 else f"{', '.join(models[:-1])} and {models[-1]} are"
    return (
        f"{named} planned at the first call, because a rehearsal of the pipeline's call failed ({why}): until its "
        "denoiser is called, all weights are streamed layer by layer, and that call is refused if it does not fit. If "
        "the pipeline requires arguments, state them in the argument call, and it is planned now"
    )


def _smallest(least_vram: int, least_ram: int) -> str:
    least = (format_least(least_vram), format_least(least_ram))
    return f"the smallest budget that works is about {least[0]}, with {least[1]} of RAM"


def _ran_again(where: str, of_host: bool, device: str, needed_bytes: int) -> str:
    begin = shortage_text(where, of_host, device, needed_bytes)
    return f"{begin}: cached memory is freed, and it runs again as before"


def _ran_leaner(where: str, of_host: bool, device: str, needed_bytes: int, leaner_bytes: int, step: str) -> str:
    begin = shortage_text(where, of_host, device, needed_bytes)
    return f"{begin}: it continues with one of {format_size(leaner_bytes)} ({step})"


def _host_decides(
    host: str,
    free_bytes: int,
    model_bytes: int,
    keeps: str,
    needed_bytes: int,
    over_budget: bool,
    bounded: bool = False,
) -> str:
    does = {
        "all": f"keeps all {format_size(model_bytes)} of the model",
        "one part": "keeps one part of the model at a time",
        "some layers": "keeps some layers and loads the rest when they are needed",
    }
    over = ", more than this budget" if over_budget else ""
    room = "within this budget" if bounded else f"with {format_size(free_bytes)} free"
    return (
        f"{host} itself decides what stays in VRAM: {room} it {does[keeps]}, and this needs "
        f"{format_size(needed_bytes)}{over}"
    )


_SENTENCES: dict[Kind, Callable[..., str]] = {
    Kind.PEAK: _peak,
    Kind.ONE_COMPONENT: lambda: "one model's weights on the device at a time",
    Kind.STREAMED: _streamed_text,
    Kind.ONE_LAYER: _one_layer_text,
    Kind.PAGE_LOCKED: _page_locked,
    Kind.FROM_DISK: _disk_text,
    Kind.EXACT_STRIPS: _exact_strips,
    Kind.DECODER_ON_CPU: lambda: "decoding on the CPU: the device cannot hold the decoder",
    Kind.COMPILED: _compiled_text,
    Kind.RECORDED: _recorded_text,
    Kind.BY_TIME_MODEL: lambda: (
        "on the GPU itself, passes are recorded once `sd-lowvram doctor --calibrate` has measured that this is faster "
        "there"
    ),
    Kind.FUSED_NOT_FASTER: lambda: (
        "fused kernels: the time is that of torch's own operators in stages that no GPU of this generation was "
        "measured to be faster in; a step of SD1.5 on an H100 took a third longer with them"
    ),
    Kind.HALF_PRODUCTS: lambda: (
        "products in fp16, all else in float32: another picture; products that overflow are found in the first step "
        "and computed in float32; the time includes those that earlier runs have found"
    ),
    Kind.PACKED: _packed_text,
    Kind.ATTENTION_UNKNOWN: lambda: (
        "the workspace of cuDNN's attention is not counted: `doctor --calibrate` on the GPU measures it"
    ),
    Kind.FIRST_PICTURE: _first_picture,
    Kind.SLOW: _slow,
    Kind.MORE_MEMORY: _more_memory,
    Kind.NOT_PLANNED: _unplanned_text,
    Kind.AT_FIRST_CALL: _at_first_call,
    Kind.RESERVED_UNLIMITED: lambda backend: (
        f"torch's allocator is {backend}: while this runs its allocated bytes are limited to the budget, and its "
        "reserved bytes are not; without backend in PYTORCH_CUDA_ALLOC_CONF both are"
    ),
    Kind.SMALLEST: _smallest,
    Kind.RAN_AGAIN: _ran_again,
    Kind.RAN_LEANER: _ran_leaner,
    Kind.HOST_FETCHES: lambda host: f"{host} fetches layers of the model as it needs them",
    Kind.HOST_DECIDES: _host_decides,
    Kind.DECODE_ONLY: lambda host: f"the decode is exact and within the budget, the steps run as in {host}",
    Kind.STEPS_PLAIN: lambda host: f"the steps run as in {host} and are counted, the decode is exact",
    Kind.TILES_UNUSED: lambda other: (
        f"{other}, which is on too, has nothing to do: the decode is already exact and within the budget"
    ),
    Kind.TILES_DECODE: lambda other: (
        f"{other}, which is on too, decodes in its own tiles, which changes the picture: turn it off"
    ),
}
"""The sentence of each kind, from its values."""
