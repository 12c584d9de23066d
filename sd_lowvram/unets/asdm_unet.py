"""The UNet of diffusers with what A-SDM (2023) puts into its shallow blocks: convolutions of several experts, regional
attention. diffusers is imported here: import this file where such a UNet is made or loaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from diffusers import ModelMixin, UNet2DConditionModel
from torch import Tensor, nn

from ..errors import BadInputError
from .cond_conv import CondConv2d
from .regional_attention import RegionalAttention

__all__ = ["ASDMUNet2DConditionModel", "ModelMixin"]  # in the latter's name diffusers looks for how a class is loaded

MOST_EXPERTS = 64
"""CondConv (2019) goes up to 32."""

_NAME = re.compile(r"(dn|up)(\d+)|mid")


class ASDMUNet2DConditionModel(UNet2DConditionModel):
    """A UNet2DConditionModel with some changed blocks, as its configuration says.

    Its arguments are those of UNet2DConditionModel, by name, and three more.
    """

    def __init__(
        self,
        *,
        experts: int = 1,
        regions: int | None = None,
        changed_blocks: tuple[str, ...] = (),
        **config: Any,
    ) -> None:
        """
        Args:
            experts: of each 3x3 convolution of the changed blocks; all are copies of the first.
            regions: side of a region of self-attention there, in tokens; None: plain attention.
            changed_blocks: "dn0", "mid", "up3".

        Raises:
            BadInputError: experts below 1 or above 64, a side below 1, or a block that is not there.
        """
        super().__init__(**config)
        check_changes(experts, regions, changed_blocks)
        self.register_to_config(experts=experts, regions=regions, changed_blocks=[*changed_blocks])
        for name in changed_blocks:
            block, factor = _block(self, name)
            if experts > 1:
                _give_experts(block, experts)
            if regions is not None:
                _give_regions(block, regions, factor)

    def forward(self, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        for module in self.modules():
            if isinstance(module, RegionalAttention):
                module.latents = tuple(map(int, sample.shape[-2:]))  # type: ignore[assignment]
        return super().forward(sample, *args, **kwargs)


def _full_signature() -> inspect.Signature:
    """diffusers reads from the signature what a configuration may say."""
    theirs = [*inspect.signature(UNet2DConditionModel.__init__).parameters.values()]
    own = inspect.signature(ASDMUNet2DConditionModel.__init__).parameters.values()
    ours = [parameter for parameter in own if parameter.kind is parameter.KEYWORD_ONLY]
    return inspect.Signature([*theirs, *ours])


ASDMUNet2DConditionModel.__init__.__signature__ = _full_signature()  # type: ignore[attr-defined]


def check_changes(experts: Any, regions: Any, blocks: Any = ()) -> None:
    """Check the changes of a UNet.

    Args:
        experts: number of experts.
        regions: side of a region; None: no regions.
        blocks: names of blocks.

    Raises:
        BadInputError: one of them cannot be used.
    """
    if type(experts) is not int or not 1 <= experts <= MOST_EXPERTS:
        raise BadInputError(
            f"experts {experts!r} is not a number of experts: 1 is the plain convolution, 2 to {MOST_EXPERTS} are mixed"
        )
    if regions is not None and (type(regions) is not int or regions < 1):
        raise BadInputError(f"regions {regions!r} is not a side of a region: give the tokens of a side, 16 or 32")
    if not isinstance(blocks, (list, tuple)) or not all(isinstance(name, str) for name in blocks):
        raise BadInputError(
            f"changed_blocks {blocks!r} is not a list of blocks: give their names, dn0 and up3 for example"
        )


def is_changed(config: Mapping[str, Any]) -> bool:
    """True if a UNet of this configuration has changed blocks."""
    return config.get("experts", 1) != 1 or config.get("regions") is not None


def _block(unet: Any, name: str) -> tuple[nn.Module, int]:
    """The block of a name, and by how much its maps are smaller than the latents."""
    match, last = _NAME.fullmatch(name), len(unet.down_blocks) - 1
    number = int(match[2] or 0) if match is not None else 0
    if match is None or number > last or (not match[1] and unet.mid_block is None):
        middle = ", mid" if unet.mid_block is not None else ""
        raise BadInputError(f"this UNet has no block {name!r}: it has dn0 to dn{last}{middle}, and up0 to up{last}")
    if not match[1]:
        return unet.mid_block, 1 << last
    if match[1] == "dn":
        return unet.down_blocks[number], 1 << number
    return unet.up_blocks[number], 1 << (last - number)


def _give_experts(block: nn.Module, experts: int) -> None:
    plain = [(path, module) for path, module in block.named_modules() if isinstance(module, nn.Conv2d)]
    for path, conv in plain:
        if conv.kernel_size == (3, 3):
            layer = CondConv2d(conv.in_channels, conv.out_channels, experts, conv.stride, conv.padding)
            layer.weight = nn.Parameter(conv.weight.detach().repeat(experts, 1, 1, 1))
            layer.bias = nn.Parameter(conv.bias.detach().repeat(experts))  # type: ignore[union-attr]
            _put(block, path, layer)


def _give_regions(block: nn.Module, side: int, factor: int) -> None:
    attentions = [
        (f"{path}.attn1", module.attn1)
        for path, module in block.named_modules()
        if hasattr(module, "attn1") and not getattr(module, "only_cross_attention", False)
    ]
    for path, attention in attentions:
        _put(block, path, RegionalAttention(attention, side, factor))


def _put(block: nn.Module, path: str, module: nn.Module) -> None:
    above, _, name = path.rpartition(".")
    setattr(block.get_submodule(above), name, module)
