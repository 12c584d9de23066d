"""What the report draws can be seen on its light ground and on its dark one."""

from __future__ import annotations

import re

import pytest

from benchmarks.plots.style import SERIES, THEMED
from benchmarks.report.page import _STYLE

LEAST = 3
"""The ratio that WCAG asks of graphics."""


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return sum(part * one for part, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_series_stands_out_from_the_ground(theme: int) -> None:
    values = [dict(re.findall(r"--(\w+): (#\w+);", rule)) for rule in re.findall(r":root \{(.*?)\}", _STYLE, re.DOTALL)]
    colours = values[theme]
    for one in SERIES:
        variable = THEMED.get(one, "").removeprefix("var(--").removesuffix(")")
        lighter, darker = sorted(map(luminance, (colours.get(variable, one), colours["paper"])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= LEAST, one
