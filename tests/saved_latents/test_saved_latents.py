"""Runs of small pipelines that go on from their latents; the file, whole and damaged."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import families
import pytest
import safetensors.torch
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from run_log import logged

from sd_lowvram.checkpoints.fingerprint import fingerprint
from sd_lowvram.checkpoints.schedulers import SCHEDULERS, set_scheduler
from sd_lowvram.errors import BadInputError, NotFiniteError
from sd_lowvram.saved_latents.file import Saved, read_saved, write_saved
from sd_lowvram.saved_latents.interval import Interval, parse_interval
from sd_lowvram.saved_latents.keeping import Safety, keep_latents

STEPS = 5
EVERY_MINUTE = Interval()


class StoppedError(Exception):
    pass


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pipes():
    return {
        "sd15": families.plain("sd15"),
        "sdxl": families.plain("sdxl", "StableDiffusionXLPipeline"),
    }


def run(
    pipe, path: Path, start: Saved | None = None, stop: int | None = None, interval: Interval = EVERY_MINUTE,
    seeds: tuple[int, ...] = (1, 2), **extra,
):  # fmt: skip
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    calls = []
    with keep_latents(pipe, generators, Safety(path, interval=interval, start=start)) as keeper:

        def after(_, step, __, values):
            values = keeper.record_step(step + 1, values)
            calls.append(step)
            if step + 1 == stop:
                raise StoppedError
            return values

        size = {} if "image" in extra else {"width": 64, "height": 64}
        return pipe(
            ["a cat", "a dog"], generator=generators, num_inference_steps=STEPS, callback_on_step_end=after,
            output_type="latent", **size, **extra,
        ).images  # fmt: skip


def goes_on(pipe, path: Path, scheduler: str, stop: int, **extra) -> None:
    """Assert that a run that is stopped has the bits of one that is not, and that no step is computed twice."""
    set_scheduler(pipe, scheduler)
    whole = run(pipe, path, **extra)
    set_scheduler(pipe, scheduler)
    with pytest.raises(StoppedError):
        run(pipe, path, stop=stop, **extra)
    saved = read_saved(path)
    assert saved.about["step"] == stop
    set_scheduler(pipe, scheduler)
    assert torch.equal(run(pipe, path, start=saved, **extra), whole)


@pytest.mark.slow(1.5)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_goes_on_exactly(pipes, tmp_path, scheduler):
    goes_on(pipes["sd15"], tmp_path / "x", scheduler, 3)


def test_noise_is_drawn_from_where_the_run_was(pipes, tmp_path):
    """Whatever was drawn of the generators since."""
    pipe, path = pipes["sd15"], tmp_path / "x"
    set_scheduler(pipe, "euler-a")
    whole = run(pipe, path)
    set_scheduler(pipe, "euler-a")
    with pytest.raises(StoppedError):
        run(pipe, path, stop=3)
    set_scheduler(pipe, "euler-a")
    assert torch.equal(run(pipe, path, start=read_saved(path), seeds=(3, 4)), whole)


def test_sdxl(pipes, tmp_path):
    goes_on(pipes["sdxl"], tmp_path / "x", "euler-a", 3)


@pytest.mark.parametrize("kind", ["Img2Img", "Inpaint"])
def test_from_a_picture(tmp_path, kind):
    pipe = tiny.pipeline("sd15", kind)
    picture = Image.effect_noise((64, 64), 90).convert("RGB")
    mask = {"mask_image": Image.linear_gradient("L").resize((64, 64))} if kind == "Inpaint" else {}
    goes_on(pipe, tmp_path / "x", "dpm++-2m-sde", 2, image=picture, strength=0.9, **mask)


def test_only_what_is_left_is_computed(pipes, tmp_path):
    pipe = pipes["sd15"]
    set_scheduler(pipe, "euler-a")
    with pytest.raises(StoppedError):
        run(pipe, tmp_path / "x", stop=3)
    calls = []
    handle = pipe.unet.conv_in.register_forward_hook(lambda *_: calls.append(1))
    set_scheduler(pipe, "euler-a")
    run(pipe, tmp_path / "x", start=read_saved(tmp_path / "x"))
    set_scheduler(pipe, "euler-a")
    assert len(calls) == STEPS - 3
    run(pipe, tmp_path / "x", start=read_saved(tmp_path / "x"))
    handle.remove()
    assert len(calls) == STEPS - 3  # it was written before the decode: nothing but that is left
    assert "forward" not in vars(pipe.unet)


@pytest.mark.parametrize("first", [1, 4])
def test_a_step_of_no_numbers_ends_the_run_and_leaves_the_latents_before_it(pipes, tmp_path, first):
    pipe, path = pipes["sd15"], tmp_path / "a b"
    set_scheduler(pipe, "euler-a")
    whole = run(pipe, tmp_path / "whole")
    calls = []

    def infinite(_, __, out):
        calls.append(1)
        return (out[0] * (torch.inf if len(calls) == first else 1),)

    handle = pipe.unet.register_forward_hook(infinite)
    set_scheduler(pipe, "euler-a")
    with pytest.raises(NotFiniteError, match=f"step {first} of {STEPS}") as told:
        run(pipe, path)
    handle.remove()
    assert path.exists() == (f"step {first - 1} are in {path}: sd-lowvram resume '{path}'" in str(told.value))
    assert path.exists() == (first > 1)
    if path.exists():
        set_scheduler(pipe, "euler-a")
        assert torch.equal(run(pipe, path, start=read_saved(path)), whole)


def test_how_often(pipes, tmp_path, monkeypatch):
    from sd_lowvram.saved_latents import keeping

    written = []
    monkeypatch.setattr(keeping, "write_saved", lambda saved, path: written.append(saved.about["step"]))
    for typed in ("2steps", "0.000001 s", "5min", "never"):
        set_scheduler(pipes["sd15"], "euler")
        run(pipes["sd15"], tmp_path / "x", interval=parse_interval(typed, "it"))
    assert written == [2, 4, 5, 1, 2, 3, 4, 5, 5, 5]


@pytest.mark.parametrize("typed", ["", "5", "0s", "1.5 steps", "-1min", "5 h", "nan s"])
def test_no_interval(typed):
    with pytest.raises(BadInputError, match="is not an interval"):
        parse_interval(typed, "--latents-every")


def test_what_cannot_be_written_is_told_and_the_run_goes_on(pipes, tmp_path):
    pipe = pipes["sd15"]
    set_scheduler(pipe, "euler")
    whole = run(pipe, tmp_path / "x")
    set_scheduler(pipe, "euler")
    pipe.scheduler.noise_sampler = object()
    with logged("EulerDiscreteScheduler, which cannot be resumed exactly: its noise_sampler") as told:
        assert torch.equal(run(pipe, tmp_path / "y", interval=Interval(None, 1)), whole)
    assert sum("cannot be saved" in one for one in told) == 1 and not (tmp_path / "y").exists()
    set_scheduler(pipe, "euler")
    with logged("cannot be saved to .*: (Not a directory|File exists)"):
        assert torch.equal(run(pipe, tmp_path / "x" / "y"), whole)


def test_other_runs_are_refused(pipes, tmp_path):
    pipe = pipes["sd15"]
    set_scheduler(pipe, "euler")
    run(pipe, tmp_path / "x")
    saved = read_saved(tmp_path / "x")
    set_scheduler(pipe, "euler-a")
    with pytest.raises(BadInputError, match="EulerDiscreteScheduler"):
        run(pipe, tmp_path / "x", start=saved)
    set_scheduler(pipe, "euler")
    short = Saved(saved.about, {**saved.tensors, "latents": saved.tensors["latents"][:1]})
    with pytest.raises(BadInputError, match="latents of another size"):
        run(pipe, tmp_path / "x", start=short)
    with pytest.raises(BadInputError, match="9 of 9"):
        run(pipe, tmp_path / "x", start=Saved({**saved.about, "step": 9, "steps": 9}, saved.tensors))
    evil = {**saved.about["scheduler"], "state": {"step": 1}}
    with pytest.raises(BadInputError, match="a name of the scheduler's own"):
        run(pipe, tmp_path / "x", start=Saved({**saved.about, "scheduler": evil}, saved.tensors))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "x"
    about = {"prompt": '"sha256":"' + "0" * 64 + '"', "number": 0.1}
    write_saved(Saved(about, {"latents": torch.arange(8.0), "flag": torch.tensor(3, dtype=torch.bfloat16)}), path)
    saved = read_saved(path)
    assert saved.about == about and torch.equal(saved.tensors["latents"], torch.arange(8.0))
    return path.read_bytes()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_damaged_is_refused(whole, tmp_path, data):
    place = data.draw(st.integers(0, len(whole) - 1))
    how = data.draw(st.sampled_from(["cut", "bit", "more"]))
    changed = bytearray(whole)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    damaged = {"cut": whole[:place], "bit": bytes(changed), "more": whole + whole[: 1 + place]}[how]
    (tmp_path / "x").write_bytes(damaged)
    with pytest.raises(BadInputError):
        read_saved(tmp_path / "x")


def test_lengths_are_checked_before_anything_is_allocated(tmp_path):
    (tmp_path / "x").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    header = b'{"a":{"dtype":"F32","shape":[1073741824],"data_offsets":[0,4294967296]}}'
    (tmp_path / "y").write_bytes(len(header).to_bytes(8, "little") + header)
    tracemalloc.start()
    for name, why in (("x", "longer than any"), ("y", "truncated")):
        with pytest.raises(BadInputError, match=why):
            read_saved(tmp_path / name)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_other_safetensors_and_other_things_are_refused(tmp_path):
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "x")
    with pytest.raises(BadInputError, match="holds no latents that were saved by this version"):
        read_saved(tmp_path / "x")
    for name in ("absent", "."):
        with pytest.raises(BadInputError, match="cannot be read"):
            read_saved(tmp_path / name)


def test_fingerprints(tmp_path):
    folder = tmp_path / "model"
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    weights = bytearray(3 << 20)
    (folder / "unet" / "x.safetensors").write_bytes(weights)
    before = fingerprint(folder)
    (folder / "readme.md").write_text("no part of the model")
    assert fingerprint(folder.rename(tmp_path / "moved")) == before
    folder = tmp_path / "moved"
    weights[2 << 20] = 1
    (folder / "unet" / "x.safetensors").write_bytes(weights)
    assert fingerprint(folder) != before
    with pytest.raises(BadInputError, match="cannot be read"):
        fingerprint(tmp_path / "absent")
