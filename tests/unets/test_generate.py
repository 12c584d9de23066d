"""``unet generate``: from what was typed to the picture, and each refusal in its own words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from two_layer_unets import write_changed_demo
from typer.testing import CliRunner

from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.cli import app
from sd_lowvram.unets.commands.generate import ScheduledSteps, parse_schedule
from sd_lowvram.unets.prune import cut_by_names, prune_unet

SEEDED = ("--seed", "3", "--vram", "2GB", "--device", "cpu")


@pytest.fixture(scope="module")
def small(tmp_path_factory: Any) -> Path:
    """A folder with the unet folder of a pruned demo model."""
    folder = tmp_path_factory.mktemp("small")
    pipe: Any = load_pipeline(None, dtype=torch.float32)
    prune_unet(pipe.unet, cut_by_names(pipe.unet.config, drop=["mid"])).save_pretrained(folder / "unet")
    return folder


def call(*arguments: object, command: tuple[str, ...] = ("unet", "generate")) -> Any:
    return CliRunner().invoke(app, [*command, "a red apple", *map(str, arguments)])


def made(*arguments: object, **of: Any) -> Any:
    done = call(*arguments, *SEEDED, "--json", **of)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout[done.stdout.index("{") :])


def pixels(file: Path) -> bytes:
    with Image.open(file) as image:
        return image.tobytes()


def test_a_picture_by_two_unets(small: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.png" for name in ("mixed", "plain", "alone", "as_typed")}
    schedule = ("--unet", f"small={small}", "--schedule", "small:1,full:2")
    told = made(*schedule, "-o", files["mixed"])
    assert told["unets"] == [{"name": "small", "steps": 1}, {"name": "full", "steps": 2}]
    assert told["plan"]["request"]["steps"] == 3 and told["latents"] is None
    with Image.open(files["mixed"]) as image:
        assert "Steps: 3," in image.text["parameters"] and "small:1 full:2" in image.text["parameters"]
    made("--steps", 3, "-o", files["plain"], command=("generate",))
    made("--schedule", "full:3", "-o", files["alone"])
    made(*("--unet", f"x={small / 'unet'}", "--schedule", "x:1, full:2"), "-o", files["as_typed"])
    assert pixels(files["alone"]) == pixels(files["plain"])
    assert pixels(files["as_typed"]) == pixels(files["mixed"]) != pixels(files["plain"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(file.name for file in files.values())


def test_a_unet_of_experts_and_regions_has_its_turn(tmp_path: Path) -> None:
    write_changed_demo(tmp_path / "e2", drop=("mid",), experts=2, regions=2)
    told = made("--unet", f"e2={tmp_path / 'e2'}", "--schedule", "e2:1,full:1", "-o", tmp_path / "a.png")
    assert [one["name"] for one in told["unets"]] == ["e2", "full"]


def test_paths_may_have_colons_and_equals_signs() -> None:
    parts = parse_schedule("a:2,full:3", [r"a=C:\models\x=y"])
    assert parts == (ScheduledSteps("a", Path(r"C:\models\x=y"), 2), ScheduledSteps("full", None, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "tiny:2,full:3"], "'tiny', .*full, small"),
        (["--schedule", "small:0,full:3"], "1 step"),
        (["--schedule", "small:-1,full:3"], "1 step"),
        (["--schedule", "small,full:3"], "NAME:STEPS"),
        (["--schedule", "small:1,"], "NAME:STEPS"),
        (["--schedule", ""], "NAME:STEPS"),
        (["--schedule", "full:3"], "small .*--schedule"),
        (["--schedule", "small:600,full:600"], "1000"),
        ([], "'--schedule'"),
        (["--unet", "small=x", "--schedule", "small:1,full:1"], "was given before"),
        (["--unet", "full=x", "--schedule", "small:1,full:1"], "is the model's own UNet"),
        (["--unet", "x", "--schedule", "small:1,full:1"], "NAME=PATH"),
        (
            ["--schedule", "small:1,full:1", "--deep-cache", 2],
            "--deep-cache=2",
        ),
        (["--schedule", "small:1,full:1", "--cuda-graphs"], "--cuda-graphs"),
        (["--schedule", "small:1,full:1"], "nowhere"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(options: list[Any], message: str) -> None:
    done = call("--unet", "small=nowhere", *options)
    assert done.exit_code == 2, done.output
    assert re.search(message, " ".join(done.stderr.split()))


@pytest.mark.parametrize(("key", "value"), [("in_channels", 9), ("cross_attention_dim", 768)])
def test_unets_of_other_models_are_refused(small: Path, tmp_path: Path, key: str, value: int) -> None:
    config = json.loads((small / "unet" / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "x.safetensors").write_bytes(next((small / "unet").glob("*.safetensors")).read_bytes())
    done = call("--unet", f"other={tmp_path}", "--schedule", "other:1,full:1")
    assert done.exit_code == 2, done.output
    assert key in done.stderr


def test_another_prediction_is_refused_where_a_scheduler_tells(small: Path, tmp_path: Path) -> None:
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text('{"prediction_type": "sample"}')
    (tmp_path / "unet").symlink_to(small / "unet")
    done = call("--unet", f"other={tmp_path}", "--schedule", "other:1,full:1")
    assert done.exit_code == 2, done.output
    assert "prediction_type" in " ".join(done.stderr.split())
