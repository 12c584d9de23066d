"""Full-size plans on a card that gives just what was planned.

From a clone: ``PYTHONPATH=.:tests/support .venv-gpu/bin/python tests/simulated_gpu/plans_on_card.py``.

Shapes only: all memory is taken by torch's own allocator and nothing is computed. Rows go to
``benchmarks/plans_on_card.json``, and the table next to it, as they come; what is there is not run again.

With ``budgets`` as its argument: plans with budgets below a card of 8 GiB, drawn by a seed, to
``benchmarks/budgets_on_card.json``. What follows is how many rows are run at most.

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from sd_lowvram.progress import capture_events

MIB = 1 << 20
FILE = Path(__file__).parents[2] / "benchmarks" / "plans_on_card.json"
BUDGETS = FILE.with_name("budgets_on_card.json")
_ENOUGH = 64 << 30
_CARD, _LARGEST_BUDGET = 8 << 30, 6 << 30
_STEPS = 4
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


_TODAYS = ("flux", "z_image", "klein", "qwen_image")
"""Transformers with few narrow layers, as those of full size do not fit into this machine's memory."""


def drawn_budgets(number: int = 100, seed: int = 46) -> list[Case]:
    """Cases with a budget below the card's memory; ``share`` is of the way from the least budget to what a plan takes
    that has 6 GiB."""
    choice, cases = random.Random(seed), dict[Case, None]()
    while len(cases) < number:
        model = choice.choice(("sd15", "sd15", "sd15", "sd15", "sdxl", "sdxl", *_TODAYS))
        sides = (256, 320) if model in _TODAYS else (512, 768, 1024)
        width, height = choice.choice(sides), choice.choice(sides)
        share, batch = choice.choice((0.0, round(choice.random(), 2), 1.0)), choice.choice((1, 1, 2))
        way = "text" if model in _TODAYS else choice.choice(("text", "text", "image", "control", "lora", "recorded"))
        cases[Case(model, width, height, share, batch, way)] = None
    return list(cases)


_BUDGETS_HEAD = """# Budgets below the card's memory, on a simulated card of 8 GiB

Cases drawn by a seed, shapes only, four steps and a decode on torch's own CUDA allocator
(`tests/simulated_gpu/plans_on_card.py budgets` wrote this). SD1.5 and SDXL are of full size, the transformers have few
narrow layers. Plans by the speed of an RTX 2070; budgets from the least (0) to that of the plan with 6 GiB (1).
*Reserved* is what torch's allocator held at most, with the driver's share, as in the budget; MiB. *Planned* is what
the plan says that it holds at most, with segments that it could free, if the budget has room for them. *Fallback steps*
are repeated calls and leaner plans after a call ran out of memory. *Allocator calls* are device allocations a step
after the second.
"""
_BUDGETS_HEADS = (
    "model", "size", "batch", "from", "share", "budget", "planned", "reserved", "fallback steps", "allocator calls",
)  # fmt: skip


class Held(NamedTuple):
    """A run within a budget, in bytes; reserved bytes include the driver's share.

    Attributes:
        planned: the most that the plan says.
        fallback_steps: how often a call ran out of memory.
        calls: device allocations in each step after the second, on average.
    """

    budget: int
    planned: int
    reserved: int
    fallback_steps: int
    calls: float


def within_budget(simulated: Any, case: Case, part: float = 1.0) -> Held:
    """Plan and run ``case`` on a card with more memory than the budget; the run is limited to a ``part`` of it."""
    with shapes_only(simulated), _rates_of_a_named_card():
        return _within_budget(simulated, case, part)


def _within_budget(simulated: Any, case: Case, part: float) -> Held:
    import torch

    from benchmarks.models import least_budget
    from sd_lowvram import Settings, optimize, plan, restore
    from sd_lowvram.devices.this_machine import overhead_of
    from sd_lowvram.session import attachments

    card, rest, others = simulated.card, _rest_taken(), _held_now()
    way = "text" if case.way == "recorded" else case.way
    with card.of_size(_CARD):
        overhead_of(torch.device("cuda", 0), recalibrate=True)
        pipe = _pipeline(case.model, way)
        recorded = {"cuda_graphs": True, "offload": "none"} if case.way == "recorded" else {}
        sizes: Any = {"width": case.width, "height": case.height, "batch": case.batch, "device": "cuda", "ram": "16GB"}
        sizes["settings"] = Settings(**recorded)
        least = least_budget(pipe, **sizes)
        most = plan(pipe, vram=f"{max(least, _LARGEST_BUDGET)} b", **sizes).predicted if case.share else None
        beyond = most.reserved_bytes + most.overhead_bytes - least if most else 0
        budget = least + int(case.share * max(0, beyond))
        chosen = optimize(pipe, vram=f"{budget} b", **sizes)
        attachments(pipe)[-1].bound.budget_bytes = int(budget * part)
        simulated.kernels.forget()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocations: list[int] = []

        def count(_pipe: Any, _step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
            allocations.append(card.allocations)
            return values

        try:
            pipe(**_given(case, pipe), num_inference_steps=_STEPS, output_type="pt", callback_on_step_end=count)
            reserved = torch.cuda.max_memory_reserved() - others[1]
            steps = attachments(pipe)[-1].plan.fallback_steps
        finally:
            restore(pipe)
    del rest
    share = chosen.predicted.overhead_bytes
    calls = (allocations[-1] - allocations[1]) / (len(allocations) - 2)
    return Held(budget, chosen.most_reserved_bytes, reserved + share, len(steps), calls)


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
side by side (`tests/simulated_gpu/plans_on_card.py` printed the rows). *Allocated* is without the workspaces of cuBLAS.
Budgets from the least (0) to the plain model's (1); MiB. A plan that ran out went on, with all that was cached given
back or with a leaner plan, and said so.
"""
_REAL_FOOT = """
Of the seven that ran out, four had recorded passes: what libraries keep for the stream of a recording lay next to the
decode, uncounted. Two began a step among segments cut up by the step before, as nothing showed that a process
limited to a part of a card is short. Both are mended, and the six ran when they ran again (below). The seventh, with
a ControlNet, ran out again; on the simulated card such a decode finds residuals scattered over segments. Least
plans allocate up to 16 MiB more than planned. In other runs' traces cuDNN takes 15 MiB for maps of some
heights and widths, which calibration did not try and does since: least plans that ran again hold 1 to 8 MiB more.

## Again

The seven, and thirteen of sixteen others that were drawn anew, nine processes side by side.
"""
_HEADS = (
    "model", "size", "batch", "from", "budget", "allocated planned", "allocated", "reserved planned", "reserved", "ran",
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
    with (
        shapes_only(simulated),
        _rates_of_a_named_card() if not isinstance(simulated, RealCard) else contextlib.nullcontext(),
    ):
        return _on_card(simulated, case, fixed)


@contextlib.contextmanager
def _rates_of_a_named_card() -> Iterator[None]:
    """Plan within the block by the speed of an RTX 2070, not by that of a processor, which other programs use too."""
    from on_card import rates_here

    from sd_lowvram.planning import request

    with mock.patch.object(request, "rates_of", rates_here):
        yield


@contextlib.contextmanager
def shapes_only(simulated: Any) -> Iterator[None]:
    """Nothing is computed within the block, and no result is looked at."""
    import torch

    from sd_lowvram.hooks.pieces import overflow, vae_causal, vae_whole

    simulated.kernels.computes = False
    try:
        with contextlib.ExitStack() as stack:
            for module in (overflow, vae_causal, vae_whole):  # contents are whatever the memory held
                stack.enter_context(mock.patch.object(module, "is_finite", lambda _: True))
            convolution = torch.nn.Conv2d
            convolve = _shaped_alone(convolution._conv_forward)
            stack.enter_context(mock.patch.object(convolution, "_conv_forward", convolve))
            yield
    finally:
        simulated.kernels.computes = True
        gc.collect()
        torch.cuda.empty_cache()


def _shaped_alone(convolve: Callable[..., Any]) -> Callable[..., Any]:
    """``Conv2d._conv_forward`` that makes the shape alone of a map in host memory: of a decode on the processor."""
    import torch

    def call(layer: Any, x: Any, weight: Any, bias: Any) -> Any:
        if x.device.type != "cpu" or type(x) is not torch.Tensor:  # nor of a trace
            return convolve(layer, x, weight, bias)
        return x.new_empty(
            torch.nn.functional.conv2d(x.to("meta"), weight.to("meta"), None, layer.stride, layer.padding).shape
        )

    return call


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
    with card.of_size(size), capture_events(told.append):
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


def _given(case: Case, pipe: Any = None) -> dict[str, Any]:
    """What the pipeline is called with."""
    import torch

    if case.model in _TODAYS:
        import todays

        prompts = {name: _repeated(value, case.batch) for name, value in todays.prompts(pipe).items()}
        return {**prompts, "width": case.width, "height": case.height}
    picture = {"image": torch.zeros(1, 3, case.height, case.width)} if case.way in ("image", "control") else {}
    size = {"strength": 1.0} if case.way == "image" else {"width": case.width, "height": case.height}
    return {"prompt": "a red apple", "num_images_per_prompt": case.batch, **picture, **size}


def _repeated(value: Any, times: int) -> Any:
    """A tensor of embeddings, or a list of them, for several pictures."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.repeat(times, *[1] * (value.dim() - 1))
    return value * times if isinstance(value, list) else value


@functools.lru_cache(maxsize=1)
def _pipeline(model: str, way: str) -> Any:
    """A pipeline of random weights, which several cases may have one after the other."""
    if model in _TODAYS:
        import todays

        return getattr(todays, model)()
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


def budget_rows(most: int) -> int:
    """Run at most ``most`` of the drawn budgets that are not in the table yet; returns how many of all broke them."""
    import torch
    from on_card import Simulated
    from simulated_card.card import card

    from benchmarks.tables import begin_rows, begun, told_as, written

    with card().of_size(_CARD):
        torch.cuda.get_device_properties(0)  # torch's limit is a part of the card's size, which it reads once
    simulated, report = Simulated(), begun({}, BUDGETS)
    rows: list[list[Any]] = report["rows"]
    missing = [case for case in drawn_budgets() if list(case) not in [row[: len(case)] for row in rows]]
    missing.sort(key=lambda case: (case.model, case.way))
    with told_as("PYTHONPATH=.:tests/support .venv-gpu/bin/python tests/simulated_gpu/plans_on_card.py budgets"):
        if missing:
            begin_rows(report)
        for case in missing[:most]:
            held = within_budget(simulated, case)
            rows.append([*case, *(round(figure / MIB, 1) for figure in held[:3]), *held[3:]])
            print(*rows[-1], flush=True)
            written(report, budget_lines, BUDGETS.with_suffix(".md"), report["made"])
    return sum(not is_kept(row[len(Case._fields) :]) for row in rows)


def is_kept(figures: Sequence[float]) -> bool:
    """True if no more was reserved than planned, no more was planned than the budget, and no call ran out of memory."""
    budget, planned, reserved, steps, _ = figures
    return reserved <= planned <= budget and not steps


def budget_lines(report: dict[str, Any]) -> Iterator[str]:
    """The report on budgets as Markdown."""
    from sd_lowvram.files import table

    yield _BUDGETS_HEAD
    rows = [(Case(*row[:6]), row[6:]) for row in report["rows"]]
    within = sum(reserved <= budget and not steps for _, (budget, _, reserved, steps, _) in rows)
    kept = sum(is_kept(figures) for _, figures in rows)
    yield (
        f"{within} of {len(rows)} within the budget, without a repeated call; {kept} reserved no more than planned. "
        f"{len(drawn_budgets())} are drawn."
    )
    yield ""
    yield from table(_BUDGETS_HEADS, (_budget_cells(case, figures) for case, figures in rows))


def _budget_cells(case: Case, figures: list[Any]) -> list[str]:
    *sizes, steps, calls = figures
    size = f"{case.width} x {case.height}"
    said = case.model, size, case.batch, case.way, case.share, *map(round, sizes), steps, f"{calls:.1f}"
    return list(map(str, said))


def main() -> int:
    if len(sys.argv) == 4:
        return on_the_real_card(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests.parent), str(tests / "support")]
    from simulated_card.card import card

    card()
    if sys.argv[1:2] == ["budgets"]:
        return budget_rows(int((sys.argv[2:3] or ["100"])[0]))
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
    from sd_lowvram.files import table

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
