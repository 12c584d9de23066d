"""Our kernels on the card: each of Triton's next to torch's own operators, and passes of a UNet with them."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sd_lowvram.devices.pairs import figures, time_alternately
from sd_lowvram.errors import SettingsError
from sd_lowvram.memory import measured_peak

from ..calls import timed_runs
from ..models import embeddings, random_denoiser
from ..tables import Columns, Row, mib, ms, pair_columns, rows_table, yes
from . import replays
from .peaks import held_on
from .record import Case, ResultRows, in_order, not_run
from .streaming import measured_steps

TYPES = ("float16", "bfloat16", "float32")
PASSES = (("sd15", 512), ("sd15", 1024))
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "fused kernels": {"fused_kernels": True},
    "CUDA graphs": {"cuda_graphs": True},
    "fused kernels, CUDA graphs": {"fused_kernels": True, "cuda_graphs": True},
    "compiled": {"compile": "regional", "channels_last": True},
}
"""Settings of the UNet, all weights on the device."""
_LOSSLESS = frozenset({"as it is", "CUDA graphs"})
_RUNS = 20
_SLACK, _FLOOR = 1.5, 2e-7
"""An error is no worse than torch's own in the same type times the one, or the other, which is float32's rounding."""


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each kernel and type, then one for each way of a pass, then those of :mod:`.replays`."""
    if importlib.util.find_spec("triton") is None:
        record.add({"kernel": "all of Triton's", "dtype": ""}, {"failed": "Triton is not installed"})
    else:
        from sd_lowvram.kernels.triton.measure import PAIRS

        kernels = [{"kernel": name, "dtype": dtype} for name in PAIRS for dtype in TYPES]
        record.fill(kernels, trial_kernels, device=str(device))
    for model, side in PASSES:
        record.fill([{"model": model, "side": side, "pass": way} for way in WAYS], trial_passes, device=str(device))
    replays.run(device, record)


def trial_kernels(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases``: error of kernel and operators to float64, bits of many runs, time, memory."""
    from sd_lowvram.kernels.triton.measure import PAIRS
    from sd_lowvram.kernels.triton.support import why_not

    where = torch.device(device)
    why = why_not(where)
    for case in cases:
        if why is not None:
            yield {"failed": why}
            continue
        with torch.inference_mode():
            yield _beside(*PAIRS[case["kernel"]](where, getattr(torch, case["dtype"])), where)


def _beside(
    kernel: Callable[..., Tensor], reference: Callable[..., Tensor], given: tuple[Tensor, ...], device: torch.device
) -> dict[str, Any]:
    ours, theirs = functools.partial(kernel, *given), functools.partial(reference, *given)
    first = ours()
    error, torchs = _errors(reference, given, first, theirs())
    (plain, own), share = time_alternately((theirs, ours), _RUNS, device, warm_ups=2)
    return {
        "shape": list(given[0].shape),
        "error": error,
        "torch_error": torchs,
        "no_worse": error <= _SLACK * torchs + _FLOOR,
        "same_bits": all(torch.equal(ours(), first) for _ in range(_RUNS)),
        **figures(plain, own, share),
        "measured_bytes": measured_peak(ours),
        "torch_bytes": measured_peak(theirs),
        **timed_runs(ours, _RUNS, device),
    }


def _errors(reference: Callable[..., Tensor], given: tuple[Tensor, ...], *results: Tensor) -> list[float]:
    """Errors of ``results`` relative to ``reference`` in float64."""
    exact = reference(*(one.double() for one in given))
    return [float((one.double() - exact).norm() / exact.norm()) for one in results]


def trial_passes(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases`` the seconds, the peak and the error of passes of a UNet in one way.

    The trial ends early if a pass leaves something on the device.
    """
    from sd_lowvram import Settings, attached
    from sd_lowvram.progress import capture_events

    where, side = torch.device(device), cases[0]["side"]
    pipe = random_denoiser(cases[0]["model"], where)
    given = embeddings(pipe, where)

    def latents() -> Tensor:
        asked = {"width": side, "height": side, "num_inference_steps": 2, "output_type": "latent"}
        found: Tensor = pipe(**given, **asked, generator=torch.Generator().manual_seed(0)).images.double().cpu()
        return found

    with attached(pipe, Settings(offload="none"), device=where):
        plain = latents()
    warnings.filterwarnings("error", "(fused_kernels|compile): ")  # else the model's own passes are timed
    for case in cases:
        try:
            with capture_events(_refused), attached(pipe, Settings(offload="none", **WAYS[case["pass"]]), device=where):
                found = latents()
                off = {"same_bits": torch.equal(found, plain), "error": float((found - plain).norm() / plain.norm())}
                row = off | measured_steps(pipe, where, given, side)
        except (UserWarning, SettingsError) as told:
            row = {"failed": str(told)}
        yield row
        if held_on(where):
            return


def _refused(sentence: str) -> None:
    if sentence.startswith(("cuda_graphs: ", "compile: ")):
        raise UserWarning(sentence)


def _kernels(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "kernel" in row]


def _passes(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return in_order((row for row in rows if "pass" in row), "model", "side")


def _replays(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "scheduler" in row]


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    ran = [row for row in _kernels(rows) if "error" in row and "ratio" in row]
    if ran:
        sound = sum(row["no_worse"] and row["same_bits"] for row in ran)
        half = [row["ratio"] for row in ran if row["dtype"] == "float16"] or [row["ratio"] for row in ran]
        yield f"{sound} of {len(ran)} no further from float64 than torch's own and with the same bits in every run"
        yield f"in 16 bits {min(half):.2f} to {max(half):.2f} times as fast"
    yield from not_run(_kernels(rows), lambda row: row["kernel"])
    yield from not_run(_passes(rows), lambda row: f"{row['model']} at {row['side']}, {row['pass']}")
    for row in _passes(rows):
        first = _plain_step(row, rows)
        if first and row.get("step_seconds") and row["pass"] != "as it is":
            yield f"{row['model']} at {row['side']}, {row['pass']}: {first / row['step_seconds']:.2f} times as fast"
    yield from replays.summary(_replays(rows))


def _plain_step(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    task = {"model": row["model"], "side": row["side"], "pass": "as it is"}
    return next((one.get("step_seconds") for one in rows if task.items() <= one.items()), None)


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Kernels"
    yield ""
    yield "Kernels in Triton next to torch's own operators. *Error*: relative, to float64; *no worse*: at most half as"
    yield f"much again as torch's in the same type. *Same bits*: in {_RUNS} runs. *Times as fast*: ratio of medians of"
    yield "runs in turn. *Host*: until the call returned; *device*: between the events around it. *Allocated*: above"
    yield "the arguments."
    yield ""
    yield from rows_table(_KERNELS, (row for row in _kernels(part["rows"]) if "failed" not in row), of=2)
    yield ""
    yield "Passes of a UNet, all of its weights on the device. *Error*: of the latents after two steps, relative to"
    yield "those of the UNet as it is; recorded passes have to have the same bits. Medians of steps."
    yield ""
    passes = (row for row in _passes(part["rows"]) if "failed" not in row)
    yield from rows_table(_PASSES, ({**row, "plain_step": _plain_step(row, part["rows"])} for row in passes), of=2)
    if rows := _replays(part["rows"]):
        yield ""
        yield from replays.lines(rows)


_KERNELS: Columns = (
    ("kernel", "{kernel}"),
    ("type", "{dtype}"),
    ("error", "{error:.1e}"),
    ("torch's", "{torch_error:.1e}"),
    ("no worse", yes("no_worse")),
    ("same bits", yes("same_bits")),
    *pair_columns("torch's, ms", "this, ms", "{:.2f}", 1e-3),
    ("host ms", ms("host_seconds")),
    ("device ms", ms("device_seconds")),
    ("allocated MiB", mib("measured_bytes", "{:.1f}")),
    ("torch's MiB", mib("torch_bytes", "{:.1f}")),
)


def _ratio(row: Row) -> str:
    return f"{row['plain_step'] / row['step_seconds']:.2f}" if row["plain_step"] else ""


_PASSES: Columns = (
    ("model", "{model}, {side}x{side}"),
    ("way", "{pass}"),
    ("same bits", lambda row: yes("same_bits", "**no**" if row["pass"] in _LOSSLESS else "no")(row)),
    ("error", "{error:.1e}"),
    ("step ms", ms("step_seconds")),
    ("times as fast", _ratio),
    ("host ms", ms("host_seconds")),
    ("device ms", ms("device_seconds")),
    ("allocated MiB", mib("peak_bytes")),
)
