"""The command line as people call it, in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import families
import infotext
import pytest
from command_line import ENVIRONMENT, LIGHT, MAIN, call, command
from PIL import Image

from sd_lowvram import doors
from sd_lowvram.commands import generate
from sd_lowvram.commands.knobs import command_line_knobs
from sd_lowvram.policies import POLICIES
from sd_lowvram.settings import knobs


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The same in this process, in an empty folder: no waiting for imports. Tiny models are fastest on one thread."""
    import torch
    from typer.testing import CliRunner

    from sd_lowvram.cli import app

    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    families.plain("sd15").save_pretrained(folder)
    return folder


def parameters(path: Path) -> tuple[str, str, dict[str, str]]:
    with Image.open(path) as image:
        return infotext.parse_parameters(image.text["parameters"])


@pytest.mark.slow(9)
def test_a_picture(model, tmp_path):
    done = call("generate", "a red apple", "--model", model, "--steps", 2, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (file,) = result["files"]
    assert file == f"outputs/00000-{result['seed']}.png" and result["plan"]["fits"]
    prompt, negative, values = parameters(tmp_path / file)
    assert (prompt, negative) == ("a red apple", "")
    assert values["Steps"] == "2" and values["Size"] == "64x64" and values["Seed"] == str(result["seed"])
    assert values["Model"] == model.name and "inference_mode=True" in values["Low VRAM plan"]
    assert result["attention"] in ("flash", "torch", "sliced") and values["Low VRAM attention"] == result["attention"]


@pytest.mark.slow(5)
def test_a_batch_with_everything_stated(model, tmp_path, here):
    options = ["--model", model, "--steps", 3, "--seed", 11, "--guidance", 5, "--negative", "blur: yes, more"]
    options += ["--scheduler", "Euler a", "--width", 72, "--height", 64, "--batch", 2, "-o", "a.png"]
    done = here("generate", "an apple", *options)
    assert done.exit_code == 0, done.stderr
    assert "a-1.png\na-2.png\n" in done.stdout and "seed: 11" in done.stderr and "3/3" in done.stderr
    assert done.stderr.startswith(f"loading {model.name}\n")
    prompt, negative, values = parameters(tmp_path / "a-2.png")
    assert (prompt, negative) == ("an apple", "blur: yes, more")
    assert values["Sampler"] == "Euler a" and values["Seed"] == "12" and values["CFG scale"] == "5"
    alone = options[: options.index("--batch")]
    alone[alone.index(11)] = 12
    assert here("generate", "an apple", *alone, "-o", "b.png", "-q").stdout == "b.png\n"
    with Image.open(tmp_path / "a-2.png") as a, Image.open(tmp_path / "b.png") as b:
        assert a.size == (72, 64)
        difference = max(abs(x - y) for x, y in zip(a.tobytes(), b.tobytes(), strict=True))
    assert difference <= 1


def test_help_shows_what_people_use_and_help_all_the_rest(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")  # narrower ones cut long names short
    order = re.findall(r"^│ ([a-z]+) ", here("--help").stdout.partition("Commands")[2], re.MULTILINE)
    usual = ["generate", "plan", "batch", "resume", "doctor", "install", "unet"]
    assert order == [name for name in usual if name not in ("batch", "unet") or name in doors.COMMANDS]
    for name in ("generate", "plan"):
        usual, every = (set(OPTIONS.findall(here(name, flag).stdout)) for flag in ("--help", "--help-all"))
        assert len(usual) <= 16 and usual < every
        assert {f"--{knob.replace('_', '-')}" for knob in command_line_knobs()} <= every - usual
        assert f"sd-lowvram {name} " in here(name, "--help").stdout.partition("Examples")[2]
        assert set(OPTIONS.findall(here(name, "--help").stdout)) == usual


OPTIONS = re.compile(r"^│ (--[a-z-]+)", re.MULTILINE)


def test_a_shell_completes_commands(here, monkeypatch):
    words = {"_SD_LOWVRAM_COMPLETE": "complete_bash", "COMP_WORDS": "sd-lowvram ge", "COMP_CWORD": "1"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    assert here().stdout == "generate\n"


def test_policies_are_listed(here):
    told = here("plan", "--list-policies")
    assert told.exit_code == 0 and [line.partition(":")[0] for line in told.stdout.splitlines() if line[0] != " "] == [
        *POLICIES
    ]
    assert set(json.loads(here("plan", "--list-policies", "--json").stdout)) == {*POLICIES}


@pytest.mark.slow(5)
def test_start_picture_and_mask(model, tmp_path, here):
    Image.new("RGB", (75, 90), "green").save(tmp_path / "start.png")
    Image.new("L", (75, 90), 255).save(tmp_path / "mask.png")
    Image.new("L", (40, 40), 255).save(tmp_path / "small.png")
    options = ["--model", model, "--steps", 4, "--strength", 0.5, "--init-image", "start.png", "-o", "out.png"]
    for extra in ([], ["--mask", "mask.png"], ["--mask", "small.png"]):
        done = here("generate", "an apple", *options, *extra)
        assert done.exit_code == 0, done.stderr
        stretched = "--mask small.png is 40x40 and the picture 75x90: the mask is stretched to it"
        assert (stretched in done.stderr) == ("small.png" in extra)
        assert "2/2" in done.stderr
        with Image.open(tmp_path / "out.png") as image:
            assert image.size == (72, 88)
        assert parameters(tmp_path / "out.png")[2]["Denoising strength"] == "0.5"


def test_an_inpainting_checkpoint_of_nine_channels(tmp_path, here):
    made = families.KINDS["inpaint, 9 channels"].make()
    made.save_pretrained(tmp_path / "inpainting")
    assert made.unet.config.in_channels == 9
    Image.new("RGB", (75, 90), "green").save(tmp_path / "start.png")
    Image.new("L", (75, 90), 255).save(tmp_path / "mask.png")
    options = ["--model", "inpainting", "--steps", 2, "-o", "out.png"]
    masked = [*options, "--init-image", "start.png", "--mask", "mask.png"]
    for extra in ([], ["--guidance-in-turn", "--offload", "layer", "--vae-tiles", "exact"]):
        done = here("generate", "an apple", *masked, *extra)
        assert done.exit_code == 0, done.stderr
        assert "2/2" in done.stderr
        with Image.open(tmp_path / "out.png") as image:
            assert image.size == (72, 88)
        (tmp_path / "out.png").unlink()
    done = here("generate", "an apple", *options)
    assert done.exit_code == 2 and re.search(r"--init-image.*--mask\)", done.stderr)


@pytest.mark.parametrize(
    ("end", "code"),
    [(">&-", 0), ("2>&-", 0), (">/dev/full", 2), ("2>/dev/full", 0), ("| head -0; exit ${PIPESTATUS[0]}", 0)],
)
def test_streams_that_nobody_reads(tmp_path, end, code):
    line = " ".join(command("generate", "--list-things", "--json")) + f" {end}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert ("cannot be written: No space" in done.stderr) == (code == 2)


@pytest.mark.slow(6)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("end", [">&-", ">/dev/full"])
def test_a_picture_is_saved_though_its_name_cannot_be_told(model, tmp_path, end):
    options = ["--model", model, "--steps", 1, "-o", "a.png"]
    line = " ".join(command("generate", "apple", *options)) + f" {end}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == (2 if "full" in end else 0) and "fault" not in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    parameters(tmp_path / "a.png")


def test_a_name_of_any_bytes_as_long_as_the_file_system_takes(forked, model, tmp_path):
    name = "\udcff" + "n" * 250 + ".png"
    options = ["--model", model, "--steps", 1, "-o", name, "-q"]
    done = forked(MAIN, "generate", "apple", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == name + "\n" and parameters(tmp_path / name)[2]["Steps"] == "1"


def test_schedulers_refuse_steps_that_they_cannot_make(model, here):
    done = here("generate", "apple", "--model", model, "--scheduler", "lcm", "--steps", 60)
    assert done.exit_code == 2 and re.search("--steps 60.*LCM", done.stderr)


def test_what_the_demo_model_does_not_know_is_named(here, tmp_path):
    done = here("generate", "A photo of a LIGHTHOUSE, t-shirt; red", "--vram", "1KB")
    assert re.search(r'"lighthouse".*--list-things', done.stderr)
    found = json.loads(here("generate", "--list-things", "--json").stdout)
    assert sum(map(len, found.values())) == 241 and ["red apple", "apple"] in found["food"]
    listed = here("generate", "--list-things").stdout
    assert "animals (68)" in listed and "red apple = apple" in listed


@pytest.mark.slow(8)
def test_generate_ends_with_file_peak_and_time_and_the_demo_model_says_its_size(here):
    done = here("generate", "a red apple", "--steps", 1, "--width", 64, "--height", 64, "--vram", "1GB", "-o", "a.png")
    assert done.exit_code == 0, done.stderr
    file, peak, seconds = done.stdout.strip().splitlines()[-3:]
    assert file == "a.png" and re.fullmatch(r"[\d.]+ MiB allocated of 1 GiB, as planned", peak)
    assert re.fullmatch(r"time .* s \(planned: .* s\), and .* s to load the model", seconds)
    assert (done.stdout + done.stderr).count("allocated") == 1
    assert re.search("128x128.*64x64", done.stderr)


def test_the_time_of_a_later_picture_is_not_reported_as_that_of_the_first() -> None:
    later = "planned: 4.0 s for a picture after the first"
    longer = "all before the second step took 1.5 s longer than a later step"
    printings = (("cuda", 0.05, later), ("cuda", 1.5, f"{later}; {longer}"), ("cpu", 1.5, "planned: 4.0 s"))
    for device, excess, printed in printings:
        plan = {"predicted": {"seconds": 4.0}, "request": {"device": device}}
        assert generate._planned_time({"plan": plan, "seconds": {"first_step_excess": excess}}) == f" ({printed})"
        assert generate._planned_time({"plan": plan, "seconds": {}}) == f" ({printed.partition(';')[0]})"
    assert generate._planned_time({}) == generate._planned_time({"plan": {"predicted": None}}) == ""


def test_make_asks_the_demo_model_for_the_size_it_knows():
    root = Path(__file__).parents[2]
    for given, sized in (("SIZE=512",), False), (("SIZE=512", "MODEL=some.safetensors"), True):
        line = ["make", "--dry-run", "--old-file=.venv/.standalone", "picture", *given]
        told = subprocess.run(line, cwd=root, capture_output=True, text=True, check=True).stdout
        assert ('--width "$SIZE" --height "$SIZE"' in told) == sized
        assert ("SIZE counts with MODEL" in told) != sized and "--help" in told


def test_bad_models(tmp_path, here):
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (tmp_path / "old.ckpt").write_bytes(b"\x80\x02}q\x00.")
    for name, message in (("cut.safetensors", "truncated"), ("old.ckpt", "--allow-pickle"), (".", "model_index.json")):
        done = here("generate", "an apple", "--model", name, "-o", "a.png")
        assert done.exit_code == 2 and message in done.stderr, done.stderr


def test_a_budget_that_cannot_hold(model, here):
    done = here("generate", "an apple", "--model", model, "--vram", "100KB")
    assert done.exit_code == 3 and "at least" in done.stderr and "Traceback" not in done.stderr


def test_debug_shows_where(tmp_path):
    done = call("generate", "an apple", "--vram", "0", "--debug", folder=tmp_path)
    assert done.returncode == 2 and "Traceback" in done.stderr


def test_a_full_disk_is_seen_before_the_first_step(forked, model, tmp_path):
    """A limit on the size of files stands in for the disk."""
    options = ["--model", model, "-o", "a.png", "--steps", 2]
    done = forked(MAIN, "generate", "an apple", *options, folder=tmp_path, largest_file=40_000)
    assert done.returncode == 2 and "cannot hold" in done.stderr, done.stderr
    assert "2/2" not in done.stderr and list(tmp_path.iterdir()) == []


def _heed_interrupts() -> None:
    """A suite that was started in the background ignores them, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow(10)
def test_interrupted_in_the_middle(model, tmp_path):
    arguments = command("generate", "an apple", "--model", model, "--steps", 900, "-o", "out/a.png")
    options: dict = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": _heed_interrupts}
    process = subprocess.Popen(arguments, cwd=tmp_path, env=ENVIRONMENT, **options)
    try:
        seen = ""
        while "seed:" not in seen and process.poll() is None:
            seen += process.stderr.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, seen + rest
    assert "interrupted" in rest and "Traceback" not in rest
    left = {path.name for path in tmp_path.rglob("*")}
    assert left in (set(), {"out", "a.latents.safetensors"})  # nothing, where no step was done yet
    assert bool(left) == ("sd-lowvram resume out/a.latents.safetensors continues" in rest)


SWALLOWED = """
import os, signal, sys
from sd_lowvram.commands import paint
from sd_lowvram.errors import CheckpointError
signal.signal(signal.SIGINT, signal.default_int_handler)
load = paint.load_pipeline
def interrupted(*given, **options):
    pipe = load(*given, **options)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass
    except KeyboardInterrupt:
        if THEN == "raise":
            raise CheckpointError("half imported") from None
    return pipe
paint.load_pipeline = interrupted
from sd_lowvram.__main__ import main
main()
"""


@pytest.mark.slow(1)
@pytest.mark.parametrize("then", ["raise", "return"])
def test_an_interrupt_that_a_library_swallows_is_heeded(forked, model, tmp_path, then):
    program = SWALLOWED.replace("THEN", repr(then))
    done = forked(program, "generate", "apple", "--model", model, "-o", "a.png", folder=tmp_path)
    assert done.returncode == 130 and done.stderr.endswith("sd-lowvram: interrupted\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_same_seed_same_bits(model, tmp_path, here):
    for name in ("a.png", "b.png"):
        here("generate", "an apple", "--model", model, "--steps", 2, "--seed", 3, "-o", name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.slow(6)
def test_same_seed_same_picture_in_another_number_type(model, tmp_path, here):
    """Of a size at which torch draws other numbers in 16 bits than in 32, by a scheduler that draws at every step."""
    options = ["--model", model, "--steps", 2, "--seed", 3, "--width", 72, "--height", 56, "--scheduler", "euler-a"]
    for name, precision in (("a.png", "fp32"), ("b.png", "bf16")):
        done = here("generate", "an apple", *options, "--precision", precision, "-o", name)
        assert done.exit_code == 0, done.stderr
    with Image.open(tmp_path / "a.png") as a, Image.open(tmp_path / "b.png") as b:
        differences = [abs(x - y) for x, y in zip(a.tobytes(), b.tobytes(), strict=True)]
    assert sum(differences) / len(differences) < 5  # 16 with other noise


def test_help_is_light_and_shows_every_knob(tmp_path):
    program = LIGHT.replace('"transformers")', '"transformers", "PIL", "numpy")')
    done = subprocess.run(
        [sys.executable, "-c", program, "generate", "--help-all"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.stdout.endswith("[]\n") and done.stderr == ""
    for name, knob in knobs().items():
        assert ("--" + name.replace("_", "-") in done.stdout) is bool(knob.surfaces)
    assert all(name in " ".join(done.stdout.split()) for name in ("euler-a", "dpm++-2m-karras"))


def test_a_new_knob_becomes_an_option(monkeypatch):
    import inspect

    from sd_lowvram.commands import knobs as generated
    from sd_lowvram.settings import Fidelity, Knob

    added = Knob("New", "a new one", Fidelity.ROUNDING, maximum=9, unit="rows")
    hidden = Knob("Hidden", "not here", Fidelity.BITWISE, surfaces=("node",))
    monkeypatch.setattr(generated, "knobs", lambda: {**knobs(), "new_one": added, "hidden_one": hidden})

    def base(a: int, settings: dict) -> None:
        assert settings["new_one"] == 4 and a == 1

    wrapped = generated.add_knob_options(base)
    names = list(inspect.signature(wrapped).parameters)
    assert names[0] == "a" and names[-1] == "new_one" and "hidden_one" not in names
    wrapped(a=1, **dict.fromkeys(names[1:-1]), new_one=4)


def test_doctor(tmp_path):
    done = call("doctor", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ram"]["free"] > 0 and found["torch"]
    backends = {row["name"]: row for row in found["attention"]}
    assert backends["sliced"]["runs"] and backends["fused-softmax"]["deterministic"] is True
    assert not backends["xformers"]["runs"] and backends["xformers"]["reason"]
    for part in found["missing"]:
        assert part["remedy"]


def test_version(tmp_path):
    assert call("--version", folder=tmp_path).stdout.startswith("sd-lowvram 0.")
