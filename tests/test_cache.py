"""The cache: what is not as it was written is not used, nor what other users could write; it never ends a command."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from typer.testing import CliRunner

from sd_lowvram import Settings, attached, cache
from sd_lowvram.checkpoints.architectures import write_folder
from sd_lowvram.cli import app
from sd_lowvram.kernels import compiler

ROOT = Path(__file__).parents[1]
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system knows no owners of files")


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_folder(families.config("sd15"), "StableDiffusionPipeline", path)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def words(model: Path) -> list[str]:
    """Arguments of a plan whose policy decides all knobs, so that of each stage one way alone is traced."""
    asked = ["--gpu", "rtx2070", "--vram", "1GB", "--ram", "4GB", "--policy", "diffusers-default"]
    return ["plan", "--model", str(model), *asked, "--json"]


def planned(model: Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, words(model))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def changed(file: Path, change: Callable[[Any], Any]) -> str:
    """Contents of a file whose value is of another type than what was written."""
    known = json.loads(file.read_text())
    known["value"] = change(known["value"])
    return json.dumps(known)


CONTENTS: dict[str, Callable[[Path], str | bytes]] = {
    "nothing": lambda file: "",
    "no JSON": lambda file: "no json",
    "no text": lambda file: b"\xff\xfe\x00",
    "nested": lambda file: "[" * 100_000,
    "null": lambda file: "null",
    "number": lambda file: "5",
    "string": lambda file: '"x"',
    "list": lambda file: "[1]",
    "table": lambda file: "{}",
    "cut": lambda file: file.read_bytes()[:-20],
    "longer": lambda file: file.read_bytes() + b" ",
    "one byte": lambda file: file.read_bytes().replace(b"1", b"2", 1),
    "value is a number": lambda file: changed(file, lambda _: 5),
    "value of tables without names": lambda file: changed(file, lambda _: [{}]),
    "value of nulls": lambda file: changed(file, lambda value: dict.fromkeys(value) if type(value) is dict else [0]),
    "large": lambda file: b" " * (cache.MOST_BYTES + 1),
}  # fmt: skip


@pytest.mark.slow(5)
def test_damaged_files_are_as_if_they_were_not_there(model: Path, folder: Path) -> None:
    first = planned(model)
    files = sorted(folder.rglob("*.json"))
    assert {file.parent.name for file in files} == {"plans", "traces"}
    whole = {file: file.read_bytes() for file in files}
    for name, content in CONTENTS.items():
        for file in (
            files if name in ("nested", "value of nulls") else [one for one in files if one.parent.name == "plans"]
        ):
            made = content(file)
            file.write_bytes(made.encode() if isinstance(made, str) else made)
        assert planned(model) == first, name
        assert {file: file.read_bytes() for file in files} == whole, name


MADE: list[Callable[[Path], Any]] = [
    getattr(os, "mkfifo", Path.touch),
    lambda file: file.symlink_to("/dev/zero"),
    Path.mkdir,
]


COUNTED = """
import os, resource, sys
os.environ["SD_LOWVRAM_CACHE"] = sys.argv.pop(1)
from sd_lowvram.__main__ import main
try:
    main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@posix
@pytest.mark.slow(4)
def test_what_is_no_file_is_not_read(model: Path, folder: Path, forked: Any) -> None:
    """A pipe that nobody writes to, a link to zeros without end: in a process of its own, whose memory is counted."""

    def run() -> tuple[Any, int]:
        done = forked(COUNTED, folder, *words(model), folder=ROOT)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), int(done.stderr.splitlines()[-1])

    first, usual = run()
    files = sorted(folder.rglob("*.json"))
    for file, make in zip(files, itertools.cycle(MADE)):
        file.unlink()
        make(file)
    again, taken = run()
    assert again == first and taken < 1.2 * usual
    assert not list(folder.rglob("tmp*"))
    assert all(stat.S_ISREG(file.lstat().st_mode) or file.is_dir() for file in files)


@posix
def test_folders_and_files_are_the_users_alone(model: Path, folder: Path) -> None:
    mask = os.umask(0)
    try:
        planned(model)
        with attached(tiny.tiniest().unet, Settings(traced=True), device="cpu"):
            pass
    finally:
        os.umask(mask)
    made = [folder, *folder.rglob("*")]
    assert len(made) > 4
    assert {stat.S_IMODE(one.stat().st_mode) for one in made if one.is_dir()} == {0o700}
    assert {stat.S_IMODE(one.stat().st_mode) for one in made if one.is_file()} == {0o600}


def traced(unet: Any) -> torch.Tensor:
    given = torch.ones(1, 4, 8, 8), torch.tensor(5), torch.ones(1, 7, unet.config.cross_attention_dim)
    with attached(unet, Settings(traced=True), device="cpu"), torch.inference_mode():
        return [unet(*given).sample for _ in range(3)][-1]


@posix
def test_folders_that_a_group_may_write_are_tightened(folder: Path, monkeypatch: Any) -> None:
    """Code that other users could have changed by then is made anew; what they could only read stays."""
    traced(tiny.tiniest().unet)
    (file,) = folder.rglob("*.pt")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    read = []
    monkeypatch.setattr(torch.jit, "load", lambda data, load=torch.jit.load: read.append(1) or load(data))
    for mode, loads in ((0o600, True), (0o660, False)):
        read.clear()
        folder.chmod(0o775)
        file.parent.chmod(0o777)
        file.chmod(mode)
        traced(tiny.tiniest().unet)
        assert {stat.S_IMODE(one.stat().st_mode) for one in (folder, file.parent)} == {0o700}
        assert bool(read) == loads and stat.S_IMODE(file.stat().st_mode) == 0o600


@posix
def test_a_folder_of_another_user_is_not_used(model: Path, folder: Path, monkeypatch: Any) -> None:
    """The reason is shown once, and the plan is the same."""
    first = planned(model)
    before = {one: one.stat().st_mtime_ns for one in folder.rglob("*")}
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    cache._warn_of_owner.cache_clear()
    told = [CliRunner().invoke(app, words(model)) for _ in range(2)]
    assert [json.loads(one.stdout) for one in told] == [first, first]
    assert re.search(f"note: .*{re.escape(str(folder))}: ", told[0].stderr)
    assert not told[1].stderr
    assert {one: one.stat().st_mtime_ns for one in folder.rglob("*")} == before


@posix
def test_code_of_another_user_in_the_users_own_folder_is_not_run(folder: Path, monkeypatch: Any) -> None:
    """Neither a trace nor the folder of torch's compiler, where one file in it is enough."""
    traced(tiny.tiniest().unet)
    (file,) = folder.rglob("*.pt")
    compiled = folder / "compiled"
    (compiled / "ab").mkdir(parents=True)
    (compiled / "ab" / "code.py").touch()
    foreign = {file.stat().st_ino, (compiled / "ab" / "code.py").stat().st_ino}

    def is_own(path: Path, about: os.stat_result, is_own: Any = cache._is_own) -> bool:
        return is_own(path, os.stat_result((*about[:4], -2, *about[5:])) if about.st_ino in foreign else about)

    monkeypatch.setattr(cache, "_is_own", is_own)
    monkeypatch.setattr(torch.jit, "load", lambda _: pytest.fail("it was run"))
    compiler._make_private.cache_clear()
    cache._warn_of_owner.cache_clear()
    with pytest.warns(UserWarning, match=f"{file.name}: "):
        traced(tiny.tiniest().unet)
    with pytest.warns(UserWarning, match="code.py"), compiler.compiling():
        used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder not in used.parents and stat.S_IMODE(used.stat().st_mode) == 0o700
    compiler._make_private.cache_clear()


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("SD_LOWVRAM_CACHE", "~/x")
    assert cache.cache_folder() == tmp_path / "x"
    monkeypatch.setenv("SD_LOWVRAM_CACHE", "~nobody-of-this-name/x")
    assert cache.cache_folder() == Path("~nobody-of-this-name/x")


def test_a_machine_without_a_home_caches_nothing(monkeypatch: Any) -> None:
    def missing() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("SD_LOWVRAM_CACHE", "LOCALAPPDATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", missing)
    assert cache.cache_folder() is None


def test_a_package_of_kernels_that_is_installed_makes_other_places(folder: Path, monkeypatch: Any) -> None:
    """Else a plan of before would not take Triton or xformers, or go on to take what is gone."""
    version, installed = importlib.metadata.version, set()

    def known(package: str) -> str:
        if package in ("triton", "triton-windows", "pytorch-triton", "xformers") and package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0" if package in installed else version(package)

    monkeypatch.setattr(importlib.metadata, "version", known)
    places = []
    try:
        for package in (None, "triton", "xformers"):
            installed.clear()
            installed.add(package)
            cache.code_digest.cache_clear()
            places.append(cache.place_of("plans", lambda: "a plan"))
    finally:
        cache.code_digest.cache_clear()
    assert len(set(places)) == 3
