"""Examples that ``--help`` shows."""

from __future__ import annotations

from collections.abc import Iterable

GENERATE = (
    'sd-lowvram generate "a red apple"',
    'sd-lowvram generate "a lighthouse" --model sdxl.safetensors --vram 4GB --width 1024 --height 1024',
    'sd-lowvram generate "in winter" --model sdxl.safetensors --init-image photo.png --strength 0.6 -o winter.png',
)
PLAN = (
    "sd-lowvram plan --model sdxl --vram 6GB --gpu rtx2070",
    "sd-lowvram plan --model model.safetensors --width 1024 --height 1024",
    "sd-lowvram plan --model sd15 --gpu gtx1650 --max-size",
)


def examples(lines: Iterable[str]) -> str:
    """``lines`` as the end of a help; each stays a line of its own."""
    return "\n\n".join(("Examples:", *lines))
