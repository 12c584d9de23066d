"""What a step reads from the file of a model that host memory does not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import rereading
from sd_lowvram.errors import BadInputError


def test_weights_that_are_held_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rereading, "_NARROW", {"dim": 256, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 128})
    for name, value in (("_MEMORY", (1.0, 0.25)), ("_ON_CARD", (0.0,)), ("_STEPS", 2)):
        monkeypatch.setattr(rereading, name, value)
    try:
        report = rereading.run(out=tmp_path / "table.md")
    except BadInputError as error:
        pytest.skip(str(error))
    rows = {(row["memory"], row["on_card"]): row["ours_mib"] for row in report["rows"]}
    anew = report["rows"][0]["anew_mib"]
    assert anew >= report["mib"]
    assert rows[1.0, 0.0] < 0.02 * anew
    assert all(ours < anew for ours in rows.values())
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in (".md", ".json")] == []
