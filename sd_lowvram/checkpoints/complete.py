"""The check after every load: a model has all of its weights."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

_NEVER_READ = ("position_ids", "logit_scale", "lm_head.weight", "num_batches_tracked")
"""Ends of names: what a library computes by itself, and what no pipeline reads of a text encoder."""


def check_complete(path: Path, model: nn.Module) -> None:
    """Raise CheckpointError where a weight of ``model``, loaded from ``path``, has no contents."""
    held = itertools.chain(model.named_parameters(), model.named_buffers())
    check_found(path, model, [name for name, tensor in held if tensor.device.type == "meta"])


def check_found(path: Path, model: nn.Module, missing: Collection[str]) -> None:
    """Raise CheckpointError where ``missing`` names a weight of ``model`` that the file at ``path`` lacks.

    Libraries leave what a file lacks without contents, or fill it at random.
    """
    lost = [name for name in missing if not name.endswith(_NEVER_READ)]
    if lost:
        count = f"{len(lost)} weight{'s' * (len(lost) > 1)}"
        first = f"{lost[0]}{', for one' * (len(lost) > 1)}"
        raise CheckpointError(f"{path} lacks {count} of its {type(model).__name__}: {first}. Download the file again")
