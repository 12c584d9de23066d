"""Today's transformers on the command line: planned by name, made from a folder, gone on with, refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import todays
import torch
from PIL import Image

from sd_lowvram.checkpoints.architectures import PIPELINES, TRANSFORMERS, architecture
from sd_lowvram.checkpoints.meta_model import named_pipeline
from sd_lowvram.commands.guidance import is_guided
from sd_lowvram.commands.inputs import Job

SIZE = ("--width", todays.SIZE, "--height", todays.SIZE, "--steps", 2, "--seed", 5, "--device", "cpu")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """The command line in this process, in an empty folder."""
    from typer.testing import CliRunner

    from sd_lowvram.cli import app

    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))
    torch.set_num_threads(threads)


MADE: dict[str, tuple[Callable[[], Any], dict[str, Any], tuple[Any, ...]]] = {
    "sd3": (todays.sd3, {"guidance_scale": 7.0, "negative_prompt": ["dark"]}, ("--negative", "dark")),
    "flux": (todays.flux, {"guidance_scale": 3.5}, ()),
    "z-image": (todays.z_image, {"guidance_scale": 0.0}, ("--guidance", 0)),
    "chroma": (todays.chroma, {"guidance_scale": 5.0}, ()),
    "klein": (todays.klein, {"guidance_scale": 4.0}, ()),
    "qwen-image": (todays.qwen_image, {"true_cfg_scale": 4.0, "negative_prompt": [" "]}, ()),
    "krea2": (todays.krea2, {"guidance_scale": 4.5}, ()),
}
"""By family: a pipeline, what it is called with, and the options that mean the same."""


@pytest.mark.parametrize(("name", "above"), [("sd3", 1), ("qwen-image", 1), ("z-image", 0), ("krea2", 0)])
def test_a_run_is_planned_with_guidance_above_what_its_pipeline_guides_above(name: str, above: float) -> None:
    pipe = MADE[name][0]()
    assert [is_guided(Job("a", guidance=scale), pipe) for scale in (above, above + 0.5, None)] == [False, True, True]


@pytest.mark.parametrize("name", MADE)
def test_a_folder_is_planned_and_makes_its_pipelines_picture(
    name: str, tmp_path: Path, here: Callable[..., Any]
) -> None:
    make, given, options = MADE[name]
    todays.save(make(), tmp_path / "model")
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    seed = [torch.Generator().manual_seed(5)]
    size = {"width": todays.SIZE, "height": todays.SIZE, "num_inference_steps": 2}
    expected = pipe(prompt=["a cat"], generator=seed, **size, **given).images[0]

    planned = here("plan", "--model", "model", "--vram", "1GB", "--json", *SIZE[:6])
    assert planned.exit_code == 0, planned.output
    told = json.loads(planned.stdout)
    assert told["stages"][-1]["component"] == "vae"
    done = here("generate", "a cat", "--model", "model", "-o", "a.png", *SIZE, "--vram", "1GB", "--json", *options)
    assert done.exit_code == 0, done.output
    assert (numpy.asarray(Image.open("a.png")) == numpy.asarray(expected)).all()
    taken = json.loads(done.stdout)
    assert [stage["component"] for stage in taken["plan"]["stages"]] == [one["component"] for one in told["stages"]]


def test_a_run_goes_on_from_its_latents(
    tmp_path: Path, here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    todays.save(todays.z_image(), tmp_path / "model")
    command = ("generate", "a cat", "--model", "model", *SIZE[:4], "--steps", 3, *SIZE[6:], "--latents-every", "1steps")
    assert here(*command, "-o", "whole.png").exit_code == 0
    with monkeypatch.context() as patched:
        patched.setattr(diffusers.AutoencoderKL, "decode", None)
        assert here(*command, "-o", "a.png", "--keep-latents").exit_code == 1
    (latents,) = tmp_path.glob("*.latents.safetensors")
    gone_on = here("resume", latents)
    assert gone_on.exit_code == 0, gone_on.output
    assert (numpy.asarray(Image.open("a.png")) == numpy.asarray(Image.open("whole.png"))).all()


REFUSED: list[tuple[Callable[[], Any], tuple[Any, ...], str]] = [
    (todays.flux, ("--negative", "dark"), "--negative is not for FluxPipeline"),
    (todays.klein, ("--scheduler", "euler"), "--scheduler euler is not for Flux2KleinPipeline"),
    (todays.klein, ("--preview", 1), "--preview is not for Flux2KleinPipeline"),
    (todays.lumina2, (), "holds a Lumina2Pipeline: SD1.x"),
]


@pytest.mark.parametrize(("make", "options", "why"), REFUSED, ids=["negative", "scheduler", "preview", "unknown"])
def test_what_a_pipeline_does_not_do_is_refused(
    make: Callable[[], Any], options: tuple[Any, ...], why: str, tmp_path: Path, here: Callable[..., Any]
) -> None:
    todays.save(make(), tmp_path / "model")
    done = here("generate", "a cat", "--model", "model", "-o", "a.png", *SIZE, *options)
    assert done.exit_code == 2 and why in " ".join(done.output.split())
    assert not (tmp_path / "a.png").exists()


def test_a_family_from_outside_is_planned_too(tmp_path: Path, here: Callable[..., Any]) -> None:
    import dataclasses

    from sd_lowvram import register
    from sd_lowvram.models.unknown import FAMILY

    def components_of(target: Any) -> dict[str, Any]:
        ours = type(target).__name__ == "Lumina2Pipeline"
        return {"vae": target.vae} if ours else {}

    todays.save(todays.lumina2(), tmp_path / "model")
    unregister = register(families={"lumina2": dataclasses.replace(FAMILY, components_of=components_of, known=True)})
    try:
        planned = here("plan", "--model", "model", "--vram", "1GB", "--json", *SIZE[:6])
    finally:
        unregister()
    assert planned.exit_code == 0, planned.output
    assert [stage["component"] for stage in json.loads(planned.stdout)["stages"]] == ["vae"]


def test_every_name_is_an_architecture() -> None:
    for name in TRANSFORMERS:
        config = architecture(name)
        assert config["transformer"]["_class_name"].endswith("Transformer2DModel")
        assert hasattr(diffusers, config["pipeline"] + "Pipeline")


@pytest.mark.parametrize("name", PIPELINES)
def test_a_named_pipeline_has_the_size_that_its_makers_state(name: str) -> None:
    stated = architecture(name)
    assert stated["licence"] and all("/" in source for source in stated["sources"])
    count = sum(weight.numel() for weight in named_pipeline(name, torch.bfloat16).transformer.parameters()) / 1e9
    assert abs(count / stated["billions"] - 1) < 0.03 or round(count) == stated["billions"]


SMALL, FILMS = ("pixart-sigma",), ("wan2.2-5b", "ltx-video")


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SMALL else [pytest.mark.rare]) for name in PIPELINES]
)
def test_a_pipeline_is_planned_by_its_name(name: str, here: Callable[..., Any]) -> None:
    size = () if name in FILMS else ("--width", 1024, "--height", 1024)
    planned = here("plan", "--model", name, "--gpu", "rtx3060", "--ram", "64GB", "--steps", 4, "--json", *size)
    assert planned.exit_code == 0, planned.output
    plan = json.loads(planned.stdout)
    assert plan["fits"] and plan["stages"][-1]["component"] == "vae"
    assert all(stage["activation_bytes"] > 0 and not stage["at_first_call"] for stage in plan["stages"])


@pytest.mark.rare
def test_the_largest_picture_of_a_pipeline_is_planned_by_its_name(here: Callable[..., Any]) -> None:
    asked = ("plan", "--model", "pixart-sigma", "--gpu", "rtx3060", "--vram", "1200MB", "--ram", "32GB", "--json")
    largest = here(*asked, "--max-size")
    assert largest.exit_code == 0, largest.output
    square = json.loads(largest.stdout)["square"]["request"]
    assert square["width"] == square["height"] >= 1024
    refused = here(*asked, "--width", square["width"] + 128, "--height", square["height"] + 128)
    assert refused.exit_code == 3, refused.output


@pytest.mark.slow(10)
@pytest.mark.parametrize("name", ["z-image-turbo", "klein-4b"])
def test_a_model_is_planned_by_its_name(name: str, here: Callable[..., Any]) -> None:
    planned = here("plan", "--model", name, "--vram", "4GB", "--gpu", "rtx3060", "--ram", "32GB", "--json")
    assert planned.exit_code == 0, planned.output
    told = json.loads(planned.stdout)
    assert (told["request"]["width"], told["request"]["guidance"]) == (1024, False)
    denoise = next(stage for stage in told["stages"] if stage["name"] == "denoise")
    assert denoise["slowdown"] < 1.05
    assert not any("None" in reason for reason in told["reasons"])
