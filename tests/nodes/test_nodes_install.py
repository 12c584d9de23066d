"""``sd-lowvram install``: links from a checkout, copies from a wheel, refuses what is no host, and comes off again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from comfy_host import ROOT
from typer.testing import CliRunner

from sd_lowvram import hosting as adapters
from sd_lowvram.cli import app
from sd_lowvram.errors import BadInputError, OutputError
from sd_lowvram.hosting import HOSTS

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = None


@pytest.fixture(params=HOSTS)
def host(request, tmp_path) -> tuple[str, Path]:
    """A folder that looks like the host."""
    for sign in HOSTS[request.param].signs:
        (tmp_path / sign).mkdir() if "." not in sign else (tmp_path / sign).touch()
    return request.param, tmp_path


@pytest.fixture
def wheel(tmp_path_factory, monkeypatch) -> Path:
    """The package as a wheel unpacks it, with the adapters among its data."""
    package = tmp_path_factory.mktemp("site-packages") / "sd_lowvram"
    data = package / "data" / "host"
    data.mkdir(parents=True)
    (package / "__init__.py").touch()
    for part in {part for one in HOSTS.values() for part in one.parts}:
        source = ROOT / part
        shutil.copytree(source, data / part) if source.is_dir() else shutil.copy(source, data / part)
    monkeypatch.setattr(adapters, "_PACKAGE", package)
    return package


def test_a_checkout_is_linked_and_comes_off(host) -> None:
    name, path = host
    place, done = adapters.install(name, path)
    assert done == "linked" and place.resolve() == ROOT and place.parent == path / HOSTS[name].folder
    assert adapters.install(name, path) == (place, "there already")
    assert adapters.uninstall(name, path) == place
    assert not list(place.parent.iterdir()) and (ROOT / "nodes").is_dir()


def test_a_wheel_is_copied_renewed_and_comes_off(host, wheel) -> None:
    name, path = host
    place, done = adapters.install(name, path)
    assert done == "copied" and not place.is_symlink()
    assert all((place / part).exists() for part in (*HOSTS[name].parts, "sd_lowvram/__init__.py"))
    assert not (place / "sd_lowvram" / "data" / "host").exists()
    (place / "old.py").touch()
    assert adapters.install(name, path)[1] == "copied"
    assert not (place / "old.py").exists() and len(list(place.parent.iterdir())) == 1
    adapters.uninstall(name, path)
    assert not list(place.parent.iterdir())


def test_where_links_are_not_allowed_a_checkout_is_copied(host, wheel, monkeypatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(1314, "a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    assert adapters.install(*host)[1] == "copied"


def test_a_copy_that_fails_leaves_nothing(host, wheel, monkeypatch) -> None:
    name, path = host

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(adapters.shutil, "copytree", full)
    with pytest.raises(OutputError, match="No space left"):
        adapters.install(name, path)
    assert not list((path / HOSTS[name].folder).iterdir())


@pytest.mark.parametrize("fails", ["copytree", "rename"])
def test_a_renewal_that_fails_leaves_what_was_there(host, wheel, monkeypatch, fails: str) -> None:
    """The next one, with space, leaves the new copy alone."""
    name, path = host
    place, _ = adapters.install(name, path)
    (place / "old.py").touch()
    rename = Path.rename

    def full(source: Path, *args: object, **kwargs: object) -> Path:
        if source == place or "old" in source.name:
            return rename(source, *args, **kwargs)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*(adapters.shutil, "copytree") if fails == "copytree" else (Path, "rename"), full)
        with pytest.raises(OutputError, match="No space left"):
            adapters.install(name, path)
    assert (place / "old.py").exists() and list(place.parent.iterdir()) == [place]
    assert adapters.install(name, path) == (place, "copied")
    assert not (place / "old.py").exists() and list(place.parent.iterdir()) == [place]


def test_a_link_gives_way_to_a_copy(host, wheel) -> None:
    name, path = host
    place = path / HOSTS[name].folder / "sd-lowvram"
    place.parent.mkdir()
    place.symlink_to(path / "moved away", target_is_directory=True)
    assert adapters.install(name, path) == (place, "copied") and not place.is_symlink()
    assert list(place.parent.iterdir()) == [place]


def test_what_somebody_else_put_there_stays(host) -> None:
    name, path = host
    theirs = path / HOSTS[name].folder / "sd-lowvram"
    theirs.mkdir(parents=True)
    for act in (adapters.install, adapters.uninstall):
        with pytest.raises(BadInputError, match="not put there"):
            act(name, path)
    assert theirs.is_dir()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["comfyui", "{empty}"], "main.py, nodes.py, comfy"),
        (["webui", "{empty}/none"], "is not a folder"),
        (["gimp", "{empty}"], "comfyui, webui"),
    ],
)
def test_bad_input_ends_with_two(arguments, word, tmp_path) -> None:
    done = CliRunner().invoke(app, ["install", *(one.format(empty=tmp_path) for one in arguments)])
    assert done.exit_code == 2
    assert word in done.output.replace("\n", " ")


def test_the_command(host) -> None:
    name, path = host
    done = CliRunner().invoke(app, ["install", name, str(path), "--json"])
    assert done.exit_code == 0 and json.loads(done.output)["done"] == "linked"
    assert CliRunner().invoke(app, ["install", name, str(path), "--uninstall"]).exit_code == 0
    again = CliRunner().invoke(app, ["install", name, str(path), "--uninstall"])
    assert again.exit_code == 2 and "not installed" in again.output


@pytest.mark.skipif(tomllib is None, reason="tomllib came with Python 3.11")
def test_the_wheel_carries_every_part() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    carried = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    parts = {part for one in HOSTS.values() for part in one.parts}
    assert carried == {part: f"sd_lowvram/data/host/{part}" for part in sorted(parts)}
    assert all((ROOT / part).exists() for part in parts)
