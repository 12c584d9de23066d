"""Full-size plans on a card that gives just what was planned.

From a clone: ``PYTHONPATH=.:tests/support .venv-gpu/bin/python tests/simulated_gpu/plans_on_card.py``.

Shapes only: all memory is taken by torch's own allocator and nothing is computed. Rows go to
``benchmarks/plans_on_card.json``, and the table next to it, as they come; what is there is not run again.

With ``OUT.json K N`` on a real card whose allocator is capped, everything computed: the K-th of N parts of all cases,
so that several processes share them. ``OUT.json`` has what ``make gpu`` has calibrated.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from sd_lowvram.progress import heard

MIB = 1 << 20
FILE = Path(__file__).parents[2] / "benchmarks" / "plans_on_card.json"
_ENOUGH = 64 << 30
SHARES = (0.0, 0.1, 0.5, 1.0)


class Case(NamedTuple):
    """What is planned and run.

    Attributes:
        share: of the way from the least budget to that of the plain model.
        way: "text", "image" (from a picture), "control" (with a ControlNet) or "lora".
    """

    model: str
    width: int
    height: int
    share: float
    batch: int = 1
    way: str = "text"


LISTED = [
    *(Case("sd15", side, side, share) for side in (512, 1024, 2048) for share in SHARES),
    *(Case("sdxl", 1024, 1024, tenth / 10) for tenth in range(11)),
    Case("sd15", 4096, 4096, 0.0),
    Case("sdxl", 2048, 2048, 0.0),
    Case("sd21", 768, 768, 0.0),
    Case("sd21", 768, 768, 0.5),
]


def drawn(number: int = 40, seed: int = 29) -> list[Case]:
    """Cases of any size, drawn by ``seed``."""
    choice, cases = random.Random(seed), []
    for _ in range(number):
        model = choice.choice(("sd15", "sd15", "sd21", "sdxl"))
        width, height = (choice.randrange(264, 1537, 8) for _ in range(2))
        share, batch = choice.choice((0.0, round(choice.random(), 2), 1.0)), choice.choice((1, 1, 2, 4))
        cases.append(Case(model, width, height, share, batch, choice.choice(("text", "image", "control", "lora"))))
    return cases


_HEAD = """# Plans on a simulated card of just their size

Full-size models, shapes only, two steps and a decode on torch's own CUDA allocator over a simulated card
(`tests/simulated_gpu/plans_on_card.py` wrote this). The card has just the bytes that the plan needs, the context's
among them; its libraries take no workspace, as calibration sees. Budgets from the least (0) to the plain model's (1);
MiB.
"""
_DRAWN = """
*Reserved planned* holds a margin: of several orders in which operators may make their temporaries, the one that needs
most. The first rows are drawn by a seed: sides of 264 to 1536 in steps of 8, batches, pictures to begin from,
ControlNets, LoRAs; the rest is listed. With a ControlNet a plan counts pictures and residuals that a caller holds
on the card from step to step; at this commit a diffusers pipeline whose weights stream held them in host memory, hence
up to a quarter less than planned.
"""
_REAL_HEAD = """# Plans on an H100 limited to their size

Full-size models of random weights, everything computed, two steps and a decode. torch's allocator may take just the
bytes that the plan says (`set_per_process_memory_fraction`), a plan by what was calibrated on this card; ten processes
side by side (`tests/simulated_gpu/plans_on_card.py` printed the rows). *Peak* is without the workspaces of cuBLAS.
Budgets from the least (0) to the plain model's (1); MiB. A plan that ran out went on, with all that was cached given
back or with a leaner plan, and said so.
"""
_REAL_FOOT = """
Of the seven that ran out, four had recorded passes: what libraries keep for the stream of a recording lay next to the
decode, uncounted. Two began a step among segments cut up by the step before, as nothing showed that a process
limited to a part of a card is short. Both are mended, and the six ran when they ran again (below). The seventh, with
a ControlNet, ran out again; on the simulated card such a decode finds residuals scattered over segments. Peaks of
least plans are up to 16 MiB above what is planned. In other runs' traces cuDNN takes 15 MiB for maps of some
heights and widths, which calibration did not try and does since: least plans that ran again hold 1 to 8 MiB more.

## Again

The seven, and thirteen of sixteen others that were drawn anew, nine processes side by side.
"""
_HEADS = (
    "model", "size", "batch", "from", "budget", "peak planned", "peak", "reserved planned", "reserved", "ran",
)  # fmt: skip


class Row(NamedTuple):
    """What was planned and what was, in bytes.

    Attributes:
        peak: as torch's allocator counts it. It leaves a block whole of which at most 1 MiB would be over, and counts
            that too.
        locked: most bytes of host memory that were page-locked, from the plan's attaching on.
        asked: most bytes that were asked of the allocator at one moment.
    """

    planned_peak: int
    peak: int
    planned_reserved: int
    reserved: int
    ran: bool
    planned_host: int
    locked: int
    asked: int


class RealCard:
    """A real card in the place of the simulated one: torch's allocator is limited to a size.

    Attributes:
        pinned, pinned_peak: unknown here.
    """

    pinned = pinned_peak = 0

    def __init__(self) -> None:
        self.card = self.kernels = self
        self.computes = True

    @contextlib.contextmanager
    def of_size(self, size: int) -> Iterator[None]:
        import torch

        from sd_lowvram.devices.this_machine import overhead_of

        here = torch.device("cuda", 0)
        tensors = size - overhead_of(here).context_bytes
        torch.cuda.set_per_process_memory_fraction(min(1.0, (tensors + 1) / torch.cuda.mem_get_info()[1]))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def forget(self) -> None:
        from sd_lowvram.compat.private import free_matrix_workspaces

        free_matrix_workspaces()

    def reset_peaks(self) -> None:
        pass


def on_card(simulated: Any, case: Case, **fixed: Any) -> Row:
    """Calibrate, plan with knobs that are ``fixed``, and run as a new process would on a card that gives what is
    planned."""
    import torch

    from sd_lowvram.hooks import overflow, vae_causal, vae_whole

    simulated.kernels.computes = False
    try:
        with contextlib.ExitStack() as stack:
            for module in (overflow, vae_causal, vae_whole):  # contents are whatever the memory held
                stack.enter_context(mock.patch.object(module, "is_finite", lambda _: True))
            return _on_card(simulated, case, fixed)
    finally:
        simulated.kernels.computes = True
        gc.collect()
        torch.cuda.empty_cache()


def _on_card(simulated: Any, case: Case, fixed: dict[str, Any]) -> Row:
    import torch

    from benchmarks.models import least_budget
    from sd_lowvram import Settings, optimize, plan, restore
    from sd_lowvram.devices.this_machine import overhead_of

    card = simulated.card
    rest = [] if isinstance(card, RealCard) else _rest_taken()
    others = _held_now()  # of earlier tests in this process
    with card.of_size(_ENOUGH):
        if not isinstance(card, RealCard):
            overhead_of(torch.device("cuda", 0), recalibrate=True)
        pipe = _pipeline(case.model, case.way)
    sizes: Any = {"width": case.width, "height": case.height, "batch": case.batch, "device": "cuda", "ram": "64GB"}
    sizes["settings"] = Settings(**fixed)
    least = least_budget(pipe, **sizes) if case.share < 1 else 0
    plain = plan(pipe, vram="64GB", **sizes).predicted if case.share else None
    most = plain.reserved_bytes + plain.overhead_bytes if plain else least
    torch.cuda.empty_cache()
    before = card.pinned
    card.reset_peaks()
    with card.of_size(_ENOUGH):
        chosen = optimize(pipe, vram=f"{least + int(case.share * (most - least))} b", **sizes).predicted
    simulated.kernels.forget()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    size = chosen.reserved_bytes + chosen.overhead_bytes + others[1]
    told: list[str] = []
    with card.of_size(size), heard(told.append):
        pipe(**_given(case), num_inference_steps=2, output_type="pt")
    ran = not any("ran out of memory" in sentence for sentence in told)  # and went on with a leaner plan
    libraries = _libraries_hold(simulated)
    held = torch.cuda.max_memory_allocated() - others[0] - libraries, torch.cuda.max_memory_reserved() - others[1]
    asked = torch.cuda.memory_stats()["requested_bytes.all.peak"] - others[2] - libraries
    locked = card.pinned_peak - before
    restore(pipe)
    del rest
    return Row(chosen.peak_bytes, held[0], chosen.reserved_bytes, held[1], ran, chosen.host_bytes, locked, asked)


def _rest_taken() -> list[Any]:
    from on_card import rest_taken  # with the simulated card, which is no matter where there is a real one

    return rest_taken()


def _libraries_hold(simulated: Any) -> int:
    """Bytes of torch's allocator that the library for matrix products has had since it was last forgotten."""
    import torch

    before = torch.cuda.memory_allocated()
    simulated.kernels.forget()
    return before - torch.cuda.memory_allocated()


def _held_now() -> tuple[int, int, int]:
    """Bytes of the card that are allocated, reserved, and were asked for."""
    import torch

    asked = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)  # nothing before the first tensor
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), asked


def _given(case: Case) -> dict[str, Any]:
    """What the pipeline is called with."""
    import torch

    picture = {"image": torch.zeros(1, 3, case.height, case.width)} if case.way in ("image", "control") else {}
    size = {"strength": 1.0} if case.way == "image" else {"width": case.width, "height": case.height}
    return {"prompt": "a red apple", "num_images_per_prompt": case.batch, **picture, **size}


@functools.lru_cache(maxsize=1)
def _pipeline(model: str, way: str) -> Any:
    """A pipeline of random weights, which several cases may have one after the other."""
    import diffusers
    import full_size
    import torch

    pipe = full_size.pipeline(model, torch.device("cuda"))
    if way == "image":
        kind = getattr(diffusers, type(pipe).__name__.replace("Pipeline", "Img2ImgPipeline"))
        return _quiet(kind(**pipe.components, **_unchecked(pipe)))
    if way == "control":
        kind = getattr(diffusers, type(pipe).__name__.replace("Pipeline", "ControlNetPipeline"))
        net = diffusers.ControlNetModel.from_unet(pipe.unet, load_weights_from_unet=False).half().requires_grad_(False)
        return _quiet(kind(**pipe.components, controlnet=net, **_unchecked(pipe)))
    if way == "lora":
        from peft import LoraConfig

        layers = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"]
        pipe.unet.add_adapter(LoraConfig(r=16, target_modules=layers))
        pipe.unet.half().requires_grad_(False).eval()
    return pipe


def _unchecked(pipe: Any) -> dict[str, bool]:
    """Of SD1.x and SD2.x: that there is no safety checker."""
    return {"requires_safety_checker": False} if "safety_checker" in pipe.components else {}


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def on_the_real_card(out: Path, part: int, parts: int) -> int:
    """One of the ``parts`` of all cases, on this machine's card, a row a line; returns how many failed."""
    import torch

    from benchmarks.gpu import calibration, results_in

    calibration.recall(results_in(out)["calibration"]["rows"], torch.device("cuda", 0))
    card, failed = RealCard(), 0
    cases = sorted([*drawn(), *LISTED], key=lambda case: (case.model, case.way))  # a pipeline serves its neighbours
    for case in cases[part * len(cases) // parts : (part + 1) * len(cases) // parts]:
        start = time.monotonic()
        try:
            row = on_card(card, case)
        except Exception as error:  # and all other cases are run
            print(json.dumps([*case, f"{type(error).__name__}: {error}"[:300]]), flush=True)
            failed += 1
            continue
        seconds = time.monotonic() - start
        print(json.dumps([*case, *(round(figure / MIB) for figure in row[:4]), row.ran, round(seconds)]), flush=True)
        failed += not row.ran
    return failed


def main() -> int:
    if len(sys.argv) == 4:
        return on_the_real_card(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests.parent), str(tests / "support")]
    from simulated_card.card import card

    card()
    from on_card import Simulated

    from benchmarks.tables import begin_rows, begun, told_as, written

    simulated, report = Simulated(), begun({}, FILE)
    rows: list[list[Any]] = report["rows"]
    cases = [*sorted(drawn(), key=lambda case: (case.model, case.way)), *LISTED]
    missing = [case for case in cases if list(case) not in [row[: len(case)] for row in rows]]
    with told_as("PYTHONPATH=.:tests/support .venv-gpu/bin/python tests/simulated_gpu/plans_on_card.py"):
        if missing:
            begin_rows(report)
        for case in missing:
            row = on_card(simulated, case)
            rows.append([*case, *(round(figure / MIB) for figure in row[:4]), row.ran])
            print(*rows[-1], flush=True)
            written(report, lines, FILE.with_suffix(".md"), report["made"])
    return 0 if all(row[-1] for row in rows) else 1


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report as Markdown."""
    from sd_lowvram.files.tables import table

    real = report.get("machine")
    yield _REAL_HEAD if real else _HEAD
    rows = [(Case(*row[:6]), row[6:]) for row in report["rows"]]
    if not real and any(case not in LISTED for case, _ in rows):
        yield _DRAWN
    yield from table(_HEADS, (_cells(case, figures) for case, figures in rows))
    if real:
        yield _REAL_FOOT
        again = report["again"]
        yield from table(_HEADS, (_cells(Case(*row[:6]), row[6:]) for row in again["rows"]))
        yield ""
        yield "{name}, driver {driver}, torch {torch}, {date}, commit {commit};".format(**real)
        yield "again: {date}, commit {commit}.".format(**again)


def _cells(case: Case, figures: list[Any]) -> list[str]:
    size = f"{case.width} x {case.height}"
    *sizes, ran = figures
    said = case.model, size, case.batch, case.way, case.share, *sizes
    return [*map(str, said), "yes" if ran else "**no**"]


if __name__ == "__main__":
    sys.exit(main())
