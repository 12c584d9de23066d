"""Run by test_triton.py in a process of its own, in which Triton interprets kernels on the CPU, or compiles them.

Error against float64 no worse than that of PyTorch's own operators, times SLACK, over odd shapes, strides, both memory
formats and three types; kernels with planted faults fail the same check.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from sd_lowvram.kernels.triton import geglu, group_norm, support

SLACK, FLOOR = 1.5, 2e-7
TYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = [torch.contiguous_format, torch.channels_last]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def bfloat16_as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round to bfloat16, which Triton's interpreter cuts off."""
    if not INTERPRETED:
        return
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16)
        return bits.numpy().view(np.uint16).reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cpu" if INTERPRETED else "cuda")


def check(kernel: Callable[..., Tensor], reference: Callable[..., Tensor], *args: Any) -> None:
    """The kernel's relative error is no worse than the reference's in the same type, and it keeps shape and type."""
    wide = [one.double() if isinstance(one, Tensor) and one.is_floating_point() else one for one in args]
    exact, theirs, ours = reference(*wide), reference(*args), kernel(*args)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    bound = SLACK * tiny.relative_error(theirs.double(), exact) + FLOOR
    assert tiny.relative_error(ours.double(), exact) <= bound


def planted(tmp_path: Path, module: Any, right: str, wrong: str) -> Any:
    """``module`` with a fault in its source."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert right in source
    file = tmp_path / f"{module.__name__.rpartition('.')[2]}.py"
    file.write_text(source.replace(right, wrong, 1), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_with_a_fault", file)
    assert spec is not None and spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = faulty
    spec.loader.exec_module(faulty)
    return faulty


# GroupNorm with SiLU

MAPS = [((2, 12, 9, 13), 4), ((2, 8, 1, 1), 4), ((3, 6, 5, 1), 2), ((1, 4, 40, 31), 2), ((1, 24, 1, 70), 1)]


def maps(dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
    """Maps whose mean is far from zero: in both formats, as rows and as columns of a map, and in no usual order."""
    for shape, groups in MAPS:
        for layout in FORMATS:
            yield (noise(*shape) + 3).to(dtype).to(memory_format=layout), groups
    large = (noise(1, 24, 11, 13) + 3).to(dtype)
    yield from ((one, 4) for one in (large[:, :, 3:9], large[:, :, :, 2:7], large[:, ::2], large.transpose(2, 3)))
    yield large.to(memory_format=torch.channels_last)[:, :, 3:9], 4


def check_group_norm(module: Any, dtype: torch.dtype) -> None:
    for x, groups in maps(dtype):
        weight, bias = (noise(x.shape[1], seed=seed).to(dtype) for seed in (1, 2))
        check(module.group_norm, group_norm.reference, x, groups, weight, bias, 1e-5, True)
    check(module.group_norm, group_norm.reference, x, groups, None, None, 1e-2, False)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_group_norm(dtype: torch.dtype) -> None:
    check_group_norm(group_norm, dtype)


def test_group_norm_keeps_the_layout() -> None:
    x = noise(2, 6, 9, 13)
    for layout in FORMATS:
        assert group_norm.group_norm(x.to(memory_format=layout), 2).is_contiguous(memory_format=layout)


def test_statistics_of_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_norm, "_CHUNK", 64)
    check(group_norm.group_norm, group_norm.reference, noise(1, 8, 9, 13) + 3, 4, None, None, 1e-5, True)


GROUP_NORM_FAULTS = [
    ("apart * apart * sizes, 0)", "apart * sizes, 0)"),
    (".to(tl.float32) - mean", ".to(tl.float32)"),
    ("1.0 / tl.sqrt(variance + eps)", "1.0 / tl.sqrt(variance)"),
    ("value * tl.sigmoid(value)", "value * tl.sigmoid(1.702 * value)"),
    ("(row % groups) * width\n", "(row % groups)\n"),
    ("inside = is_inside & (p + places < stop)", "inside = is_inside & (p + places < pixels - 1)"),
]


@pytest.mark.parametrize("fault", GROUP_NORM_FAULTS, ids=str)
def test_a_wrong_group_norm_is_caught(fault: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = planted(tmp_path, group_norm, *fault)
    monkeypatch.setattr(faulty, "_CHUNK", 256)
    with pytest.raises(AssertionError):
        check_group_norm(faulty, torch.float32)


# GEGLU


def check_geglu(module: Any, dtype: torch.dtype) -> None:
    for product in (noise(2, 7, 80), noise(5, 2), noise(3, 2600), noise(2, 60, 9).transpose(1, 2)):
        check(module.geglu, geglu.reference, product.to(dtype))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_geglu(dtype: torch.dtype) -> None:
    check_geglu(geglu, dtype)


@pytest.mark.parametrize(
    "fault",
    [
        ("value * gelu_by_erf(gate)", "gate * gelu_by_erf(value)"),
        ("column < width", "column < width - 1"),
        ("0.7071067811865476", "0.7"),
    ],
)
def test_a_wrong_geglu_is_caught(fault: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_geglu(planted(tmp_path, geglu, *fault), torch.float32)


def test_the_same_bits_again() -> None:
    x = noise(1, 6, 9, 13)
    assert torch.equal(group_norm.group_norm(x, 2), group_norm.group_norm(x, 2))


def test_interpreted_kernels_run_on_the_cpu() -> None:
    assert support.why_not(torch.device("cpu")) is None
    assert not support.takes(noise(1).double())
