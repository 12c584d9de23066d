"""Loss terms of a student against its teacher at one step: A-SDM's terms (2023), on the blocks that both have.

Features are compared relative to the teacher's own mean square, so that every block has equal weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadInputError

MID = "mid"
_SHARED = ("in_channels", "out_channels", "cross_attention_dim")


def check_match(teacher: Any, student: Any) -> None:
    """Raise BadInputError where ``student`` is not a UNet of the teacher's outer blocks and inputs."""
    ours, theirs = student.config, teacher.config
    for name in _SHARED:
        if ours.get(name) != theirs.get(name):
            raise BadInputError(
                f"the student and the teacher do not match: {name} is {ours.get(name)} in the student and "
                f"{theirs.get(name)} in the teacher"
            )
    channels = [*ours["block_out_channels"]], [*theirs["block_out_channels"]][: len(ours["block_out_channels"])]
    if channels[0] != channels[1]:
        raise BadInputError(
            f"the student and the teacher do not match: the student's blocks have {channels[0]} channels and the "
            f"teacher's outermost {channels[1]}"
        )


@contextlib.contextmanager
def maps_of(unet: Any) -> Iterator[dict[str, Tensor]]:
    """Record the maps of the last call within the block: "dn0", "up0" after each block, "mid" before the innermost up
    block; numbers count from the outside in on both sides."""
    maps: dict[str, Tensor] = {}
    handles = []

    def keep(name: str, module: nn.Module) -> None:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            maps[name] = output[0] if isinstance(output, tuple) else output

        handles.append(module.register_forward_hook(hook))

    def keep_mid(module: Any, arguments: Any, named: Any) -> None:
        maps[MID] = named["hidden_states"] if "hidden_states" in named else arguments[0]

    try:
        for number, block in enumerate(unet.down_blocks):
            keep(f"dn{number}", block)
        for number, block in enumerate(reversed(unet.up_blocks)):
            keep(f"up{number}", block)
        handles.append(unet.up_blocks[0].register_forward_pre_hook(keep_mid, with_kwargs=True))
        yield maps
    finally:
        for handle in handles:
            handle.remove()


def features_terms(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """ "blocks": how far the student's maps are from the teacher's, mean over the blocks of one shape; "mid": what goes
    into its up blocks, where the teacher has a map of that shape there."""
    pairs = {name: (ours[name], theirs[name]) for name in ours if name in theirs}
    alike = {name: _relative(*pair) for name, pair in pairs.items() if pair[0].shape == pair[1].shape}
    mid = alike.pop(MID, None)
    terms = {"blocks": torch.stack([*alike.values()]).mean()} if alike else {}
    return terms | ({MID: mid} if mid is not None else {})


def semantic_term(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    """Distance between the features of the student's and of the teacher's pictures, averaged over the depths."""
    return torch.stack([_relative(*pair) for pair in zip(ours, theirs, strict=True)]).mean()


def _relative(ours: Tensor, theirs: Tensor) -> Tensor:
    ours, theirs = ours.float(), theirs.float().detach()
    return (ours - theirs).square().mean() / theirs.square().mean().clamp_min(1e-12)


def clean_of(noisy: Tensor, output: Tensor, alphas: Tensor, prediction: str) -> Tensor:
    """Return the clean latents that ``output`` predicts.

    Args:
        noisy: (N, C, h, w).
        output: of the UNet, of the same shape.
        alphas: cumulative products of the schedule, shaped to multiply with ``noisy``.
        prediction: "epsilon" or "v_prediction".
    """
    if prediction == "epsilon":
        return (noisy - (1 - alphas).sqrt() * output) / alphas.sqrt()
    return alphas.sqrt() * noisy - (1 - alphas).sqrt() * output
