"""Batches that are killed all the time: every job has one result in the end, that of an undisturbed run."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from batch_runs import WARM, jobs, results
from command_line import ENVIRONMENT, MAIN
from forked import forks_of

KILLED = """
import os, random, sys, threading, time
from pathlib import Path
seed = int(sys.argv.pop(1))
def kill(chance=random.Random(seed)):
    if chance.random() < 0.75:  # some are killed while they load
        enough = len(list(Path("out").glob("*.png"))) + chance.randint(1, MOST)
        while len(list(Path("out").glob("*.png"))) < enough:
            time.sleep(0.01)
    time.sleep(chance.random() / 2)  # anywhere in the work on a picture
    os.kill(os.getpid(), 9)
threading.Thread(target=kill, daemon=True).start()
from sd_lowvram.__main__ import main
main()
"""

IN_A_JOB = """
import os, sys, torch
last = int(sys.argv.pop(1))
from diffusers import UNet2DConditionModel
from sd_lowvram.saved_latents.keeping import Keeper
forward, start, after = UNet2DConditionModel.forward, Keeper.__init__, Keeper.record_step
runs, calls = [], []
def started(self, *args):
    runs.append(1)
    start(self, *args)
def counted(*args, **kwargs):
    if runs and type(args[1]) is torch.Tensor:  # not of a measurement or a trace
        calls.append(1)
    return forward(*args, **kwargs)
def killed(self, step, values):
    if step == last:
        os.kill(os.getpid(), 9)
    return after(self, step, values)
UNet2DConditionModel.forward, Keeper.__init__, Keeper.record_step = counted, started, killed
from sd_lowvram.__main__ import main
try:
    main()
finally:
    print(len(calls), file=open("calls", "w"))
"""


@pytest.fixture(scope="module")
def forked():
    with forks_of(WARM, ENVIRONMENT) as run:
        yield run


def killed_until_done(run, folder: Path, count: int, most: int) -> tuple[dict[str, str], dict[str, str], int]:
    """Results of a batch killed after at most ``most`` new pictures each time, of one that is not, and the kills."""
    file = jobs(folder, count)
    quiet = run(MAIN, "batch", file, "--out", "undisturbed", "--json", folder=folder)
    assert quiet.returncode == 0, quiet.stderr
    kills = 0
    while True:
        done = run(KILLED.replace("MOST", str(most)), kills, "batch", file, "--out", "out", "--json", folder=folder)
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
        kills += 1
    assert [job["state"] for job in json.loads(done.stdout)["jobs"]] == ["done"] * count
    pictures = {path.name for path in (folder / "out").glob("*.png")}
    assert pictures == set(results(done.stdout))
    return results(done.stdout), results(quiet.stdout), kills


@pytest.mark.slow(15)
@pytest.mark.parametrize("count", [12, pytest.param(40, marks=pytest.mark.rare)])
def test_jobs_killed_every_few_seconds(forked, tmp_path, count):
    disturbed, undisturbed, kills = killed_until_done(forked, tmp_path, count, 12 if count == 40 else 4)
    assert disturbed == undisturbed and max(Counter(disturbed.values()).values()) == 1
    assert len(disturbed) == count and kills >= (4 if count == 40 else 2)
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.endswith(".part")]


@pytest.mark.slow(15)
def test_a_job_that_is_killed_goes_on_from_its_latents(forked, tmp_path):
    file = tmp_path / "jobs.csv"
    file.write_text("prompt,seed,width,height,steps,batch\na red apple,3,64,64,20,2\na car,4,64,64,20,1\n")
    quiet = forked(IN_A_JOB, 0, "batch", file, "--out", "undisturbed", "--json", folder=tmp_path)
    assert quiet.returncode == 0 and (tmp_path / "calls").read_text() == "40\n", quiet.stderr
    command = ("batch", file, "--out", "out", "--json", "--latents-every", "5steps")
    for step in (13, 18):
        assert forked(IN_A_JOB, step, *command, folder=tmp_path).returncode == -9
        assert len(list((tmp_path / "out" / "latents").iterdir())) == 1
    done = forked(IN_A_JOB, 0, *command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == results(quiet.stdout)
    assert re.search("line 2.*15.*20", done.stderr)
    assert (tmp_path / "calls").read_text() == "25\n" and not (tmp_path / "out" / "latents").exists()


@pytest.mark.slow(10)
def test_latents_of_another_run_are_left_alone(forked, tmp_path):
    """In a folder whose journal has gone, the first job is another one; then what is there is damaged."""
    file = tmp_path / "jobs.csv"
    for prompt, harm in (("a red apple", None), ("a car", "other"), ("a car", "damaged")):
        file.write_text(f"prompt,seed,width,height,steps\n{prompt},3,64,64,4\n")
        command = ("batch", file, "--out", "out", "--json", "--latents-every", "1step")
        if harm == "other":
            (tmp_path / "out" / "journal.sqlite").unlink()
        if harm == "damaged":
            [latents] = (tmp_path / "out" / "latents").iterdir()
            latents.write_bytes(latents.read_bytes()[:-1])
        done = forked(IN_A_JOB, 0 if harm == "damaged" else 3, *command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "it was started again: " in done.stderr and (tmp_path / "calls").read_text() == "4\n"
