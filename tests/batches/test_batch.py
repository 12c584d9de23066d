"""Batches as people run them: jobs from files, results by the journal, and what a second run does."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import io
import json
import os
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from command_line import call
from PIL import Image

from sd_lowvram.batches import checks, painter
from sd_lowvram.batches.jobs import read_jobs
from sd_lowvram.batches.journal import Journal
from sd_lowvram.batches.marks import CHUNK, FinishedPicture, mark_of
from sd_lowvram.batches.painter import Failed, Painted
from sd_lowvram.batches.run import Wanted, run
from sd_lowvram.commands.inputs import Job, check_job
from sd_lowvram.commands.pictures import png_of
from sd_lowvram.errors import OutputError
from sd_lowvram.saved_latents.interval import Interval

SHAPE = {"width": 64, "height": 64, "steps": 1}
SMALL = ["--width", 64, "--height", 64, "--steps", 1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """``batch`` in this process, in an empty folder."""
    import torch
    from typer.testing import CliRunner

    from sd_lowvram.cli import app

    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda *arguments: CliRunner().invoke(app, ["batch", *map(str, arguments)])
    torch.set_num_threads(threads)


def png(text: str) -> bytes:
    """Stands for a picture."""
    return b"\x89PNG " + text.encode()


@pytest.fixture
def quick(monkeypatch):
    """No model: a painter whose pictures contain their prompt and seed, and which fails where the prompt says so."""
    seen: list[str] = []

    class Quick:
        def __init__(self, share: int = 1) -> None:
            pass

        def attempt(self, job, place, pictures):
            seen.append(job.prompt)
            if "interrupt" in job.prompt and seen.count(job.prompt) == 1:
                raise KeyboardInterrupt
            if "fails" in job.prompt or ("once" in job.prompt and seen.count(job.prompt) == 1):
                return Failed(3, "4 MiB cannot hold it")
            pictures = [FinishedPicture(png(f"{job.prompt} {job.seed + n}"), b"small") for n in range(job.batch)]
            return Painted(tuple(pictures), 1.0, ())

    monkeypatch.setattr("sd_lowvram.batches.crew.Painter", Quick)
    return seen


def told(done) -> dict:
    return json.loads(done.stdout)


@pytest.mark.slow(5)
def test_pictures_from_a_table(here, tmp_path):
    Path("jobs.csv").write_text(
        'Prompt,--seed,Steps,guidance,output,vae-tiles\na red apple,7,2,,a.png,\n"a car, red",,,5,,exact\n'
    )
    done = here("jobs.csv", "--out", "out", *SMALL)
    assert done.exit_code == 0, done.output
    names = sorted(file.name for file in Path("out").iterdir())
    assert len(names) == 4 and names[1:] == ["a.png", "index.html", "journal.sqlite"] and names[0].startswith("00000-")
    with Image.open("out/a.png") as picture, Image.open(f"out/{names[0]}") as other:
        assert "Steps: 2" in picture.text["parameters"] and "Seed: 7" in picture.text["parameters"]
        assert "vae_tiles=exact" in other.text["parameters"] and "CFG scale: 5" in other.text["parameters"]
        assert other.text["parameters"].startswith("a car, red\n") and other.size == (64, 64)
    assert "2 of 2 done" in done.stdout and "pictures an hour" in done.stdout
    sheet = Path("out/index.html").read_text()
    assert sheet.count("data:image/jpeg;base64,") == 2 and "a car, red" in sheet
    assert str(tmp_path) not in sheet and "http" not in sheet


@pytest.mark.slow(5)
def test_a_picture_of_a_batch_is_that_of_generate(here, tmp_path):
    from typer.testing import CliRunner

    from sd_lowvram.cli import app

    Path("jobs.txt").write_text("a red apple\n\na green apple\na red car\n")
    assert here("jobs.txt", "--out", "out", *SMALL, "--seed", 5).exit_code == 0
    alone = ["generate", "a red car", *map(str, SMALL), "--seed", "5", "-o", "alone.png"]
    assert CliRunner().invoke(app, alone).exit_code == 0
    with Image.open("out/00002-5.png") as picture, Image.open("alone.png") as other:
        assert picture.tobytes() == other.tobytes()
        assert picture.info.pop(CHUNK) and picture.info == other.info


def test_the_same_painter_takes_sizes_and_schedulers_in_any_order():
    """Nothing of one job is left in the next one's picture."""
    small = {"width": 64, "height": 64, "steps": 2, "seed": 3}
    jobs = [Job("a red apple", **small), Job("a red apple", scheduler="euler-a", **small)]
    jobs += [Job("a red apple", batch=2, **small | {"width": 72})]
    one = painter.Painter()
    first = [one.attempt(check_job(job)) for job in jobs]
    again = [one.attempt(check_job(job)) for job in reversed(jobs)][::-1]
    for a, b in zip(first, again, strict=True):
        assert isinstance(a, Painted) and isinstance(b, Painted), (a, b)
        assert [one.png for one in a.pictures] == [one.png for one in b.pictures]
    assert len({picture.png for made in first for picture in made.pictures}) == 4


def test_a_text_file_a_prompt_a_line_each_with_a_seed_of_its_own(here, quick):
    Path("jobs.txt").write_text("\ufeffan apple\n\n  an apple \n# a car\n", encoding="utf-8")
    assert here("jobs.txt", "--out", "out").exit_code == 0
    assert quick == ["an apple", "an apple", "# a car"]
    pictures = [file.read_bytes() for file in sorted(Path("out").glob("*.png"))]
    assert len(set(pictures)) == 3


def test_objects_a_line(here, quick):
    rows = [
        {"prompt": "a", "seed": 2**64 - 1, "steps": 20, "approximate": True},
        {"prompt": "b", "vram": 4096, "mask": None},
    ]
    Path("jobs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = here("jobs.jsonl", "--out", "out", "--json")
    assert done.exit_code == 0, done.stderr
    jobs = told(done)["jobs"]
    assert [job["state"] for job in jobs] == ["done"] * 2 and jobs[0]["seed"] == 2**64 - 1
    for job in jobs:
        (picture,) = job["pictures"]
        assert hashlib.sha256(Path("out", picture["file"]).read_bytes()).hexdigest() == picture["sha256"]


BAD = [
    (
        "a.csv",
        "prompt,widht\nx,512\n",
        "a.csv, line 1: the column 'widht' is not an option of generate (did you mean width?)",
    ),
    ("a.csv", "prompt,width\nx,512\ny,wide\n", "a.csv, line 3: width 'wide' must be a whole number"),
    ("a.csv", 'prompt,width\n"x\ny",512\nz,513\n', "a.csv, line 4: --width 513 is not a multiple of 8: 512 and 520"),
    (
        "a.csv",
        "prompt,width\nx,1\ny,2\nz,512\n",
        "line 2: --width 1 is not a multiple of 8: 8 is nearest (and wrong too: line 3)",
    ),
    ("a.csv", "prompt\na, b\n", 'a.csv, line 2: 2 values for 1 columns; put a prompt that holds a comma in "quotes"'),
    ("a.csv", "seed\n1\n", "line 1: the first line names the columns, and none of them is prompt"),
    ("a.csv", "prompt,seed,Seed\na,1,2\n", "line 1: the column seed stands there twice"),
    ("a.csv", "prompt,vae_tiles\na,banana\n", "line 2: --vae-tiles='banana' is unknown: choose one of"),
    ("a.csv", "prompt,memory_plot\na,b.png\n", "the column memory_plot is of generate alone"),
    ("a.csv", "prompt,output\na,../b.png\n", "output '../b.png' must be a file's name inside --out that ends in .png"),
    ("a.csv", "prompt,output\na,C:b.png\n", "must be a file's name inside --out"),
    ("a.csv", "prompt,output\na,b.png\nc,B.png\n", "a.csv, lines 2 and 3: both have the output 'b.png'"),
    ("a.csv", "prompt,output\na,caf\u00e9.png\nc,Cafe\u0301.png\n", "a.csv, lines 2 and 3: both have the output"),
    ("a.csv", "prompt,init_image\na,none.png\n", "line 2: --init-image none.png cannot be opened: No such file"),
    ("a.csv", "prompt,model\na,none\n", "line 2: there is no model at none"),
    ("a.csv", "prompt,vram\na,1KB\n", "line 2: 1 KiB cannot hold 128x128"),
    ("a.csv", 'prompt\n"a\n', "it is not a CSV that can be read"),
    ("a.csv", "prompt,width\n,512\n", "line 2: it has no prompt"),
    ("a.csv", b"prompt\na\n\xff\n", "a.csv, line 3: it is not UTF-8"),
    ("a.csv", "", "a.csv holds no jobs"),
    ("a.jsonl", '{"prompt": "a"}\n{"prompt": \n', "a.jsonl, line 2: it is not a JSON object that can be read"),
    ("a.jsonl", "[1]\n", "line 1: it is not a JSON object that can be read (it is not an object)"),
    ("a.jsonl", '{"prompt": "a", "prompt": "b"}\n', "a name stands there twice"),
    ("a.jsonl", '{"prompt": "a", "steps": [1]}\n', "line 1: steps '[1]' must be a whole number"),
    ("a.jsonl", '{"prompt": "a", "steps": true}\n', "line 1: steps 'True' must be a whole number"),
    ("a.jsonl", '{"prompt": ["a"]}\n', "line 1: prompt \"['a']\" must be a text"),
    ("a.txt", "\n\n", "a.txt holds no jobs"),
    ("a.xls", "x", "a.xls must end in .csv"),
    ("none.txt", None, "none.txt cannot be read: No such file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD, ids=lambda value: str(value)[:24])
def test_bad_jobs_are_named_before_any_work(here, quick, name, content, message):
    if content is not None:
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    done = here(name, "--out", "out")
    assert done.exit_code in (2, 3), done.output
    assert message in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""
    assert not quick and not Path("out").exists()


@pytest.mark.skipif(os.name == "nt", reason="links take rights there")
@pytest.mark.parametrize("name", ["sub/a.png", "a.png", "circle/a.png"])
def test_links_do_not_lead_out_of_the_folder(here, quick, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    Path("out").mkdir()
    Path("out", "sub").symlink_to(outside, target_is_directory=True)
    Path("out", "a.png").symlink_to(outside / "b.png")
    Path("out", "circle").symlink_to("circle")
    Path("jobs.csv").write_text(f"prompt,output\nan apple,{name}\n")
    for more in ([], ["--dry-run"]):
        done = here("jobs.csv", "--out", "out", *more)
        assert done.exit_code == 2 and f"line 2: the output {name}" in done.stderr, done.output
    assert not quick and not list(outside.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="links take rights there")
def test_links_within_the_folder_are_followed(here, quick):
    Path("out", "real").mkdir(parents=True)
    Path("out", "sub").symlink_to("real", target_is_directory=True)
    Path("jobs.csv").write_text("prompt,output\nan apple,sub/a.png\n")
    assert here("jobs.csv", "--out", "out").exit_code == 0
    assert Path("out", "real", "a.png").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", 2], "--workers 2 .*--on"),
        (["--on", "mars"], "--on 'mars' .*local, ray or ray://HOST"),
        (["--on", "local", "--device", "cpu"], "--device cpu .*--on local"),
        (["--on", "local", "--workers", 0], "--workers 0 .*1"),
        (["--retry", -1], "--retry -1 .*0"),
        (["--steps", 0], "line 1: --steps 0 .*1"),
        (["--out", "jobs.txt"], "--out jobs.txt"),
    ],
    ids=str,
)
def test_bad_options(here, quick, options, message):
    Path("jobs.txt").write_text("an apple\n")
    done = here("jobs.txt", "--out", "out", *options)
    assert done.exit_code == 2 and re.search(message, done.stderr) and done.stderr.count("\n") == 1


def test_a_second_run_makes_what_is_new_and_tells_what_is_gone(here, quick):
    Path("jobs.csv").write_text("prompt,seed\na,1\nb,2\nc,3\n")
    assert here("jobs.csv", "--out", "out").exit_code == 0
    before = {file.name: file.read_bytes() for file in Path("out").glob("*.png")}
    Path("jobs.csv").write_text("prompt,seed\nc,3\nd,4\na,1\n")
    Path("out/00000-1.png").unlink()
    Path("out/00002-3.png").write_bytes(b"painted over")
    done = here("jobs.csv", "--out", "out")
    assert done.exit_code == 0 and quick == ["a", "b", "c", "d", "a"]
    for note in (
        "1 jobs are done",
        "new in jobs.csv: line 3",
        "gone from jobs.csv: what was line 3; their pictures stay",
        "missing, and made again: 00000-1.png",
        "changed since, and left as they are: 00002-3.png",
    ):
        assert note in done.stderr
    after = {file.name: file.read_bytes() for file in Path("out").glob("*.png")}
    assert after == before | {"00002-3.png": b"painted over", "00003-4.png": png("d 4")}


def test_other_budgets_are_no_other_jobs(here, quick):
    Path("jobs.txt").write_text("a\n")
    for options in ([], ["--vram", "4GB"], ["--ram", "9GB"]):
        assert here("jobs.txt", "--out", "out", *options).exit_code == 0
    assert quick == ["a"]
    assert here("jobs.txt", "--out", "out", "--steps", 3).exit_code == 0
    assert quick == ["a", "a"] and len(list(Path("out").glob("*.png"))) == 2


def test_failures_are_tried_again_and_told(here, quick):
    Path("jobs.txt").write_text("once\nfails\nc\n")
    done = here("jobs.txt", "--out", "out", "--retry", 1)
    assert done.exit_code == 3 and quick == ["once", "fails", "c", "once", "fails"]
    assert re.search("line 1.*4 MiB", done.stderr) and re.search("1 jobs .*line 2: 4 MiB", done.stderr)
    jobs = told(here("jobs.txt", "--out", "out", "--json"))["jobs"]
    assert [(job["state"], job["attempts"]) for job in jobs] == [("done", 2), ("failed", 3), ("done", 1)]
    sheet = Path("out/index.html").read_text()
    assert "2 of 3 " in sheet and "line 2: failed" in sheet


def test_stop_on_error(here, quick):
    Path("jobs.txt").write_text("a\nfails\nc\n")
    done = here("jobs.txt", "--out", "out", "--stop-on-error")
    assert done.exit_code == 3 and quick == ["a", "fails"]
    assert here("jobs.txt", "--out", "out").exit_code == 3 and quick[2:] == ["fails", "c"]


def test_an_interrupt_leaves_the_job_to_the_next_run(here, quick):
    Path("jobs.txt").write_text("a\ninterrupt\nc\n")
    done = here("jobs.txt", "--out", "out")
    assert done.exit_code == 130 and "1 of 3 " in done.stderr
    done = here("jobs.txt", "--out", "out", "--json")
    assert done.exit_code == 0 and quick == ["a", "interrupt", "interrupt", "c"]
    for job in told(done)["jobs"]:  # with the seed that the first run drew
        assert str(job["seed"]).encode() in Path("out", job["pictures"][0]["file"]).read_bytes()


def test_a_picture_that_cannot_be_saved_ends_the_batch(here, quick, monkeypatch, tmp_path):
    Path("jobs.txt").write_text("a\nb\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr("tempfile.tempdir", str(temporary))
        patched.setattr(os, "fsync", fail_full)  # the contact sheet cannot be written either
        done = here("jobs.txt", "--out", "out")
    assert done.exit_code == 2 and quick == ["a"] and not list(temporary.iterdir())
    assert re.search(r"0 of 2 done; the same command.*\n.*00000-\d+\.png .*no space left.*free some space", done.stderr)
    assert here("jobs.txt", "--out", "out").exit_code == 0 and quick == ["a", "a", "b"]


def fail_full(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_after_the_last_picture(here, quick, monkeypatch):
    Path("jobs.txt").write_text("a\n")
    assert here("jobs.txt", "--out", "out").exit_code == 0
    sheet = Path("out/index.html")
    sheet.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail_full)
        done = here("jobs.txt", "--out", "out")
    assert done.exit_code == 2 and re.search(r"index\.html .*no space left.*free some space", done.stderr)
    assert here("jobs.txt", "--out", "out").exit_code == 0 and sheet.is_file() and quick == ["a"]


def test_a_journal_on_a_full_disk(here, quick, monkeypatch):
    """Wherever it grows, its start included."""
    Path("jobs.txt").write_text("".join(f"a car {number}\n" for number in range(40)))
    assert here("jobs.txt", "--out", "whole").exit_code == 0
    size = os.path.getsize("whole/journal.sqlite") // 4096
    for pages in (1, size - 4, size - 2, size - 1):
        shutil.rmtree("out", ignore_errors=True)
        quick.clear()
        fill_journal(here, quick, monkeypatch, pages)


def fill_journal(here, quick, monkeypatch, pages: int) -> None:
    """Run a batch whose journal cannot have more pages, and continue it."""
    connect = sqlite3.connect

    def bounded(*args, **kwargs):
        rows = connect(*args, **kwargs)
        rows.execute(f"PRAGMA max_page_count = {pages}")
        return rows

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", bounded)
        done = here("jobs.txt", "--out", "out")
    assert done.exit_code == 2, done.stderr
    assert re.search(r"journal\.sqlite cannot be written \(.*full\): free some space", done.stderr)
    assert here("jobs.txt", "--out", "out").exit_code == 0
    assert len(list(Path("out").glob("*.png"))) == 40 <= len(quick) <= 41


def test_nobody_reads_what_it_prints(here, quick, monkeypatch):
    """Pictures are made all the same."""
    from sd_lowvram.batches import progress

    class Left(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    shown = progress.Lines.__init__

    def nobody(self, *given):
        shown(self, *given)
        self._out = Left()

    monkeypatch.setattr(progress.Lines, "__init__", nobody)
    monkeypatch.setattr(progress, "give_up_stdout", lambda: None)
    Path("jobs.txt").write_text("a\nb\n")
    assert here("jobs.txt", "--out", "out").exit_code == 0 and quick == ["a", "b"]


def test_jobs_of_one_shape_come_one_after_the_other(here, quick):
    Path("jobs.csv").write_text("prompt,width\na,64\nb,128\nc,64\nd,128\ne,64\n")
    assert here("jobs.csv", "--out", "out").exit_code == 0
    assert quick == ["a", "c", "e", "b", "d"]


def test_files_that_are_there_are_left_alone(here, quick):
    Path("out").mkdir()
    Path("out/00007-1.png").write_bytes(b"mine")
    Path("out/mine.png").write_bytes(b"mine")
    Path("jobs.csv").write_text("prompt,seed,output\na,1,\n")
    assert here("jobs.csv", "--out", "out").exit_code == 0
    assert Path("out/00008-1.png").exists() and Path("out/00007-1.png").read_bytes() == b"mine"
    Path("jobs.csv").write_text("prompt,seed,output\nb,1,mine.png\n")
    done = here("jobs.csv", "--out", "out")
    assert done.exit_code == 2 and re.search(r"line 2.*mine\.png", done.stderr)
    assert Path("out/mine.png").read_bytes() == b"mine"


def test_several_pictures_a_job(here, quick):
    Path("jobs.csv").write_text("prompt,seed,batch,output\na,5,2,\nb,5,2,sub/b.png\n")
    assert here("jobs.csv", "--out", "out").exit_code == 0
    made = {str(file.relative_to("out")): file.read_bytes() for file in Path("out").rglob("*.png")}
    assert made == {
        "00000-5.png": png("a 5"),
        "00001-6.png": png("a 6"),
        "sub/b-1.png": png("b 5"),
        "sub/b-2.png": png("b 6"),
    }


def test_one_batch_at_a_time_in_a_folder(here, quick):
    Path("jobs.txt").write_text("a\n")
    assert here("jobs.txt", "--out", "out").exit_code == 0
    with contextlib.closing(Journal(Path("out"))):
        done = here("jobs.txt", "--out", "out")
        assert done.exit_code == 2 and "another batch is at work in out" in done.stderr
    for content in (b"no database at all" * 99, None):
        Path("out/journal.sqlite").unlink()
        if content is not None:
            Path("out/journal.sqlite").write_bytes(content)
        else:
            with contextlib.closing(sqlite3.connect("out/journal.sqlite")) as other:
                other.execute("CREATE TABLE jobs (x)")
        done = here("jobs.txt", "--out", "out")
        assert done.exit_code == 2 and "move it away" in done.stderr


def test_the_sheet_names_nothing_of_the_machine(here, quick, tmp_path):
    Image.new("RGB", (8, 8)).save("start.png")
    Path("jobs.jsonl").write_text(
        json.dumps({"prompt": '<b>&"a" fails', "init_image": str(tmp_path / "start.png")}) + "\n"
    )
    with Path("jobs.jsonl").open("a") as more:
        more.write(json.dumps({"prompt": '<b>&"a"', "init_image": str(tmp_path / "start.png")}))
    here("jobs.jsonl", "--out", tmp_path / "out")
    sheet = Path("out/index.html").read_text()
    assert str(tmp_path) not in sheet and "start.png" in sheet
    assert "<b>" not in sheet and "&lt;b&gt;&amp;&quot;a&quot;" in sheet


def test_a_dry_run_makes_nothing(here, quick):
    Path("jobs.csv").write_text("prompt,width,vram\na,64,\nb,128,\nc,64,\nd,512,4MB\n")
    done = here("jobs.csv", "--out", "out", "--dry-run", "--json")
    assert done.exit_code == 3, done.output
    shapes = told(done)["shapes"]
    assert [shape["lines"] for shape in shapes] == [[2, 4], [3], [5]] and shapes[0]["height"] == 128
    assert all(shape["peak_bytes"] > 0 and shape["seconds"] > 0 for shape in shapes[:2])
    assert "4 MiB" in shapes[2]["refused"] and shapes[2]["peak_bytes"] is None
    assert not quick and not Path("out").exists()
    Path("jobs.csv").write_text("prompt,width\na,64\n")
    here("jobs.csv", "--out", "out")
    shown = here("jobs.csv", "--out", "out", "--dry-run")
    assert shown.exit_code == 0 and "1 jobs, 1 of " in shown.stdout


def test_the_live_table(monkeypatch):
    """The time left is by pixels and steps: the job that is left has as many as both that are done."""
    from rich.console import Console

    from sd_lowvram.batches import progress as shown
    from sd_lowvram.batches.driver import JobEvent
    from sd_lowvram.batches.journal import JournalEntry

    clock = iter((0.0, *[30.0] * 9))
    monkeypatch.setattr(shown.time, "perf_counter", lambda: next(clock))
    small, large = Job("a [b]", width=64, height=64), Job("a car", width=128, height=64)
    entries = [JournalEntry(n, n, job, (f"{n}.png",)) for n, job in enumerate((small, small, large, small))]
    progress = shown.Progress(entries, earlier=2)
    table = shown.LiveTable(progress)
    for event in ("begun", "done"):
        table(JobEvent(event, entries[0], "gpu-0", 12))
        table(JobEvent(event, entries[1], "gpu-1", 12))
    table(JobEvent("failed", entries[3], "gpu-1", message="4 MiB cannot hold it"))
    table(JobEvent("begun", entries[2], "gpu-0"))
    console = Console(width=120, file=io.StringIO())
    console.print(table)
    text = console.file.getvalue()
    assert re.search("4.*6.*1.*240.*30", text)
    assert "0.png" in text and "gpu-0: line 2" in text and "a car" in text and "4 MiB" in text


def test_line_breaks_in_the_names_of_pictures(here, tmp_path):
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "an apple", "output": "a\\nb.png"}\n')
    done = here("jobs.jsonl", "--out", "pictures")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert re.search(r"'a\\nb\.png'.*'\\n'", done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.jsonl"]


def test_columns_are_the_options_of_generate():
    """Every option of generate but those that are about one run, and no other."""
    import inspect

    from sd_lowvram.batches.jobs import columns
    from sd_lowvram.commands.generate import generate

    of_a_run = {"as_json", "quiet", "debug", "memory_plot", "latents_every", "keep_latents", "preview"}
    of_a_run |= {"list_things", "help_all", "context"}
    of_a_run |= {"transformer", "text_encoder", "vae", "tokenizer"}  # of the model of all jobs
    assert set(columns()) == set(inspect.signature(generate).parameters) - of_a_run


@pytest.mark.slow(20)
def test_a_damaged_journal_is_made_anew_of_the_pictures(tmp_path):
    """In processes of their own; every page but the first two is overwritten. What is missing is painted, no more."""
    lines = [
        "prompt,seed,batch,output",
        "a red apple,,,",
        "a red apple,,,",
        "a red apple,5,2,two.png",
        "a blue car,7,,car.png",
    ]
    (tmp_path / "jobs.csv").write_text("\n".join(lines))
    batch = functools.partial(call, "batch", "jobs.csv", "--out", "out", *SMALL, folder=tmp_path)
    made = batch()
    assert made.returncode == 0, made.stderr
    out = tmp_path / "out"
    before = {file.name: file.read_bytes() for file in out.glob("*.png")}
    assert len(before) == 5
    jobs = json.loads(batch("--json").stdout)["jobs"]
    (out / "car.png").unlink()
    (out / "two-2.png").write_bytes(before["two-2.png"][:400])  # of a job of two pictures, of which both are made again
    journal = out / "journal.sqlite"
    pages = journal.read_bytes()
    journal.write_bytes(pages[:8192] + b"\xaa" * (len(pages) - 8192))
    looked = call("batch", "jobs.csv", "--out", "out", "--dry-run", *SMALL, folder=tmp_path)
    assert looked.returncode == 2 and "the batch itself makes a new one" in looked.stderr
    (out / "two-1.png").unlink()
    (out / "two-2.png").unlink()
    again = batch("--json")
    assert again.returncode == 0, again.stderr
    assert re.search(r"journal\.sqlite.*journal\.sqlite\.damaged", again.stderr)
    told = json.loads(again.stdout)
    found = sorted(name for name in before if name.startswith("0"))
    assert sorted(told["found"]) == found and told["new"] == [4, 5]
    assert {file.name: file.read_bytes() for file in out.glob("*.png")} == before
    assert [(one["seed"], one["pictures"], one["state"]) for one in told["jobs"]] == [
        (one["seed"], one["pictures"], one["state"]) for one in jobs
    ]
    assert all(name in (out / "index.html").read_text() for name in before)


def test_pictures_without_their_journal_are_taken_up_by_the_jobs_that_made_them(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("jobs.csv").write_text("prompt,seed\na red apple,3\na red apple,4\na blue car,\n")
    tasks = read_jobs(Path("jobs.csv"), Job("", **SHAPE), {})
    folder = Path("out")
    folder.mkdir()
    for name, job, number in (
        ("00000-4.png", tasks[1].job, 0),
        ("00001-9.png", dataclasses.replace(tasks[2].job, seed=9), 0),
        ("00002-3.png", dataclasses.replace(tasks[0].job, steps=7), 0),  # of another job
        ("00003-3.png", dataclasses.replace(tasks[0].job, batch=2), 1),  # one of two
    ):
        (folder / name).write_bytes(png_of(Image.new("RGB", (8, 8)), {CHUNK: mark_of(job, number)}))
    (folder / "00004-3.png").write_bytes(b"no picture")
    (folder / "00005-3.png").write_bytes(png_of(Image.new("RGB", (8, 8)), {CHUNK: "{}"}))
    with contextlib.closing(Journal(folder)) as journal:
        entries, changes = journal.take_up(tasks)
        assert [entry.line for entry in entries] == [2]
        assert changes.found == ["00000-4.png", "00001-9.png"]
        assert [one["seed"] for one in journal.summary()][1:] == [4, 9]


def test_a_finished_batch_in_a_folder_that_cannot_be_written_is_summarised(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("jobs.txt").write_text("a red apple\n")
    wanted = Wanted(Path("jobs.txt"), Path("out"), None, None, Interval(), 0, False, False, False)
    tasks = read_jobs(wanted.jobs, Job("", **SHAPE), {})

    def refused(path, size):
        raise OutputError(f"{path} cannot be written") from OSError(30, "Read-only file system")

    monkeypatch.setattr(checks, "check_writable", refused)
    with pytest.raises(OutputError, match=r"--out.*\(Read-only.*system\).*--out"):
        run(tasks, wanted)
    Path("out").mkdir()
    with contextlib.closing(Journal(Path("out"))) as journal:
        (entry,), _ = journal.take_up(tasks)
    with pytest.raises(OutputError):
        run(tasks, wanted)
    picture = png_of(Image.new("RGB", (8, 8)), {})
    Path("out", entry.files[0]).write_bytes(picture)
    with contextlib.closing(Journal(Path("out"))) as journal:
        journal.begin(entry, "cpu")
        journal.record_result(entry, [FinishedPicture(picture, b"")], 1.0, ())
    assert run(tasks, wanted) == 0
    assert "1 of 1 done" in capsys.readouterr().out
