"""Hostile files of jobs: an error that names the line, or jobs; never a fault."""

from __future__ import annotations

from pathlib import Path

import hostile
import pytest
from hostile import damaged, inputs, survives
from hypothesis import given
from hypothesis import strategies as st

from sd_lowvram.batches.jobs import columns, read_jobs
from sd_lowvram.commands.inputs import Job


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@inputs(0.14)
@given(hostile.job_files(list(columns())), st.booleans(), st.data())
def test_job_files(folder, written, broken, data):
    name, content = written
    content = data.draw(damaged(st.just(content))) if broken else content
    (folder / name).write_bytes(content)
    with survives(len(content)):
        tasks = read_jobs(folder / name, Job(""), {})
        assert tasks and len({task.key for task in tasks}) == len(tasks)
