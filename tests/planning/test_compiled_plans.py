"""Plans that know what compiling gains and costs: one picture, many, and what other knobs leave of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from sd_lowvram import Settings, plan
from sd_lowvram.devices.compiling import Compiling, compiling_of, remember_compiling
from sd_lowvram.devices.performance import THIS, profile
from sd_lowvram.hooks.replay import compiled
from sd_lowvram.hooks.replay.compiled import kinds_of
from sd_lowvram.kernels import compiler
from sd_lowvram.planning import cost_model
from sd_lowvram.session import anatomy_of

CPU = torch.device("cpu")
SIZE = {"width": 64, "height": 64, "steps": 30, "device": "cpu"}
pytestmark = pytest.mark.skipif(compiler.why_not(CPU) is not None, reason=f"{compiler.why_not(CPU)}")


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.tiniest()


@pytest.fixture
def costing(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Has the machine take as long as so many runs for compiling the pipe; answers with the plan of before."""

    def known(runs: float, gain: float = 1.5) -> Any:
        plain = plan(pipe, **SIZE)
        kinds = sum(map(len, kinds_of(anatomy_of(pipe)).values()))
        found = Compiling(gain, runs * plain.predicted.seconds / kinds, 0.0)
        for module in (cost_model, compiled):
            monkeypatch.setattr(module, "compiling_of", lambda *_: found)
        monkeypatch.setattr(cost_model, "were_compiled", lambda *_: False)  # by another test, on this machine
        return plain

    return known


@pytest.mark.slow(10)
def test_one_picture_is_not_compiled_for_and_forty_are(pipe: Any, costing: Callable[..., Any]) -> None:
    plain = costing(runs=3)
    one, forty = plan(pipe, **SIZE), plan(pipe, **SIZE, pictures=40)
    assert one.settings == plain.settings and one.settings.compile is None
    assert forty.settings.compile == "regional" and forty.settings.channels_last is True
    assert str(forty.fidelity) == "rounding"
    assert forty.predicted.seconds < plain.predicted.seconds
    assert any(re.search("compiled, .*1.5 times", reason) for reason in forty.reasons)
    assert plan(pipe, **SIZE | {"steps": 1000}).settings.compile == "regional", "steps make it pay as well"


def test_what_is_known_to_be_slower_is_not_chosen(pipe: Any, costing: Callable[..., Any]) -> None:
    costing(runs=0, gain=0.66)
    assert plan(pipe, **SIZE, pictures=1000).settings.compile is None


@pytest.mark.slow(8)
def test_what_a_person_has_fixed_stays(pipe: Any, costing: Callable[..., Any]) -> None:
    costing(runs=0)
    assert plan(pipe, **SIZE).settings.compile == "regional"
    for fixed in ({"residual_strips": 2}, {"compile": "off"}, {"offload": "layer"}, {"channels_last": False}):
        assert plan(pipe, **SIZE, settings=Settings(**fixed)).settings.compile in (None, "off"), fixed


@pytest.mark.slow(5)
def test_what_is_asked_for_is_planned_though_its_gain_is_unknown(pipe: Any) -> None:
    for fixed in (Settings(compile="regional"), Settings(compile="whole")):
        found = plan(pipe, **SIZE, settings=fixed)
        assert found.settings.compile == fixed.compile and found.settings.offload in (None, "none", "component")


def test_a_tight_budget_is_met_without(pipe: Any, costing: Callable[..., Any]) -> None:
    costing(runs=0)
    roomy = plan(pipe, **SIZE)
    tight = plan(pipe, **SIZE, vram=f"{roomy.minimum_peak_bytes} B")
    assert tight.fits and tight.settings.compile is None


def test_where_it_is_known_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = compiling_of(profile("h100"), CPU)
    assert measured is not None and measured.gain < 1 and measured == compiling_of(profile("h200"), CPU)
    assert compiling_of(profile("rtx2070"), CPU) is None
    here = dataclasses.replace(profile("rtx2070"), name=THIS)
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    assert compiling_of(here, CPU) is None
    remember_compiling(CPU, Compiling(1.2, 3.0, 1.0))
    assert compiling_of(here, CPU) == Compiling(1.2, 3.0, 1.0)
