"""One file for a machine that has torch for CUDA and no network: this tree, and what `make gpu` needs there as wheels.

    python tools/gpu_pack.py gpu-pack --python 3.12 --there transformers

collects the wheels in ``gpu-pack`` and writes ``gpu-pack.tar.gz``. What is needed is read from the wheels themselves:
each names what it requires, down to what torch, and whatever else is there, brings along. The versions are those of
constraints.txt where they hold for the other machine's Python. Of the tree all files go that git knows, as they are
now, but for the demo model's: on a card all is measured with random weights.
"""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
MOST_MIB = 25
LEFT_OUT = "sd_lowvram/demo/model/"
"""Four fifths of the tree."""
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


def brought_by(names: Iterable[str], environment: dict[str, str]) -> set[str]:
    """``names`` and all that is installed with them, on the other machine too, as far as they are known here."""
    found: set[str] = set()
    waiting = [str(canonicalize_name(name)) for name in names]
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
        there: names of what the other machine has besides torch; what they require is there too.
    """
    environment = target(python)
    there = brought_by(("torch", *there), environment) | UNUSED
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


def collect(folder: Path, python: str, there: Iterable[str] = ()) -> None:
    """Fill ``folder`` with the wheels, none from before among them.

    Args:
        python: the version of the machine with the GPU, such as "3.12".
        there: names of what it has besides torch.

    Raises:
        PackError: no such Python, no index, or a wheel that is not to be had.
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


def tree() -> list[str]:
    """Of this checkout, what is carried: paths below its root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise PackError(f"{ROOT} is no checkout of git's, which knows what belongs to the tree")
    return [path for path in listed.stdout.split("\0") if path and not path.startswith(LEFT_OUT)]


def _commit() -> bytes:
    asked = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, check=False).stdout or b"unknown"


def carried(folder: Path, most_bytes: int) -> Path:
    """The tree with the wheels of ``folder`` in its gpu-pack/ and its commit in COMMIT, as one file next to ``folder``.

    Raises:
        PackError: no checkout, or it has more than ``most_bytes``.
    """
    file, wheels = folder.with_name(f"{folder.name}.tar.gz"), sorted(folder.glob("*.whl"))
    paths = [(ROOT / path, path) for path in tree() if (ROOT / path).exists()]
    with tarfile.open(file, "w:gz") as archive:
        for source, path in [*paths, *((wheel, f"gpu-pack/{wheel.name}") for wheel in wheels)]:
            archive.add(source, f"sd-lowvram/{path}", recursive=False)
        entry = tarfile.TarInfo("sd-lowvram/COMMIT")
        entry.size = len(number := _commit())
        archive.addfile(entry, io.BytesIO(number))
    if file.stat().st_size > most_bytes:
        size, largest = file.stat().st_size, sorted(wheels, key=lambda wheel: -wheel.stat().st_size)[:4]
        file.unlink()
        told = ", ".join(f"{one.name.partition('-')[0]} {one.stat().st_size / 2**20:.1f}" for one in largest)
        raise PackError(
            f"it has {size / 2**20:.1f} MiB, more than {most_bytes >> 20}: its largest wheels are {told}; "
            "GPU_HAS= (--there) names what the other machine has already, GPU_MOST= (--most) another limit"
        )
    return file


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Pack this tree with what `make gpu` needs beside torch for CUDA.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=f"3.{sys.version_info.minor}", help="of the machine with the GPU")
    parser.add_argument("--there", nargs="+", default=(), metavar="NAME", help="what it has besides torch")
    parser.add_argument("--most", type=int, default=MOST_MIB, metavar="MIB", help="that can be carried")
    asked = parser.parse_args(arguments)
    try:
        collect(asked.folder, asked.python, asked.there)
        file = carried(asked.folder, asked.most << 20)
    except PackError as error:
        sys.exit(f"no pack: {error}")
    sizes = [wheel.stat().st_size for wheel in asked.folder.glob("*.whl")]
    print(
        f"{file}: {file.stat().st_size / 2**20:.1f} MiB, {len(sizes)} wheels of {sum(sizes) / 2**20:.1f} MiB among it, "
        f"for Python {asked.python} on Linux x86_64"
    )


if __name__ == "__main__":
    main()
