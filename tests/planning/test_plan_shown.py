"""A plan as people see it: one line, a page of text that is the command line's table, and bars in a notebook."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re

import families
import pytest
from rich.console import Console

import sd_lowvram
from sd_lowvram.commands.plan_table import show
from sd_lowvram.planning.wording import Kind, Reason
from sd_lowvram.units import format_size


@pytest.fixture(scope="module")
def plan() -> sd_lowvram.Plan:
    return sd_lowvram.plan(families.plain("sd15"), vram="64MB", width=64, height=64, device="cpu")


def test_repr_is_one_line_with_size_peak_budget_time_and_fidelity(plan: sd_lowvram.Plan) -> None:
    told = repr(plan)
    assert "\n" not in told and len(told) < 160
    peak = format_size(plan.predicted.peak_bytes)
    assert re.fullmatch(
        rf"<Plan 64x64, batch 1, \d+ steps: {peak} allocated.* of 64 MiB, .* s, picture {plan.fidelity.words}>", told
    )


def test_print_is_the_table_of_the_command_line_on_a_page(plan: sd_lowvram.Plan) -> None:
    lines = str(plan).splitlines()
    assert len(lines) <= 60
    shown = io.StringIO()
    show(Console(file=shown, width=200), plan.as_dict() | {"rates": "of this machine"})
    for line in filter(None, lines):
        words = line.split("  ") if line.startswith(("stage", "denoise ", "decode ", "text ")) else [line]
        assert all(word.strip() in shown.getvalue() for word in words), line


def test_a_notebook_shows_a_bar_for_each_stage(plan: sd_lowvram.Plan) -> None:
    page = plan._repr_html_()
    assert page.count("<tr>") == page.count("</tr>") == 1 + len(plan.stages)
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", page)]
    assert len(widths) == 2 * len(plan.stages) and max(widths) <= 100 and sum(widths) > 10
    assert page.count("<div") == page.count("</div>") and format_size(plan.predicted.peak_bytes) in page


def test_reasons_are_sentences_that_json_gives_with_their_values(plan: sd_lowvram.Plan) -> None:
    """Users print them; programs read kinds and values, from which the same sentences come again."""
    settings = sd_lowvram.Settings(offload="layer", vae_tiles="exact")
    slow = sd_lowvram.plan(families.plain("sd15"), vram="64MB", width=64, height=64, device="cpu", settings=settings)
    for one in (plan, slow):
        told = json.loads(json.dumps(one.as_dict()))
        assert "\n".join(one.reasons).splitlines() == told["reasons"] == list(one.reasons)
        again = [Reason(value["kind"], **value["values"]) for value in told["reason_values"]]
        for copied in (again, copy.deepcopy(one.reasons), pickle.loads(pickle.dumps(one.reasons))):
            assert [(reason, reason.kind) for reason in copied] == [(reason, reason.kind) for reason in one.reasons]
    assert [reason.kind for reason in slow.reasons][:3] == [Kind.PEAK, Kind.ONE_LAYER, Kind.EXACT_STRIPS]
