"""Weights that are streamed: the same bits, in the bytes that were promised, whatever happens on the way."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from test_unet_hooks import TOGETHER, inputs, run
from torch import nn

from sd_lowvram import Settings, attached
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.errors import BudgetError, ConflictError
from sd_lowvram.patches import set_patch
from sd_lowvram.session import attach, detach, enter_hooks, prepare
from sd_lowvram.streaming import buffer
from sd_lowvram.streaming.copier import Copier
from sd_lowvram.streaming.engine import ActiveStreams, Stream
from sd_lowvram.streaming.host_weights import host_budget, mapped_bytes
from sd_lowvram.streaming.layout import ResidencyPolicy
from sd_lowvram.streaming.pool import Pool
from sd_lowvram.streaming.weight_scopes import repeated_calls
from sd_lowvram.tracing import trace
from sd_lowvram.units import MIB
from sd_lowvram.weights import all_tensors, weight_bytes

WAYS: dict[str, Settings] = {
    "layer": Settings(offload="layer"),
    "halves": Settings(offload="halves"),
    "blocks": Settings(offload="blocks", weights_mib=3),
    "little": Settings(offload="blocks", weights_mib=1),
    "all stay": Settings(offload="blocks", weights_mib=100),
}
SPLIT = Settings(offload="layer", split_layers=True)


def unet_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return build_components(tiny.config(name), only=("unet",))["unet"].to(dtype)


@functools.lru_cache
def shared(name: str) -> Any:
    return unet_of(name)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of every buffer on the device, as it is taken."""
    taken: list[int] = []
    before = Pool.__init__

    def noted(self: Pool, size: int, device: torch.device) -> None:
        taken.append(size)
        before(self, size, device)

    monkeypatch.setattr(Pool, "__init__", noted)
    yield taken


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of every fetch."""
    fetched: list[int] = []
    before = Copier.copy

    def noted(self: Copier, copies: Any, *rest: Any, **more: Any) -> Any:
        copies = list(copies)
        fetched.append(sum(source.numel() * source.element_size() for source, _ in copies))
        return before(self, copies, *rest, **more)

    monkeypatch.setattr(Copier, "copy", noted)
    yield fetched


@pytest.mark.slow(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_same_bits(name: str, dtype: torch.dtype) -> None:
    """Also when steps follow each other, and at another size."""
    unet = shared(name).to(dtype)
    expected = {size: run(unet, size) for size in ((8, 16), (8, 8))}
    for settings in WAYS.values() if name == "sd15" else (WAYS["layer"], WAYS["blocks"]):
        with attached(unet, settings, device="cpu") as attachment:
            for size in ((8, 16), (8, 8), (8, 16)):
                assert torch.equal(run(unet, size), expected[size]), settings
            assert attachment.sites["offload"] > 300


@pytest.mark.parametrize("way", ["layer", "halves", "little", "component", "component, stored"])
def test_kernels_stay_in_their_file_and_come_channels_last(way: str, tmp_path: Path) -> None:
    """The bits of a resident model whose weights are channels last, and nothing held for them; what is changed
    meanwhile stays changed."""
    from diffusers import UNet2DConditionModel

    shared("sd15").to(torch.float32).save_pretrained(tmp_path)
    unet = UNet2DConditionModel.from_pretrained(tmp_path).requires_grad_(False)
    before = {name: (weight.data_ptr(), weight.stride()) for name, weight in unet.named_parameters()}
    others: dict[str, Any] = {"channels_last": True, "weight_storage": "int8" if "stored" in way else None}
    with attached(unet, Settings(**others), device="cpu"):
        expected = run(unet, (17, 25))
    settings = WAYS.get(way, Settings(offload="component")).filled(**others)
    with host_budget(0), attached(unet, settings, device="cpu"):
        assert mapped_bytes(unet) == weight_bytes(unet) or "stored" in way
        assert torch.equal(run(unet, (17, 25)), expected)
        assert torch.equal(run(unet, (17, 25)), expected)
    assert {name: (weight.data_ptr(), weight.stride()) for name, weight in unet.named_parameters()} == before
    if "stored" not in way:
        with attached(unet, settings, device="cpu"):  # in memory that the host weights get
            assert torch.equal(run(unet, (17, 25)), expected)
            unet.conv_in.weight.data += 1
        assert unet.conv_in.weight.is_contiguous() and unet.conv_in.weight.mean() > 0.5


@pytest.mark.parametrize("way", ["layer", "blocks", "little"])
def test_same_bits_with_the_other_hooks(way: str) -> None:
    unet = shared("sd15").to(torch.float32)
    others = {**TOGETHER, "attention": "sliced", "attention_mib": 1, "inference_mode": True}
    with attached(unet, Settings(**others), device="cpu"):
        expected = run(unet, (17, 25))
    streamed = {name: value for name, _, value in WAYS[way].decided()}
    with attached(unet, Settings(**others, **streamed), device="cpu"):
        assert torch.equal(run(unet, (17, 25)), expected)
        assert torch.equal(run(unet, (17, 25)), expected)


@pytest.mark.parametrize("way", ["layer", "little"])
def test_same_bits_while_layers_are_widened(way: str) -> None:
    """A ring that is too small for what a sweep over strips holds drops weights that are lent widened."""
    unet = unet_of("sd15", torch.float16)
    with attached(unet, Settings(**TOGETHER, precision="fp16-storage"), device="cpu"):
        expected = run(unet, (17, 25))
    streamed = {name: value for name, _, value in WAYS[way].decided()}
    with attached(unet, Settings(**TOGETHER, **streamed, precision="fp16-storage"), device="cpu"):
        assert torch.equal(run(unet, (17, 25)), expected)


def test_layers_split_by_rows_differ_by_rounding_only(pools: list[int]) -> None:
    unet = shared("sd15").to(torch.float32)
    expected = run(unet, (17, 25))
    for more in ({}, {"channels_last": True}, TOGETHER):
        with attached(unet, Settings(offload="layer", split_layers=True, **more), device="cpu"):
            assert tiny.relative_error(run(unet, (17, 25)), expected) < 1e-5
            assert tiny.relative_error(run(unet, (17, 25)), expected) < 1e-5
    largest = max(tensor.numel() * tensor.element_size() for tensor in all_tensors(unet))
    assert max(pools) < largest


@pytest.mark.parametrize("way", ["layer", "halves", "blocks", "little"])
def test_device_bytes_stay_within_the_room(way: str, pools: list[int]) -> None:
    """By the engine's own account; tests of the trace compare it with the allocator."""
    unet = shared("sd15").to(torch.float32)
    room = (WAYS[way].weights_mib or 1000) * MIB
    largest = max(tensor.numel() * tensor.element_size() for tensor in all_tensors(unet))
    limit = {"layer": 2.1 * largest, "halves": 0.55 * weight_bytes(unet)}.get(way, room)
    with attached(unet, WAYS[way], device="cpu"):
        given = inputs(unet, (16, 16), 2)
        given.pop("return_dict")
        run(unet, (8, 8))
        run(unet, (8, 8))
        traced = trace(unet, **given)
    assert 0 < max(pools) <= min(limit, room)
    assert traced.weights_bytes < 0.01 * weight_bytes(unet)  # all of them wait on the host
    assert traced.peak_bytes - traced.activation_peak_bytes <= max(pools) + traced.input_bytes
    assert traced.host_peak_bytes >= weight_bytes(unet)


@functools.lru_cache
def full_size() -> Any:
    return build_components("sd15", dtype=torch.float16, device="meta", only=("unet",))["unet"]


@pytest.mark.parametrize(("split", "limit"), [(None, 112.5), (True, 40)])
def test_smallest_working_set_of_sd15(split: bool | None, limit: float, pools: list[int]) -> None:
    """SD1.5's largest layer has 56.25 MiB in fp16."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from sd_lowvram.models import dissect
    from sd_lowvram.tracing.fake_model import fake_copy

    anatomy = dissect(full_size())
    assert anatomy is not None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    unet: Any = fake_copy(anatomy, mode).denoiser_module
    with mode, torch.no_grad(), attached(unet, Settings(offload="layer", split_layers=split), device="cpu"):
        latents, text = torch.empty(2, 4, 8, 8).half(), torch.empty(2, 77, 768).half()
        traced = trace(unet, latents, torch.tensor(1), text)
    assert max(pools) <= limit * MIB
    assert traced.peak_bytes - traced.activation_peak_bytes <= limit * MIB + traced.input_bytes


def test_too_little_room_is_refused_before_the_run() -> None:
    unet = full_size()
    with pytest.raises(BudgetError, match="split"):
        attach_to_twin(unet, Settings(offload="blocks", weights_mib=40))


def attach_to_twin(unet: Any, settings: Settings) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from sd_lowvram.models import dissect
    from sd_lowvram.tracing.fake_model import fake_copy

    anatomy = dissect(unet)
    assert anatomy is not None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copy: Any = fake_copy(anatomy, mode).denoiser_module
    with mode:
        attach(copy, settings, torch.device("cpu"))


def test_residents_are_fetched_once_and_the_rest_once_a_step(copied: list[int]) -> None:
    unet = shared("sd15").to(torch.float32)
    with attached(unet, WAYS["blocks"], device="cpu"):
        run(unet, (8, 8))
        run(unet, (8, 8))
        before = len(copied)
        run(unet, (8, 8))
        step = sum(copied[before:])
    assert 0 < step <= weight_bytes(unet) - 2 * MIB


@pytest.mark.parametrize("more", [{"guidance_in_turn": True}, TOGETHER])
def test_what_runs_in_pieces_streams_once_a_step(more: dict[str, Any], copied: list[int]) -> None:
    """Not once for each half of the guidance, strip or chunk."""
    unet = shared("sd15").to(torch.float32)
    with attached(unet, Settings(offload="layer", weights_mib=1, **more), device="cpu"):
        run(unet, (17, 25))
        run(unet, (17, 25))
        before = len(copied)
        run(unet, (17, 25))
    assert weight_bytes(unet) - MIB <= sum(copied[before:]) <= weight_bytes(unet)


@pytest.mark.parametrize("settings", [*WAYS.values(), WAYS["little"].filled(**TOGETHER)], ids=[*WAYS, "in pieces"])
def test_a_step_like_an_earlier_one_is_not_searched_again(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one in another order is, and the next step knows its moves again."""
    unet = shared("sd15").to(torch.float32)
    searched: list[int] = []
    before = buffer._Search.move

    def noted(self: Any, position: int, *rest: Any) -> Any:
        searched.append(position)
        return before(self, position, *rest)

    monkeypatch.setattr(buffer._Search, "move", noted)
    with attached(unet, settings, device="cpu"):
        *_, expected = (run(unet, (8, 8)) for _ in range(3))
        assert searched
        searched.clear()
        assert torch.equal(run(unet, (8, 8)), expected) and not searched
        with torch.no_grad():
            unet.up_blocks[0].resnets[1](torch.randn(1, 128, 8, 8), torch.randn(1, 128))
        assert torch.equal(run(unet, (8, 8)), expected)
        run(unet, (8, 8))
        searched.clear()
        assert torch.equal(run(unet, (8, 8)), expected) and not searched


class _Row(nn.Module):
    """Blocks of five linear layers, each of which is run by chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(32, 32) for _ in range(5)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            with repeated_calls():
                x = torch.cat([functools.reduce(lambda some, layer: layer(some), block, some) for some in x.chunk(4)])
        return x


def test_layers_of_a_block_that_are_used_in_turn_do_not_take_each_others_place(copied: list[int]) -> None:
    row, given = _Row().requires_grad_(False), torch.randn(64, 32)
    expected, total = row(given), weight_bytes(row)
    room = total * 5 // 12  # of two blocks and a half
    stream = Stream({"row": row}, torch.device("cpu"), ResidencyPolicy("blocks", room, together=True), ActiveStreams())
    with contextlib.ExitStack() as undoing:
        for patch in stream.patches():
            undoing.callback(set_patch(patch))
        undoing.callback(stream.offload())
        assert torch.equal(stream.run(row.forward, given), expected)
        assert total <= sum(copied) <= total + room and stream.device_bytes <= room


def test_parts_of_a_split_layer_stay_and_are_lent_one_after_the_other() -> None:
    """The parts share one weight, so that only whole layers are lent together."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 4096), nn.Linear(4096, 64)).requires_grad_(False)
    given = torch.randn(4, 256)
    expected, policy = model(given), ResidencyPolicy("blocks", weight_bytes(model) * 2 // 3, split=True)
    stream = Stream({"model": model}, torch.device("cpu"), policy, ActiveStreams(), repeats=True)
    with contextlib.ExitStack() as undoing:
        for patch in stream.patches():
            undoing.callback(set_patch(patch))
        undoing.callback(stream.offload())
        for _ in range(4):
            assert tiny.relative_error(stream.run(model.forward, given), expected) < 1e-5
        layout = stream._layout
        assert len({layout.blocks[number].rows is None for number in layout.residents}) == 2


def test_tied_weights_come_once(copied: list[int]) -> None:
    unet = unet_of("sd15")
    first, second = (unet.down_blocks[number].resnets[1].conv1 for number in (1, 2))
    assert first.weight.shape == second.weight.shape
    second.weight = first.weight
    expected = run(unet, (8, 8))
    with attached(unet, WAYS["all stay"], device="cpu"):
        assert torch.equal(run(unet, (8, 8)), expected)
        assert torch.equal(run(unet, (8, 8)), expected)
        assert sum(copied) == weight_bytes(unet)
    with attached(unet, WAYS["layer"], device="cpu"):
        assert torch.equal(run(unet, (8, 8)), expected)


def test_buffers_and_bare_parameters_move() -> None:
    unet = unet_of("sd15")

    class Bare(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.scale = nn.Parameter(torch.full((1,), 1.25))
            self.register_buffer("shift", torch.full((64,), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale + self.shift.view(-1, 1, 1)

    block = unet.down_blocks[1].resnets[1]
    block.conv2 = Bare(block.conv2)
    expected = run(unet, (8, 8))
    with attached(unet, WAYS["little"], device="cpu"):
        assert torch.equal(run(unet, (8, 8)), expected)
        seen = []
        block.conv2.inner.register_forward_hook(lambda *_: seen.append(block.conv2.shift.data_ptr()))
        on_host = block.conv2.shift.data_ptr()
        run(unet, (8, 8))
        assert seen and on_host not in seen


def test_foreign_tensors_are_refused_by_name() -> None:
    unet = unet_of("sd15")
    weight = unet.mid_block.resnets[0].conv1.weight.detach().as_subclass(_Quantised)
    del unet.mid_block.resnets[0].conv1.weight
    unet.mid_block.resnets[0].conv1.register_buffer("weight", weight)
    with pytest.raises(ConflictError, match=r"mid_block\.resnets\.0\.conv1 holds _Quantised"):
        attach(unet, WAYS["layer"], torch.device("cpu"))


class _Quantised(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def blocks_of_unet(unet: Any) -> list[nn.Module]:
    parts = [unet.conv_in, unet.time_embedding, unet.mid_block, unet.conv_norm_out, unet.conv_out]
    for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks):
        parts += [*block.resnets, *(getattr(block, "attentions", None) or ())]
        for kind in ("downsamplers", "upsamplers"):
            parts += [*(getattr(block, kind, None) or ())]
    return parts


def state(unet: nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    return {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in unet.state_dict().items()}


def test_an_error_in_any_block_leaves_all_as_it_was() -> None:
    unet = unet_of("sd15")
    expected, before = run(unet, (8, 8)), state(unet)
    attachment = attach(unet, WAYS["blocks"], torch.device("cpu"))
    stream = stream_of(attachment)

    def fail(*_: Any) -> None:
        raise error("planted")

    errors = itertools.cycle([RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
    for number, (block, error) in enumerate(zip(blocks_of_unet(unet), errors, strict=False)):
        planted = (block.register_forward_pre_hook if number % 2 else block.register_forward_hook)(fail)
        with pytest.raises(error, match="planted"):
            run(unet, (8, 8))
        planted.remove()
        assert stream.device_bytes == 0
        assert all(tensor.data_ptr() == before[name][0] for name, tensor in unet.state_dict().items())
        if number % 12 == 0:
            assert torch.equal(run(unet, (8, 8)), expected)
    assert torch.equal(run(unet, (8, 8)), expected)
    detach(unet, attachment)
    after = state(unet)
    assert all(torch.equal(after[name][1], tensor) for name, (_, tensor) in before.items())
    assert not [key for module in unet.modules() for key in vars(module) if "lowvram" in key or key == "forward"]


def stream_of(attachment: Any) -> Stream:
    """The stream whose layers are patched."""
    return next(step.apply.__self__ for step in attachment._steps if hasattr(step, "apply"))


def test_an_error_while_copying_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from sd_lowvram.streaming.host_weights import HostWeights

    unet = unet_of("sd15")
    expected, copy_to = run(unet, (8, 8)), HostWeights.copy_to
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 150 == 0:
            raise torch.OutOfMemoryError("planted")
        copy_to(*args, **kwargs)

    with attached(unet, WAYS["little"], device="cpu"):
        monkeypatch.setattr(HostWeights, "copy_to", failing)
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                run(unet, (8, 8))
        monkeypatch.undo()
        assert torch.equal(run(unet, (8, 8)), expected)


def test_another_order_and_parts_alone() -> None:
    """A host may skip blocks, or call a part of the model without the whole."""
    unet = unet_of("sd15")
    text, maps = torch.randn(2, 77, 32), torch.randn(2, 64, 8, 8)
    block = unet.down_blocks[2]
    with torch.no_grad():
        expected = block.attentions[0](maps, encoder_hidden_states=text)[0]
        embedding = unet.time_embedding(torch.randn(2, 32, generator=torch.Generator().manual_seed(1)))
    whole = run(unet, (8, 8))
    with attached(unet, WAYS["little"], device="cpu"), torch.no_grad():
        assert torch.equal(block.attentions[0](maps, encoder_hidden_states=text)[0], expected)
        assert torch.equal(run(unet, (8, 8)), whole)
        assert torch.equal(block.attentions[0](maps, encoder_hidden_states=text)[0], expected)
        again = unet.time_embedding(torch.randn(2, 32, generator=torch.Generator().manual_seed(1)))
        assert torch.equal(again, embedding)
        assert torch.equal(run(unet, (8, 8)), whole)


def test_nested_runs() -> None:
    """A model that is called while it runs, as some callbacks do."""
    unet = unet_of("sd15")
    expected = run(unet, (8, 8))
    inner = []
    with attached(unet, WAYS["little"], device="cpu"):
        handle = unet.mid_block.register_forward_pre_hook(
            lambda *_: (handle.remove(), inner.append(run(unet, (8, 8))))[0]
        )
        assert torch.equal(run(unet, (8, 8)), expected)
    assert torch.equal(inner[0], expected)


def test_one_model_at_a_time_has_the_device() -> None:
    pipe = families.plain("sd15")
    with attached(pipe, WAYS["layer"], device="cpu") as attachment:
        found = [getattr(getattr(step, "apply", None), "__self__", None) for step in attachment._steps]
        streams = [one for one in found if isinstance(one, Stream)]
        for _ in range(2):  # the first run learns the order of layers, and leaves nothing
            tiny.run(pipe, steps=1)
        assert len(streams) == 3 and sum(stream.device_bytes > 0 for stream in streams) <= 1


def test_entered_again_and_again() -> None:
    """As hosts do that attach around every call."""
    unet = unet_of("sd15")
    expected = run(unet, (8, 8))
    attachment = prepare(unet, WAYS["blocks"], torch.device("cpu"))
    for _ in range(2):
        with enter_hooks(unet, attachment):
            assert torch.equal(run(unet, (8, 8)), expected)
        assert not [key for module in unet.modules() for key in vars(module) if "lowvram" in key or key == "forward"]


@pytest.mark.parametrize("way", ["layer", "halves", "blocks"])
def test_whole_pipelines(way: str) -> None:
    """Text encoders, UNet and autoencoder take turns on the device."""
    pipe = tiny.pipeline("sdxl") if way == "halves" else families.plain("sd15")
    expected = tiny.run(pipe)
    with attached(pipe, WAYS[way], device="cpu"):
        assert torch.equal(tiny.run(pipe), expected)
        assert torch.equal(tiny.run(pipe), expected)
