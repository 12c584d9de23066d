"""Memory that another program takes after the plan was made: the run ends with the right picture and reports how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from command_line import MAIN
from PIL import Image

SHORT = """
import re, resource, sys
left = int(sys.argv.pop(1)) << 20
from diffusers import AutoencoderKL
decode = AutoencoderKL.decode
def short_of_memory(*args, **kwargs):
    now = int(re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (now + left, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    AutoencoderKL.decode = decode
    return decode(*args, **kwargs)
AutoencoderKL.decode = short_of_memory
from sd_lowvram.__main__ import main
main()
"""
GENERATE = ("generate", "a red apple", "--steps", 2, "--width", 768, "--height", 768, "--seed", 5, "--vram", "8GB")


@pytest.mark.slow(40)
def test_what_is_left_is_enough_for_strips(forked: Any, tmp_path: Path) -> None:
    """The plain decoder holds maps of 288 MiB, several at a time; 400 MiB are left when it begins."""
    plain = forked(MAIN, *GENERATE, "-o", "plain.png", folder=tmp_path)
    assert plain.returncode == 0 and "ran out of memory" not in plain.stderr, plain.stderr
    short = forked(SHORT, 400, *GENERATE, "-o", "short.png", folder=tmp_path)
    assert short.returncode == 0, short.stderr
    assert short.stderr.count("vae ran out of memory on cpu") >= 1
    with Image.open(tmp_path / "plain.png") as expected, Image.open(tmp_path / "short.png") as found:
        assert (
            "Low VRAM ran out: " in found.info["parameters"] and "Low VRAM ran out" not in expected.info["parameters"]
        )
        away = numpy.asarray(expected, dtype=int) - numpy.asarray(found, dtype=int)
    assert abs(away).max() <= 1
