"""Run by test_triton.py: compiles every kernel for one architecture, which need not be here.

Prints for each: its name, the type, bytes of its cubin and of shared memory.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sd_lowvram.kernels.triton import geglu, group_norm

FLOATS = {"eps"}
TILE = {"CHANNELS": 4, "PIXELS": 256}


def compiled(kernel: Any, kind: str, target: GPUTarget, pointers: dict[str, str], warps: int, **constants: Any) -> None:
    """Compile ``kernel`` with its arguments ``pointers`` in these types, all other ones whole numbers or `FLOATS`."""
    numbers = (name for name in kernel.arg_names if name not in pointers and name not in constants)
    signature = {name: "fp32" if name in FLOATS else "i32" for name in numbers} | pointers
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    built = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": 1})
    print(kernel.__name__, kind, len(built.asm["cubin"]), built.metadata.shared)


def main(architecture: int) -> None:
    target = GPUTarget("cuda", architecture, 32)
    for kind in ("fp32", "fp16", *(("bf16",) if architecture >= 80 else ())):
        at = f"*{kind}"
        norm = dict.fromkeys(("x", "out", "weight", "bias"), at) | {"partial": "*fp32"}
        compiled(group_norm._moments_kernel, kind, target, {"x": at, "partial": "*fp32"}, 4, **TILE)
        switches = {"CHUNKS": 64, "WEIGHT": True, "BIAS": True, "SILU": True}
        compiled(group_norm._normalise_kernel, kind, target, norm, 4, **switches, **TILE)
        compiled(geglu._geglu_kernel, kind, target, {"product": at, "out": at}, 4, BLOCK=256)


main(int(sys.argv[1]))
