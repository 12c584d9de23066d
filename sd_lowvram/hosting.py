"""Puts the adapters into a host: ComfyUI's custom_nodes/ or a WebUI's extensions/, as a link or as a copy.

A checkout is linked, so that an update of it is one of the host's too. An installed package carries the adapters as
data and is copied. Neither touches the host's own packages.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import BadInputError, OutputError

NAME = "sd-lowvram"
_MARK = ".installed-by-sd-lowvram"
_PACKAGE = Path(__file__).parent
_DATA = "host"
"""The folder of the package's data in which a wheel carries the adapters."""


@dataclass(frozen=True)
class Host:
    """A program into which the package is installed: the marks of its folder, and its folder for extensions."""

    title: str
    signs: tuple[str, ...]
    folder: str
    parts: tuple[str, ...]


HOSTS = {
    "comfyui": Host(
        "ComfyUI",
        ("main.py", "nodes.py", "comfy"),
        "custom_nodes",
        (
            "__init__.py",
            "nodes",
            "web",
            "example_workflows",
            "locales",
            "subgraphs",
            "pyproject.toml",
            "LICENSE",
            "NOTICE",
        ),
    ),
    "webui": Host(
        "AUTOMATIC1111's, Forge's, Forge Neo's or reForge's WebUI",
        ("launch.py", "webui.py", "modules"),
        "extensions",
        ("scripts", "webui_ext", "install.py", "metadata.ini", "LICENSE", "NOTICE"),
    ),
}


def install(name: str, path: Path) -> tuple[Path, str]:
    """Link or copy the adapter into the host at ``path``; a copy of ours that is there is renewed, once the new one is
    whole.

    Returns:
        The place, and "linked", "copied" or "there already".

    Raises:
        BadInputError: no such host, or something else of our name is there. OutputError: the place cannot be written.
    """
    host = _check_place(name, path)
    place = path / host.folder / NAME
    checkout = _PACKAGE.parent
    source = checkout if (checkout / host.parts[0]).exists() else _PACKAGE / "data" / _DATA
    if not (source / host.parts[0]).exists():
        raise BadInputError(f"this installation of sd-lowvram carries no adapters ({source}): install the wheel again")
    if os.path.lexists(place):
        if place.resolve() == source.resolve():
            return place, "there already"
        _check_ours(place)
    new, old = (place.with_name(f".{NAME}{age}.disabled") for age in ("", "-old"))  # names that hosts pass over
    try:
        place.parent.mkdir(exist_ok=True)
        for left in (new, old):  # by an installation that was ended
            _remove(left)
        linked = source == checkout and _try_link(new, source)
        try:
            if not linked:
                _copy(source, host.parts, new)
            _put(new, place, old)
        finally:
            _remove(new)
    except OSError as error:
        raise OutputError(f"{place} cannot be written: {error.strerror or error}") from None
    return place, "linked" if linked else "copied"


def uninstall(name: str, path: Path) -> Path:
    """Take off what :func:`install` put into the host at ``path``; returns where it was.

    Raises:
        BadInputError: no such host, nothing is there, or something that we did not put there.
    """
    place = path / _check_place(name, path).folder / NAME
    if not os.path.lexists(place):
        raise BadInputError(f"sd-lowvram is not installed in {path}: there is no {place}")
    _check_ours(place)
    try:
        _remove(place)
    except OSError as error:
        raise OutputError(f"{place} cannot be removed: {error.strerror or error}") from None
    return place


def _check_place(name: str, path: Path) -> Host:
    host = HOSTS.get(name)
    if host is None:
        raise BadInputError(f"host {name!r} is unknown: choose one of {', '.join(HOSTS)}")
    if not path.is_dir():
        raise BadInputError(f"{path} is not a folder: give the one that {host.title} is in")
    missing = [sign for sign in host.signs if not (path / sign).exists()]
    if missing:
        raise BadInputError(
            f"{path} does not look like {host.title}: it has no {', '.join(missing)}; give the folder that has them"
        )
    return host


def _try_link(place: Path, source: Path) -> bool:
    """Return True if a link could be made; Windows allows it to some users only."""
    try:
        place.symlink_to(source, target_is_directory=True)
    except (OSError, NotImplementedError):
        return False
    return True


def _copy(source: Path, parts: tuple[str, ...], new: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", _DATA)
    new.mkdir()
    (new / _MARK).write_text("made by sd-lowvram install, and removed by --uninstall\n", encoding="ascii")
    shutil.copytree(_PACKAGE, new / _PACKAGE.name, ignore=ignore)
    for name in parts:
        path = source / name
        if path.is_dir():
            shutil.copytree(path, new / name, ignore=ignore)
        elif path.exists():
            shutil.copy2(path, new / name)


def _put(new: Path, place: Path, old: Path) -> None:
    """Rename ``new`` to ``place``, and remove what was there; if that fails, what was there stays."""
    if not os.path.lexists(place):
        new.rename(place)
        return
    place.rename(old)
    try:
        new.rename(place)
    except BaseException:
        old.rename(place)
        raise
    _remove(old)


def _check_ours(place: Path) -> None:
    if not place.is_symlink() and not (place / _MARK).exists():
        raise BadInputError(f"{place} was not put there by sd-lowvram install: remove or rename it first")


def _remove(place: Path) -> None:
    """Remove a link or a folder, if it is there."""
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)
