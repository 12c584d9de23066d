"""Wheels for a machine that has torch for CUDA and no network: all that `make gpu` needs there beside torch.

    python tools/gpu_pack.py gpu-pack --python 3.12

What is needed is read from the wheels themselves: each names what it requires, down to what torch brings along. The
versions are those of constraints.txt where they hold for the other machine's Python.
"""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 60 << 20
WANTED = (
    "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy", "pillow", "psutil", "nvidia-ml-py",
    "typer", "rich", "pytest", "hypothesis",
)  # fmt: skip
"""What this project and its tests for a GPU import; `tests/test_gpu_pack.py` holds it against the sources."""
UNUSED = {"hf-xet"}
"""Required by name, and imported only while something is downloaded."""
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
_PYTHON = re.compile(r"3\.(\d+)")


class PackError(Exception):
    """Why there is no pack, in a sentence."""


def target(python: str) -> dict[str, str]:
    """What markers are asked of: Linux on x86_64 with that Python."""
    return {
        **{name: str(value) for name, value in default_environment().items()},
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }


def applying(lines: Iterable[str], environment: dict[str, str], extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """Of lines such as ``idna>=2; python_version < "3.12"``, the requirements that count."""
    for requirement in map(Requirement, lines):
        asked = [environment | {"extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(map(requirement.marker.evaluate, asked)):
            yield requirement


def brought_by_torch(environment: dict[str, str]) -> set[str]:
    """The names of torch and of all that is installed with it, on the other machine too."""
    found: set[str] = set()
    waiting = ["torch"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            lines = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue  # a library of CUDA, where torch here is the build for the CPU
        waiting += [canonicalize_name(one.name) for one in applying(lines, environment)]
    return found


def lacking(folder: Path, python: str, there: Iterable[str], wanted: Iterable[str]) -> dict[str, SpecifierSet]:
    """What ``wanted``, and the wheels in ``folder``, require and do not find there; empty where the pack is complete.

    Args:
        there: names of what the other machine has besides torch.
    """
    environment = target(python)
    there = brought_by_torch(environment) | UNUSED | {canonicalize_name(name) for name in there}
    wheels = {canonicalize_name(metadata["Name"]): metadata for metadata in map(_metadata, folder.glob("*.whl"))}
    needed: dict[str, SpecifierSet] = {}
    waiting = [Requirement(name) for name in wanted]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), tuple(sorted(requirement.extras))
        if name in there:
            continue
        if name not in wheels:
            needed[name] = needed.get(name, SpecifierSet()) & requirement.specifier
        elif (name, extras) not in seen:
            seen.add((name, extras))
            waiting += applying(wheels[name].get_all("Requires-Dist") or (), environment, extras)
    return needed


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return email.message_from_bytes(archive.read(name))


def collect(folder: Path, python: str, there: Iterable[str] = ()) -> int:
    """Fill ``folder`` with the wheels, none from before among them; returns their bytes.

    Args:
        python: the version of the machine with the GPU, such as "3.12".
        there: names of what it has besides torch.

    Raises:
        PackError: no such Python, no index, a wheel that is not to be had, or more than ``MOST_BYTES``.
    """
    if not _PYTHON.fullmatch(python) or int(python[2:]) < 10:
        raise PackError(f"--python {python}: a version such as 3.12 is needed, 3.10 or newer")
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = applying((line for line in lines if line and not line.startswith("#")), target(python))
    pins = {str(canonicalize_name(one.name)): one.specifier for one in tested}
    before: dict[str, SpecifierSet] = {}
    while missing := lacking(folder, python, there, WANTED):
        if missing == before:
            raise PackError(f"what was downloaded for {', '.join(sorted(missing))} goes by other names")
        _download(folder, python, [f"{name}{pins.get(name, versions)}" for name, versions in sorted(missing.items())])
        before = missing
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if size > MOST_BYTES:
        raise PackError(f"{folder} has {size / 2**20:.0f} MiB, more than {MOST_BYTES >> 20} MiB")
    return size


def _download(folder: Path, python: str, requirements: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", f"--dest={folder}"]
    command += [f"--platform={name}" for name in _PLATFORMS]
    run = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if run.returncode:
        last = [line for line in run.stderr.splitlines() if line.startswith("ERROR")][-1:] or run.stderr.splitlines()[
            -1:
        ]
        raise PackError(f"not all wheels for Python {python} are to be had ({''.join(last).removeprefix('ERROR: ')})")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Collect the wheels that `make gpu` needs beside torch for CUDA.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=f"3.{sys.version_info.minor}", help="of the machine with the GPU")
    parser.add_argument("--there", nargs="+", default=(), metavar="NAME", help="what it has besides torch")
    asked = parser.parse_args(arguments)
    try:
        size = collect(asked.folder, asked.python, asked.there)
    except PackError as error:
        sys.exit(f"no pack: {error}")
    count = len(list(asked.folder.glob("*.whl")))
    print(f"{asked.folder}: {count} wheels, {size / 2**20:.0f} MiB, for Python {asked.python} on Linux x86_64")


if __name__ == "__main__":
    main()
