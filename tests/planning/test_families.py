"""Every kind of pipeline is traced as it runs: the picture stays, the peak is the plan's, and nothing stays behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from families import KINDS, SEEN, SIZE, Kind, load_ip_adapters, picture

import sd_lowvram
from sd_lowvram import Settings
from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.hooks.pieces import feed_forward, residual_strips, transformer_chunks
from sd_lowvram.memory import measured_peak
from sd_lowvram.planning.as_others import request_by
from sd_lowvram.planning.plan import Plan
from sd_lowvram.planning.search import make_plan
from sd_lowvram.session import anatomy_of, attachments
from sd_lowvram.units import MIB
from sd_lowvram.weights import all_tensors, weight_bytes

pytestmark = pytest.mark.in_order  # each kind's pipeline is made once


@dataclasses.dataclass
class Case:
    """A pipeline with its plain picture and the bytes of its weights."""

    name: str
    pipe: Any
    kind: Kind
    expected: torch.Tensor
    weights: int

    def optimized(self, vram: int, settings: Settings | None = None) -> Plan:
        size = {"width": SIZE, "height": SIZE}
        return sd_lowvram.optimize(self.pipe, vram=f"{vram} B", ram="1GB", device="cpu", settings=settings, **size)

    def check(self, plan: Plan) -> None:
        """The picture with ``plan`` attached is the plain one, within what was planned."""
        made: list[torch.Tensor] = []
        held = self.weights + measured_peak(lambda: made.append(picture(self.pipe, self.kind)))
        assert attachments(self.pipe)[0].plan is plan  # nothing came that was not planned for
        assert tiny.relative_error(made[0], self.expected) < 1e-4
        planned = max(stage.held_bytes for stage in plan.stages)
        assert held <= planned + max(planned // 50, 2 * MIB)


@pytest.fixture(scope="module", autouse=True)
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Strips and chunks may be so small here that there are several even of these pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SD_LOWVRAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(residual_strips, "FEWEST_ROWS", 4)
        for hook in (feed_forward, transformer_chunks):
            patch.setattr(hook, "FEWEST_TOKENS", 32)
        yield


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    kind = KINDS[request.param]
    pipe = kind.make()
    return Case(request.param, pipe, kind, picture(pipe, kind), weight_bytes(*anatomy_of(pipe).components.values()))


SEARCHED = ["sdxl", "sd15", "controlnet, two", "ip adapters, plain and plus", "pag", "x4 upscaler", "taesd"]
"""Kinds with which it is shown that plenty and the least hold, the first one in ``make test``: the modules of other
kinds are those of these, save for small parts. Of every kind the plain run and the smallest one hold."""
PLAIN = Settings.policy("diffusers-default")


@pytest.mark.slow(6)
def test_a_run_keeps_its_picture_and_its_plan(case: Case) -> None:
    case.check(case.optimized(1 << 30, PLAIN))
    case.check(case.optimized(1 << 30, Settings.smallest()))
    assert {"residual_strips", "transformer_chunks", "guidance_in_turn"} <= attachments(case.pipe)[0].sites.keys()
    before = [tensor.clone() for tensor in all_tensors(case.pipe.unet)]
    sd_lowvram.restore(case.pipe)
    assert all(map(torch.equal, all_tensors(case.pipe.unet), before))
    assert not any("forward" in vars(module) for module in case.pipe.unet.modules())
    assert torch.equal(picture(case.pipe, case.kind), case.expected)


@pytest.mark.slow(6)
@pytest.mark.parametrize(
    "case", [pytest.param(kind, marks=[] if kind == SEARCHED[0] else [pytest.mark.rare]) for kind in SEARCHED],
    indirect=True,
)  # fmt: skip
def test_what_a_search_chooses_holds_with_plenty_and_with_the_least(case: Case) -> None:
    plenty = case.optimized(1 << 30)
    case.check(plenty)
    case.check(case.optimized(plenty.minimum_vram_bytes))
    sd_lowvram.restore(case.pipe)


def test_an_ip_adapter_that_is_loaded_afterwards_is_planned_for() -> None:
    pipe, kind = KINDS["sd15"].make(), Kind(KINDS["sd15"].make, {"ip_adapter_image": SEEN})
    load_ip_adapters(pipe, "plain")
    expected = picture(pipe, kind)
    pipe.unload_ip_adapter()
    without = picture(pipe, KINDS["sd15"])
    assert tiny.relative_error(expected, without) > 0.001
    sd_lowvram.optimize(pipe, vram="1GB", ram="1GB", width=SIZE, height=SIZE, settings=Settings.smallest())
    first = attachments(pipe)[0].plan
    load_ip_adapters(pipe, "plain")
    assert tiny.relative_error(picture(pipe, kind), expected) < 1e-4
    again = attachments(pipe)[0].plan
    assert again is not first
    assert tiny.relative_error(picture(pipe, kind), expected) < 1e-4
    assert attachments(pipe)[0].plan is again
    pipe.unload_ip_adapter()
    assert tiny.relative_error(picture(pipe, KINDS["sd15"]), without) < 1e-4
    sd_lowvram.restore(pipe)
    assert torch.equal(picture(pipe, KINDS["sd15"]), without)


@pytest.mark.slow(6)
def test_an_autoencoder_beside_a_transformer_is_planned_channels_last() -> None:
    """In the plain order cuDNN holds a copy of each map that it convolves in 16 bits."""
    anatomy = meta_anatomy("z-image-turbo", torch.bfloat16, only=("transformer", "vae"))
    request = request_by("ours", anatomy, gpu="rtx3060", vram=8 << 30, ram=64 << 30, width=512, height=512)
    peaks = {}
    for last in (None, False):
        plan = make_plan(anatomy, request, dataclasses.replace(PLAIN, offload=None, channels_last=last))
        peaks[plan.settings.channels_last] = next(one.peak_bytes for one in plan.stages if one.name == "decode")
    assert 1.2 * peaks[True] < peaks[False]
