"""Looks what this Python has, tells what is missing, and installs nothing.

AUTOMATIC1111 runs it at every start, ComfyUI-Manager after a clone; what both bring themselves is enough.
"""

import importlib.util

NEEDED = {"torch": "torch", "safetensors": "safetensors"}
USED = {
    "psutil": ("psutil", "host memory is read from the system, where it says"),
    "pynvml": ("nvidia-ml-py", "free graphics memory is read from torch, which may not see other programs"),
}


def missing(modules):
    """The names among ``modules`` that cannot be imported; none is imported."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def main():
    for name in missing(NEEDED):
        print(f"sd-lowvram: {NEEDED[name]} is missing, and nothing works without it (pip install {NEEDED[name]})")
    for name in missing(USED):
        package, instead = USED[name]
        print(f"sd-lowvram: {package} is not installed: {instead} (optional: pip install {package})")


if __name__ == "__main__":
    main()
