"""``sd-lowvram unet lora``: a LoRA that fits a UNet from which layers were cut."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

import typer

from ...commands.exit_codes import exit_on_error
from ...commands.values import check_given
from ...errors import OutputError
from .unet import Debug, Json, empty_unet, unet


@unet.command()
def lora(
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="The smaller model: what `unet prune`, `combine` or `distil` wrote.", metavar="PATH"
        ),
    ],
    lora: Annotated[
        Path, typer.Option("--lora", help="The LoRA of the whole model, a .safetensors file.", metavar="FILE")
    ],
    out: Annotated[Path, typer.Option("--out", help="The converted LoRA, a new .safetensors file.", metavar="FILE")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert a LoRA of the whole model for a smaller one: its layers are renumbered, and parts for layers that were
    cut are left out and named. For diffusers, ComfyUI and the WebUIs alike."""
    with exit_on_error(debug):
        check_given(model=model)
        if out.suffix.lower() != ".safetensors":
            raise OutputError(f"--out {out} must end in .safetensors")
        if out.exists():
            raise OutputError(f"--out {out} is there already: name a new file")
        from safetensors.torch import save

        from ...files import write_whole
        from ..lora import lora_for

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reduced = lora_for(empty_unet(model), lora)
        left_out = [str(warning.message) for warning in caught if warning.category is UserWarning]
        write_whole(save({name: tensor.contiguous() for name, tensor in reduced.items()}, _about(lora)), out)
        if as_json:
            print(json.dumps({"out": str(out), "tensors": len(reduced), "left_out": left_out}, indent=2))
        else:
            print("\n".join([*left_out, f"written: {out}"]))


def _about(lora: Path) -> dict[str, str]:
    """Metadata of the file: trigger words and the like."""
    from safetensors import safe_open

    with safe_open(lora, framework="pt") as file:
        return file.metadata() or {}
