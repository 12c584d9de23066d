"""One pass that stands for its equals: traces see the same peaks and count the same work as with all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import todays
import torch
from torch import nn

from sd_lowvram import Settings, attached
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.compat.private import tree_flatten
from sd_lowvram.devices.performance import profile
from sd_lowvram.hooks.offers import Target
from sd_lowvram.hooks.pieces import vae_exact
from sd_lowvram.hooks.registry import list_offers
from sd_lowvram.memory.repeats import representative_pieces, representatives
from sd_lowvram.models import anatomy_of_components
from sd_lowvram.models.calls import Shape
from sd_lowvram.planning.options import ladder
from sd_lowvram.planning.stage_costs import StageCosts
from sd_lowvram.tracing import MemoryTrace, trace
from sd_lowvram.tracing.equal_calls import equal_modules
from sd_lowvram.tracing.tracer import trace_equals_once
from sd_lowvram.weights import weight_bytes

FIGURES = (
    "peak_bytes",
    "host_peak_bytes",
    "activation_peak_bytes",
    "largest_bytes",
    "flops",
    "moved_bytes",
    "copied_bytes",
    "operators",
    "allocated_peak_bytes",
    "packed_bytes",
)


def figures(traced: MemoryTrace) -> dict[str, int]:
    return {name: getattr(traced, name) for name in FIGURES}


def reserved(traced: MemoryTrace) -> tuple[int, int, int]:
    return traced.reserved_bytes, traced.repeated_bytes, traced.recorded_bytes


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        ("a", ([0], [0])),
        ("aa", ([0, 1], [0, 1])),
        ("aaaaa", ([0, 1, 4], [0, 1, 1, 1, 2])),
        ("abbaba", ([0, 1, 3, 5], [0, 1, 1, 2, 1, 3])),
    ],
)
def test_representatives(kinds: str, chosen: tuple[list[int], list[int]]) -> None:
    assert representatives(kinds) == chosen


@pytest.mark.parametrize(
    ("part", "where"), [("decode", "held"), ("decode", "parked"), ("decode", "recomputed"), ("encode", "parked")]
)
def test_strips_of_the_autoencoder(part: str, where: str, monkeypatch: Any) -> None:
    vae = build_components(tiny.config("sd15"), only=("vae",), device="meta")["vae"]
    settings = Settings(vae_tiles="exact", vae_map=where, vae_strip_mib=1)

    def once() -> MemoryTrace:
        with torch.inference_mode(), attached(vae, settings, device="cpu"):
            if part == "decode":
                return trace(lambda vae, x: vae.decode(x).sample, vae, torch.empty(1, 4, 45, 48, device="meta"))
            return trace(lambda vae, x: vae.encode(x), vae, torch.empty(1, 3, 360, 384, device="meta"))

    short = once()
    monkeypatch.setattr(vae_exact, "representatives", lambda kinds: (range(len(kinds)), range(len(kinds))))
    whole = once()
    assert len(short.timeline) < 0.7 * len(whole.timeline)
    assert figures(short) == figures(whole)


@pytest.mark.parametrize(
    ("part", "where"), [("decode", "held"), ("decode", "parked"), ("decode", "recomputed"), ("encode", "parked")]
)
def test_equal_strips_in_float32(part: str, where: str) -> None:
    vae = build_components(tiny.config("sd15"), only=("vae",), device="meta")["vae"].half()
    given = torch.empty(1, *((4, 45, 48) if part == "decode" else (3, 360, 384)), dtype=torch.float16, device="meta")

    def run(vae: Any, x: torch.Tensor) -> Any:
        return vae.decode(x).sample if part == "decode" else vae.encode(x)

    settings = Settings(vae_tiles="exact", vae_map=where, vae_strip_mib=1)
    with torch.inference_mode(), attached(vae, settings, device="cpu"):
        short, whole = trace_equals_once(run, (vae, given), {}, equal_modules(vae)), trace(run, vae, given)
    assert len(short.timeline) < 0.9 * len(whole.timeline)
    assert figures(short) == figures(whole)
    assert (short.reserved_bytes, short.recorded_bytes) == (whole.reserved_bytes, whole.recorded_bytes)


def work_of_modules(traced: MemoryTrace) -> dict[str, list[int]]:
    """Sums over a module's spans."""
    found: dict[str, list[int]] = {}
    for span in traced.spans:
        path, *sums = dataclasses.astuple(span)
        found[path] = [one + other for one, other in zip(found.get(path, [0] * len(sums)), sums, strict=True)]
    return found


def short_and_whole(component: Any, *args: Any, **kwargs: Any) -> tuple[MemoryTrace, MemoryTrace]:
    short = trace_equals_once(component, args, kwargs, equal_modules(component))
    return short, trace(component, *args, **kwargs)


def levels() -> list[Settings]:
    """Every level of what the hooks offer to run a UNet with less."""
    unet = anatomy_of_components("diffusers", build_components(tiny.config("sd15"), device="meta", only=("unet",)))
    target = Target(unet, torch.device("cpu"), profile("rtx2070"), 1, Settings(), False)
    return [Settings(), *(Settings(**level) for level in ladder(list_offers(target)).values())]


LEVELS = levels()


def deep_config(family: str) -> Any:
    config = tiny.config(family)
    if family == "sdxl":
        config["unet"]["transformer_layers_per_block"] = [1, 2, 5]
    return config


@pytest.mark.parametrize("settings", [*LEVELS, Settings(transformer_chunks=4, guidance_in_turn=True)])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_equal_blocks(family: str, settings: Settings) -> None:
    extra: dict[str, Any] = {}
    if family == "sdxl":
        extra["added_cond_kwargs"] = {
            "text_embeds": torch.empty(2, 32, device="meta"),
            "time_ids": torch.empty(2, 6, device="meta"),
        }
    unet = build_components(deep_config(family), only=("unet",), device="meta")["unet"]
    width = unet.config.cross_attention_dim
    given = torch.empty(2, 4, 64, 64, device="meta"), torch.tensor(1), torch.empty(2, 77, width, device="meta")

    with torch.inference_mode(), attached(unet, settings, device="cpu"):
        short, whole = short_and_whole(unet, *given, **extra, return_dict=False)
    assert len(short.timeline) < 0.9 * len(whole.timeline)
    assert figures(short) == figures(whole)
    assert work_of_modules(short) == work_of_modules(whole)


@pytest.mark.parametrize("offload", ["blocks", "halves", "layer"])
def test_weights_that_are_streamed_come_and_go_in_every_call(offload: str) -> None:
    anatomy = anatomy_of_components("diffusers", build_components(deep_config("sdxl"), only=("unet",), device="meta"))
    settings = Settings(offload=offload, weights_mib=2 if offload == "blocks" else None, inference_mode=True)
    costs = StageCosts(anatomy, Shape(512, 512), False, torch.device("cuda"))
    stage = next(stage for stage in costs.stages if stage.name == "denoise")
    short, whole = (costs.trace(stage, settings, whole=whole) for whole in (False, True))
    assert figures(short) == figures(whole) and reserved(short) == reserved(whole)
    assert len(short.timeline) < 0.9 * len(whole.timeline)
    assert whole.copied_bytes > weight_bytes(anatomy.denoiser_module) // 2


TRANSFORMERS = {
    "flux": lambda: todays.flux(num_layers=5, num_single_layers=6).components,
    "z-image": lambda: {**todays.z_image().components, "transformer": todays.z_image_transformer(6)},
}
CHUNKS = {"transformer_chunks": 8, "feed_forward_chunks": 8}


@pytest.mark.parametrize(
    "knobs",
    [{}, {"split_layers": True}, CHUNKS, {**CHUNKS, "split_layers": True}, {**CHUNKS, "weight_storage": "fp8"}],
)  # what is widened for several calls hangs on which blocks have to go
@pytest.mark.parametrize("offload", ["blocks", "layer"])
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_the_engine_moves_the_weights_of_equal_blocks(family: str, offload: str, knobs: dict[str, Any]) -> None:
    parts = {name: part for name, part in TRANSFORMERS[family]().items() if isinstance(part, nn.Module)}
    anatomy = anatomy_of_components(family, parts)
    turns = {"guidance_in_turn": True} if family == "z-image" else {}
    settings = Settings(offload=offload, inference_mode=True, **turns, **knobs)
    costs = StageCosts(anatomy, Shape(1024, 1024), False, torch.device("cuda"))
    for stage in (stage for stage in costs.stages if stage.name in ("text", "denoise")):
        short, whole = (costs.trace(stage, settings, whole=whole) for whole in (False, True))
        assert figures(short) == figures(whole) and reserved(short) == reserved(whole)
        left_out = len(short.timeline) < 0.9 * len(whole.timeline)
        assert left_out == ("weight_storage" not in knobs) or stage.name == "text"


def test_equal_layers_of_a_text_encoder() -> None:
    encoder = build_components(tiny.config("sd15"), only=("text_encoder",), device="meta")["text_encoder"]
    tokens = torch.zeros(1, 77, dtype=torch.long)
    short, whole = short_and_whole(encoder, tokens, output_hidden_states=True)
    assert len(short.timeline) < len(whole.timeline)
    assert figures(short) == figures(whole)
    assert work_of_modules(short) == work_of_modules(whole)


class Pair(nn.Module):
    """Two equal modules, the first called with ``first`` and the second with ``second``."""

    def __init__(self, member: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList([member(), member()])

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
        return [self.members[0](first), self.members[1](second)]


class Keeper(nn.Module):
    """Makes more than its result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(x * 2)
        return self.inner(x)


class Same(nn.Module):
    """Gives back what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner(x)
        return x


class Halves(nn.Module):
    """Gives back two views of one new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.inner(x).chunk(2, dim=-1)


class Turned(nn.Module):
    """Gives back a view of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner(x)
        return x.t()


class Numbered(nn.Module):
    """Keeps its place, and may go by it."""

    def __init__(self, place: int, times: Callable[[Any], int] = lambda _: 1, hooked: bool = False) -> None:
        super().__init__()
        self.inner, self.place, self.times = nn.Linear(8, 8), place, times
        if hooked:
            self.inner.register_forward_hook(lambda inner, args, out: out * place)

    def passes(self) -> int:
        return self.times(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(self.inner(x) for _ in range(self.passes()))


class ByPlace(Numbered):
    def passes(self) -> int:
        assert self.__class__ is ByPlace
        return super().passes() + self.place


def by_name(block: Numbered) -> int:
    return int(getattr(block, "".join(("pl", "ace"))))


UNREAD = functools.partial(Numbered)
READ = {
    "a function that it keeps": functools.partial(Numbered, times=lambda block: block.place),
    "by a name that is made": functools.partial(Numbered, times=by_name),
    "all attributes": functools.partial(Numbered, times=lambda block: vars(block)["place"]),
    "a subclass": ByPlace,
    "a hook": functools.partial(Numbered, hooked=True),
}


@pytest.mark.parametrize(("member", "once"), [(UNREAD, True), *((one, False) for one in READ.values())])
def test_a_number_that_no_call_reads_makes_no_difference(member: Callable[[int], Numbered], once: bool) -> None:
    pair = Pair(functools.partial(member, 1))
    for place, alike in ((2, once), (1, member is not READ["a hook"])):
        pair.members[1] = member(place)
        with torch.no_grad():
            short, whole = short_and_whole(pair, torch.empty(4, 8), torch.empty(4, 8))
        assert figures(short) == figures(whole)
        assert (len(short.timeline) < len(whole.timeline)) == alike
    assert all(type(one) in (Numbered, ByPlace) for one in pair.members)


class Inner(nn.Linear):
    """Has the index of its block, as attention of transformers has, and may go by it."""

    def __init__(self, index: int, reads: bool) -> None:
        super().__init__(8, 8)
        self.layer_idx, self.reads = index, reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.layer_idx if self.reads else 1):
            x = super().forward(x)
        return x


@pytest.mark.parametrize("reads", [False, True])
def test_an_index_inside_a_block_that_no_call_reads_makes_no_difference(reads: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(Inner(index, reads)) for index in (1, 2, 2)))
    with torch.no_grad():
        short, whole = short_and_whole(model, torch.empty(4, 8))
    assert figures(short) == figures(whole)
    assert len(whole.timeline) - len(short.timeline) == 2  # two results, or one of two products
    assert all(type(block[0]) is Inner for block in model)


@pytest.mark.parametrize(
    "member", [Keeper, Same, Halves, Turned, lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))]
)
@pytest.mark.parametrize("rows", [(4, 4), (4, 9)])
def test_only_what_may_be_left_out_is(member: Callable[[], nn.Module], rows: tuple[int, int]) -> None:
    pair = Pair(member)
    given = [torch.empty(number, 8) for number in rows]
    with torch.no_grad():
        short, whole = short_and_whole(pair, *given)
    assert figures(short) == figures(whole)
    outputs = [
        [(out.shape, out.stride(), out.storage_offset()) for out in tree_flatten(traced.output)[0]]
        for traced in (short, whole)
    ]
    assert outputs[0] == outputs[1]
    left_out = len(short.timeline) < len(whole.timeline)
    assert left_out == (rows[0] == rows[1] and member not in (Keeper, Turned))


def test_a_loop_that_fails_leaves_the_next_trace_alone() -> None:
    x = torch.zeros(4)

    def failing(x: torch.Tensor) -> None:
        for piece in representative_pieces(range(4), x):
            if piece:
                raise ValueError

    with pytest.raises(ValueError) as held:  # and with it the loop
        trace(failing, x)
    assert trace(torch.neg, x).operators == 1
    assert held.tb is not None


def test_a_list_of_blocks_may_have_gaps() -> None:
    blocks = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    model = nn.ModuleList([None, *blocks])  # type: ignore[list-item]
    assert equal_modules(model).keys() == {*blocks}
