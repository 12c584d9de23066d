"""A card that holds less than was planned: a leaner plan takes over, and the picture is the same."""

from __future__ import annotations

import gc
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from on_card import GPU, rest_taken
from run_log import logged

import sd_lowvram
from sd_lowvram import Settings
from sd_lowvram.devices.overhead import Overhead
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BudgetError
from sd_lowvram.memory import pinned
from sd_lowvram.planning import request
from sd_lowvram.planning.fallback_steps import AS_BEFORE
from sd_lowvram.session import attachments
from sd_lowvram.streaming.host_weights import RING_BYTES

MIB = 1 << 20
CONTEXT = 300 * MIB
SIZE = 256


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What plans are made for: more than cards will have, rates that nobody measures, and no libraries."""
    monkeypatch.setattr(request, "rates_of", lambda device: profile("rtx3060"))
    monkeypatch.setattr(request, "Overhead", lambda: Overhead(matrix_bytes=0, convolution_bytes=0))
    return {"vram": "2GB", "ram": "1GB", "width": SIZE, "height": SIZE, "device": GPU}


@pytest.fixture(scope="module")
def pipe() -> Any:
    return families.plain("sd15")


def emptied(card: Any) -> int:
    """What the card holds that nobody can give up."""
    gc.collect()
    torch.cuda.empty_cache()
    return int(card.used)


@pytest.mark.parametrize("room", [24, 20])
def test_a_card_of_less_than_planned(gpu: Any, pipe: Any, planned: dict[str, Any], room: int) -> None:
    first = sd_lowvram.optimize(pipe, **planned)
    wanted = tiny.run(pipe, size=SIZE).cpu()
    sd_lowvram.restore(pipe)
    with (
        gpu.card.of_size(CONTEXT + emptied(gpu.card) + room * MIB, CONTEXT),
        logged("ran out"),
    ):
        sd_lowvram.optimize(pipe, **planned)
        made = tiny.run(pipe, size=SIZE).cpu()
        second = tiny.run(pipe, size=SIZE).cpu()  # which may find the card in other pieces, and go one step further
        (last,) = attachments(pipe)
        third = tiny.run(pipe, size=SIZE).cpu()
    assert last.plan.predicted.peak_bytes < first.predicted.peak_bytes
    assert attachments(pipe) == [last]
    assert max(tiny.relative_error(one, wanted) for one in (made, second)) < 1e-4
    assert torch.equal(third, second)
    sd_lowvram.restore(pipe)


def test_a_tensor_that_somebody_holds_beside_the_run(gpu: Any, pipe: Any, planned: dict[str, Any]) -> None:
    first = sd_lowvram.optimize(pipe, **planned)
    wanted = tiny.run(pipe, size=SIZE).cpu()
    sd_lowvram.restore(pipe)
    room = first.predicted.reserved_bytes + 8 * MIB
    with gpu.card.of_size(CONTEXT + emptied(gpu.card) + room, CONTEXT), logged("ran out"):
        hog = torch.empty(room - 24 * MIB, dtype=torch.uint8, device=GPU)
        sd_lowvram.optimize(pipe, **planned)
        made = tiny.run(pipe, size=SIZE).cpu()
    plan = attachments(pipe)[0].plan
    assert hog.is_cuda and plan.fallback_steps and all(step.told in plan.reasons for step in plan.fallback_steps)
    assert tiny.relative_error(made, wanted) < 1e-4
    sd_lowvram.restore(pipe)


def test_a_tensor_that_somebody_holds_from_the_middle_of_a_run_on(gpu: Any, pipe: Any, planned: dict[str, Any]) -> None:
    """The steps before it are not made again: those after it, and the decode, go on from their latents.

    None is recorded: a recording has its memory, and needs none of what is held.
    """
    planned = {**planned, "settings": Settings(cuda_graphs=False)}
    first = sd_lowvram.optimize(pipe, **planned)
    wanted = tiny.run(pipe, size=SIZE, steps=4).cpu()
    sd_lowvram.restore(pipe)
    room = first.predicted.reserved_bytes + 8 * MIB
    hogs: list[torch.Tensor] = []
    after: list[tuple[int, int]] = []

    def held(_: Any, step: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        after.append((step, len(attachments(pipe)[0].plan.fallback_steps)))
        if step == 1:
            gc.collect()
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            hogs.append(torch.empty(free - 4 * MIB, dtype=torch.uint8, device=GPU))
        return values

    with gpu.card.of_size(CONTEXT + emptied(gpu.card) + room, CONTEXT), logged("ran out"):
        sd_lowvram.optimize(pipe, **planned)
        made = tiny.run(pipe, size=SIZE, steps=4, callback_on_step_end=held).cpu()
    plan = attachments(pipe)[0].plan
    assert [step for step, _ in after] == [0, 1, 2, 3] and [fallback_steps for _, fallback_steps in after[:2]] == [0, 0]
    assert len(hogs) == 1 and plan.fallback_steps and all(step.told in plan.reasons for step in plan.fallback_steps)
    assert tiny.relative_error(made, wanted) < 1e-4
    sd_lowvram.restore(pipe)


def test_a_decoder_without_room_on_the_card_runs_on_the_cpu(gpu: Any, pipe: Any, planned: dict[str, Any]) -> None:
    """The last step, where nothing else is left: whoever fixed the plain decode leaves no strips to be made smaller."""
    planned |= {"width": 512, "height": 512, "settings": Settings(vae_tiles="off")}
    first = sd_lowvram.optimize(pipe, **planned)
    wanted = tiny.run(pipe, size=512).cpu()
    sd_lowvram.restore(pipe)
    least = first.minimum_vram_bytes - first.predicted.overhead_bytes
    with (
        gpu.card.of_size(CONTEXT + emptied(gpu.card) + least * 4 // 5, CONTEXT),
        logged(r"vae ran out of memory on cuda.*\(decoder on the CPU\)"),
    ):
        sd_lowvram.optimize(pipe, **planned)
        made = tiny.run(pipe, size=512).cpu()
    plan = attachments(pipe)[0].plan
    assert plan.settings.decoder_device == "cpu" and plan.fallback_steps[-1].name == "decoder on the CPU"
    assert next(pipe.vae.decoder.parameters()).device.type == "cpu"
    assert tiny.relative_error(made, wanted) < 1e-4
    sd_lowvram.restore(pipe)


@pytest.fixture
def host_of(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the host have so many bytes for what is page-locked: the system refuses more of them (RLIMIT_DATA)."""

    def give(room: int) -> None:
        pages = pinned._Pages

        def within(*args: Any, **flags: Any) -> Any:
            now = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]
            before = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (now + max(0, room - gpu.card.pinned), before[1]))
            try:
                return pages(*args, **flags)
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, before)

        monkeypatch.setattr(pinned, "_Pages", within)

    return give


@pytest.mark.parametrize(("lacking", "where"), [(4 * MIB, "vae"), (64 * MIB, "the move of the weights")])
def test_a_host_of_less_than_planned_leaves_weights_in_their_file(
    gpu: Any, planned: dict[str, Any], host_of: Callable[[int], None], tmp_path: Path, lacking: int, where: str
) -> None:
    """There is no memory for the decoder's parked maps next to the weights, or none for the weights."""
    from diffusers import StableDiffusionPipeline

    large = families.plain("sd15")
    words = large.text_encoder.get_input_embeddings().weight
    large.text_encoder.resize_token_embeddings(3 * RING_BYTES // words[0].nbytes)
    large.save_pretrained(tmp_path)
    small = StableDiffusionPipeline.from_pretrained(tmp_path)
    small.set_progress_bar_config(disable=True)
    planned["settings"] = Settings(offload="component", vae_tiles="exact", vae_map="parked")
    first = sd_lowvram.optimize(small, **planned)
    wanted = tiny.run(small, size=SIZE).cpu()
    sd_lowvram.restore(small)
    assert first.minimum_ram_bytes < first.predicted.host_bytes - lacking
    host_of(first.predicted.host_bytes - lacking)
    with logged(rf"{where} ran out of RAM on cuda.*\(weights from their file\)"):
        sd_lowvram.optimize(small, **planned)
        made = tiny.run(small, size=SIZE).cpu()
    plan = attachments(small)[0].plan
    assert [step.name for step in plan.fallback_steps] == [AS_BEFORE, "weights from their file"]
    assert plan.predicted.host_bytes < first.predicted.host_bytes
    assert torch.equal(made, wanted)
    sd_lowvram.restore(small)


def test_a_card_on_which_nothing_fits(gpu: Any, pipe: Any, planned: dict[str, Any]) -> None:
    before = {name: tensor.clone() for name, tensor in pipe.unet.state_dict().items()}
    rest = rest_taken()
    with (
        gpu.card.of_size(CONTEXT + emptied(gpu.card) + 2 * MIB, CONTEXT),
        pytest.raises(BudgetError, match=r"ran out of memory .* and nothing leaner fits"),
    ):
        sd_lowvram.optimize(pipe, **planned)
        tiny.run(pipe, size=SIZE)
    del rest
    sd_lowvram.restore(pipe)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.unet.state_dict().items())
