"""Print which packages are missing; install nothing.

AUTOMATIC1111 runs this file at every start, ComfyUI-Manager after a clone. The packages of both hosts are enough. A
missing optional package is reported once.
"""

import contextlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

REPORTED = Path(__file__).with_name(".install-told")
"""File with the packages that were reported last."""

NEEDED = {"torch": "torch", "safetensors": "safetensors"}
USED = {
    "psutil": ("psutil", "free RAM is read from the system, if possible"),
    "pynvml": ("nvidia-ml-py", "free VRAM is read from torch, which may not see other programs"),
}


def missing(modules: Iterable[str]) -> list[str]:
    """The names among ``modules`` that cannot be imported; none is imported."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def main() -> None:
    for name in missing(NEEDED):
        print(f"sd-lowvram: {NEEDED[name]} is missing, and sd-lowvram needs it (pip install {NEEDED[name]})")
    optional = missing(USED)
    if news(optional):
        for name in optional:
            package, instead = USED[name]
            print(f"sd-lowvram: {package} is not installed: {instead} (optional: pip install {package})")


def news(names: list[str]) -> bool:
    """True if ``names`` differ from the last start's; they are stored."""
    text = " ".join(names)
    if REPORTED.is_file() and REPORTED.read_text() == text:
        return False
    with contextlib.suppress(OSError):  # a folder that cannot be written to gets it again
        REPORTED.write_text(text)
    return True


if __name__ == "__main__":
    main()
