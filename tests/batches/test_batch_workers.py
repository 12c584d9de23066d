"""Batches by several workers, of which one is killed in the middle: processes here, and a real Ray cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from batch_runs import WARM, jobs, results
from command_line import ENVIRONMENT, MAIN, command
from forked import forks_of

from sd_lowvram.batches import driver, over_ray, processes
from sd_lowvram.batches.alike import pictures_by_line
from sd_lowvram.batches.crew import Lost
from sd_lowvram.batches.journal import Journal
from sd_lowvram.batches.latents import JobLatents
from sd_lowvram.batches.marks import FinishedPicture
from sd_lowvram.batches.over_ray import Lacks, PainterActor
from sd_lowvram.batches.painter import Painted
from sd_lowvram.commands.inputs import Job
from sd_lowvram.saved_latents.interval import Interval

COUNT = 16
NO_RAY = 'no Ray: pip install "sd-lowvram[ray]"'
WHERE = ["local", pytest.param("ray", marks=pytest.mark.skipif(not importlib.util.find_spec("ray"), reason=NO_RAY))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, str]:
    """Checksums of the same batch in one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with forks_of(WARM, ENVIRONMENT) as run:
        done = run(MAIN, "batch", jobs(folder, COUNT), "--out", "out", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return results(done.stdout)


def workers_of(process: subprocess.Popen, where: str) -> list[psutil.Process]:
    """The processes that paint, of a batch that runs."""
    found = psutil.Process(process.pid).children(recursive=True)
    mark = "ray::PainterActor" if where == "ray" else "spawn_main"
    lines = {}
    for one in found:
        with contextlib.suppress(psutil.Error):  # it ends just now
            lines[one] = " ".join(one.cmdline())
    return [one for one, line in lines.items() if mark in line]


@pytest.mark.slow(35)
@pytest.mark.parametrize("where", WHERE)
def test_a_worker_is_killed_in_the_middle(undisturbed, tmp_path, where):
    arguments = command("batch", jobs(tmp_path, COUNT), "--out", "out", "--on", where, "--workers", 2, "--json")
    streams: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, cwd=tmp_path, env=ENVIRONMENT, **streams) as process:
        try:
            while len(list(Path(tmp_path, "out").glob("*.png"))) < 5 and process.poll() is None:
                time.sleep(0.05)
            workers = workers_of(process, where)
            assert len(workers) == 2, workers
            workers[0].send_signal(signal.SIGKILL)
            out, err = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0, err
    made = results(out)
    assert made == undisturbed and len(set(made.values())) == COUNT
    told = json.loads(out)["jobs"]
    assert [job["state"] for job in told] == ["done"] * COUNT and sum(job["attempts"] for job in told) == COUNT + 1
    assert "tried again: its worker" in err


@pytest.mark.slow(20)
@pytest.mark.parametrize("where", WHERE)
def test_a_worker_that_is_killed_in_a_job_is_gone_on_for(tmp_path, where):
    """By itself, when it is there again."""
    (tmp_path / "one.csv").write_text("prompt,seed,steps,width,height,output\na red apple,3,30,64,64,a.png\n")
    once = subprocess.run(
        command("batch", "one.csv", "--out", "once", "--json"), cwd=tmp_path, env=ENVIRONMENT, capture_output=True,
        text=True, check=True, timeout=240,
    )  # fmt: skip
    options = ("--out", "out", "--on", where, "--workers", 1, "--json", "--latents-every", "1step")
    streams: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command("batch", "one.csv", *options), cwd=tmp_path, env=ENVIRONMENT, **streams) as process:
        try:
            while not list(Path(tmp_path, "out", "latents").glob("*.safetensors")) and process.poll() is None:
                time.sleep(0.01)
            for worker in workers_of(process, where):
                worker.send_signal(signal.SIGKILL)
            out, err = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert results(out) == results(once.stdout)
    assert json.loads(out)["jobs"][0]["attempts"] == 2 and not (tmp_path / "out" / "latents").exists()
    with sqlite3.connect(tmp_path / "out" / "journal.sqlite") as rows:
        [(notes,)] = rows.execute("SELECT notes FROM attempts WHERE seconds IS NOT NULL").fetchall()
    assert re.search(r"it went on from step \d+ of 30", notes)


class Losing:
    """A crew of two whose workers end over a job that is called "bomb"; the other worker answers."""

    size = 2

    def __init__(self) -> None:
        self.busy: dict[str, object] = {}
        self.given: list[str] = []

    def idle(self):
        return [name for name in ("one", "two") if name not in self.busy]

    def give(self, worker, job, place, pictures):
        self.given.append(job.prompt)
        self.busy[worker] = job

    def wait(self):
        worker, job = self.busy.popitem()
        if "bomb" in job.prompt or ("late" in job.prompt and self.given.count(job.prompt) == 1):
            return [(worker, Lost(f"its worker {worker} ended"))]
        return [(worker, Painted((FinishedPicture(job.prompt.encode(), b""),), 1.0, ()))]

    def close(self):
        pass


def test_jobs_of_workers_that_end_are_given_to_others_but_not_forever(tmp_path):
    from sd_lowvram.batches.jobs import read_jobs

    (tmp_path / "jobs.txt").write_text("a\nbomb\nlate\nb\n")
    tasks = read_jobs(tmp_path / "jobs.txt", Job(""), {})
    crew = Losing()
    with contextlib.closing(Journal(tmp_path)) as journal:
        entries, _ = journal.take_up(tasks)
        counts = pictures_by_line(tasks, crew.size)
        driver.work(entries, crew, journal, tmp_path, lambda event: None, interval=Interval(), pictures=counts)
        jobs = journal.summary()
    assert [job["state"] for job in jobs] == ["done", "failed", "done", "done"]
    assert crew.given.count("bomb") == 3 and crew.given.count("late") == 2 and jobs[1]["error"].startswith("its worker")
    assert os.path.exists(tmp_path / jobs[0]["pictures"][0]["file"])


def test_one_process_a_card(monkeypatch):
    from sd_lowvram.errors import BadInputError

    monkeypatch.setattr(processes, "_cards", lambda: ["0", "2"])
    assert processes.places(None) == {"gpu-0": {"CUDA_VISIBLE_DEVICES": "0"}, "gpu-2": {"CUDA_VISIBLE_DEVICES": "2"}}
    assert list(processes.places(1)) == ["gpu-0"]
    with pytest.raises(BadInputError, match=r"--workers 3.*2"):
        processes.places(3)
    monkeypatch.setattr(processes, "_cards", list)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert processes.places(2) == {name: {"OMP_NUM_THREADS": "4"} for name in ("cpu-1", "cpu-2")}
    assert len(processes.places(None)) == 1


def test_a_worker_that_ends_while_it_starts_is_started_again_but_not_forever(monkeypatch, capsys):
    from sd_lowvram.errors import LowVRAMError

    crew, begun = processes.Processes({}), []
    ended = SimpleNamespace(process=SimpleNamespace(join=lambda: None, exitcode=-9), ready=False, busy=False)

    def start(name):
        begun.append(name)
        crew._workers[name] = ended

    monkeypatch.setattr(crew, "_start", start)
    crew._workers = {"one": ended, "two": ended}
    for _ in range(3):
        assert crew._restart_worker("one") == []
    assert begun == ["one", "one"] and list(crew._workers) == ["two"]
    assert re.search(r"one .*SIGKILL .*again\n.*again\n.*one .*3 times: it is left out", capsys.readouterr().err)
    for _ in range(2):
        crew._restart_worker("two")
    with pytest.raises(LowVRAMError, match=r"two .*SIGKILL .*doctor"):
        crew._restart_worker("two")


class Gone:
    """A cluster to which the connection is lost: each call but the question for it fails, or starts another one."""

    def is_initialized(self):
        return False

    def shutdown(self):
        pass

    def __getattr__(self, name):
        raise ConnectionError("Client is shutting down.")


def test_a_cluster_that_has_gone_ends_the_batch_and_is_not_called_again():
    from sd_lowvram.errors import LowVRAMError

    with socket.create_server(("127.0.0.1", 0)) as nobody:
        place = nobody.getsockname()
    crew = object.__new__(over_ray.Actors)
    crew._ray, crew._stack, crew._own, crew._sizes, crew._sent = Gone(), contextlib.ExitStack(), True, {}, {}
    crew._actors, crew._given, crew._pending, crew._ready = {"one": Gone()}, {}, {object(): "one"}, {"one"}
    for head in (place, None):
        crew._head = head
        with pytest.raises(LowVRAMError, match="the Ray cluster has gone"):
            crew.wait()
    with pytest.raises(LowVRAMError, match="the Ray cluster has gone"):
        crew.give("one", Job("a"), JobLatents("latents"), 1)
    crew.close()


def test_workers_share_the_memory_that_nobody_states(monkeypatch):
    """On a CPU, whose memory is the device's too; a budget that is stated is each one's own."""
    import torch

    from sd_lowvram.batches.painter import Painter
    from sd_lowvram.devices import info

    monkeypatch.setattr(info, "available_ram", lambda: 900)
    for device, vram in (("cpu", "300B"), ("cuda", None)):
        painter = Painter(share=3)
        painter._device = torch.device(device)
        shared = painter._share_budgets(Job("a"))
        assert (shared.vram, shared.ram) == (vram, "300B")
        stated = painter._share_budgets(Job("a", vram="4GB", ram="2GB"))
        assert (stated.vram, stated.ram) == ("4GB", "2GB")
    alone = Painter()
    assert alone._share_budgets(Job("a")) == Job("a")


def test_files_that_a_worker_lacks_are_sent_once(tmp_path, monkeypatch):
    """References are the parts themselves here; which file lies where is what counts."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda part: part))
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    monkeypatch.setattr(over_ray, "Painter", lambda share: SimpleNamespace(attempt=lambda job, place, pictures: job))
    (tmp_path / "model" / "unet").mkdir(parents=True)
    (tmp_path / "model" / "unet" / "weights").write_bytes(b"weights")
    (tmp_path / "start.png").write_bytes(b"picture")
    model, start = str(tmp_path / "model"), tmp_path / "start.png"
    job = Job("a", model=model, init_image=start)
    sizes = {model: over_ray._sizes(Path(model)), str(start): over_ray._sizes(start)}
    assert sizes == {model: {"unet/weights": 7}, str(start): {".": 7}}

    station, place = PainterActor(1, None), JobLatents(str(tmp_path / "out" / "latents" / "1"))
    assert station.attempt(job, place, 1, sizes, {}) == job  # they are here
    assert station.attempt(Job("a", model="elsewhere"), place, 1, {}, {}) == Job("a", model="elsewhere")
    (tmp_path / "model" / "unet" / "weights").write_bytes(b"others")
    assert station.attempt(job, place, 1, sizes, {}) == Lacks(model)
    start.unlink()
    sent = {model: {"unet/weights": [b"wei", b"ghts"]}}
    assert station.attempt(job, place, 1, sizes, sent) == Lacks(str(start))
    moved = station.attempt(job, place, 1, sizes, {**sent, str(start): {".": [b"picture"]}})
    assert Path(moved.model).name == "model" and Path(moved.model, "unet", "weights").read_bytes() == b"weights"
    assert moved.init_image.name == "start.png" and moved.init_image.read_bytes() == b"picture"
    assert station.attempt(job, place, 1, sizes, {}) == moved
    station.leave()
    assert not moved.init_image.exists()


def test_without_ray_it_says_what_to_install(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from sd_lowvram.cli import app

    monkeypatch.chdir(tmp_path)
    for name in (
        "USAGE_STATS_ENABLED",
        "AUTH_MODE",
        "AUTH_TOKEN",
        "ENABLE_WINDOWS_OR_OSX_CLUSTER",
        "ENABLE_AUTO_CONNECT",
    ):
        monkeypatch.setenv(f"RAY_{name}", "")
    monkeypatch.setitem(sys.modules, "ray", None)
    Path("jobs.txt").write_text("an apple\n")
    done = CliRunner().invoke(app, ["batch", "jobs.txt", "--out", "out", "--on", "ray"])
    assert done.exit_code == 2 and r'"sd-lowvram[ray]"' in done.stderr
