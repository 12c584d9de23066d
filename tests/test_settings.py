"""Knobs and sizes: what they take, what they refuse, and what they say then."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sd_lowvram
from sd_lowvram import Fidelity, Settings, register
from sd_lowvram.errors import BadInputError, SettingsError
from sd_lowvram.settings import SURFACES, Knob, conflict, knobs
from sd_lowvram.units import GIB, MIB, format_size, format_time, parse_size

PACKAGE = Path(sd_lowvram.__file__).parent


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("4GB", 4 * GIB),
        ("4 gib", 4 * GIB),
        ("3.5 GiB", 7 * GIB // 2),
        ("3,5g", 7 * GIB // 2),
        ("700 MB", 700 * MIB),
        (4096, 4 * GIB),
        ("4096", 4 * GIB),
        (64, 64 * MIB),
        ("4MB", 4 * MIB),
        ("0.5 MiB", MIB // 2),
        ("123 B", 123),
        ("1.5k", 1536),
    ],
)
def test_sizes_are_read_as_people_write_them(written: Any, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize(
    "written", ["banana", "", "0", 0, "0GB", -1, "-4GB", "4GBB", "1e400", "nan", float("inf"), True]
)
def test_what_is_no_size_is_named(written: Any) -> None:
    with pytest.raises(BadInputError, match="GB"):
        parse_size(written, "vram")


@pytest.mark.parametrize("written", ["4", 4, 63, " 3.5 ", 0.5])
def test_a_number_too_small_to_be_meant_as_mib_asks(written: Any) -> None:
    with pytest.raises(BadInputError, match=f'"{str(written).strip()}GB"\\?'):
        parse_size(written, "vram")


@given(st.integers(1, 1 << 45))
def test_formatted_sizes_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        {"attention": "magic"},
        {"attention_mib": 0},
        {"attention_mib": True},
        {"attention_mib": "8"},
        {"inference_mode": 1},
        {"vae_tiles": True},
        {"precision": "fp8"},
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(SettingsError, match=f"{name}={value!r}"):
        Settings(**wrong)


def test_every_knob_is_whole() -> None:
    for name, knob in knobs().items():
        assert knob.label and knob.help and set(knob.surfaces) <= set(SURFACES), name
        assert knob.choices or knob.type is bool or knob.minimum < knob.maximum, name
        values = knob.choices or (True,) if knob.type is not int else (knob.minimum, knob.maximum)
        for value in values:
            knob.check(name, value)
            assert isinstance(knob.fidelity_of(value), Fidelity), name


def test_the_order_of_knobs_never_changes() -> None:
    saved = "precision attention attention_mib deterministic channels_last inference_mode vae_slices vae_tiles vae_map"
    saved += " vae_strip_mib decoder_device offload"
    names = saved.split(" ")
    assert list(knobs())[: len(names)] == names
    assert [knob.place for knob in knobs().values()] == list(range(len(knobs())))
    unregister = register(knobs={"a_strangers": Knob(label="Toy", help="a toy", fidelity=Fidelity.BITWISE)})
    assert list(knobs())[-1] == "a_strangers" and knobs()["a_strangers"].place > len(knobs())
    unregister()


TOY = '''
def doubled(anatomy, settings, device):
    """What the denoiser predicts, so many times; torch is imported here, as the command line asks for knobs first."""
    from ..patches import wrap

    def around(original, *args, **kwargs):
        return (original(*args, **kwargs | {"return_dict": False})[0] * settings.toy,)

    yield wrap(anatomy.denoiser_module, "forward", around, "toy")


'''
TOY_FIELD = """
    toy: int | None = declare(
        place=32, label="Toy", help="a toy of tests", maximum=9, fidelity=APPROXIMATE, stages=DENOISE, hook=doubled
    )
"""
USES = """
import tiny, torch
from sd_lowvram import Settings, plan, attached

unet = tiny.tiniest().unet
given = torch.randn(2, 4, 8, 8), torch.tensor(5), torch.randn(2, 7, unet.config.cross_attention_dim)
with torch.no_grad():
    before = unet(*given, return_dict=False)[0]
    with attached(unet, Settings(toy=2), device="cpu"):
        assert torch.equal(unet(*given, return_dict=False)[0], before * 2)
    assert torch.equal(unet(*given, return_dict=False)[0], before)
made = plan(unet, width=64, height=64, device="cpu", settings=Settings(toy=2))
assert made.settings.toy == 2 and made.fidelity.name == "APPROXIMATE"
"""


@pytest.mark.slow(20)
def test_a_knob_of_ours_is_one_file(tmp_path: Path) -> None:
    """A copy of the package with one file changed: the knob is a typed field, an option and in plans; its hook acts."""
    package = tmp_path / "sd_lowvram"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("model"))
    file = package / "knobs" / "weights.py"
    before, head, fields = file.read_text().partition("@dataclass(")
    file.write_text(before + TOY + head + fields + TOY_FIELD)
    places = os.pathsep.join([str(tmp_path), *sys.path])
    run = functools.partial(
        subprocess.run,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
    )
    told = run([sys.executable, "-m", "sd_lowvram", "plan", "--help-all"])
    assert "--toy" in told.stdout, told.stderr
    done = run([sys.executable, "-c", USES])
    assert done.returncode == 0, done.stderr


def test_filling_decides_only_what_is_open() -> None:
    settings = Settings(attention="sliced").filled(attention="sdpa", offload="layer")
    assert (settings.attention, settings.offload) == ("sliced", "layer")
    assert Settings(**dataclasses.asdict(settings)) == settings


def test_the_smallest_settings_are_lossless() -> None:
    assert all(knob.fidelity_of(value).lossless for _, knob, value in Settings.smallest().decided())
    assert Fidelity.ROUNDING.lossless and not Fidelity.APPROXIMATE.lossless
    assert max(Fidelity) is Fidelity.APPROXIMATE and str(Fidelity.BITWISE) == "bitwise"


def test_what_excludes_what_is_refused_in_one_sentence() -> None:
    """Each pair that the declarations exclude, in either place, and no other pair."""
    excluded = 0
    for (name, one), (other, two) in itertools.permutations(knobs().items(), 2):
        for mine, its in itertools.product(values_of(one), values_of(two)):
            settings = Settings(**{name: mine, other: its})
            acts = one.excluded_by(mine) & two.acts_of(its) or two.excluded_by(its) & one.acts_of(mine)
            why = conflict(settings)
            assert (why is not None) == bool(acts), settings
            if why is not None:
                excluded += 1
                assert f"{name}={mine!r}" in why and f"{other}={its!r}" in why and "leave one of them off" in why
    assert excluded > 100


@pytest.mark.parametrize(
    "knobs",
    [
        {"compile": "regional", "winograd": True},
        {"traced": True, "packed_weights": True},
        {"cuda_graphs": True, "deterministic": True},
        {"packed_weights": True, "weight_storage": "int8"},
    ],
    ids=str,
)
def test_exclusions_that_hooks_rely_on(knobs: dict[str, Any]) -> None:
    assert conflict(Settings(**knobs)) is not None


def values_of(knob: Knob) -> tuple[Any, ...]:
    if knob.choices:
        return knob.choices
    return (knob.minimum,) if knob.maximum else (False, True)


def test_a_short_time_is_no_time_of_nothing() -> None:
    assert [format_time(seconds) for seconds in (0.0, 0.04, 0.4, 12.0, 200.0)] == [
        "0.0 s",
        "0.04 s",
        "0.4 s",
        "12 s",
        "3 min 20 s",
    ]
