"""The WebUI panel without a WebUI: its arguments, saved API payloads, the infotext, and the line's manners."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sd_lowvram import Settings
from sd_lowvram.errors import BadInputError, BudgetError
from sd_lowvram.knob import GROUPS
from sd_lowvram.planning.wording import Kind, Reason
from sd_lowvram.settings import SURFACES, knobs
from webui_ext import estimate, infotext
from webui_ext.arguments import IN_SIGHT, PRESETS, arguments, read, settings_of

ROOT = Path(__file__).parents[2]
PAYLOADS = sorted((Path(__file__).parents[1] / "data" / "payloads").glob("*.json"))
DEFAULTS = {one.name: one.default for one in arguments()}


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: path.stem)
def test_saved_payloads_keep_their_meaning(path: Path) -> None:
    saved = json.loads(path.read_text(encoding="utf-8"))
    chosen = read(saved["request"]["alwayson_scripts"]["sd-lowvram"]["args"], DEFAULTS)
    assert {name: value for name, value in chosen.items() if value != DEFAULTS[name]} == saved["chosen"]
    settings = {name: value for name, _, value in settings_of(chosen).decided()}
    assert settings.items() >= saved["settings"].items()


def test_every_knob_is_shown_somewhere_and_the_panel_shows_its_own() -> None:
    shown = {one.name for one in arguments() if one.knob}
    assert shown == {name for name, knob in knobs().items() if "panel" in knob.surfaces}
    assert [name for name, knob in knobs().items() if not set(knob.surfaces) & set(SURFACES)] == ["streamed_graphs"]
    assert IN_SIGHT == ("vram", "preset")
    assert {one.group for one in arguments()} == set(GROUPS)
    assert max(len(one.help) for one in arguments()) < 250  # three lines of a column


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"enabeld": True}, "'enabled'"),
        ({"vram": "banana"}, "4GB"),
        ({"attention": "magic"}, "sliced"),
        ({"vae_strip_mib": 1.5}, "whole number"),
        ({"weights_mib": -1}, "whole number"),
        ({"weights_mib": float("inf")}, "whole number"),
        ({"weights_mib": float("nan")}, "whole number"),
        ({"enabled": "yes"}, "true or false"),
        ([True], "one flat list"),
    ],
)
def test_what_cannot_be_used_is_named(wrong: Any, says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        read([wrong], DEFAULTS)


def test_short_lists_and_missing_names_take_the_defaults() -> None:
    defaults = {**DEFAULTS, "vram": "6GB"}
    assert read([True], defaults) == {**defaults, "enabled": True}
    assert read([{"enabled": True}], defaults) == read([True, None, None], defaults)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_lossless_and_leave_fixed_knobs(preset: str) -> None:
    settings = settings_of({**DEFAULTS, "preset": preset, "attention": "sliced", "channels_last": "on"})
    assert all(knob.fidelity_of(value).lossless for _, knob, value in settings.decided() if value)
    assert settings.attention == "sliced" and settings.channels_last is True
    assert (settings.park_skips is True) == (preset == "smallest")


def test_automatic_means_undecided() -> None:
    undecided = settings_of({**DEFAULTS, "preset": "exact and fastest"})
    assert undecided == Settings(inference_mode=False)
    assert settings_of({**DEFAULTS, "weights_mib": 512}).offload == "blocks"


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: path.stem)
def test_infotext_comes_back(path: Path) -> None:
    saved = json.loads(path.read_text(encoding="utf-8"))
    chosen = read([{**saved["chosen"], "enabled": True}], DEFAULTS)
    parameters = {infotext.KEY: infotext.write(chosen)}
    assert {name: infotext.paste(parameters, name) for name in chosen} == chosen
    assert all(infotext.paste({}, name) is None for name in chosen)


def test_infotext_of_a_newer_version_is_survived() -> None:
    parameters = {infotext.KEY: "attention magic | novelty 3 | vae_strip_mib many"}
    assert infotext.paste(parameters, "attention") == "auto"
    assert infotext.paste(parameters, "vae_strip_mib") == 0


def test_only_the_last_question_of_a_tab_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_SETTLE_SECONDS", 0.05)
    turn, answers = threading.Lock(), {}
    turn.acquire()  # a generation is under way

    def ask(key: str) -> None:
        answers[key] = estimate.answer("tab", ("last", key), turn, lambda: f"told {key}", patient=True)

    askers = [threading.Thread(target=ask, args=(key,)) for key in "abc"]
    for asker in askers:
        asker.start()
        asker.join(0.02)
    turn.release()
    for asker in askers:
        asker.join(5)
    assert answers == {"a": None, "b": None, "c": "told c"}


def test_while_a_picture_is_drawn_the_line_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page asks a second time then, and that question waits."""
    monkeypatch.setattr(estimate, "_SETTLE_SECONDS", 0.01)
    turn, told = threading.Lock(), []
    turn.acquire()  # a generation is under way
    at_once = estimate.answer("tab", "drawn", turn, lambda: "never")
    assert at_once is not None and "waits for the running picture" in at_once.line
    assert "waits for the running picture" in at_once.head and "#c00" not in at_once.line
    second = threading.Thread(
        target=lambda: told.append(estimate.answer("tab", "drawn", turn, lambda: "the plan", patient=True))
    )
    second.start()
    second.join(0.1)
    assert second.is_alive()
    turn.release()
    second.join(5)
    assert told == ["the plan"] and estimate.answer("tab", "drawn", turn, lambda: "never") == "the plan"


def test_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_SETTLE_SECONDS", 0.0)
    calls: list[int] = []
    for _ in range(2):
        estimate.answer("tab", "remembered", threading.Lock(), lambda: calls.append(1) or "text")
    assert calls == [1]


def test_the_line_says_why_not() -> None:
    def refuse() -> Any:
        raise BudgetError("2 GiB cannot hold it", needed_bytes=3 << 30, stage="denoise")

    told = estimate.sentence(refuse, "512x512")
    assert 'data-verdict="does not fit"' in told.line and ">does not fit<" in told.head
    assert "&lt;b&gt;" in estimate.complaint("<b>").line


@pytest.fixture
def grid_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A host with nothing but its grid script."""

    class AxisOption:
        def __init__(self, label: str, type: Any, apply: Any, **more: Any) -> None:
            self.label, self.type, self.apply, self.more = label, type, apply, more

    module = SimpleNamespace(axis_options=[], AxisOption=AxisOption, process_images=None, Processed=None)
    owner = type("Script", (), {"__module__": "xyz_grid.py"})
    modules, scripts = ModuleType("modules"), ModuleType("modules.scripts")
    scripts.scripts_data = [SimpleNamespace(script_class=owner, module=module)]  # type: ignore[attr-defined]
    modules.scripts = scripts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modules", modules)
    monkeypatch.setitem(sys.modules, "modules.scripts", scripts)
    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(HTTPException=Exception))
    for name in ("grid", "refusal"):
        monkeypatch.delitem(sys.modules, f"webui_ext.{name}", raising=False)
    yield module
    for name in ("grid", "refusal"):
        sys.modules.pop(f"webui_ext.{name}", None)


def test_axes_are_added_once_and_cells_share_nothing(grid_script: Any) -> None:
    grid = importlib.import_module("webui_ext.grid")
    grid.add_axes()
    grid.add_axes()
    assert len(grid_script.axis_options) == len(arguments()) - 1
    axis = next(one for one in grid_script.axis_options if one.label.endswith("] Attention"))
    assert axis.more["choices"]() == list(next(one for one in arguments() if one.name == "attention").choices)
    first, second = SimpleNamespace(), SimpleNamespace()
    axis.apply(first, "sliced", [])
    second.__dict__.update(first.__dict__)  # as a grid copies
    axis.apply(second, "sdpa", [])
    assert getattr(first, grid.OVERRIDES) == {"enabled": True, "attention": "sliced"}
    with pytest.raises(RuntimeError, match="magic"):
        axis.more["confirm"](first, ["magic"])


def test_install_looks_and_installs_nothing_and_speaks_once(tmp_path: Path) -> None:
    source = (ROOT / "install.py").read_text(encoding="utf-8")
    assert "subprocess" not in source and "import pip" not in source
    installer = tmp_path / "install.py"
    installer.write_text(source, encoding="utf-8")
    # isolated: no site-packages, so that everything is missing and nothing could be installed unseen
    command = [sys.executable, "-I", "-S", str(installer)]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout for _ in range(2)
    )
    assert all(package in first for package in ("torch is missing", "safetensors is missing", "psutil", "nvidia-ml-py"))
    assert "torch is missing" in second and "psutil" not in second  # without torch nothing works, so that is repeated


def test_the_hosts_own_scripts_and_utils_are_found(tmp_path: Path) -> None:
    """A regular package of ours named as the host's own would hide it: WebUIs put extensions' folders first."""
    for name in ("scripts", "modules", "utils"):
        assert not (ROOT / name / "__init__.py").exists() and not (ROOT / f"{name}.py").exists()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "theirs.py").write_text("FOUND = True\n")
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import scripts.theirs as t; assert t.FOUND"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=tmp_path)


def decided(over: bool) -> Reason:
    held = {"free_bytes": 8 << 30, "model_bytes": 2 << 30, "keeps": "all", "needed_bytes": 5 << 30}
    return Reason(Kind.HOST_DECIDES, host="the WebUI", **held, bounded=False, over_budget=over)


def planned(peak: int, vram: int, *reasons: Reason) -> Any:
    return SimpleNamespace(
        predicted=SimpleNamespace(reserved_bytes=peak, overhead_bytes=0, stage="decode", seconds=125.0),
        request=SimpleNamespace(vram=vram, steps=20),
        settings=Settings(offload="blocks", vae_tiles="exact"),
        reasons=reasons,
    )


def test_the_line_names_what_was_chosen() -> None:
    told = estimate.sentence(lambda: planned(3 << 30, 4 << 30), "512x512").line
    assert re.search("512x512.*3 GiB.*4 GiB.*2.*20 steps", told)
    assert "part of the model stays in VRAM, the rest is loaded when needed; decoded in exact strips" in told


def test_the_line_names_no_order_of_ours_where_the_host_decides_on_weights() -> None:
    told = estimate.sentence(lambda: planned(3 << 30, 4 << 30, decided(True)), "512x512").line
    assert "more than this budget; decoded in exact strips" in told


@pytest.mark.parametrize(
    ("peak", "vram", "reasons", "head"),
    [
        (33 << 27, 9 << 29, (), ">fits, 4.1 of 4.5 GiB<"),
        (300 << 20, 4 << 30, (), ">fits, 300 MiB of 4 GiB<"),
        (1 << 30, 4 << 30, (decided(False),), ">fits into 4 GiB<"),
        (1 << 30, 4 << 30, (decided(True),), ">takes more than 4 GiB<"),
    ],
)
def test_the_panels_head_has_the_verdict(peak: int, vram: int, reasons: tuple[Reason, ...], head: str) -> None:
    told = estimate.sentence(lambda: planned(peak, vram, *reasons), "512x512")
    assert head in told.head and ("#c00" in told.head) == ("more" in head)


def test_the_head_of_two_passes_is_that_of_the_worse() -> None:
    small, large = (estimate.sentence(lambda peak=peak: planned(peak << 30, 4 << 30), "512x512") for peak in (1, 3))
    both, no = estimate.join_texts([small, large]), estimate.complaint("never")
    assert both.head == large.head and both.line == small.line + large.line
    assert estimate.join_texts([no, large]).head == no.head and not estimate.note("not yet").head
