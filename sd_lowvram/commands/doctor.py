"""``sd-lowvram doctor``: shows what the examination in doctor.py found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..devices.disk import describe_rate
from ..errors import BadInputError
from .exit_codes import exit_on_error
from .values import check_given


def doctor(
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure this machine again and store the result for plans: speed of computing and copying, and the "
            "memory that the GPU's driver and libraries use. The first plan measures in some seconds; only this option "
            "also measures the gain of torch.compile, which takes minutes. Close other programs first.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="A model's folder or file, to show the speed of its disk; left out: the current folder.",
            metavar="PATH",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show what this machine has, what runs here and what is missing."""
    with exit_on_error(debug):
        check_given(model=model)
        where = Path(model or ".").resolve()
        if not where.exists():
            raise BadInputError(f"--model {model} does not exist: give a folder or a file on the disk")
        from .examination import calibrate_machine, disk_of, examine

        machine = examine(probe=not calibrate) | {"disk": disk_of(where, calibrate)}
        if calibrate:
            machine["calibration"] = calibrate_machine()
        if as_json:
            print(json.dumps(machine, indent=2))
        else:
            _show(machine)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..units import format_size

    console = Console(highlight=False)
    machine = Table(show_header=False, box=None)
    for gpu in report["gpus"]:
        memory = gpu["memory"]
        machine.add_row("GPU", f"{gpu['name']}, {format_size(memory['free'])} of {format_size(memory['total'])} free")
        machine.add_row("driver", gpu["driver"] or "unknown")
    if not report["gpus"]:
        none = "none that torch can use: pictures are computed on the CPU"
        machine.add_row("GPU", none if report["device"] == "cpu" else report["device"])
    ram = report["ram"]
    machine.add_row("RAM", f"{format_size(ram['free'])} of {format_size(ram['total'])} free")
    disk = report["disk"]
    rate = (
        "not measured: this system has no reads without its cache"
        if disk["rate"] is None
        else describe_rate(disk["rate"])
    )
    machine.add_row("disk", f"{rate}, of {disk['path']}")
    machine.add_row("torch", report["torch"])
    for support in report["support"]:
        machine.add_row(support["level"], f"{support['name']}: {support['sentence']}")
    console.print(machine)
    if report["attention"]:
        table = Table("attention", "runs here", "same bits every time", title="")
        for row in report["attention"]:
            runs = "yes" if row["runs"] else f"no: {row['reason']}"
            table.add_row(
                row["name"], runs, {True: "yes", False: "[red]no[/red]", None: "not tested"}[row["deterministic"]]
            )
        console.print(table)
    if "calibration" in report:
        console.print(_calibration(report["calibration"]))
    for warning in report["warnings"]:
        console.print(f"[yellow]warning:[/yellow] {warning}")
    for missing in report["missing"]:
        console.print(f"missing: {missing['what']}: {missing['remedy']}", markup=False)


def _calibration(measured: dict[str, Any]) -> Any:
    from rich.table import Table

    from ..units import format_size

    rates, overhead = measured["rates"], measured["overhead"]
    source = rates["source"].removeprefix("measured here")
    table = Table("measured", rates["title"], title="", caption=source.removeprefix(" ") or None)
    table.add_row("matrix work, 32 bits", f"{rates['float_flops'] / 1e9:.4g} GFLOP/s")
    table.add_row("matrix work, 16 bits", f"{rates['half_flops'] / 1e9:.4g} GFLOP/s")
    if rates["wide_flops"]:
        table.add_row("matrix work, 16 bits, sizes of transformers", f"{rates['wide_flops'] / 1e9:.4g} GFLOP/s")
    table.add_row("memory", f"{rates['bandwidth'] / 1e9:.3g} GB/s")
    table.add_row("copies from RAM to the GPU", f"{rates['copy_bandwidth'] / 1e9:.3g} GB/s")
    table.add_row("weights from a mapped file", f"{rates['reading'] / 1e9:.3g} GB/s")
    table.add_row("its convolutions, copied to channels last", f"{rates['reordering'] / 1e9:.3g} GB/s")
    if rates["packing"]:
        table.add_row("weights, copied into the kernels' order", f"{rates['packing'] / 1e9:.3g} GB/s")
    if rates["group_seconds"]:
        table.add_row("an element of a group in GroupNorm", f"{rates['group_seconds'] * 1e9:.3g} ns")
    table.add_row("starting an operation", f"{rates['launch_seconds'] * 1e6:.3g} us")
    table.add_row("offload, a call of a layer", f"{rates['layer_launches']:.2g} operations")
    table.add_row("streaming, a copy of weights", f"{rates['fetch_launches']:.2g} operations")
    if rates["queued"]:
        table.add_row("an operation in strips", f"{rates['strip_launches']:.2g} operations")
        table.add_row("replaying, a module", f"{rates['replay_launches']:.2g} operations")
    if rates["loading_seconds"]:
        table.add_row("loading libraries and kernels", f"{rates['loading_seconds']:.1f} s")
    for name, ratio in measured["kernels"].items():
        table.add_row(name, f"{ratio:.2f} times as fast as torch's operators")
    compiling = measured["compile"]
    if compiling:
        table.add_row("compiled", f"{compiling['gain']:.2f} times as fast, channels last")
        table.add_row("compiling a kind of block", f"{compiling['first_seconds']:.1f} s")
        table.add_row("loading it in a later run", f"{compiling['again_seconds']:.1f} s")
    for name, title in (("context_bytes", "context"), ("matrix_bytes", "cuBLAS"), ("convolution_bytes", "cuDNN")):
        if overhead:
            table.add_row(f"memory of {title}", format_size(overhead[name]))
    return table
