"""What a GPU holds besides tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional

from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.devices.overhead import NONE, Overhead
from sd_lowvram.kernels.attention import torch_kernels
from sd_lowvram.memory import kernels_of
from sd_lowvram.models.calls import Shape
from sd_lowvram.planning.stage_costs import StageCosts
from sd_lowvram.settings import Settings
from sd_lowvram.tracing.tracer import trace_equals_once
from sd_lowvram.units import MIB


def test_a_convolutions_workspace_is_the_larger_of_both_figures() -> None:
    overhead = Overhead(convolution_bytes=MIB, convolution_share=0.5)
    assert (overhead.workspace(6 * MIB), overhead.workspace(MIB)) == (3 * MIB, MIB)
    assert NONE.workspace(6 * MIB) == 0


def test_workspaces_are_counted_where_they_are_taken_and_in_no_peak_of_tensors() -> None:
    anatomy, device = meta_anatomy("sd15", torch.float16), torch.device("cuda")
    shape = Shape(256, 256, 1, 2)
    plain = StageCosts(anatomy, shape, False, device)
    decode = next(stage for stage in plain.stages if stage.name == "decode")
    without = plain(decode, Settings())
    with_them = {
        overhead: StageCosts(anatomy, shape, False, device, overhead, like=plain)(decode, Settings())
        for overhead in (Overhead(convolution_bytes=200 * MIB), Overhead(0, 0, 0, 1.0), Overhead(0, 12 * MIB, 0))
    }
    fixed, share, matrix = (cost.reserved_bytes - without.reserved_bytes for cost in with_them.values())
    assert fixed > 100 * MIB
    assert 0 < share < fixed
    assert 0 < matrix <= 20 * MIB
    for cost in with_them.values():
        given = {"reserved_bytes": without.reserved_bytes, "recorded_bytes": without.recorded_bytes}
        given |= {name: getattr(without, name) for name in ("repeated_bytes", "kept_bytes")}
        assert dataclasses.replace(cost, **given) == without
        assert cost.recorded_bytes >= cost.reserved_bytes


def test_cudnns_attention_takes_its_share_where_torch_takes_that_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(2, 8, 4096, 64, dtype=torch.float16, device="meta")

    def attended(share: float | None) -> Any:
        overhead = Overhead(0, 0, 0, attention_share=share)
        with kernels_of("gpu"):
            attend = lambda q: functional.scaled_dot_product_attention(q, q, q)  # noqa: E731
            return trace_equals_once(attend, (q,), {}, {}, overhead)

    monkeypatch.setattr(torch_kernels, "own_kernel", lambda problem: "cudnn")
    known, unknown = attended(0.5), attended(None)
    assert known.peak_bytes == unknown.peak_bytes == 2 * q.nbytes  # tensors alone
    assert known.reserved_bytes - unknown.reserved_bytes == 2 * q.nbytes
    monkeypatch.setattr(torch_kernels, "own_kernel", lambda problem: "flash")
    assert attended(0.5).reserved_bytes == attended(None).reserved_bytes
