"""Pipelines as diffusers' own tests configure them: calls rehearsed against a real run, and results within budgets.

``python tests/others/over_pipelines.py FOLDER`` (a checkout of diffusers, whose ``tests`` are imported) writes
``benchmarks/pipelines.json`` and ``pipelines.md``. What is there already is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import glob
import importlib
import inspect
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(Path(__file__).parent)]
os.environ["HF_HUB_OFFLINE"] = "1"

import attached_plugin  # noqa: E402
import diffusers  # noqa: E402
import numpy as np  # noqa: E402
import rehearsed  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import sd_lowvram  # noqa: E402
from sd_lowvram.errors import BudgetError  # noqa: E402
from sd_lowvram.files import table  # noqa: E402
from sd_lowvram.settings import Fidelity  # noqa: E402
from sd_lowvram.tracing.rehearsal import rehearse  # noqa: E402
from sd_lowvram.units import MIB  # noqa: E402

HALF = (
    "StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline", "FluxPipeline",
    "QwenImagePipeline", "ChromaPipeline", "SanaPipeline", "PixArtSigmaPipeline", "OvisImagePipeline",
    "ZImagePipeline", "WanPipeline", "CogVideoXPipeline", "LTXPipeline",
)  # fmt: skip
"""Classes whose calls are compared in fp16 and bf16 too, with a short and a long prompt."""
HALVES = torch.float16, torch.bfloat16
PROMPTS = {"short": "a cat", "long": "a red apple on the old table " * 8}
CALLS = "calls, fp32"
PICTURES = (
    "StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline",
    "StableDiffusionControlNetPipeline", "StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusion3Pipeline", "FluxPipeline", "FluxKontextPipeline", "FluxFillPipeline", "FluxControlPipeline",
    "Flux2KleinPipeline", "QwenImagePipeline", "QwenImageEditPipeline", "ChromaPipeline", "Lumina2Pipeline",
    "LuminaPipeline", "SanaPipeline", "PixArtAlphaPipeline", "PixArtSigmaPipeline", "AuraFlowPipeline",
    "ZImagePipeline", "Krea2Pipeline", "BriaPipeline", "BriaFiboPipeline", "CogView3PlusPipeline", "CogView4Pipeline",
    "Kandinsky3Pipeline", "KandinskyV22Pipeline", "KandinskyV22PriorPipeline", "KandinskyPipeline",
    "StableCascadeDecoderPipeline", "StableCascadePriorPipeline", "OvisImagePipeline", "PRXPipeline",
    "HiDreamImagePipeline", "IFPipeline", "DiTPipeline", "LatentConsistencyModelPipeline", "OmniGenPipeline",
    "LongCatImagePipeline", "HunyuanImagePipeline", "Ideogram4Pipeline", "NucleusMoEImagePipeline",
)  # fmt: skip
FILMS = (
    "WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline", "LTXPipeline", "LTXImageToVideoPipeline",
    "LTX2Pipeline", "CogVideoXPipeline", "CogVideoXImageToVideoPipeline", "AnimateDiffPipeline", "HunyuanVideoPipeline",
    "MochiPipeline", "AllegroPipeline", "LattePipeline", "SkyReelsV2Pipeline", "StableVideoDiffusionPipeline",
    "SanaVideoPipeline", "Kandinsky5T2VPipeline", "ConsisIDPipeline",
)  # fmt: skip
"""Classes that are planned within budgets."""
BUDGETS = ("plenty", "half", "least")
ROUNDING = 2e-3
"""Largest difference that rounding may make, over the largest value: random models amplify it."""
SECONDS = 200
EXCUSED = {("StableDiffusionInpaintPipelineTesterConfig", "least")}
"""Runs whose difference is torch's own: a black picture is encoded, and the plain encoder differs from float64 by 1.5,
the exact tiles by 2e-6."""


class Configuration(NamedTuple):
    """A class of tests that makes a pipeline's tiny models and the arguments of its call."""

    test: Any
    pipeline: Any

    def make(self) -> Any:
        """A new pipeline; its models compute without dropout."""
        torch.manual_seed(0)
        pipe = self.pipeline(**self.test().get_dummy_components())
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                part.eval().requires_grad_(False)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def call(self, dtype: torch.dtype = torch.float32, prompt: str = "") -> dict[str, Any]:
        """Arguments of the call, with a generator of the same seed each time."""
        made = self.test().get_dummy_inputs
        torch.manual_seed(1)
        np.random.seed(1)
        call = made("cpu") if "device" in inspect.signature(made).parameters else made()
        if prompt and isinstance(call.get("prompt"), str):
            call["prompt"] = prompt
        return rehearsed.narrowed(call, dtype)


def configurations(module: Any) -> Iterator[Configuration]:
    """Classes of a test file that differ."""
    seen = set()
    own = (value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__)
    for test in own:
        parts, inputs = (getattr(test, f"get_dummy_{name}", None) for name in ("components", "inputs"))
        pipeline = getattr(test, "pipeline_class", None)
        key = pipeline, parts, inputs
        if inspect.isclass(pipeline) and parts and inputs and key not in seen:
            seen.add(key)
            yield Configuration(test, pipeline)


# What is compared


def compared(configuration: Configuration, dtype: torch.dtype, prompt: str) -> dict[str, Any]:
    """Calls of a rehearsal and of a real run."""
    pipe = configuration.make().to(dtype)
    begun = time.process_time()
    try:
        found: Any = rehearsed.rehearsal(rehearse(pipe, **configuration.call(dtype, prompt)))
    except Late:
        raise
    except Exception as error:
        found = described(error)
    seconds = time.process_time() - begun
    real = rehearsed.real(pipe, **configuration.call(dtype, prompt))
    if isinstance(found, str):
        return {"equal": False, "reason": found, "calls": len(real)}
    first = next((str((mine, theirs))[:400] for mine, theirs in zip(found, real) if mine != theirs), "")  # noqa: B905
    reason = "" if found == real else first or f"{len(found)} calls instead of {len(real)}"
    return {"equal": not reason, "reason": reason, "calls": len(real), "seconds": round(seconds, 2)}


def planned(configuration: Configuration) -> dict[str, Any]:
    """Results within plenty of memory, half of what the fastest plan uses, and the least."""
    pipe = configuration.make()
    expected, places = made(pipe, configuration), weights_of(pipe)
    if not same_bits(made(pipe, configuration), expected):
        return {"reason": "two plain runs differ"}
    asked = {"device": "cpu", "call": configuration.call()}
    row: dict[str, Any] = {}
    plenty = sd_lowvram.optimize(pipe, vram="8GB", **asked)
    row["at_first_call"] = plenty.at_first_call
    row["plenty"], final = within(pipe, configuration, expected)
    least, most = final.minimum_vram_bytes, final.predicted.peak_bytes
    if least is None:
        row["reason"] = "a model cannot be traced at its first call either"
    for name, vram in {"half": (least + most) // 2, "least": least}.items() if least else ():
        try:
            sd_lowvram.optimize(pipe, vram=f"{vram} B", **asked)
            row[name], _ = within(pipe, configuration, expected)
        except BudgetError as error:
            row[name] = {"refused": str(error)}
    sd_lowvram.restore(pipe)
    left = any("forward" in vars(module) for part in models_of(pipe) for module in part.modules())
    row["restored"] = not left and weights_of(pipe) == places and same_bits(made(pipe, configuration), expected)
    return row


def within(pipe: Any, configuration: Configuration, expected: list[Any]) -> tuple[dict[str, Any], Any]:
    """A run of an optimized pipeline, and the plan that it ended with."""
    with sd_lowvram.measured(pipe) as run:
        found = made(pipe, configuration)
    plan = sd_lowvram.session.attachments(pipe)[-1].plan
    bytes_planned = max((stage.held_bytes for stage in plan.stages if not stage.at_first_call), default=0)
    difference = difference_of(found, expected)
    row = {
        "difference": difference,
        "fidelity": plan.fidelity.name.lower(),
        "vram": plan.request.vram,
        "planned": bytes_planned,
        "peak": run.peak_bytes,
        "as_planned": run.peak_bytes <= max(bytes_planned * 1.02, bytes_planned + 2 * MIB),
        "same": difference <= (0 if plan.fidelity is Fidelity.BITWISE else ROUNDING),
        "offload": plan.settings.offload,
    }
    return row, plan


def made(pipe: Any, configuration: Configuration) -> list[Any]:
    """Results of the pipeline, as arrays."""
    torch.manual_seed(2)
    np.random.seed(2)
    call = configuration.call()
    with torch.no_grad():
        result = pipe(**call)
    return list(arrays(result))


def arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value.detach().float().numpy().copy()
    elif isinstance(value, np.ndarray):
        yield value.astype(np.float64)
    elif hasattr(value, "getdata"):  # a picture
        yield np.asarray(value).astype(np.float64) / 255
    elif isinstance(value, (list, tuple)) or hasattr(value, "values"):
        for each in value.values() if hasattr(value, "values") else value:
            yield from arrays(each)


def difference_of(found: list[Any], expected: list[Any]) -> float:
    if [each.shape for each in found] != [each.shape for each in expected]:
        return float("inf")
    pairs = [(mine, theirs) for mine, theirs in zip(found, expected, strict=True) if theirs.size]
    if any(np.isnan(mine).any() != np.isnan(theirs).any() for mine, theirs in pairs):
        return float("inf")
    largest = (np.nanmax(np.abs(mine - theirs)) / max(1e-6, np.nanmax(np.abs(theirs))) for mine, theirs in pairs)
    return float(max(largest, default=0.0))


def same_bits(found: list[Any], expected: list[Any]) -> bool:
    return difference_of(found, expected) == 0


def models_of(pipe: Any) -> list[nn.Module]:
    return [part for part in pipe.components.values() if isinstance(part, nn.Module)]


def weights_of(pipe: Any) -> list[tuple[int, int, torch.dtype]]:
    tensors = (tensor for part in models_of(pipe) for tensor in (*part.parameters(), *part.buffers()))
    return [(id(tensor), tensor.data_ptr(), tensor.dtype) for tensor in tensors]


# One process for each test file


class Late(BaseException):
    """A configuration that took too long."""


def _late(*_: Any) -> None:
    raise Late


def described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}"


def rows_of(name: str, only: Iterable[str], parts: Iterable[str], done: set[Any]) -> Iterator[dict[str, Any]]:
    """Rows of one test file that are not among ``done``."""
    signal.signal(signal.SIGALRM, _late)
    try:
        signal.alarm(SECONDS)
        module = importlib.import_module(name)
    except BaseException as error:
        yield {"test": name, "part": "import", "cannot_run": described(error)}
        return
    finally:
        signal.alarm(0)
    for configuration in configurations(module):
        pipeline = configuration.pipeline.__name__
        if only and pipeline not in only:
            continue
        for part in parts:
            for key, work in _works(part, configuration):
                row = {"pipeline": pipeline, "test": f"{name}.{configuration.test.__name__}", "part": key}
                if (row["test"], key) in done:
                    continue
                try:
                    signal.alarm(SECONDS)
                    row |= work()
                except Late:
                    row["error"] = f"not done in {SECONDS} s"
                except BaseException as error:
                    row["error"] = described(error)
                finally:
                    signal.alarm(0)
                yield row
                gc.collect()


def _works(part: str, configuration: Configuration) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Names of rows, with the functions that fill them."""
    pipeline = configuration.pipeline.__name__
    if part == "calls":
        yield CALLS, functools.partial(compared, configuration, torch.float32, "")
    elif part == "plans" and pipeline in PICTURES + FILMS:
        yield part, functools.partial(planned, configuration)
    elif part == "half" and pipeline in HALF:
        for dtype in HALVES:
            for length, prompt in PROMPTS.items():
                name = f"calls, {str(dtype).removeprefix('torch.')}, {length}"
                yield name, functools.partial(compared, configuration, dtype, prompt)


def forked_rows(*arguments: Any) -> list[dict[str, Any]]:
    """:func:`rows_of` in a process of its own."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        try:
            with os.fdopen(writes, "w") as out:
                for row in rows_of(*arguments):
                    print(json.dumps(row), file=out, flush=True)
        except BaseException:
            traceback.print_exc()
        finally:  # folders that end with the process are the parent's
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as lines:
        rows = [json.loads(line) for line in lines]
    os.waitpid(child, 0)
    return rows


# The table


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table as Markdown."""
    ran = [row for row in found if "calls" in row]
    plans = [row for row in found if "plenty" in row]
    yield "# Pipelines of diffusers, as its own tests configure them"
    yield ""
    yield "Tiny random models on a CPU. *Calls*: how many calls of models a real run makes. A rehearsal records the"
    yield "same components, methods, shapes and types in the same order, or the cell shows what differs. *Half*:"
    yield "likewise in fp16 and bf16, each with a prompt of 2 and of 56 words. *Plenty, half, least*: budgets; the"
    yield "last is the smallest that the plan names. The cell has the most allocated bytes over the planned ones, and"
    yield "`=` for the bits of a plain run, or the largest difference over the largest value."
    yield ""
    yield from (f"- {sentence}" for sentence in _sums(ran, plans))
    yield ""
    tests: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found:
        if "pipeline" in row:
            tests.setdefault(row["test"], {})[row["part"]] = row
    shown = {name: parts for name, parts in tests.items() if any(row in ran or row in plans for row in parts.values())}
    yield from table(("pipeline", "calls", "half", *BUDGETS, "restored"), map(_cells, shown.values()))
    yield ""
    yield "*Inpainting, least*: a black picture is encoded there. The plain encoder differs from float64 by 1.5, the"
    yield "exact tiles by 2e-6. Not run here:"
    yield ""
    for row in found:
        if row["part"] in (CALLS, "import") and row not in ran:
            yield f"- {row.get('pipeline') or row['test'].removeprefix('tests.pipelines.')}: {_short(row)}"


def _sums(ran: list[dict[str, Any]], plans: list[dict[str, Any]]) -> Iterator[str]:
    whole, half = ([row for row in ran if (row["part"] == CALLS) == is_whole] for is_whole in (True, False))
    kinds = {row["pipeline"] for row in whole}
    yield f"Calls: {len(whole)} configurations of {len(kinds)} classes, {sum(row['equal'] for row in whole)} equal."
    kinds = {row["pipeline"] for row in half}
    yield f"In fp16 and bf16: {len(half)} runs of {len(kinds)} classes, {sum(row['equal'] for row in half)} equal."
    runs = [row[name] for row in plans for name in BUDGETS if "peak" in row.get(name, {})]
    kinds = {row["pipeline"] for row in plans}
    within = sum(run["peak"] <= 1.02 * run["planned"] for run in runs)
    same, bits = sum(run["same"] for run in runs), sum(run["difference"] == 0 for run in runs)
    kept = sum(run["as_planned"] for run in runs)
    pictures, films = len(kinds - {*FILMS}), len(kinds & {*FILMS})
    yield f"Within budgets: {pictures} classes of pictures and {films} of films, {len(runs)} runs."
    yield f"Results: {same} plain up to rounding, {bits} of them to the bit."
    yield f"Allocated bytes: {kept} within the plan and 2 % or 2 MiB, {within} within 2 %."
    yield f"Restored bit for bit: {sum(row.get('restored', False) for row in plans)} of {len(plans)}."


def _short(row: dict[str, Any]) -> str:
    reason = row.get("error") or row.get("cannot_run") or row.get("reason", "")
    return "a file of the Hub" if "connect" in reason or "OSError" in reason else f"{reason:.100}".replace("|", "/")


def _cells(parts: dict[str, dict[str, Any]]) -> list[str]:
    row = next(iter(parts.values()))
    calls = parts.get(CALLS, {})
    half = [part for name, part in parts.items() if name not in (CALLS, "plans") and "equal" in part]
    plans = parts.get("plans", {})
    return [
        f"`{row['pipeline']}`",
        "" if "calls" not in calls else f"{calls['calls']}" if calls["equal"] else f"**{_short(calls)}**",
        f"{sum(part['equal'] for part in half)} of {len(half)}" if half else "",
        *(_run_cell(plans.get(name)) for name in BUDGETS),
        "" if "restored" not in plans else "yes" if plans["restored"] else "**no**",
    ]


def _run_cell(run: dict[str, Any] | None) -> str:
    if not run:
        return ""
    if "refused" in run:
        return "refused"
    difference = "=" if run["difference"] == 0 else f"{run['difference']:.0e}"
    return f"{run['peak'] / run['planned']:.2f} {difference if run['same'] else f'**{difference}**'}"


def run(folder: Path, out: Path, parts: Sequence[str], only: Sequence[str], files: str) -> list[dict[str, Any]]:
    """Add the rows that are missing to the table ``out``, and return all."""
    from benchmarks.tables import begin_rows, begun, told_as, written

    sys.path.insert(0, str(folder))
    report = begun({}, out)
    found: list[dict[str, Any]] = report["rows"]
    done = {(row["test"], row["part"]) for row in found}
    stamp: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place, told_as("make test-others"):
        attached_plugin._use_them(attached_plugin._stand_ins(Path(place)))
        for common in ("testing_utils", "test_pipelines_common", "flux.test_pipeline_flux", "wan.test_wan"):
            with contextlib.suppress(Exception):  # what forks need not import anew
                importlib.import_module(f"tests.pipelines.{common}")
        gc.freeze()
        for file in sorted(glob.glob(str(folder / "tests/pipelines" / files))):
            name = str(Path(file).relative_to(folder))[:-3].replace("/", ".")
            for row in forked_rows(name, only, parts, done):
                stamp = stamp or begin_rows(report)
                found.append({**row, "made": stamp})
                print(json.dumps(row)[:400], flush=True)
                written(report, lambda report: lines(report["rows"]), out, report["made"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of diffusers")
    parser.add_argument("--part", action="append", choices=("calls", "half", "plans"))
    parser.add_argument("--only", action="append", default=[], help="classes of pipelines")
    parser.add_argument("--files", default="*/test_*.py", help="pattern of test files in tests/pipelines")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "pipelines.md")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    diffusers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = run(args.folder.resolve(), args.out, args.part or ("calls", "half", "plans"), args.only, args.files)
    return any(is_wrong(row) for row in found)


def is_wrong(row: dict[str, Any]) -> bool:
    """True for other calls than a real run's, and for a run that is not as it was planned."""
    test = row["test"].rpartition(".")[2]
    runs = {name: row[name] for name in BUDGETS if "peak" in row.get(name, {})}
    differs = any(not run["same"] and (test, name) not in EXCUSED for name, run in runs.items())
    bad = differs or not all(run["as_planned"] for run in runs.values()) or not row.get("restored", True)
    return bad or not row.get("equal", True)


if __name__ == "__main__":
    sys.exit(main())
