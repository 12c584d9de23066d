"""Faults planted in our code, each of which its own tests must see: ``python tests/faults/planted.py [WORD...]``.

``tests/data/planted.jsonl`` holds a fault a line: the file, a text that occurs once in it, by what it is replaced, and
the tests that see it. Each fault is planted in a copy of the tree, where its own tests alone run. Seen is what a test
fails by that ran; tests that cannot be collected, or are rare, have seen nothing. A WORD names faults that have it in
their line.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "planted.jsonl"
_LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "gpu-pack*", "results", Path(sys.prefix).name)
_LIBRARIES = ["torch", "diffusers.models", "diffusers.pipelines.stable_diffusion", "transformers.models.clip", "pytest"]
_LIBRARIES += ["hypothesis", "typer.testing", "PIL.Image", "torch._dynamo"]
"""Imported once, for all faults: that takes longer than most of the tests."""
_ENDS = {0: "NOBODY", 1: "seen"}
"""Outcomes by pytest's exit code, 1 being that tests ran and failed."""

Fault = dict[str, str]


def faults() -> list[Fault]:
    """All faults, but those of packages that were taken out of the tree."""
    found = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    return [one for one in found if (ROOT / one["file"]).parent.is_dir()]


def with_fault(fault: Fault) -> str:
    """The file's text with the fault in it.

    Raises:
        ValueError: the text that is replaced occurs never or more than once.
    """
    text = (ROOT / fault["file"]).read_text(encoding="utf-8")
    if (count := text.count(fault["text"])) != 1:
        raise ValueError(f"{fault['file']} has {fault['text']!r} {count} times: name a text that occurs once")
    return text.replace(fault["text"], fault["by"])


def tested(tree: Path, tests: list[str]) -> tuple[int, str]:
    """Pytest's exit code for some tests in a tree, and its output; once in a process."""
    import pytest

    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    kept = [one for one in sys.path if not Path(one).is_relative_to(ROOT) or Path(one).is_relative_to(sys.prefix)]
    sys.path[:] = [str(tree), *kept]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(["-qx", "-p", "no:cacheprovider", "-m", "not rare", *tests])
    return int(code), output.getvalue()


def planted(tree: Path, fault: Fault) -> tuple[Fault, str, float]:
    """Outcome of ``fault`` in a copy of ``tree``, and the seconds it took."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = shutil.copytree(tree, Path(folder, "tree"), symlinks=True)
        (copy / fault["file"]).write_text(with_fault(fault), encoding="utf-8")
        code, _ = tested(copy, fault["tests"].split())
    return fault, _ENDS.get(code, f"NOT RUN, {code}"), time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults, and see whether their tests fail.")
    parser.add_argument("words", nargs="*", metavar="WORD", help="faults that have one of these in their line")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    asked = parser.parse_args()
    chosen = [one for one in faults() if not asked.words or any(word in json.dumps(one) for word in asked.words)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LIBRARIES)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder, context.Pool(asked.jobs, maxtasksperchild=1) as pool:
        tree = shutil.copytree(ROOT, Path(folder, "tree"), ignore=_LEFT_OUT, symlinks=True)
        code, output = pool.apply(tested, (tree, list(dict.fromkeys(" ".join(one["tests"] for one in chosen).split()))))
        if code:
            print(output, "these tests must pass without a fault", sep="\n")
            return 1
        bad = 0
        for fault, end, seconds in pool.imap_unordered(functools.partial(planted, tree), chosen):
            bad += end != "seen"
            print(f"{end:6} {seconds:5.1f} s  {fault['file']}: {fault['text']!r} -> {fault['by']!r}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} faults are seen")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
