"""What a streamed run of a UNet of half a gigabyte holds in host memory, as the system counts it."""

from __future__ import annotations

import sys
from pathlib import Path

import host_memory
import pytest

ALLOWED = 300_000_000


@pytest.mark.slow(25)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells anonymous memory from mapped files")
def test_a_streamed_run_of_a_mapped_file(tmp_path: Path) -> None:
    """On a CPU the device's bytes are anonymous memory too: the engine's own are taken off."""
    file = tmp_path / "unet.safetensors"
    try:
        host_memory.write(file)
        found = host_memory.measured(file)
    finally:
        file.unlink(missing_ok=True)  # which pytest would keep
    assert found["same"] == [True, True, True] and found["finite"]
    runs, weights = found["runs"], found["weights"]
    assert weights > 1.5 * ALLOWED
    assert found["minimum_ram"] < 100_000_000
    for name in ("minimum", "minimum, channels last"):
        assert runs[name]["above"] - runs[name]["device"] <= ALLOWED
        assert runs[name]["planned_host"] == found["minimum_ram"]
    assert weights < runs["ample"]["above"] - runs["ample"]["device"] <= weights + ALLOWED
    assert runs["ample"]["planned_host"] >= weights
