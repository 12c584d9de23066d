"""Wheels for a machine without a network: nothing that is needed is missing, and what torch brings is not carried."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def gpu_pack() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_pack", ROOT / "tools" / "gpu_pack.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, name: str, *requires: str) -> None:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", *(f"Requires-Dist: {one}" for one in requires)]
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}-1.dist-info/METADATA", "\n".join(lines) + "\n")


def test_what_is_lacking(gpu_pack: ModuleType, tmp_path: Path) -> None:
    def lacking(python: str = "3.12", there: tuple[str, ...] = ()) -> dict[str, str]:
        return {name: str(spec) for name, spec in gpu_pack.lacking(tmp_path, python, there, ["Painter"]).items()}

    assert lacking() == {"painter": ""}
    wheel(
        tmp_path, "painter", "torch>=2", "sympy", "hf-xet", "brush>=2", 'tomli; python_version < "3.11"',
        'colours[oil]<3; sys_platform == "linux"', 'registry; sys_platform == "win32"', 'frame; extra == "hung"',
    )  # fmt: skip
    assert lacking() == {"brush": ">=2", "colours": "<3"}
    assert set(lacking("3.10")) == {"brush", "colours", "tomli"}
    assert set(lacking(there=("Brush",))) == {"colours"}
    wheel(tmp_path, "brush")
    wheel(tmp_path, "colours", 'linseed; extra == "oil"', 'gouache; extra == "water"')
    assert lacking() == {"linseed": ""}
    wheel(tmp_path, "linseed", "painter")
    assert lacking() == {}


def test_all_that_is_imported_is_wanted(gpu_pack: ModuleType) -> None:
    """Of the measurements without their charts, and of tests that need a GPU with what they share."""
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks" / "gpu").glob("*.py")]
    files += [*(ROOT / "benchmarks" / "commands").glob("*.py"), ROOT / "tests" / "conftest.py"]
    files += [ROOT / "sd_lowvram" / name for name in ("commands/program.py", "checkpoints/load.py")]
    files += [test for test in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in test.read_text(encoding="utf-8")]
    own = {path.stem for path in (ROOT / "tests").rglob("*.py")} | {"sd_lowvram", "benchmarks"}
    environment = gpu_pack.target(f"3.{sys.version_info.minor}")
    carried = {*gpu_pack.WANTED, *gpu_pack.brought_by(["torch"], environment)}
    carried |= {"xformers"}  # a backend where it is installed
    carried |= {"mmgp", "diffusers-dynamic-offloader", "aircanvas"}  # peers: installed manually where they are measured
    names = importlib.metadata.packages_distributions()
    for file in files:
        for module in imported(file) - own - set(sys.stdlib_module_names):
            assert carried & {name.lower().replace("_", "-") for name in names.get(module, [module])}, (file, module)


def imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_there_is_no_pack(
    gpu_pack: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            gpu_pack.main([str(tmp_path), *arguments])
        return str(end.value)

    assert "3.10" in said("--python", "2.7")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel(tmp_path, "old")
    assert "Python 3.12" in said("--python", "3.12")
    assert not list(tmp_path.iterdir())  # an old one must not be taken for a part of it


def test_one_file_is_carried(
    gpu_pack: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_pack, "WANTED", ("numpy", "painter"))
    monkeypatch.setattr(gpu_pack, "_download", lambda folder, python, names: [wheel(folder, name) for name in asked])
    monkeypatch.setattr(gpu_pack, "tree", lambda: ["Makefile", "removed.py", "sd_lowvram/__init__.py"])
    asked, folder, file = ["numpy", "painter"], tmp_path / "pack", tmp_path / "pack.tar.gz"

    def packed(*arguments: str) -> set[str]:
        gpu_pack.main([str(folder), "--python", "3.12", *arguments])
        assert str(file) in capsys.readouterr().out
        with tarfile.open(file) as archive:
            return {name.removeprefix("sd-lowvram/") for name in archive.getnames()}

    own = {"COMMIT", "Makefile", "sd_lowvram/__init__.py"}
    assert packed() == own | {"gpu-pack/numpy-1-py3-none-any.whl", "gpu-pack/painter-1-py3-none-any.whl"}
    asked = ["painter"]
    assert packed("--there", "numpy") == own | {"gpu-pack/painter-1-py3-none-any.whl"}
    with pytest.raises(SystemExit, match=r"painter .*GPU_HAS="):
        packed("--there", "numpy", "--most", "0")
    assert not file.exists()


def test_what_is_there_brings_what_it_requires(gpu_pack: ModuleType) -> None:
    brought = gpu_pack.brought_by(["Transformers"], gpu_pack.target("3.12"))
    assert {"transformers", "numpy", "tokenizers"} <= brought and "diffusers" not in brought


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="of a checkout")
def test_the_tree_is_small(gpu_pack: ModuleType) -> None:
    """With the wheels that torch and transformers leave to be carried, 16 MiB, it stays below 25 MiB, unpacked too."""
    paths = gpu_pack.tree()
    assert "Makefile" in paths and not any(path.endswith(".safetensors") for path in paths)
    assert sum((ROOT / path).stat().st_size for path in paths if (ROOT / path).exists()) < 8 << 20
