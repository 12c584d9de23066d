"""A larger picture than planned is planned anew before its first step, or refused there."""

from __future__ import annotations

import gc
from typing import Any

import families
import pytest
import tiny
import torch

import sd_lowvram
from sd_lowvram.errors import BudgetError
from sd_lowvram.planning.search import PlanSearch
from sd_lowvram.session import attachments


@pytest.fixture
def pipe() -> Any:
    return families.plain("sd15")


def test_a_hires_fix_is_planned_anew(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny.run(pipe, size=128)
    small = sd_lowvram.plan(pipe, width=64, height=64)
    budget = small.minimum_vram_bytes + (small.predicted.peak_bytes - small.minimum_vram_bytes) // 2
    first = sd_lowvram.optimize(pipe, vram=f"{budget} B", width=64, height=64)
    tiny.run(pipe, size=64)
    assert attachments(pipe)[0].plan is first
    monkeypatch.setattr(PlanSearch, "smallest", lambda self: pytest.fail("nobody sees it"))
    assert tiny.relative_error(tiny.run(pipe, size=128), expected) < 1e-4
    (again,) = attachments(pipe)
    assert (again.plan.request.width, again.plan.request.height) == (128, 128)
    assert again.plan.request.vram == budget
    tiny.run(pipe, size=64)
    assert attachments(pipe) == [again]
    sd_lowvram.restore(pipe)
    assert "forward" not in vars(pipe.unet)


def test_one_that_cannot_fit_is_refused_at_the_first_step(pipe: Any) -> None:
    small = sd_lowvram.plan(pipe, width=64, height=64)
    sd_lowvram.optimize(pipe, vram=f"{small.minimum_vram_bytes} B", width=64, height=64)
    decoded: list[int] = []
    pipe.vae.register_forward_hook(lambda *_: decoded.append(1))
    with pytest.raises(BudgetError):
        tiny.run(pipe, size=512)
    assert not decoded
    assert tiny.run(pipe, size=64).shape == (1, 3, 64, 64)


@pytest.mark.slow(10)
def test_twenty_cycles_leave_no_memory_behind(pipe: Any) -> None:
    psutil = pytest.importorskip("psutil")
    process, levels = psutil.Process(), []
    plan = sd_lowvram.plan(pipe, width=64, height=64)
    for cycle in range(20):
        sd_lowvram.optimize(pipe, vram=f"{plan.minimum_vram_bytes} B", width=64, height=64)
        tiny.run(pipe, steps=1)
        sd_lowvram.restore(pipe)
        if cycle in (1, 19):
            gc.collect()
            levels.append(process.memory_info().rss)
    assert levels[1] - levels[0] <= 20 << 20
    assert all(tensor.grad is None for tensor in pipe.unet.parameters())
    assert torch.isfinite(tiny.run(pipe, steps=1)).all()
