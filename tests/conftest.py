"""For all tests: no network, GPU tests only where there is a GPU, no time limits inside hypothesis."""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

# What one test traced another need not trace again, and what an earlier version traced counts for nothing.
_cache = tempfile.TemporaryDirectory(prefix="sd-lowvram-cache-")
os.environ.setdefault("SD_LOWVRAM_CACHE", str(Path(_cache.name, "traces")))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# Before torch starts its threads: spinning ones starve each other next to any other program.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
# Processes that share the tests take them in the same order.
ORDER = os.environ.setdefault("SD_LOWVRAM_ORDER", str(random.randrange(1_000_000)))


class ClosedDoor:
    """Registered apart, because hooks of this file do not reach the folder above it."""

    @staticmethod
    def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        """The root's __init__.py is ComfyUI's door, not a package of tests: it must not be imported here."""
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ClosedDoor())
    from hypothesis import settings

    settings.register_profile("plain", deadline=None, print_blob=True)
    settings.load_profile("plain")


def pytest_report_header() -> str:
    return f"order: SD_LOWVRAM_ORDER={ORDER} repeats it, SD_LOWVRAM_ORDER=written is that of the files"


def pytest_collection_finish() -> None:
    """Looking for cycles takes a tenth of the time: it is done seldom, and not among what is imported by now."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@functools.cache
def _leftovers() -> Any:
    from leftovers import Leftovers

    return Leftovers()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Any:
    """A fixture of many tests may change the process for as long as it is there. It draws what it draws in a process of
    its own, whichever test comes first."""
    if fixturedef.scope == "function":
        return (yield)
    from leftovers import seed

    seed()
    made = yield
    _leftovers().refresh()
    return made


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    if fixturedef.scope != "function":
        _leftovers().refresh()


@pytest.fixture(autouse=True, scope="session")
def measured_rates() -> Iterator[None]:
    """Measure the processor once for all plans, also for those with a cache of their own: each time takes seconds."""
    import torch

    from sd_lowvram.devices import this_machine
    from sd_lowvram.planning import request, stage_seconds

    measured = functools.cache(lambda device, threads: this_machine.rates_of(device))

    def rates_of(device: Any) -> Any:
        return measured(device, torch.get_num_threads()) if device.type == "cpu" else this_machine.rates_of(device)

    with pytest.MonkeyPatch.context() as patch:
        for module in (request, stage_seconds):
            patch.setattr(module, "rates_of", rates_of)
        yield


@pytest.fixture(scope="session")
def forked() -> Iterator[Any]:
    """Programs in forks of a process that has imported what a picture needs."""
    from command_line import ENVIRONMENT, HEAVILY
    from forked import forks_of

    with forks_of(HEAVILY, ENVIRONMENT) as run:
        yield run


@pytest.fixture(autouse=True, scope="module")
def leaves_nothing_as_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Warn, with its name, of a file whose tests or fixtures leave threads, hooks or patches of libraries."""
    gc.collect()
    gc.freeze()  # what was imported for earlier files: a measurement collects first, and would look through all of it
    with _leftovers().of_file() as left:
        yield
    if left:
        warnings.warn(f"the file {request.node.nodeid} left: {'; '.join(left)}", stacklevel=1)


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail, by name, a test that leaves its process otherwise than it found it. Generators of the process may be drawn
    from: they are set before each test."""
    from leftovers import seed

    seed()
    with _leftovers().of_test(request.node.nodeid) as left:
        yield
        (request.node.funcargs or {}).clear()  # which pytest holds on to until after the last check of the file
    if left:
        pytest.fail(f"{request.node.nodeid} left: {'; '.join(left)}", pytrace=False)


def shuffle(items: list[pytest.Item]) -> None:
    """Draw the order of the tests of each file, and of files that take about as long; the longest begin first, so that
    processes that share the files end together."""
    choice, written = random.Random(ORDER), ORDER == "written"
    seconds: Counter[Path] = Counter()
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        seconds[item.path] += sum(marker.args[0] for marker in item.iter_markers("slow"))
        files.setdefault(item.path, []).append(item)
    for tests in files.values():
        if not written and not any(item.get_closest_marker("in_order") for item in tests):
            choice.shuffle(tests)
    drawn = sorted(
        files, key=lambda file: -seconds[file] if written else (-int(seconds[file]).bit_length(), choice.random())
    )
    items[:] = [item for file in drawn for item in files[file]]


@pytest.hookimpl(tryfirst=True)  # before those that -m leaves out are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    shuffle(items)

    rare = frozenset(json.loads(Path(__file__).with_name("data").joinpath("rare.json").read_text(encoding="utf-8")))
    for item in items:
        if item.nodeid in rare:
            item.add_marker("rare")

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print each reason for which tests were skipped, how many were, and in which folders."""
    folders: dict[str, Counter[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        file = Path(report.nodeid.partition("::")[0])
        folders.setdefault(reason, Counter())[(file.parent if len(file.parts) > 2 else file).as_posix()] += 1
    if folders:
        terminalreporter.section("skipped")
    for reason, counts in sorted(folders.items(), key=lambda one: -sum(one[1].values())):
        terminalreporter.write_line(f"{sum(counts.values()):5}  {reason} ({', '.join(sorted(counts))})")
    if {"failed", "error"} & terminalreporter.stats.keys():
        terminalreporter.write_line(pytest_report_header())
