"""What the command line refuses, in one line and before anything heavy is imported."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import zlib
from importlib import metadata

import pytest
import tiny
import torch
from command_line import ENVIRONMENT, LIGHT, LIGHTLY, MAIN
from forked import forks_of

from sd_lowvram.checkpoints.architectures import write_folder
from sd_lowvram.checkpoints.schedulers import SCHEDULERS
from sd_lowvram.commands.exit_codes import code_and_message


@pytest.fixture(scope="module")
def light():
    """In processes of their own that begin where the command line has imported what it needs to refuse something."""
    with forks_of(LIGHTLY, ENVIRONMENT) as run:
        yield run


BAD = [
    (["--scheduler", "eulr"], 2, "euler"),
    (["--scheduler", "banana"], 2, re.escape(", ".join(SCHEDULERS))),
    (["--width", 0], 2, "positive multiple of 8"),
    (["--width", -64], 2, "positive multiple of 8"),
    (["--width", "wide"], 2, "--width"),
    (["--height", 130], 2, "128 and 136 are nearest"),
    (["--height", 3], 2, "8 is nearest"),
    (["--vram", "banana"], 2, "4GB"),
    (["--vram", 0], 2, "more than zero"),
    (["--ram", "-3GB"], 2, "4GB"),
    (["--steps", 0], 2, "at least 1"),
    (["--batch", 0], 2, "at least 1"),
    (["--seed", -5], 2, "-1 for a random one"),
    (["--guidance", "nan"], 2, "from 0 to 1000"),
    (["--attention", "banana"], 2, "fused-softmax"),
    (["--vae-strip-mib", 0], 2, "from 1 to 1024"),
    (["--strength", 0.5], 2, "needs --init-image"),
    (["--mask", "mask.png"], 2, "needs --init-image"),
    (["--init-image", "nothing.png"], 2, "No such file"),
    (["--init-image", __file__], 2, "not a picture"),
    (["--output", "a.jpg"], 2, ".png"),
    (["--output", "/proc/nowhere/a.png"], 2, "cannot be written"),
    (["--model", "nothing"], 2, "no model at"),
    (["--device", "banana"], 2, "cpu always can"),
    (["--device", ""], 2, "--device is empty"),
    (["--model", ""], 2, "--model is empty"),
    (["--banana"], 2, "--banana"),
    (["--vram", "4"], 2, '"4GB"'),
    (["--vram", "1KB"], 3, "1 KiB.*128x128"),
    (["--vram", "9" * 30 + "GB"], 2, "more than any machine has"),
    (["--width", 65536], 2, "more than 16384 pixels"),
    (["--width", "1e3"], 2, "--width '1e3'"),
    (["--guidance=much"], 2, "--guidance 'much'"),
    (["--steps", 10**23], 2, "at most 1000"),
    (["--batch", 10**23], 2, "at most 1000"),
    (["--vae-tiles", "banana"], 2, "--vae-tiles='banana'"),
    (["--vae-strip-mib", 10**23], 2, "--vae-strip-mib=1"),
    (["--prediction", "banana"], 2, "epsilon.*v_prediction"),
    (["--output", "n" * 300 + ".png"], 2, "File name too long"),
    (["--memory-plot", "n" * 300 + ".png"], 2, "File name too long"),
    (["--model", "n" * 300], 2, "File name too long"),
    (["--negative", "\udcff"], 2, "is not UTF-8"),
    (["--model", "\udcff"], 2, "is not UTF-8"),
    (["--model", "pipe.safetensors"], 2, "not a regular file"),
    (["--model", "pipe.ckpt", "--allow-pickle"], 2, "not a regular file"),
    (["--model", __file__], 2, "not a .safetensors file"),
    (["--init-image", "pipe"], 2, "not a regular file"),
    (["--output", "pipe.png"], 2, "not a regular file"),
]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    BAD,
    ids=lambda value: "".join(map(str, value))[:20] if isinstance(value, list) else "",
)
def test_bad_input_before_anything_is_loaded(light, tmp_path, options, code, message):
    pipes = [tmp_path / name for name in ("pipe", "pipe.ckpt", "pipe.png", "pipe.safetensors")]
    for pipe in pipes:
        os.mkfifo(pipe)
    done = light(LIGHT, "generate", "an apple", *options, folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert re.search(message, done.stderr) and done.stderr.count("\n") == 1
    assert done.stdout == "[]\n"  # nothing heavy was imported
    assert sorted(tmp_path.glob("**/*")) == pipes  # and nothing was made, no folder either


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["banana"], "'banana'.*sd-lowvram --help"),
        (["generate"], "'prompt'.*sd-lowvram generate --help"),
        (["generate", "a", "b"], "unexpected extra argument"),
        (["generate", "\udcff"], "is not UTF-8"),
        (["plan", "--vram"], "requires an argument"),
        (["plan", "--steps", "0"], "--steps 0 .*1"),
        (["plan", "--batch", "x"], "--batch 'x'"),
        (["plan", "--width", "65536"], "more than 16384 pixels"),
        (["plan", "--model", "nothing"], "no model at nothing"),
        (["plan", "--model", "/dev/zero"], "not a regular file"),
        (["plan", "--model", "sdxl", "--vram", "1KB"], "1 KiB.*1024x1024"),
        (["plan", "--split-layers=3"], "--split-layers"),
        (["install", "comfyui"], "'PATH'"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else "",
)
def test_bad_words_in_one_line(light, tmp_path, words, message):
    done = light(MAIN, *words, folder=tmp_path)
    assert done.returncode in (2, 3) and done.stderr.startswith("sd-lowvram: ")
    assert re.search(message, done.stderr)
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize("layers", [-1, [2, -2], "two", None, 10**6])
@pytest.mark.parametrize("part", ["unet", "vae"])
def test_layers_that_no_model_has(light, tmp_path, part, layers):
    parts = tiny.config("sd15")
    parts[part]["layers_per_block"] = layers
    (tmp_path / "model").mkdir()
    write_folder(parts, "StableDiffusionPipeline", tmp_path / "model")
    done = light(MAIN, "plan", "--model", "model", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.search(rf"{part}/config.json .*layers_per_block.*{re.escape(str(layers))}.*0.*256", done.stderr)


def test_line_breaks_in_the_names_of_pictures(light, tmp_path):
    done = light(MAIN, "generate", "an apple", "--output", "a\nb.png", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.search(r"'a\\nb\.png'.*'\\n'", done.stderr)
    assert not [*tmp_path.iterdir()]


def test_pictures_that_would_harm(light, tmp_path):
    """A PNG of some bytes that claims 13000x13000 pixels, and a program that draws itself."""
    header = struct.pack(">IIBBBBB", 13000, 13000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b"")]
    body = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(body))
    (tmp_path / "b.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n")
    for name, message in (
        ("a.png", "13000x13000"),
        ("b.png", "PostScript"),
    ):
        done = light(MAIN, "generate", "an apple", "--init-image", name, folder=tmp_path)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_versions_that_do_not_fit_are_named_with_versions_that_do(tmp_path):
    """diffusers 0.42 uses ``torch.accelerator``, which came after torch 2.4."""
    arguments = ["generate", "an apple", "--steps", "1", "--output", str(tmp_path / "a.png")]
    program = f"import sys, torch; sys.argv[1:] = {arguments!r}; del torch.accelerator; {MAIN}"
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    pair = f"diffusers {metadata.version('diffusers')} cannot run with torch {metadata.version('torch')} ("
    assert done.returncode == 2 and pair in done.stderr, done.stderr
    assert r'"diffusers==0.31.*" "transformers==4.46.*"' in done.stderr


def test_an_attribute_that_our_code_misses_stays_an_internal_error():
    with pytest.raises(AttributeError) as error:
        torch.no_such_module  # noqa: B018
    assert code_and_message(error.value)[0] == 1
