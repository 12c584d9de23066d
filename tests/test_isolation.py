"""Tests leave their process as they found it, and run in an order that is drawn anew."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from leftovers import Leftovers
from tiny import tiniest
from torch.nn import functional as F

from sd_lowvram import Settings, doors, optimize, restore
from sd_lowvram.planning import search


@pytest.fixture(scope="module")
def watch() -> Leftovers:
    doors.find()
    return Leftovers()


@pytest.fixture
def undone() -> Iterator[list[Callable[[], Any]]]:
    """Functions that undo what a test has left, called at its end."""
    functions: list[Callable[[], Any]] = []
    yield functions
    for function in reversed(functions):
        function()


PATCHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "environment SD_LOWVRAM_TOY: not there -> '1'": lambda patch: patch.setenv("SD_LOWVRAM_TOY", "1"),
    "current directory": lambda patch: patch.chdir(Path(__file__).parent),
    "sys.path": lambda patch: patch.syspath_prepend(Path(__file__).parent / "left"),
    "sys.modules['sd_lowvram.units']": lambda patch: patch.delitem(sys.modules, "sd_lowvram.units"),
    "sd_lowvram.doors.FAMILIES: 0 -> 1": lambda patch: patch.setitem(doors.FAMILIES, "left", None),
    "patched torch.nn.functional.relu": lambda patch: patch.setattr(F, "relu", F.gelu),
    "patched torch.nn.modules.module.Module.forward": lambda patch: patch.setattr(torch.nn.Module, "forward", None),
    "patched sd_lowvram.planning.search.Settings": lambda patch: patch.setattr(search, "Settings", None),
}
SWITCHES: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "umask": (os.umask, 0o77, 0o22),
    "get_default_dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "get_num_threads": (torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "is_grad_enabled": (torch.set_grad_enabled, False, True),
    "torch function modes": (torch.set_default_device, "cpu", None),
}


@pytest.mark.parametrize("named", PATCHES)
def test_a_patch_that_stays_is_named(named: str, watch: Leftovers, monkeypatch: pytest.MonkeyPatch) -> None:
    watch.refresh()
    with watch.of_test("one") as left:
        PATCHES[named](monkeypatch)
    assert [one for one in left if one.startswith(named)] and len(left) == 1
    with watch.of_test("another") as nothing:
        pass
    assert not nothing


@pytest.mark.parametrize("named", SWITCHES)
def test_a_switch_that_stays_set_is_named(named: str, watch: Leftovers, undone: list[Callable[[], Any]]) -> None:
    switch, value, usual = SWITCHES[named]
    watch.refresh()
    undone.append(lambda: switch(usual))
    with watch.of_test("one") as left:
        switch(value)
    assert [one for one in left if one.startswith(named)]


def test_a_thread_and_hooks_that_stay_are_named_at_the_end_of_the_file(undone: list[Callable[[], Any]]) -> None:
    watch, pipe, end = Leftovers(), tiniest(), threading.Event()
    undone.extend((end.set, lambda: restore(pipe)))
    with watch.of_file() as left:
        with watch.of_test("one") as nothing:
            threading.Thread(target=end.wait, name="waits").start()
        with watch.of_test("another"):
            optimize(pipe, settings=Settings(attention="sliced"))
    assert not nothing
    assert left == ["thread waits of one", "hooks on a model that is still held, of another"]


def test_the_order_is_drawn_by_a_seed_file_by_file(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: Any = next(one for one in request.config.pluginmanager.get_plugins() if hasattr(one, "shuffle"))

    def items(file: str, seconds: int, number: int, in_order: bool = False) -> list[Any]:
        marks = [SimpleNamespace(args=[seconds])]
        return [
            SimpleNamespace(
                path=Path(file),
                place=place,
                iter_markers=lambda _: marks,
                get_closest_marker=lambda _: in_order or None,
            )
            for place in range(number)
        ]

    def order(seed: str) -> list[tuple[str, int]]:
        drawn = [*items("a", 0, 20), *items("b", 0, 20), *items("long", 50, 3), *items("c", 0, 20, in_order=True)]
        monkeypatch.setattr(rules, "ORDER", seed)
        rules.shuffle(drawn)
        return [(item.path.name, item.place) for item in drawn]

    first, seeds = order("1"), list("123456")
    assert order("1") == first and len({tuple(order(seed)) for seed in seeds}) == len(seeds)
    for drawn in map(order, seeds):
        names = [name for name, _ in drawn]
        assert sorted(drawn) == sorted(first) and names[:3] == ["long"] * 3
        assert sum(one != other for one, other in itertools.pairwise(names)) == 3
        assert [place for name, place in drawn if name == "c"] == list(range(20))
        assert [place for name, place in drawn if name == "a"] != list(range(20))
