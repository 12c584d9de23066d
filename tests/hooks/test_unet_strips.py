"""What the UNet hooks are made of: strips of residual blocks, group statistics, maps that wait, lent weights."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sd_lowvram.devices.calibration import Operators
from sd_lowvram.hooks.parking.offloaded_tensor import OffloadedMap
from sd_lowvram.hooks.pieces import residual_strips as hook
from sd_lowvram.hooks.pieces.strips import Statistics, assemble, equal_spans
from sd_lowvram.memory import current_account
from sd_lowvram.memory.repeats import representative_pieces, standing_for, times
from sd_lowvram.models.diffusers import residual
from sd_lowvram.streaming.weight_scopes import hold_weights, lend_to_call


@given(total=st.integers(1, 300), pieces=st.integers(1, 40), least=st.integers(1, 50))
def test_spans_cover_all_once(total: int, pieces: int, least: int) -> None:
    found = equal_spans(total, pieces, least)
    assert [row for span in found for row in range(*span)] == list(range(total))
    assert len(found) <= pieces
    sizes = [stop - start for start, stop in found]
    assert len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
    assert all(size >= min(least, total) for size in sizes[:-1])


@contextlib.contextmanager
def computing_as(device: str) -> Iterator[None]:
    """Take the statistics of a strip by the operators that ``device`` gets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd_lowvram.hooks.pieces.strips.is_on_cpu", lambda _: device == "cpu")
        yield


DEVICES = st.sampled_from(["cpu", "cuda"])


@given(
    cuts=st.lists(st.integers(1, 19), max_size=4, unique=True),
    batch=st.integers(1, 2),
    mean=st.floats(-50, 50),
    device=DEVICES,
)
def test_moments_do_not_depend_on_the_strips(cuts: list[int], batch: int, mean: float, device: str) -> None:
    x = torch.randn(batch, 8, 20, 7, generator=torch.Generator().manual_seed(1)) * 0.5 + mean
    norm = nn.GroupNorm(4, 8)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    statistics = Statistics(norm)
    edges = [0, *sorted(cuts), 20]
    for start, stop in itertools.pairwise(edges):
        with computing_as(device):
            statistics.add(x[:, :, start:stop])
        statistics.normalise(x[:, :, :1])  # what was worked out for some strips must not stay for more
    normalised = [statistics.normalise(x[:, :, start:stop]) for start, stop in itertools.pairwise(edges)]
    expected = norm.double()(x.double())
    assert (torch.cat(normalised, 2) - expected).abs().max() < 2e-3 * max(1e-2, abs(mean) / 50)


@given(value=st.floats(-100, 100, width=16), dtype=st.sampled_from([torch.float16, torch.float32]), device=DEVICES)
def test_an_even_map_is_zero(value: float, dtype: torch.dtype, device: str) -> None:
    """The mean is the map's value to the last bit: an error would be divided by the root of eps."""
    statistics = Statistics(nn.GroupNorm(2, 6, eps=1e-12))
    x = torch.full((1, 6, 15, 7), value, dtype=dtype)
    with computing_as(device):
        for start, stop in ((0, 4), (4, 11), (11, 15)):
            statistics.add(x[:, :, start:stop])
    assert torch.equal(statistics.normalise(x).float(), torch.zeros(x.shape))


def operators(strip: Tensor, device: str) -> int:
    """Operators that are no views, for a strip that is not the first."""
    statistics = Statistics(nn.GroupNorm(2, 6))
    with computing_as(device), Operators() as counted:
        statistics.add(strip)
        first = counted.number
        statistics.add(strip)
    return counted.number - first


def test_a_card_launches_few_operators_for_the_statistics_of_a_strip() -> None:
    strip = torch.randn(1, 6, 8, 7)
    assert operators(strip, "cuda") <= 5 < operators(strip, "cpu")
    assert operators(strip.half(), "cuda") <= 6


def block(**options: Any) -> Any:
    from diffusers.models.resnet import ResnetBlock2D

    torch.manual_seed(0)
    made = ResnetBlock2D(in_channels=16, temb_channels=12, groups=4, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made.eval().requires_grad_(False)


VARIANTS: dict[str, dict[str, Any]] = {
    "same width": {},
    "wider": {"out_channels": 32},
    "narrower": {"out_channels": 8},
    "scaled": {"output_scale_factor": 1.5},
    "time without act": {"skip_time_act": True},
    "no time": {"temb_channels": None},
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("circular", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_residual_block_by_strips(
    variant: str, circular: bool, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "FEWEST_ROWS", 1)
    options = {"temb_channels": 12, **VARIANTS[variant]}
    made = block(**{key: value for key, value in options.items() if key != "temb_channels"})
    if options["temb_channels"] is None:
        made.time_emb_proj = None
    if circular:
        made.conv1.padding_mode = made.conv2.padding_mode = "circular"
    noise = torch.Generator().manual_seed(3)
    for height in (2, 5, 13, 16):
        x = torch.randn(2, 16, height, 9, generator=noise).to(memory_format=layout)
        temb = None if options["temb_channels"] is None else torch.randn(2, 12, generator=noise)
        before = x.clone()
        expected = made.forward(x, temb)
        for strips in (2, 3, height):
            result = hook._run_in_strips(residual, made, strips, made.forward, x, temb)
            assert tiny.relative_error(result, expected) < 1e-5
            assert torch.equal(x, before)


def test_other_residual_blocks_are_left_alone() -> None:
    from diffusers.models.resnet import ResnetBlock2D

    for options in ({"up": True}, {"down": True}, {"time_embedding_norm": "scale_shift"}):
        assert residual(ResnetBlock2D(in_channels=16, temb_channels=12, groups=4, **options)) is None
    assert residual(block()) is not None


def test_pieces_of_fakes_stand_for_each_other() -> None:
    pieces = equal_spans(100, 7, 1)
    seen = 0

    for _ in representative_pieces(pieces, torch.empty(1)):
        seen += times()
    assert seen == 7
    with FakeTensorMode():
        fake = torch.empty(2, 100, 4)
        for _ in standing_for([()], [0, 0, 0]):
            for _ in representative_pieces(pieces, fake):
                seen += times()
        assert seen == 7 + 3 * 7
        assert assemble(lambda start, stop: fake[:, start:stop], pieces, 1, fake).shape == fake.shape
    assert times() == 1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_waiting_maps(layout: torch.memory_format) -> None:
    one, two = (torch.randn(4, c, 5, 6).to(memory_format=layout) for c in (3, 7))
    first, second = (OffloadedMap.join([OffloadedMap.park(x[:2]), OffloadedMap.park(x[2:])]) for x in (one, two))
    assert first.shape == one.shape and first.dtype == one.dtype and first.ndim == 4 and first.size(1) == 3
    assert torch.equal(first.fetch_tensor(), one)
    both = torch.cat([first, second], dim=1)
    assert isinstance(both, OffloadedMap)
    whole = torch.cat([one, two], dim=1)
    assert torch.equal(both.fetch_tensor(), whole) and both.fetch_tensor().stride() == whole.stride()
    half = both.pictures(2, 4)
    assert isinstance(half, OffloadedMap) and torch.equal(half.fetch_tensor(), whole[2:])
    assert torch.equal(both.pictures(1, 3), whole[1:3])
    assert torch.equal(torch.cat([first, two], dim=1), whole)
    assert torch.equal(torch.cat([first, OffloadedMap.park(two)], dim=1), whole)
    assert torch.equal(torch.cat([first, first]), torch.cat([one, one]))
    assert torch.equal(nn.functional.silu(first), nn.functional.silu(one))
    assert torch.equal(first * 2, one * 2) and torch.equal(first[:, :2], one[:, :2])
    for total in (first + one, one + first, first + first):
        assert torch.equal(total.fetch_tensor() if isinstance(total, OffloadedMap) else total, one + one)
    with pytest.raises(AttributeError, match="in place"):
        first.add_(1)


def test_changes_of_a_waiting_map_reach_all_who_hold_it() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    map_ = skip = OffloadedMap.park(tensor)
    map_ += torch.ones(2, 3, 4, 5)
    assert map_ is skip and torch.equal(skip.fetch_tensor(), tensor + 1)
    map_[:, :1] = map_[:, :1] * 2
    assert torch.equal(skip.fetch_tensor()[:, :1], (tensor + 1)[:, :1] * 2)
    assert torch.equal(skip.fetch_tensor()[:, 1:], (tensor + 1)[:, 1:])


def test_kept_weights_come_once() -> None:
    layer = nn.Linear(2, 2, bias=False)
    before, calls = layer.weight.data, []

    def fetch(data: Tensor) -> Tensor:
        calls.append(current_account())
        return data * 2

    def call() -> Tensor:
        with lend_to_call([layer.weight], fetch), lend_to_call([layer.weight], Tensor.double):
            return layer(torch.eye(2, dtype=torch.double))

    expected = (2 * before.double()).T
    for _ in range(2):
        assert torch.equal(call(), expected)
    assert len(calls) == 2
    with pytest.raises(ZeroDivisionError), hold_weights():
        for _ in range(3):
            with hold_weights():
                assert torch.equal(call(), expected)
        assert len(calls) == 3
        assert layer.weight.dtype == torch.double
        raise ZeroDivisionError
    assert layer.weight.data.data_ptr() == before.data_ptr()
    assert torch.equal(call(), expected) and len(calls) == 4
