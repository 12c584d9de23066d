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
    """Check that every weight of a loaded model has contents.

    Args:
        path: the file or folder, for the error.
        model: the model.

    Raises:
        CheckpointError: a weight has no contents.
    """
    held = itertools.chain(model.named_parameters(), model.named_buffers())
    check_found(path, model, [name for name, tensor in held if tensor.device.type == "meta"])


def check_found(path: Path, model: nn.Module, missing: Collection[str]) -> None:
    """Check that a file had every weight of its model. Libraries leave missing weights without contents, or fill them
    at random.

    Args:
        path: the file or folder, for the error.
        model: the model.
        missing: names that the library reports.

    Raises:
        CheckpointError: a weight of ``model`` is missing.
    """
    lost = [name for name in missing if not name.endswith(_NEVER_READ)]
    if lost:
        count = f"{len(lost)} weight{'s' * (len(lost) > 1)}"
        first = f"{lost[0]}{', for one' * (len(lost) > 1)}"
        raise CheckpointError(f"{path} lacks {count} of its {type(model).__name__}: {first}. Download the file again")
