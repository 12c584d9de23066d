"""The watch finds what it is there for: faults planted in our own code, each a change that a slip could make."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from on_card import GPU, Seen
from simulated_card.card import card
from test_hooks_on_the_card import LAYER, WAYS, Broken, denoise, denoise_past, mapped, run, timing_of
from torch import Tensor

from sd_lowvram import Settings, attached
from sd_lowvram.memory import Parked, fetch, host_offload, park, pinned, send
from sd_lowvram.memory.pinned_buffers import PINNED_BUFFERS, PinnedBuffers
from sd_lowvram.streaming import layout
from sd_lowvram.streaming.buffer import DeviceBuffer
from sd_lowvram.streaming.copier import Copier
from sd_lowvram.streaming.engine import ActiveStreams, Stream
from sd_lowvram.streaming.host_weights import HostWeights, _Ring
from sd_lowvram.streaming.layout import DeviceLayout
from sd_lowvram.weights import weight_bytes

Work = Callable[[Any, Path], bool]
"""A run on the card; whether its result is right."""


PLAIN: dict[str, Any] = {}
"""What is right: latents of the UNet alone, results of single calls, and a picture."""


@pytest.fixture(scope="module")
def whole() -> Any:
    pipe = families.plain("sd15")
    with attached(pipe, Settings(offload="none"), device=GPU):
        PLAIN.update(latents=denoise(pipe.unet), mixed=mixed(pipe.unet), picture=run(pipe, {}))
    return pipe


@pytest.fixture
def pipe(whole: Any) -> Any:
    """A copy, which a fault may spoil."""
    return copy.deepcopy(whole)


def streamed(way: str) -> Work:
    def work(pipe: Any, folder: Path) -> bool:
        with attached(pipe.unet, WAYS[way], device=GPU):
            return all(torch.equal(denoise(pipe.unet), PLAIN["latents"]) for _ in range(2))

    return work


def mixed(unet: Any, batches: tuple[int, ...] = (2, 2, 2, 2, 1, 2)) -> list[Tensor]:
    """Calls of which the host waits for none; the last ones of a kind are replayed where calls are recorded."""
    noise = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, 8, 8, generator=noise).to(GPU)
    text = torch.randn(2, 7, unet.config.cross_attention_dim, generator=noise).to(GPU)
    timestep = torch.tensor(900, device=GPU)
    with torch.inference_mode():
        made = [unet(latents[:batch], timestep, text[:batch], return_dict=False)[0] for batch in batches]
    return [one.cpu() for one in made]


def recorded(pipe: Any, folder: Path) -> bool:
    settings, replays = dataclasses.replace(WAYS["blocks"], streamed_graphs=True), card().replays
    with attached(pipe.unet, settings, device=GPU):
        right = all(map(torch.equal, mixed(pipe.unet), PLAIN["mixed"]))
        return right and card().replays == replays + 3


def following(pipe: Any, folder: Path) -> bool:
    """Also when a run passes over blocks that were read ahead."""
    with attached(pipe.unet, LAYER, device=GPU, timing=timing_of(pipe.unet)):
        right = torch.equal(denoise(pipe.unet), PLAIN["latents"])
        denoise_past(pipe.unet)
        return right and torch.equal(denoise(pipe.unet), PLAIN["latents"])


def from_a_file(pipe: Any, folder: Path) -> bool:
    pipe.unet.save_pretrained(folder)
    with mapped(folder) as unet, attached(unet, WAYS["blocks"], device=GPU):
        return all(torch.equal(denoise(unet), PLAIN["latents"]) for _ in range(2))


def on_the_device(module: torch.nn.Module) -> bool:
    return any(tensor.is_cuda for tensor in module.parameters())


def pictures(way: str) -> Work:
    """Two pictures, each of which leaves no weights on the device but those of what ran last."""

    def work(pipe: Any, folder: Path) -> bool:
        before, right = torch.cuda.memory_allocated(), True
        with attached(pipe, WAYS[way], device=GPU):
            for _ in range(2):
                right &= torch.equal(run(pipe, {}), PLAIN["picture"])
                right &= torch.cuda.memory_allocated() - before < 1.1 * weight_bytes(pipe.vae)
        return right

    return work


def broken(pipe: Any, folder: Path) -> bool:
    def breaks(*_: Any) -> None:
        raise Broken

    with attached(pipe.unet, WAYS["blocks"], device=GPU):
        hook = pipe.unet.mid_block.register_forward_hook(breaks)
        with contextlib.suppress(Broken):
            denoise(pipe.unet)
        hook.remove()
        return not on_the_device(pipe.unet) and torch.equal(denoise(pipe.unet), PLAIN["latents"])


def parked_elsewhere(pipe: Any, folder: Path) -> bool:
    """Rows are stored on one stream and read on another, and by the host."""
    noise = torch.randn(1, 8, 32, 32, generator=torch.Generator().manual_seed(0))
    tensor, stream = noise.to(GPU), torch.cuda.Stream()
    parked = Parked.empty(tensor.shape, tensor.dtype, like=tensor)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        parked.store(slice(0, 32), tensor)
    tensor.record_stream(stream)
    return torch.equal(parked.load().cpu(), noise)


def cut_on_the_host(pipe: Any, folder: Path) -> bool:
    noise = torch.randn(1, 8, 32, 32, generator=torch.Generator().manual_seed(0))
    return torch.equal(fetch(park(noise.to(GPU)), slice(4, 9)).cpu(), noise[:, :, 4:9])


def sent(pipe: Any, folder: Path) -> bool:
    """A map leaves while other tensors take its memory: large ones, as small ones may find other free blocks."""
    shape = 1, 8, 512, 768
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with PINNED_BUFFERS.keep():
        fetch(send(torch.zeros(shape, device=GPU)))  # to get memory, here or there, may wait for all streams
        parked = send(noise.to(GPU) * 1)
        send(torch.zeros(shape, device=GPU))
        torch.zeros(shape, device=GPU)
        return torch.equal(fetch(parked).cpu(), noise)


def dropped(pipe: Any, folder: Path) -> bool:
    """A parked map is gone before its copies have run."""
    noise = torch.randn(1, 8, 32, 32, generator=torch.Generator().manual_seed(0))
    tensor = noise.to(GPU)
    return all(torch.equal(back.cpu(), noise) for back in [fetch(park(tensor)) for _ in range(3)])


def handed_on(pipe: Any, folder: Path) -> bool:
    """What a map leaves is taken by one that is parked on another stream."""
    noise = torch.randn(2, 1, 8, 32, 32, generator=torch.Generator().manual_seed(0))
    first, second = noise.to(GPU)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with PINNED_BUFFERS.keep():
        back = fetch(park(first))
        with torch.cuda.stream(stream):
            again = fetch(park(second))
    torch.cuda.synchronize()
    return torch.equal(back.cpu(), noise[0]) and torch.equal(again.cpu(), noise[1])


def after_others(pipe: Any, folder: Path) -> bool:
    """The memory on the device is what other tensors have just freed."""

    def taken(take_room: Any) -> Any:
        def takes(self: DeviceLayout, *args: Any) -> None:
            torch.ones(self.bytes, dtype=torch.uint8, device=GPU)
            take_room(self, *args)

        return takes

    with exchanged(DeviceLayout, "take_room", taken):
        return LAYERS(pipe, folder)


def _in_no_order(_: Any) -> Any:
    return lambda self, device: contextlib.nullcontext()


def _copies_at_once(copy: Any) -> Any:
    return lambda self, copies, after, ended: copy(self, copies, ())


def _refilled_early(copy: Any) -> Any:
    def refills(self: _Ring, *args: Any) -> None:
        copy(self, *args)
        self._copied = [None] * len(self._copied)

    return refills


def _without_its_event(leave: Any) -> Any:
    return lambda self, room, copied: leave(self, room, None)


def _never(*args: Any) -> None:
    return None


def _at_once(_: Any) -> Any:
    return lambda self: contextlib.nullcontext()


def _unjoined(recorded: Any) -> Any:
    @contextlib.contextmanager
    def records(self: Copier) -> Iterator[None]:
        with exchanged(Copier, "join", _removed), recorded(self):
            yield

    return records


def _unallocated(fetch: Any) -> Any:
    def fetches(self: DeviceBuffer, *args: Any) -> None:
        self._begun = None
        fetch(self, *args)

    return fetches


def _half_a_kilobyte_off(places: Any) -> Any:
    def misplaced(pool: Any, waiting: Any, offset: int, parts: Any) -> Any:
        return places(pool, waiting, max(0, offset - 512), parts)

    return misplaced


def _alone(_: Any) -> Any:
    return property(lambda self: dict.fromkeys(self.streamed, ()))


def _removed(_: Any) -> Any:
    return _never


BLOCKS, LAYERS, PICTURES, IN_TURNS = streamed("blocks"), streamed("layer"), pictures("layer"), pictures("component")
WORKS = {
    "blocks": BLOCKS, "layers": LAYERS, "pictures": PICTURES, "in turns": IN_TURNS, "from a file": from_a_file,
    "recorded": recorded, "following": following, "after others": after_others, "broken": broken,
    "sent": sent, "parked elsewhere": parked_elsewhere, "cut on the host": cut_on_the_host,
    "dropped": dropped, "handed on": handed_on,
}  # fmt: skip

# Each: what is changed and how, what is run, and what gives it away.
FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any], Work, str]] = {
    "the compute does not wait for copies": (Copier, "wait", _removed, BLOCKS, "races"),
    "copies do not wait for the compute": (Copier, "copy", _copies_at_once, BLOCKS, "races"),
    "the compute sets no marks": (Copier, "mark", _removed, BLOCKS, "races"),
    "room is given back during copies": (Copier, "drain", _removed, PICTURES, "races"),
    "room is filled before it is free": (DeviceBuffer, "_fetch", _unallocated, after_others, "races"),
    "memory of a ring that follows is filled too early": (Copier, "copy", _copies_at_once, following, "races"),
    "a recording waits for events of before it": (DeviceBuffer, "_forget_events", _removed, recorded, "wrong"),
    "copies of a recording are not joined": (Copier, "recorded", _unjoined, recorded, "wrong"),
    "the compute of a recording does not wait for copies": (Copier, "wait", _removed, recorded, "races"),
    "copies do not wait for a replay": (DeviceBuffer, "replayed", _at_once, recorded, "races"),
    "the ring is refilled early": (_Ring, "copy", _refilled_early, from_a_file, "races"),
    "blocks in the same bytes know nothing of each other": (DeviceLayout, "overlapping", _alone, LAYERS, "races"),
    "blocks lie over each other": (layout, "_place_block", _half_a_kilobyte_off, BLOCKS, "wrong"),
    "a failed run is not tidied up": (Stream, "abandon", _removed, broken, "wrong"),
    "host weights stay pinned": (HostWeights, "undo", _removed, BLOCKS, "pinned"),
    "the memory of a map is given away while it leaves": (host_offload, "_wait_when_dropped", _removed, sent, "races"),
    "a map leaves before it is computed": (torch.cuda.Stream, "wait_stream", _removed, sent, "races"),
    "a component is not taken back": (ActiveStreams, "take", _removed, IN_TURNS, "wrong"),
    "parking sets no events": (Parked, "_order_copies", _in_no_order, parked_elsewhere, "races"),
    "pages are unlocked during copies": (pinned, "_wait", _removed, dropped, "races"),
    "rooms are handed on during copies": (PinnedBuffers, "leave", _without_its_event, handed_on, "races"),
    "the host cuts a map that is on its way": (Parked, "_wait", _removed, cut_on_the_host, "races"),
}


@contextlib.contextmanager
def exchanged(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def seen_of(gpu: Any, schedule: str, work: Work, pipe: Any, folder: Path) -> tuple[Seen, bool]:
    """What was seen, and whether the result was right; an error of ours is not."""
    right = False
    with gpu.watched(schedule) as seen, contextlib.suppress(RuntimeError, KeyError):
        right = work(pipe, folder)
    return seen, right


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(
    gpu: Any, pipe: Any, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where every copy happens to run at once, and bits are right. Memory that is given back to the card between
    stages waits for all copies, and would hide what lacks: here none is."""
    torch.cuda.empty_cache()  # of other tests
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    owner, name, make, work, found = FAULTS[fault]
    with exchanged(owner, name, make):
        seen, right = seen_of(gpu, "eager", work, pipe, tmp_path)
    print(f"{fault}: {'right' if right else 'wrong'}, {seen}")
    told = {
        "races": bool(seen.races),
        "wrong": not right,
        "left": seen.device_bytes > 0,
        "pinned": seen.pinned_bytes > 0,
    }
    assert told[found], f"right: {right}; {seen}"


@pytest.mark.parametrize("work", WORKS)
def test_without_a_fault_there_is_nothing(gpu: Any, pipe: Any, work: str, tmp_path: Path) -> None:
    seen, right = seen_of(gpu, "lazy", WORKS[work], pipe, tmp_path)
    assert right
    assert seen.clean, seen
