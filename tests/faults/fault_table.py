"""What becomes of a run when something ends it: at each block of the UNet and each group of the decoder, each fault.

``python tests/faults/fault_table.py`` writes ``benchmarks/faults.json`` and ``faults.md``. A run is ``generate`` on the
demo model in a process of its own, its weights streamed from their file and its decoder in strips; the fault comes when
a convolution of the place has run. Either the picture has the bits of an undisturbed run, or the latents are on the
disk and ``resume`` makes that picture of them.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import torch  # noqa: E402
from command_line import ENVIRONMENT, HEAVILY, MAIN  # noqa: E402
from forked import forks_of  # noqa: E402
from PIL import Image  # noqa: E402

from sd_lowvram import progress  # noqa: E402
from sd_lowvram.checkpoints.load import load_pipeline  # noqa: E402
from sd_lowvram.files import table  # noqa: E402

FAULTS = {
    "out of memory": "what is cached is given up, and the call is made again",
    "exception": "an error in a layer",
    "KeyboardInterrupt": "Ctrl-C",
    "SIGTERM": "a request to end",
    "SIGKILL": "`kill -9`",
    "full disk": "nothing can be written from then on",
    "truncated checkpoint": "the weights' file loses all but its beginning",
    "NaN": "one value of what the layer gives, once",
}
RESUMED, SAME = "resumed", "same bits"
_OPTIONS = ("--steps", 4, "--width", 64, "--height", 64, "--seed", 5, "--vram", "2GB", "--latents-every", "1step")
_SETTINGS = ("--offload", "layer", "--vae-tiles", "exact", "--vae-strip-mib", 1)
_FROM_ITS_FILE = ("--ram", "40MB")
"""Less than its weights: most are read where they lie."""
_GENERATE = ("generate", "a red apple", *_OPTIONS, *_SETTINGS, "--model", "model")

FAULTY = """
import os, resource, signal, sys
fault, place = sys.argv.pop(1), sys.argv.pop(1)
import torch
from torch._subclasses.fake_tensor import FakeTensor
from sd_lowvram.commands import paint

calls = []

def come(output):
    if fault == "out of memory":
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    if fault == "exception":
        raise ValueError("injected")
    if fault == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if fault in ("SIGTERM", "SIGKILL"):
        os.kill(os.getpid(), getattr(signal, fault))
    if fault == "full disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if fault == "truncated checkpoint":
        for part in ("unet", "vae"):
            os.truncate(f"model/{part}/diffusion_pytorch_model.safetensors", 4096)
    if fault == "NaN":
        output = output.clone()
        output.view(-1)[0] = float("nan")
    return output

def faulty(module, inputs, output):
    if isinstance(output, FakeTensor):
        return None
    calls.append(1)
    return come(output) if len(calls) == (3 if place.startswith("unet") else 1) else None

run = paint.run
def running(job, pipe, *args):
    part, _, path = place.partition(".")
    group = getattr(pipe, part).get_submodule(path)
    first = next(module for module in group.modules() if isinstance(module, torch.nn.Conv2d))
    first.register_forward_hook(faulty)
    return run(job, pipe, *args)
paint.run = running
from sd_lowvram.__main__ import main
main()
"""


def places(pipe: Any) -> list[str]:
    """Every block of the UNet and every group of the decoder that has a convolution."""
    unet = [
        "conv_in",
        *(f"{way}_blocks.{number}" for way in ("down", "up") for number in range(len(pipe.unet.down_blocks))),
    ]
    unet.insert(1 + len(pipe.unet.down_blocks), "mid_block")
    decoder = [
        "conv_in",
        "mid_block",
        *(f"up_blocks.{number}" for number in range(len(pipe.vae.decoder.up_blocks))),
        "conv_out",
    ]
    return [*(f"unet.{name}" for name in unet), *(f"vae.decoder.{name}" for name in decoder)]


def rows(
    where: Sequence[str] | None = None,
    faults: Sequence[str] = tuple(FAULTS),
    known: Collection[tuple[str, str]] = (),
    there: Callable[..., Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """What became of a run for each fault at each place.

    Args:
        where: None: everywhere.
        known: places and faults that are left out.
        there: what :func:`forked.forks_of` yields. None: forks of a process of their own.
    """
    forks = forks_of(HEAVILY, ENVIRONMENT) if there is None else contextlib.nullcontext(there)
    with tempfile.TemporaryDirectory() as folder, forks as run:
        model = Path(folder, "model")
        pipe: Any = load_pipeline(None, dtype=torch.float32)
        pipe.save_pretrained(model)
        expected = _undisturbed(run, Path(folder, "undisturbed"), model)
        asked = [(place, fault) for place in where or places(pipe) for fault in faults if (place, fault) not in known]
        for number, (place, fault) in enumerate(progress.report_each("faults", asked)):
            yield {
                "place": place,
                "fault": fault,
                **_after(run, fault, place, Path(folder, str(number)), model, expected),
            }


def _undisturbed(run: Callable[..., Any], folder: Path, model: Path) -> bytes:
    shutil.copytree(model, folder / "model")
    done = run(MAIN, *_GENERATE, "-o", "out.png", folder=folder)
    assert done.returncode == 0, done.stderr
    return _pixels(folder / "out.png")


def _pixels(picture: Path) -> bytes:
    """The picture without its parameters, which say what the run has given up."""
    with Image.open(picture) as image:
        return image.tobytes()


def _after(
    run: Callable[..., Any], fault: str, place: str, folder: Path, model: Path, expected: bytes
) -> dict[str, Any]:
    """How the run ended, and whether its picture is there, at once or of its latents."""
    shutil.copytree(model, folder / "model")
    picture, latents = folder / "out.png", folder / "out.latents.safetensors"
    more = _FROM_ITS_FILE if fault == "truncated checkpoint" else ()
    done = run(FAULTY, fault, place, *_GENERATE, *more, "-o", "out.png", folder=folder)
    told = {"exit_code": done.returncode, "told": (done.stderr.strip().splitlines() or [""])[-1]}
    if done.returncode == 0:
        same = _pixels(picture) == expected and not latents.exists()
        return {**told, "outcome": SAME if same else "another picture"}
    if picture.exists() or not latents.exists():
        return {**told, "outcome": "half a picture" if picture.exists() else "lost"}
    shutil.rmtree(folder / "model")
    shutil.copytree(model, folder / "model")
    again = run(MAIN, "resume", "out.latents.safetensors", folder=folder)
    same = again.returncode == 0 and _pixels(picture) == expected and not latents.exists()
    shutil.rmtree(folder)
    return {**told, "outcome": RESUMED if same else f"not resumed: {again.stderr.strip().splitlines()[-1:]}"}


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table as Markdown."""
    yield "# What becomes of a run when something ends it"
    yield ""
    yield "The demo model at 64x64, four steps, weights streamed, the decoder in strips. The fault comes in the third"
    yield "step, or in the decode. *same bits*: the run goes on, and its picture is that of an undisturbed one."
    yield "*resumed*: it ends, its latents are on the disk, and `sd-lowvram resume` makes that picture."
    yield ""
    outcomes = {(row["place"], row["fault"]): row["outcome"] for row in found}
    everywhere = dict.fromkeys(row["place"] for row in found)
    yield from table(
        ("", *FAULTS), ([f"`{place}`", *(outcomes.get((place, fault), "") for fault in FAULTS)] for place in everywhere)
    )
    yield ""
    yield from (f"- {fault}: {what}" for fault, what in FAULTS.items())


def main() -> int:
    """Write the table row by row; what is there already is not run again."""
    from benchmarks.tables import begin_rows, begun, told_as, written

    file = ROOT / "benchmarks" / "faults.json"
    report = begun({}, file)
    found: list[dict[str, Any]] = report["rows"]
    with told_as("make faults"):
        made: dict[str, str] = {}
        for row in rows(known={(row["place"], row["fault"]) for row in found}):
            made = made or begin_rows(report)
            found.append({**row, "made": made})
            print(row["place"], row["fault"], row["exit_code"], row["outcome"], sep="\t", flush=True)
            written(report, lambda report: lines(report["rows"]), file.with_suffix(".md"), report["made"])
    return any(row["outcome"] not in (SAME, RESUMED) for row in found)


if __name__ == "__main__":
    sys.exit(main())
