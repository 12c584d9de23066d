"""Where autograd follows a call, gradients are those of the plain model whatever is set, or they are refused."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import tiny
import torch
from gradients import WANTED, Case, every_knob, named, tolerance

from sd_lowvram import Settings, attached, optimize, restore
from sd_lowvram.errors import LowVRAMError
from sd_lowvram.session import attachments

PLAIN: dict[tuple[str, str], list[torch.Tensor]] = {}
COUNTS: Counter[str] = Counter()
REFUSED: dict[str, str] = {}


def plain(case: Case) -> list[torch.Tensor]:
    if (case.part, case.wanted) not in PLAIN:
        PLAIN[case.part, case.wanted] = case.gradients()
    return PLAIN[case.part, case.wanted]


def check(case: Case, settings: Settings, expected: list[torch.Tensor]) -> str:
    """Hold the gradients of ``case`` as it is now against those of the plain model; by which rule, is returned."""
    found, allowed = case.gradients(before=settings.compile in (None, "off")), tolerance(settings)
    assert [one.dtype for one in found] == [leaf.dtype for leaf in case.weights or expected]
    together = [torch.cat([one.flatten().double() for one in each]) for each in (found, expected)]
    error = tiny.relative_error(*together)
    if allowed is not None:
        assert error <= allowed
        return "equal" if allowed == 0 else "rounding"
    if case.wanted == "inputs" and computes_in_float32(settings):
        slope, way = case.slope()
        assert (found[0] * way).sum().item() == pytest.approx(slope, rel=2e-2)
    assert error < 0.5
    return "approximate"


def computes_in_float32(settings: Settings) -> bool:
    return settings.precision in (None, "fp32", "fp16-storage")


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("settings", [*every_knob()], ids=named)
@pytest.mark.parametrize("part", ["unet", "vae"])
def test_gradients(part: str, settings: Settings, wanted: str) -> None:
    if (part, wanted) == ("vae", "text"):
        return
    if settings.channels_last and (part, wanted) == ("vae", "some parameters"):
        pytest.skip("torch 2.13 itself crashes: GroupNorm's backward on a CPU, channels last, by its weights alone")
    case = Case(part, wanted)
    expected = plain(case)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with attached(case.model, settings, device="cpu"):
                COUNTS[check(case, settings, expected)] += 1
    except LowVRAMError as error:
        assert str(error)
        COUNTS["refused"] += 1
        REFUSED[named(settings)] = str(error)


def test_the_counts() -> None:
    """Of the cases above, how many by which rule, shown with ``-rP``; what is refused is refused where it is set."""
    print(dict(COUNTS), REFUSED)
    assert all(len(told) > 20 for told in REFUSED.values())


@pytest.mark.parametrize("wanted", WANTED)
def test_a_plan_that_streams(wanted: str) -> None:
    case = Case("unet", wanted, kind="sd15")
    expected = case.gradients()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = optimize(case.model, vram="4MiB", width=128, height=128, device="cpu")
        assert chosen.settings.offload in ("blocks", "layer", "halves")
        found = case.gradients()
    restore(case.model)
    for one, other in zip(found, expected, strict=True):
        assert tiny.relative_error(one, other) <= 1e-4


@pytest.mark.parametrize("wanted", WANTED)
def test_planned_anew_between_a_call_and_its_backward(wanted: str) -> None:
    case = Case("unet", wanted, kind="sd15")
    expected = case.gradients()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen = optimize(case.model, vram="16MiB", width=64, height=64, device="cpu")
            assert chosen.settings.offload in (None, "none")
            small = case.inputs[:, :, :8, :8]
            with torch.no_grad():
                case.output(small, case.text, 900)
            found = case.gradients()
        assert attachments(case.model)[-1].plan.settings.offload in ("blocks", "layer", "halves")
    finally:
        restore(case.model)
    for one, other in zip(found, expected, strict=True):
        assert tiny.relative_error(one, other) <= 1e-4


def test_what_autograd_keeps_is_told_once() -> None:
    unet = tiny.tiniest().unet
    optimize(unet, vram="64MiB", width=64, height=64, device="cpu")
    given = torch.zeros(1, 4, 8, 8), torch.tensor(500), torch.zeros(1, 7, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            unet(*given)  # the remedy that the warning names
    with pytest.warns(UserWarning, match=r"UNet2DConditionModel.*on.*torch\.no_grad\(\)"):
        unet(*given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unet(*given)
