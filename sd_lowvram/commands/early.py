"""Budgets that no settings can make do, refused before torch is imported."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..errors import BudgetError
from ..units import format_size, parse_size

_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri")
"""Files of a Linux machine with a GPU; a change of them means another plan."""

_NARROWEST = 2
"""Bytes of an element of a map, at the least."""


def gpu_files() -> list[str]:
    """Existing files of a GPU's driver."""
    return [path for path in _GPUS if os.path.exists(path)]


def has_no_gpu() -> bool:
    """True if the machine certainly has no GPU, as far as that is known without torch."""
    return sys.platform == "linux" and not gpu_files()


def check_floor(
    config: dict[str, Any],
    width: int | None,
    height: int | None,
    batch: int,
    budget: int,
) -> None:
    """Refuse a budget that cannot hold one map of the UNet's first level, which every step makes whole; of a
    transformer nothing is known without a plan.

    Args:
        config: of the model's parts.
        width, height: pixels; None: the model's own.
        budget: bytes.

    Raises:
        BudgetError: with less than would be needed in all, which takes a plan.
    """
    if "unet" not in config:
        return
    own_width, own_height, factor = own_size(config)
    width, height = width or own_width, height or own_height
    elements = (width // factor) * (height // factor) * config["unet"].get("block_out_channels", (320,))[0]
    least = _NARROWEST * batch * elements
    if least > budget:
        raise BudgetError(
            f"{format_size(budget)} cannot hold {width}x{height}: a single intermediate result of a step is "
            f"{format_size(least)}; sd-lowvram plan shows what the whole run needs",
            needed_bytes=least,
            stage="denoise",
        )


def own_size(config: dict[str, Any]) -> tuple[int, int, int]:
    """Width and height in pixels that a model of these configurations makes by itself; pixels a side for a latent's."""
    factor = 2 ** (len(config.get("vae", {}).get("block_out_channels", (0,) * 4)) - 1)
    denoiser = config["unet"] if "unet" in config else {"sample_size": 128, **config["transformer"]}
    sample = denoiser.get("sample_size") or 64
    rows, columns = (sample, sample) if isinstance(sample, int) else sample
    return columns * factor, rows * factor, factor


def known_budget(vram: str | None, device: str | None) -> int | None:
    """Bytes as they were typed, or that are free; None: not known without torch."""
    if vram is not None:
        return parse_size(vram, "--vram")
    if device == "cpu" or (device is None and has_no_gpu()):
        from ..devices.info import available_ram

        return available_ram()
    return None
