"""Shows, at the end of a run, the most memory that hostile inputs took."""

from __future__ import annotations

from typing import Any

import hostile


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for test, (peak, size) in sorted(hostile.WORST.items()):
        terminalreporter.write_line(f"{test}: at most {peak:,} bytes of memory, for an input of {size:,}")
