"""What happens in a run is logged, and seen where a user looks; warnings are of what the caller can change."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sd_lowvram.progress import capture_events, log_event

TELLS = "unet ran out of memory"
RUN = """
import torch, tiny, sd_lowvram
pipe, failed = tiny.tiniest(), []
sd_lowvram.optimize(pipe, vram="1GB", width=64, height=64, device="cpu")

def full(*_):
    if not failed:
        failed.append(1)
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.")

pipe.unet.mid_block.register_forward_pre_hook(full)
pipe("a red apple", width=64, height=64, num_inference_steps=1, output_type="latent")
"""
SET_UP = {
    "no logging": ("", f"sd-lowvram: {TELLS}"),
    "the default format": ("import logging; logging.basicConfig()", f"WARNING:sd_lowvram.api:sd-lowvram: {TELLS}"),
    "ComfyUI's format": ("import logging; logging.basicConfig(format='%(message)s')", f"sd-lowvram: {TELLS}"),
}


@pytest.mark.slow(6)
@pytest.mark.parametrize("logging", SET_UP)
def test_a_leaner_plan_is_told_once_on_the_console(logging: str, forked: Any, tmp_path: Path) -> None:
    before, line = SET_UP[logging]
    support = Path(__file__).parent / "support"
    script = f"import sys, warnings; sys.path.insert(0, {str(support)!r})\n{before}\n"
    done = forked(f"{script}warnings.simplefilter('error', UserWarning)\n{RUN}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(TELLS) == 1
    assert any(each.startswith(line) for each in done.stderr.splitlines()), done.stderr


def test_who_listens_hears_in_place_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    outer: list[str] = []
    inner: list[str] = []
    with capture_events(outer.append):
        with capture_events(inner.append):
            log_event("sd_lowvram.hooks.pieces.overflow", "first")
        log_event("sd_lowvram.hooks.pieces.overflow", "second")
    assert (outer, inner, caplog.records) == (["second"], ["first"], [])
    log_event("sd_lowvram.hooks.pieces.overflow", "third")
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == (
        "sd_lowvram.hooks.pieces.overflow",
        "WARNING",
        "sd-lowvram: third",
    )


def test_two_threads_that_listen_hear_each_its_own_run(caplog: pytest.LogCaptureFixture) -> None:
    """The first begins first and ends first: what it found in place is not put back over the other's."""
    notes: dict[str, list[str]] = {"first": [], "second": []}
    began, over = threading.Barrier(2), threading.Event()

    def first() -> None:
        with capture_events(notes["first"].append):
            began.wait()
            log_event("sd_lowvram.api", "first")
        over.set()

    def second() -> None:
        began.wait()
        with capture_events(notes["second"].append):
            over.wait()
            log_event("sd_lowvram.api", "second")

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert notes == {"first": ["first"], "second": ["second"]} and not caplog.records
    log_event("sd_lowvram.api", "after both")
    assert [record.getMessage() for record in caplog.records] == ["sd-lowvram: after both"]
