"""What a disk reads a second: named, stated, measured, and remembered."""

from __future__ import annotations

from pathlib import Path

import pytest

from sd_lowvram.devices import disk
from sd_lowvram.errors import BadInputError
from sd_lowvram.units import MIB


def test_disks_are_named_or_stated() -> None:
    assert disk.parse_disk("NVMe") == disk.DISKS["nvme"] and disk.parse_disk("550") == 550e6
    assert (
        disk.describe_rate(disk.DISKS["sata"]) == "SATA (0.5 GB/s)"
        and disk.describe_rate(1.26e9) == "a disk of 1.3 GB/s"
    )


@pytest.mark.parametrize("text", ["floppy", "0", "-3", "nan", "1e9"])
def test_no_disk(text: str) -> None:
    with pytest.raises(BadInputError, match=f"--disk '{text}': .*nvme, sata, hdd, .*MB/s"):
        disk.parse_disk(text)


@pytest.mark.parametrize("lies", ["file", "folder", "nothing"])
def test_a_disk_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lies: str) -> None:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(disk, "_LEAST", 16 * MIB)
    place = tmp_path / "model"
    place.mkdir()
    if lies != "nothing":
        (place / "unet.safetensors").write_bytes(bytes(17 * MIB))
    here = place / "unet.safetensors" if lies == "file" else place
    rate = disk.disk_rate(here)
    assert sorted(file.name for file in place.iterdir()) == (["unet.safetensors"] if lies != "nothing" else [])
    if rate is None:
        pytest.skip("this file system reads from no disk")
    assert 1e6 < rate < 1e12
    monkeypatch.setattr(disk, "measured_rate", lambda _: 7e8)
    assert (disk.disk_rate(here), disk.disk_rate(here, again=True), disk.disk_rate(here)) == (rate, 7e8, 7e8)


def test_where_nothing_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.disk_rate(tmp_path / "missing") is None
    monkeypatch.setattr(disk, "_IO", tmp_path / "missing")
    assert disk.measured_rate(tmp_path) is None
