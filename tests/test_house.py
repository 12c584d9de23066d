"""What keeps the code easy to find one's way in, where the import contracts of ``make lint`` do not say it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import planted
import pytest

from sd_lowvram import errors
from sd_lowvram.settings import knobs

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sd_lowvram"
ADAPTERS = sorted(file for folder in ("nodes", "webui_ext", "scripts") for file in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("file", ADAPTERS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_adapters_import_nothing_of_torch_that_is_private(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        private = [name for name in names if name.startswith("torch.") and "._" in name]
        assert not private, f"{file.name}, line {getattr(node, 'lineno', 0)}: {private}"


_WAYS = 15


def _ways(node: ast.AST) -> int:
    """Branches of a function's code, those of conditions and comprehensions too, but not of functions in it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return 0
    if isinstance(node, ast.Assert):
        return 1
    inside = sum(map(_ways, ast.iter_child_nodes(node)))
    if isinstance(node, ast.If | ast.IfExp | ast.comprehension):
        return inside + 1 + len(getattr(node, "ifs", ()))
    if isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.Try):
        return inside + len(getattr(node, "handlers", " ")) + bool(node.orelse)
    return inside + len(node.values) - 1 if isinstance(node, ast.BoolOp) else inside


def test_no_function_has_more_ways_through_it_than_a_reader_can_follow() -> None:
    """ruff's complexity counts no `and`, `or` and comprehensions; this is that of radon, which does."""
    files = [
        file for folder in ("sd_lowvram", "nodes", "webui_ext", "scripts") for file in (ROOT / folder).rglob("*.py")
    ]
    longer, found = [], 0
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        owners = {
            inner: f"{node.name}." for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for inner in node.body
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name, ways = owners.get(node, "") + node.name, 1 + sum(map(_ways, node.body))
                found += 1
                if ways > _WAYS:
                    longer.append(f"{file.relative_to(ROOT)}: {name} has {ways}")
    assert not longer and found > 2000


def test_private_parts_of_torch_are_touched_in_one_file() -> None:
    private = re.compile(r"\btorch(?!\.ops)(\.\w+)*\._[a-zA-Z]|\._cdata\b|\._version\b")
    places = {
        file.relative_to(ROOT).as_posix(): found
        for file in (ROOT / "sd_lowvram").rglob("*.py")
        if (found := sorted({match.group() for match in private.finditer(file.read_text(encoding="utf-8"))}))
    }
    places.pop("sd_lowvram/compat/private.py")
    assert not places


@pytest.mark.parametrize("file", ["search.py", "options.py"])
def test_the_search_knows_no_knob_by_name(file: str) -> None:
    tree = ast.parse((ROOT / "sd_lowvram" / "planning" / file).read_text(encoding="utf-8"))
    words = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    words |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
    from sd_lowvram.settings import knobs

    assert words.isdisjoint(knobs())


_CODE = re.compile(
    r"\w\(|\(\)|\bSettings\b|\b[a-z]\w*=|\bNone\b|\bTrue\b|\bFalse\b|__|\b(torch|sd_lowvram)\.(?!compile\b)"
    rf"|\b(?!(?:{'|'.join(knobs())})\b)[a-z]+(_[a-z]+)+\b"
)
"""What no painter has to read: calls, keywords, values and names of Python; settings have their names on the page."""
_TO_PROGRAMMERS = {
    "api.py": "restore() what it was optimized with first",
    "session.py": "restore() takes what was given to optimize()",
    "settings.py": "expected Settings, got",
    "device_io.py": "hidden from trace()",
    "followed.py": "call backward()",
    "calls_diffusers.py": "projection's clip_embeds",
}
"""What only a program that calls us can meet, by file."""


def _said(node: ast.expr) -> str:
    """The text of a message, with a word in place of what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_said, node.values))
    if isinstance(node, ast.BinOp):
        return _said(node.left) + _said(node.right)
    if isinstance(node, ast.IfExp):
        return _said(node.body)
    return "'word'" if isinstance(node, ast.FormattedValue) and node.conversion == ord("r") else "word"


def test_no_error_that_painters_read_has_python_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that panel, nodes and HTTP can meet, once their door has errors speak plainly."""
    monkeypatch.setattr(errors.LowVRAMError, "spoken_plainly", True)
    rooms = ("hooks", "streaming", "kernels", "planning", "models", "memory", "devices", "tracing", "approximate")
    files = [one for room in rooms for one in (PACKAGE / room).rglob("*.py")]
    files += [one for folder in (PACKAGE, ROOT / "nodes", ROOT / "webui_ext") for one in folder.glob("*.py")]
    told, found = [], 0
    for file in files:
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named = getattr(getattr(call, "func", None), "id", "")
            if isinstance(call, ast.Call) and call.args and isinstance(getattr(errors, named, None), type):
                plainly = next((_said(one.value) for one in call.keywords if one.arg == "plainly"), "")
                text = str(errors.LowVRAMError(_said(call.args[0]), plainly=plainly))
                found += 1
                if _CODE.search(text) and _TO_PROGRAMMERS.get(file.name, "None") not in text:
                    told.append(f"{file.relative_to(ROOT)}:{call.lineno}: {text}")
    assert not told and found > 100


def test_every_public_name_is_there_and_no_other() -> None:
    import sd_lowvram

    assert sd_lowvram.__all__ == [
        "AttentionBackend", "Fidelity", "Knob", "MemoryTrace", "Plan", "Settings", "attached", "decode", "encode",
        "errors", "max_size", "measured", "optimize", "plan", "register", "restore", "resumable", "trace",
    ]  # fmt: skip
    assert all(hasattr(sd_lowvram, name) for name in sd_lowvram.__all__)


_DRAWING = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"),
    *("multinomial", "normal_", "uniform_", "random_", "exponential_", "bernoulli_", "trunc_normal_"),
}
_OF_THE_PROCESS = {"fork_rng", "set_rng_state", "get_rng_state", "seed_all", "manual_seed_all", "default_generator"}


def test_nothing_draws_from_a_generator_of_the_process() -> None:
    """A seed that a user has set gives the same picture whatever was planned and measured before."""
    found = []
    for file in sorted(
        file for folder in ("sd_lowvram", "nodes", "webui_ext") for file in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in _OF_THE_PROCESS:
                found.append((file.name, node.lineno))
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            bare = isinstance(node.func.value, ast.Name)
            own = {one.arg for one in node.keywords} & {"generator", None}  # None: with `**`, which may name it
            if node.func.attr in _DRAWING and not own and not (bare and node.func.value.id == "tl"):
                found.append((file.name, node.lineno))
            if node.func.attr == "manual_seed" and bare and node.func.value.id == "torch":
                found.append((file.name, node.lineno))
    assert not found


def test_every_planted_fault_has_its_place_and_its_tests() -> None:
    """What ``make planted`` replaces occurs once in its file, which stays Python, and the tests that see it exist."""
    found = planted.faults()
    assert len(found) >= 40
    for fault in found:
        compile(planted.with_fault(fault), fault["file"], "exec")
        for test in fault["tests"].split():
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_rare_tests_exist() -> None:
    for test in json.loads((ROOT / "tests" / "data" / "rare.json").read_text(encoding="utf-8")):
        file, _, name = test.partition("[")[0].partition("::")
        there = (ROOT / file).parent.is_dir()  # not where a package has been deleted
        assert not there or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test
