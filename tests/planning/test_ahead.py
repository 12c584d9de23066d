"""A second process does its part, tells it through the cache, and is gone whatever happens."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sd_lowvram.cache import remember, remembered
from sd_lowvram.planning.ahead import meanwhile, two_processes

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or (os.cpu_count() or 1) < 2, reason="no second process here")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))


@pytest.fixture
def children(monkeypatch: Any) -> list[int]:
    """The processes that were made."""
    made: list[int] = []
    fork = os.fork

    def noted() -> int:
        made.append(fork())
        return made[-1]

    monkeypatch.setattr(os, "fork", noted)
    return made


def are_gone(children: list[int]) -> bool:
    for child in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
    return bool(children)


def test_what_the_second_process_found_is_there_afterwards(tmp_path: Path, children: list[int]) -> None:
    place = tmp_path / "found.json"
    with two_processes():
        with meanwhile(lambda: (time.sleep(0.2), remember(place, os.getpid()))):
            pass
        assert [remembered(place)] == children
    assert are_gone(children) and len(children) == 1


def test_inside_another_its_work_is_awaited_and_no_process_more_begins(tmp_path: Path, children: list[int]) -> None:
    place, ready = tmp_path / "found.json", tmp_path / "ready"

    def find() -> None:
        while not ready.exists():
            time.sleep(0.01)
        remember(place, 1)

    with two_processes(), meanwhile(find, awaited=False):
        with meanwhile(lambda: remember(tmp_path / "other.json", 2)):
            assert remembered(place) is None
            ready.touch()
        assert remembered(place) == 1
        with meanwhile(lambda: remember(tmp_path / "more.json", 3), another=True):
            pass
        assert remembered(tmp_path / "more.json") == 3
    assert are_gone(children) and len(children) == 2
    assert remembered(tmp_path / "other.json") is None


def test_what_is_not_awaited_is_ended(children: list[int]) -> None:
    start = time.monotonic()
    with two_processes(), meanwhile(lambda: time.sleep(50), awaited=False):
        pass
    assert are_gone(children) and time.monotonic() - start < 20


def test_nothing_happens_where_nobody_asked(tmp_path: Path, monkeypatch: Any) -> None:
    with meanwhile(lambda: pytest.fail("done in this process")):
        pass
    monkeypatch.setenv("SD_LOWVRAM_CACHE", "")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("what it finds could not come back"))
    with two_processes(), meanwhile(lambda: None):
        pass


def test_an_error_there_stays_there(capfd: Any, children: list[int]) -> None:
    with two_processes(), meanwhile(lambda: 1 / 0):
        pass
    assert are_gone(children)
    assert capfd.readouterr() == ("", "")


def test_an_error_here_ends_it(children: list[int]) -> None:
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), two_processes(), meanwhile(lambda: time.sleep(50)):
        raise KeyboardInterrupt
    assert are_gone(children) and time.monotonic() - start < 20


def test_one_that_is_stuck_is_ended_all_the_same(children: list[int]) -> None:
    def stuck() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        time.sleep(50)

    with pytest.raises(ValueError, match="here"), two_processes(), meanwhile(stuck):
        time.sleep(0.2)
        raise ValueError("here")
    assert are_gone(children)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remember(tmp_path / "file" / "below.json", 1)
    assert remembered(tmp_path / "file" / "below.json") is None
    with pytest.raises(TypeError):
        remember(tmp_path / "half.json", object())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "broken.json").write_text("{")
    assert remembered(tmp_path / "broken.json") is None
