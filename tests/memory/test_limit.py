"""Limits of torch's allocator where no GPU is needed: what versions of torch report."""

from __future__ import annotations

import pytest
import torch

from sd_lowvram.memory import limit


def test_a_fraction_of_more_than_the_whole_gpu_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """cudaMallocAsync reports it where no limit was ever set, and torch's setter refuses it."""
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 7.2e8, raising=False)
    assert limit.fraction_of(0) == 1.0
