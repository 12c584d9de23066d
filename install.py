"""Looks what this Python has, tells what is missing, and installs nothing.

AUTOMATIC1111 runs it at every start, ComfyUI-Manager after a clone; what both bring themselves is enough. What one can
do without it tells once.
"""

import contextlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

TOLD = Path(__file__).with_name(".install-told")
"""Remembers what was told last."""

NEEDED = {"torch": "torch", "safetensors": "safetensors"}
USED = {
    "psutil": ("psutil", "host memory is read from the system, where it says"),
    "pynvml": ("nvidia-ml-py", "free graphics memory is read from torch, which may not see other programs"),
}


def missing(modules: Iterable[str]) -> list[str]:
    """The names among ``modules`` that cannot be imported; none is imported."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def main() -> None:
    for name in missing(NEEDED):
        print(f"sd-lowvram: {NEEDED[name]} is missing, and nothing works without it (pip install {NEEDED[name]})")
    optional = missing(USED)
    if news(optional):
        for name in optional:
            package, instead = USED[name]
            print(f"sd-lowvram: {package} is not installed: {instead} (optional: pip install {package})")


def news(names: list[str]) -> bool:
    """Whether this is not what was told at the last start; remembers it."""
    text = " ".join(names)
    if TOLD.is_file() and TOLD.read_text() == text:
        return False
    with contextlib.suppress(OSError):  # a folder that cannot be written to hears it again
        TOLD.write_text(text)
    return True


if __name__ == "__main__":
    main()
