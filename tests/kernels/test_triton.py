"""Triton's kernels: interpreted on the CPU, compiled for cards that are not here, imported only where used."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sd_lowvram.kernels.triton.support import _failure, why_not

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(*command: str, **environment: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@TRITON
@pytest.mark.slow(40)
@pytest.mark.parametrize("part", ["kernels/triton_interpreted.py", "hooks/fused_interpreted.py"])
def test_interpreted(part: str) -> None:
    """No worse than PyTorch's own operators against float64; planted faults are caught."""
    file = HERE.parent / part
    told = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(file), TRITON_INTERPRET="1")
    assert " passed" in told and "skipped" not in told


@TRITON
@pytest.mark.gpu
def test_compiled_for_the_card_that_is_here() -> None:
    """In fp16, as interpreted: odd shapes and strides."""
    told = run("-m", "pytest", "-q", "-k", "float16 and not bfloat16", str(HERE / "triton_interpreted.py"))
    assert "3 passed" in told and "skipped" not in told


@TRITON
@pytest.mark.slow(30)
@pytest.mark.parametrize("architecture", [75, 86, 90])
def test_compiled_for_cards_that_are_not_here(architecture: int, tmp_path: Path) -> None:
    """Every kernel in every type: it has a cubin, and its shared memory is within what each of these cards has."""
    told = run(str(HERE / "triton_compiled.py"), str(architecture), TRITON_CACHE_DIR=str(tmp_path))
    lines = [line.split() for line in told.splitlines()]
    assert {name for name, *_ in lines} == {"_moments_kernel", "_normalise_kernel", "_geglu_kernel"}
    assert all(int(cubin) > 0 and int(shared) <= 64 << 10 for _, _, cubin, shared in lines)


def test_triton_is_imported_only_where_it_is_used() -> None:
    """Not by what plans and traces import; torch imports it in some of its own modules, which are imported late."""
    code = (
        "import sys, sd_lowvram, sd_lowvram.api, sd_lowvram.planning.search, sd_lowvram.hooks.numbers.fused_kernels\n"
        "print([name for name in sys.modules if name == 'triton' or name.startswith('triton.')])"
    )
    assert run("-c", code).splitlines()[-1] == "[]"


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if importlib.util.find_spec("triton") is not None:
        assert why_not(torch.device("cpu")) == "Triton's kernels run on CUDA, not on cpu"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr("sd_lowvram.kernels.triton.support.capability", lambda device: (8, 6))
        assert "Triton's kernels fail here (" in (why_not(torch.device("cuda")) or "")  # no card answers
        _failure.cache_clear()
    monkeypatch.setattr("sd_lowvram.kernels.triton.support._is_installed", lambda: False)
    assert "pip install triton" in (why_not(torch.device("cuda")) or "")
    monkeypatch.setattr(torch, "__version__", "2.1.2+cu121")
    assert re.search(r"torch 2\.4 .*2\.1\.2\+cu121", why_not(torch.device("cuda")) or "")
