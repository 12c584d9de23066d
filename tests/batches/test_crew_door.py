"""A stranger's crew, registered by one call, makes the pictures of a batch."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sd_lowvram import register
from sd_lowvram.batches.crew import Alone
from sd_lowvram.cli import app


def test_a_batch_runs_on_a_registered_crew(tmp_path: Path) -> None:
    given: list[int | None] = []

    def crew(workers: int | None) -> Alone:
        given.append(workers)
        return Alone()

    (tmp_path / "jobs.txt").write_text("a red apple\n")
    arguments = [
        *("batch", str(tmp_path / "jobs.txt"), "--out", str(tmp_path / "out"), "--width", "64", "--height", "64"),
        *("--steps", "1", "--on", "theirs", "--workers", "3", "--json"),
    ]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2 and "--on 'theirs'" in refused.output
    unregister = register(crews={"theirs": crew})
    try:
        done = CliRunner().invoke(app, arguments)
    finally:
        unregister()
    assert done.exit_code == 0, done.output
    assert given == [3] and len(json.loads(done.stdout)["jobs"]) == 1
