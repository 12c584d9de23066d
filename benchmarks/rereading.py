"""Bytes that a step reads from the file of a model that host memory does not hold: by this engine, and by a loop that
reads every layer anew in every step, as tools do that keep nothing ("bf16 in 4 GB" of any model). Counted, not timed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd_lowvram import Settings
from sd_lowvram.checkpoints.architectures import empty_model, parts_of_transformers
from sd_lowvram.checkpoints.safetensors_header import Header, read_header
from sd_lowvram.devices.disk import DISKS
from sd_lowvram.errors import BadInputError
from sd_lowvram.session import attached
from sd_lowvram.streaming.host_weights import RING_BYTES, host_budget
from sd_lowvram.streaming.mapped_files import can_read_past_cache
from sd_lowvram.units import MIB

from .tables import Sheet, written

_NARROW = {"dim": 640, "n_heads": 5, "n_kv_heads": 5, "cap_feat_dim": 256}
"""Z-Image's depth, a sixth as wide."""
_STEPS = 3
_MEMORY = (1.0, 0.5, 0.25)
_ON_CARD = (0.0, 0.25)

lines = Sheet(
    "What a step reads from the model's file",
    "Z-Image's transformer at a sixth of its width, {mib:.0f} MiB in float32, on a CPU; bytes that the system read "
    "from the disk in the last of {steps} steps. *Read anew*: each layer is read from the file "
    "before it computes, in every step, and given up after it. Seconds are those bytes by the rates of disks, not "
    "measured.",
    (
        ("host memory for weights", "{memory:.0%} of them"),
        ("weights on the card", "{on_card:.0%}"),
        ("read anew MiB", "{anew_mib:.1f}"),
        ("ours MiB", "{ours_mib:.1f}"),
        *(
            (f"{title}: anew, ours s", f"{{anew_{name}:.3f}}, {{ours_{name}:.3f}}")
            for name, title in (("nvme", "NVMe"), ("sata", "SATA"))
        ),
    ),
    of=2,
).lines


def run(*, out: Path | None) -> dict[str, Any]:
    """Count both ways; writes ``out`` and JSON beside it.

    Raises:
        BadInputError: the system does not tell what it reads from a disk, or nothing here is read from one.
    """
    if not can_read_past_cache():
        raise BadInputError("rereading: this system does not tell which bytes it reads from a disk")
    with tempfile.TemporaryDirectory(dir=out.parent if out is not None else None) as folder:
        path = Path(folder) / "model.safetensors"
        total = _write(path)
        with torch.no_grad():
            wanted = _call(_loaded(path))
            anew = _counted(path, _read_anew(path), wanted)
            if not anew:
                raise BadInputError(f"rereading: nothing was read from a disk of {folder}: give --out on one")
            rows = [
                _row(memory, on_card, anew, _counted(path, _ours(path, total, memory, on_card), wanted))
                for memory in _MEMORY
                for on_card in _ON_CARD
            ]
    return written({"mib": total / MIB, "steps": _STEPS, "rows": rows}, lines, out)


def _row(memory: float, on_card: float, anew: int, ours: int) -> dict[str, Any]:
    found: dict[str, Any] = {"memory": memory, "on_card": on_card}
    for way, read in (("anew", anew), ("ours", ours)):
        found |= {f"{way}_mib": read / MIB, **{f"{way}_{name}": read / DISKS[name] for name in ("nvme", "sata")}}
    return found


def _empty() -> Any:
    with torch.device("meta"):
        return empty_model(parts_of_transformers()["z-image"] | _NARROW)


def _write(path: Path) -> int:
    """Random weights in a file that no cache holds; returns their bytes."""
    drawn = torch.Generator().manual_seed(0)
    state = {name: 0.02 * torch.randn(one.shape, generator=drawn) for name, one in _empty().state_dict().items()}
    save_file(state, path)
    return sum(tensor.nbytes for tensor in state.values())


def _loaded(path: Path) -> Any:
    model = _empty()
    model.load_state_dict(load_file(path), assign=True)
    return model.eval().requires_grad_(False)


def _call(model: nn.Module) -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    latents, text = (
        torch.randn(16, 1, 16, 16, generator=drawn),
        torch.randn(32, _NARROW["cap_feat_dim"], generator=drawn),
    )
    found: Tensor = model([latents], torch.tensor([0.5]), [text])[0][0]
    return found


@contextlib.contextmanager
def _read_anew(path: Path) -> Iterator[nn.Module]:
    """A model whose layers hold weights while they compute, read from the file each time."""
    model, header = _empty().eval().requires_grad_(False), read_header(path)
    with contextlib.ExitStack() as stack:

        def fill(module: nn.Module, names: list[str], before: str) -> None:
            for name in names:
                module._parameters[name] = nn.Parameter(_read(path, header, before + name), requires_grad=False)
            _forget(path)

        def give_up(module: nn.Module, names: list[str]) -> None:
            for name in names:
                module._parameters[name] = nn.Parameter(getattr(module, name).to("meta"), requires_grad=False)

        for place, module in model.named_modules():
            names = [name for name, _ in module.named_parameters(recurse=False)]
            before = f"{place}." if place else ""
            if names:
                hooks = (
                    module.register_forward_pre_hook(lambda m, _, n=names, b=before: fill(m, n, b)),
                    module.register_forward_hook(lambda m, *_, n=names: give_up(m, n)),
                )
                for hook in hooks:
                    stack.callback(hook.remove)
        yield model


def _read(path: Path, header: Header, name: str) -> Tensor:
    entry = header.tensors[name]
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead of what is asked for
        data = bytearray(os.pread(file.fileno(), entry.end - entry.begin, header.data_offset + entry.begin))
    return torch.frombuffer(data, dtype=torch.float32).view(entry.shape)


@contextlib.contextmanager
def _ours(path: Path, total: int, memory: float, on_card: float) -> Iterator[nn.Module]:
    settings = Settings(offload="layer")
    if on_card:
        settings = Settings(offload="blocks", weights_mib=int(on_card * total / MIB))
    model = _loaded(path)
    with host_budget(RING_BYTES + int(memory * total)), attached(model, settings, device="cpu"):
        yield model


def _counted(path: Path, way: contextlib.AbstractContextManager[nn.Module], wanted: Tensor) -> int:
    """Bytes that the last of some steps had read from the disk; all of them make ``wanted``."""
    gc.collect()  # pages that an earlier model has mapped stay cached
    _forget(path)
    with way as model:
        for _ in range(_STEPS):
            before = _read_bytes()
            made = _call(model)
            read = _read_bytes() - before
            torch.testing.assert_close(made, wanted)  # weights that lie otherwise in memory are summed in another order
    return read


def _forget(path: Path) -> None:
    """Drop a file from the system's cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_bytes() -> int:
    """Bytes that this process has had read from a disk so far."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
    return int(told["read_bytes"])
