"""The layers of diffusers' UNet2DConditionModel, by the names that the pruning literature gives them.

A UNet has blocks (dn0 from the outside in, mid, up0 from the inside out), a block has layers, a layer has a residual
unit and mostly a transformer unit: "dn0.1.res" is the residual unit of the second layer of the outermost down block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ..errors import BadInputError
from ..models import anatomy_of_components
from ..models.latents import native_size


class UNetLayer(NamedTuple):
    """A residual or transformer unit, or a sampler between two blocks.

    Attributes:
        name: "dn0.1.res", "mid.0.attn", "up1.sample".
        path: of the module in the UNet.
    """

    name: str
    path: str
    module: nn.Module


def own_side(unet: Any) -> int:
    """The side in pixels of the pictures that ``unet`` was made for."""
    return native_size(anatomy_of_components("diffusers", {"unet": unet}))


def check_unet(unet: Any) -> None:
    """Raise BadInputError if ``unet`` is not a plain UNet2DConditionModel of SD1.x, SD2.x or SDXL."""
    from ..models.diffusers import is_unet

    if not is_unet(unet):
        raise BadInputError(
            f"{type(unet).__name__} is not a UNet of SD1.x, SD2.x or SDXL as diffusers builds them: its layers are "
            "unknown"
        )


def units_of(unet: Any) -> Iterator[UNetLayer]:
    """All units in the order of the run.

    Raises:
        BadInputError: not a UNet that is known.
    """
    check_unet(unet)
    for number, block in enumerate(unet.down_blocks):
        yield from _units(f"dn{number}", f"down_blocks.{number}", block, "downsamplers")
    if unet.mid_block is not None:
        yield from _units("mid", "mid_block", unet.mid_block, None)
    for number, block in enumerate(unet.up_blocks):
        yield from _units(f"up{number}", f"up_blocks.{number}", block, "upsamplers")


def _units(name: str, path: str, block: Any, samplers: str | None) -> Iterator[UNetLayer]:
    attentions = [*(getattr(block, "attentions", None) or ())]
    for number, residual in enumerate(block.resnets):
        yield UNetLayer(f"{name}.{number}.res", f"{path}.resnets.{number}", residual)
        if number < len(attentions):
            yield UNetLayer(f"{name}.{number}.attn", f"{path}.attentions.{number}", attentions[number])
    for sampler in (samplers and getattr(block, samplers, None)) or ():
        yield UNetLayer(f"{name}.sample", f"{path}.{samplers}.0", sampler)
