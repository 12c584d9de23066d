"""A card that holds less than was planned: a leaner plan takes over, and the picture is the same."""

from __future__ import annotations

import gc
from typing import Any

import families
import pytest
import tiny
import torch
from on_card import GPU

import sd_lowvram
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BudgetError
from sd_lowvram.planning import request
from sd_lowvram.session import attachments

MIB = 1 << 20
CONTEXT = 300 * MIB
SIZE = 256


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What plans are made for: more than cards will have, and rates that nobody measures."""
    monkeypatch.setattr(request, "rates_of", lambda device: profile("rtx3060"))
    return {"vram": "2GB", "ram": "1GB", "width": SIZE, "height": SIZE, "device": GPU}


@pytest.fixture(scope="module")
def pipe() -> Any:
    return families.plain("sd15")


def emptied(card: Any) -> int:
    """What the card holds that nobody can give up."""
    gc.collect()
    torch.cuda.empty_cache()
    return int(card.used)


@pytest.mark.parametrize("room", [30, 20])
def test_a_card_of_less_than_planned(gpu: Any, pipe: Any, planned: dict[str, Any], room: int) -> None:
    first = sd_lowvram.optimize(pipe, **planned)
    wanted = tiny.run(pipe, size=SIZE).cpu()
    sd_lowvram.restore(pipe)
    with (
        gpu.card.of_size(CONTEXT + emptied(gpu.card) + room * MIB, CONTEXT),
        pytest.warns(UserWarning, match="ran out"),
    ):
        sd_lowvram.optimize(pipe, **planned)
        made = tiny.run(pipe, size=SIZE).cpu()
        (last,) = attachments(pipe)
        again = tiny.run(pipe, size=SIZE).cpu()
    assert last.plan.predicted.peak_bytes < first.predicted.peak_bytes
    assert attachments(pipe) == [last]
    assert tiny.relative_error(made, wanted) < 1e-4
    assert torch.equal(again, made)
    sd_lowvram.restore(pipe)


def test_a_card_on_which_nothing_fits(gpu: Any, pipe: Any, planned: dict[str, Any]) -> None:
    before = {name: tensor.clone() for name, tensor in pipe.unet.state_dict().items()}
    with (
        gpu.card.of_size(CONTEXT + emptied(gpu.card) + 2 * MIB, CONTEXT),
        pytest.raises(BudgetError, match=r"ran out of memory .* and nothing leaner fits"),
    ):
        sd_lowvram.optimize(pipe, **planned)
        tiny.run(pipe, size=SIZE)
    sd_lowvram.restore(pipe)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.unet.state_dict().items())
