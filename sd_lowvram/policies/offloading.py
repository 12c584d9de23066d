"""diffusers' own offloading, called as its documentation says: on a pipeline that carries no hooks of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _in_groups(pipe: Any, device: torch.device) -> None:
    pipe.enable_group_offload(
        onload_device=device, offload_device=torch.device("cpu"), offload_type="leaf_level", use_stream=True
    )


CALLS: dict[str, Callable[[Any, torch.device], None]] = {
    "diffusers-model-offload": lambda pipe, device: pipe.enable_model_cpu_offload(device=device),
    "diffusers-sequential": lambda pipe, device: pipe.enable_sequential_cpu_offload(device=device),
    "diffusers-group": _in_groups,
}
"""Functions of a pipeline and the GPU, by the policy's name. Their changes to the pipeline are permanent."""
