"""What strangers add by one call: each kind by an example that touches no file of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch

import sd_lowvram
from sd_lowvram import AttentionBackend, Fidelity, Knob, Settings, attached, doors, optimize, register, restore
from sd_lowvram.checkpoints.safetensors_header import Header, TensorEntry
from sd_lowvram.commands import examination
from sd_lowvram.errors import BadInputError, CheckpointError, NoSiteError, SettingsError
from sd_lowvram.kernels.attention.choice import choose_backend
from sd_lowvram.kernels.attention.registry import available_backends
from sd_lowvram.patches import Patch, wrap
from sd_lowvram.settings import knobs

PACKAGE = Path(sd_lowvram.__file__).parent


def rounded(anatomy: Any, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """A stranger's hook: what the denoiser predicts, rounded to so many digits."""
    if anatomy.denoiser is None:
        raise NoSiteError("rounded: the model has no denoiser")

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        (found,) = original(*args, **kwargs | {"return_dict": False})
        return (found.round(decimals=settings.round_digits),)  # type: ignore[attr-defined]

    yield wrap(anatomy.components[anatomy.denoiser], "forward", around, "rounded")


DIGITS = Knob(
    label="Digits", help="round what the model predicts", fidelity=Fidelity.APPROXIMATE, maximum=9, stages=("denoise",),
    hook=rounded,
)  # fmt: skip


@pytest.fixture
def knob() -> Iterator[None]:
    unregister = register(knobs={"round_digits": DIGITS})
    yield
    unregister()


@pytest.mark.usefixtures("knob")
def test_a_strangers_knob_is_a_setting_like_ours() -> None:
    settings = Settings(round_digits=2, offload="layer")
    assert settings.round_digits == 2 and settings.as_dict()["round_digits"] == 2
    assert settings.of_stage("decode").round_digits is None and settings.filled(round_digits=3) == settings
    assert {settings, Settings(round_digits=2, offload="layer")} == {settings} != {Settings(offload="layer")}
    with pytest.raises(SettingsError, match=r"round_digits=99.*1.*9"):
        Settings(round_digits=99)
    with pytest.raises(BadInputError, match="'round_digits'"):
        register(knobs={"round_digits": DIGITS})


@pytest.mark.usefixtures("knob")
def test_its_hook_acts_in_a_plan_and_comes_off() -> None:
    pipe = tiny.tiniest()
    given = torch.randn(2, 4, 8, 8), torch.tensor(5), torch.randn(2, 7, pipe.unet.config.cross_attention_dim)
    before = pipe.unet(*given, return_dict=False)[0]
    plan = optimize(pipe, width=64, height=64, device="cpu", settings=Settings(round_digits=1))
    assert plan.settings.round_digits == 1 and plan.as_dict()["settings"]["round_digits"] == 1
    assert plan.fidelity is Fidelity.APPROXIMATE
    assert torch.equal(pipe.unet(*given, return_dict=False)[0], before.round(decimals=1))
    restore(pipe)
    assert torch.equal(pipe.unet(*given, return_dict=False)[0], before)
    with pytest.raises(NoSiteError), attached(pipe.vae, Settings(round_digits=1), device="cpu"):
        pass


def test_unregistered_it_is_unknown() -> None:
    assert "round_digits" not in knobs()
    with pytest.raises(TypeError, match="round_digits"):
        Settings(round_digits=2)  # type: ignore[call-arg]


DOOR = '''
from {package} import Fidelity, Knob, register


def enter():
    knob = Knob(label="Toy", help="a toy for tests", fidelity=Fidelity.BITWISE, maximum=9, hook=lambda *given: ())
    register(knobs=dict(toy=knob), commands=dict(greet=lambda: greet))


def greet(name: str) -> None:
    """Greet somebody."""
    print("hello", name)
'''


def run(path: Path, *arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_entry_points_are_found(tmp_path: Path) -> None:
    """An installed distribution with an entry point: its knob has an option, its command runs."""
    (tmp_path / "theirs.py").write_text(DOOR.format(package="sd_lowvram"))
    about = tmp_path / "theirs-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[sd_lowvram]\ntheirs = theirs:enter\n")
    path = Path(os.pathsep.join([str(tmp_path), str(PACKAGE.parent)]))
    assert "--toy" in run(path, "-m", "sd_lowvram", "generate", "--help-all", cwd=tmp_path)
    assert run(path, "-m", "sd_lowvram", "greet", "you", cwd=tmp_path) == "hello you\n"


def test_folders_are_found_where_a_host_imports_the_package_by_another_name(tmp_path: Path) -> None:
    copy = tmp_path / "host" / "pack" / "sd_lowvram"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("data", "model", "__pycache__"))
    (copy / "theirs").mkdir()
    (copy / "theirs" / "__init__.py").touch()
    (copy / "theirs" / "door.py").write_text(DOOR.format(package="...sd_lowvram") + "\n\nenter()\n")
    (copy / "broken").mkdir()
    (copy / "broken" / "door.py").write_text("raise ImportError('no such thing')")
    look = (
        "import warnings, sys; warnings.simplefilter('ignore'); from host.pack.sd_lowvram.settings import Settings; "
        "print(Settings(toy=3).toy, 'sd_lowvram' in sys.modules)"
    )
    assert run(tmp_path, "-c", look, cwd=tmp_path) == "3 False\n"
    told = subprocess.run(
        [sys.executable, "-c", look.replace("ignore", "always")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert re.search(r"ImportError.*thing\)", told.stderr)


class Holder:
    """A stranger's container of models that no family of ours knows."""

    def __init__(self) -> None:
        self.parts = {"unet": tiny.tiniest().unet}


def family() -> Any:
    """One in which a UNet of diffusers' lies where nobody of ours looks for it."""
    from sd_lowvram.models.diffusers import FAMILY

    return replace(FAMILY, components_of=lambda target: target.parts if isinstance(target, Holder) else {})


def test_a_strangers_family_is_planned_run_and_restored() -> None:
    target = Holder()
    unet = target.parts["unet"]
    given = torch.randn(2, 4, 8, 8), torch.tensor(5), torch.randn(2, 7, unet.config.cross_attention_dim)
    with torch.no_grad():
        before = unet(*given, return_dict=False)[0]
        with pytest.raises(BadInputError, match="Holder"):
            optimize(target, width=64, height=64, device="cpu")
        unregister = register(families={"theirs": family()})
        try:
            plan = optimize(target, vram="1GB", width=64, height=64, device="cpu", settings=Settings(offload="layer"))
            assert [stage.name for stage in plan.stages] == ["denoise"]
            assert torch.equal(unet(*given, return_dict=False)[0], before)
            restore(target)
        finally:
            unregister()
        assert torch.equal(unet(*given, return_dict=False)[0], before)


def test_a_strangers_class_of_model_is_built_by_its_name() -> None:
    from diffusers import UNet2DConditionModel

    from sd_lowvram.checkpoints.architectures import build_components

    class TheirUNet(UNet2DConditionModel):
        pass

    config = {"unet": {**tiny.tiniest().unet.config, "_class_name": "TheirUNet"}}
    with pytest.raises(CheckpointError, match=r"TheirUNet.*diffusers"):
        build_components(config, only=("unet",))
    unregister = register(classes={"TheirUNet": lambda: TheirUNet})
    try:
        assert type(build_components(config, only=("unet",))["unet"]) is TheirUNet
    finally:
        unregister()


def test_a_strangers_unet_in_a_single_file_is_loaded_by_them(tmp_path: Path) -> None:
    """SD1.5's names without one of its blocks."""
    from small import narrow, single_file_state

    from sd_lowvram.checkpoints import inspection
    from sd_lowvram.checkpoints.architectures import build_components

    state = single_file_state(build_components(narrow("sd15", 600), device="meta"))
    left = {
        name: TensorEntry("F32", tuple(one.shape), 0, 0)
        for name, one in state.items()
        if "output_blocks.4." not in name
    }
    header = Header(left, {}, 0)
    theirs = inspection.OwnUNet({"mid_block_type": None}, lambda path, config, dtype: (path, config, dtype))

    def known(name: str, whole: Any, header: Any, path: Path) -> Any:
        assert name == "sd15" and whole["cross_attention_dim"] == 768
        return theirs if path.name == "theirs.safetensors" else None

    unregister = register(unets={"theirs": known})
    try:
        kind = inspection.detect(header, tmp_path / "theirs.safetensors", lambda name: 0.0)
    finally:
        unregister()
    assert kind.unet is theirs and inspection.single_file_config(kind, "epsilon")["unet"]["mid_block_type"] is None


class Bright(torch.nn.Module):
    """A stranger's convolution, which looks at the mean of its map."""

    stored_by_rows = True

    def __init__(self, plain: torch.nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self.kernel_size, self.stride, self.dilation, self.padding = (3, 3), (1, 1), (1, 1), (1, 1)
        self.padding_mode = "zeros"

    def over_map(self, strips: Any) -> torch.Tensor:
        return torch.cat([*strips], 2).mean((1, 2, 3), keepdim=True)

    def forward(self, x: torch.Tensor, mean: torch.Tensor | None = None) -> torch.Tensor:
        mean = self.over_map([x]) if mean is None else mean
        return torch.nn.functional.conv2d(x, self.weight, self.bias, padding=1) * (1 + mean)


class Behind(torch.nn.Module):
    """A stranger's attention: each token sees the one before it."""

    processor = None

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.to_v = plain.to_v

    def forward(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.to_v(tokens) + tokens.roll(1, dims=1)

    def in_chunks(self, norm: torch.nn.Module, tokens: torch.Tensor, chunks: int) -> torch.Tensor:
        before = norm(tokens[:, -1:])
        parts = []
        for part in tokens.chunk(chunks, 1):
            normed = norm(part)
            parts.append(self.to_v(normed) + torch.cat([before, normed[:, :-1]], 1) + part)
            before = normed[:, -1:]
        return torch.cat(parts, 1)


def test_a_strangers_layers_go_by_strips_and_chunks_and_in_8_bits() -> None:
    unet = tiny.tiniest().unet.requires_grad_(False)
    resnet = unet.down_blocks[0].resnets[0]
    block = next(module for module in unet.modules() if hasattr(module, "attn1"))
    resnet.conv1, block.attn1 = Bright(resnet.conv1), Behind(block.attn1)
    given = torch.randn(2, 4, 64, 64), torch.tensor(5), torch.randn(2, 7, unet.config.cross_attention_dim)
    before = unet(*given, return_dict=False)[0]
    chunks = mock.patch.object(Behind, "in_chunks", autospec=True, side_effect=Behind.in_chunks)
    strips = mock.patch.object(Bright, "forward", autospec=True, side_effect=Bright.forward)
    cuts = Settings(residual_strips=4, transformer_chunks=4, offload="layer")
    with chunks as in_chunks, strips as forward, attached(unet, cuts, device="cpu"):
        assert tiny.relative_error(unet(*given, return_dict=False)[0], before) < 1e-5
    assert in_chunks.called and [len(call.args) for call in forward.call_args_list] == [3] * 4
    with attached(unet, Settings(weight_storage="int8"), device="cpu"):
        assert resnet.conv1.weight.dtype == torch.int8
        assert tiny.relative_error(unet(*given, return_dict=False)[0], before) < 0.03
    assert torch.equal(unet(*given, return_dict=False)[0], before)


def eight_bits(q: Any, k: Any, v: Any, mask: Any = None, scale: float | None = None, **options: Any) -> Any:
    """A stranger's attention: probabilities in 8 bits, by what stands for a kernel into which no trace can look."""
    assert type(q) is torch.Tensor
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    probabilities = (scores if mask is None else scores + mask).softmax(-1)
    return ((probabilities * 255).round() / 255 @ v).transpose(1, 2).contiguous().transpose(1, 2)


EIGHT_BITS = AttentionBackend(
    eight_bits,
    why_not=lambda problem: None if problem.device.type == "cpu" else "it is for processors",
    held_bytes=lambda problem: 100 << 20,
    label="in 8 bits",
    fidelity=Fidelity.APPROXIMATE,
)


def test_a_strangers_attention_is_planned_run_listed_and_comes_off() -> None:
    pipe = tiny.tiniest()
    before = tiny.run(pipe, steps=1)
    unregister = register(attention_backends={"8bit": EIGHT_BITS})
    try:
        plan = optimize(pipe, width=64, height=64, device="cpu", settings=Settings(attention="8bit"))
        assert plan.fidelity is Fidelity.APPROXIMATE and max(one.peak_bytes for one in plan.stages) > 100 << 20
        assert 0 < tiny.relative_error(tiny.run(pipe, steps=1), before) < 0.1
        restore(pipe)
        assert torch.equal(tiny.run(pipe, steps=1), before)
        assert knobs()["attention"].choices[-1] == "8bit" and doors.registered_names()["attention backend"] == ["8bit"]
        listed = {row["name"]: row["runs"] for row in examination.examine(probe=False)["attention"]}
        assert listed["8bit"] and available_backends(torch.device("cuda"))["8bit"] == "it is for processors"
        with pytest.raises(SettingsError, match="attention='8bit'"):
            choose_backend(Settings(attention="8bit"), torch.device("cuda"))
    finally:
        unregister()
    with pytest.raises(SettingsError, match="attention='8bit'"):
        Settings(attention="8bit")


def test_it_is_chosen_unasked_only_where_it_says_so_and_is_lossless() -> None:
    def chosen(**more: Any) -> str:
        unregister = register(attention_backends={"theirs": replace(EIGHT_BITS, **more)})
        try:
            pipe = tiny.tiniest()
            plan = optimize(pipe, width=64, height=64, device="cpu")
            restore(pipe)
            return str(plan.settings.attention)
        finally:
            unregister()

    lossless = {"fidelity": Fidelity.ROUNDING, "held_bytes": lambda problem: 0}
    assert chosen(before="sdpa", **lossless) == "theirs"
    assert chosen(**lossless) != "theirs" and chosen(before="sdpa") != "theirs"
    assert chosen(before="sdpa", why_not=lambda problem: "never", **lossless) != "theirs"
