"""Batches in processes of their own: jobs for them, and what they made."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import HEAVILY

WARM = f"{HEAVILY}import sd_lowvram.batches.run\n"


def jobs(folder: Path, count: int) -> Path:
    """Jobs of two shapes and two schedulers."""
    things = ("apple", "car", "house", "tree", "cat")
    lines = ["prompt,seed,width,height,scheduler,steps"]
    for n in range(count):
        lines.append(f"a {things[n % 5]},{n},{64 + 8 * (n % 2)},64,{'euler-a' if n % 3 else ''},2")
    (folder / "jobs.csv").write_text("\n".join(lines))
    return folder / "jobs.csv"


def results(stdout: str) -> dict[str, str]:
    """The checksum of each file, by the journal."""
    made = [(picture["file"], picture["sha256"]) for job in json.loads(stdout)["jobs"] for picture in job["pictures"]]
    assert len(dict(made)) == len(made)
    return dict(made)
