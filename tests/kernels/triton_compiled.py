"""Run by test_triton.py: compiles every kernel for one architecture, which need not be here.

Prints for each: its name, the type, bytes of its cubin and of shared memory.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sd_lowvram.kernels.triton import attention, geglu, group_norm, strip, wide_attention

FLOATS = {"eps", "scale"}
TILE = {"CHANNELS": 4, "PIXELS": 256}
TORCHS = {"fp32": torch.float32, "fp16": torch.float16}


def compiled(kernel: Any, kind: str, target: GPUTarget, pointers: dict[str, str], warps: int, **constants: Any) -> None:
    """Compile ``kernel`` with its arguments ``pointers`` in these types, all others whole numbers or `FLOATS`."""
    numbers = (name for name in kernel.arg_names if name not in pointers and name not in constants)
    signature = {name: "fp32" if name in FLOATS else "i32" for name in numbers} | pointers
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    built = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": 1})
    print(kernel.__name__, kind, len(built.asm["cubin"]), built.metadata.shared)


def main(architecture: int) -> None:
    target = GPUTarget("cuda", architecture, 32)
    for kind, size in (("fp32", 4), ("fp16", 2), *((("bf16", 2),) if architecture >= 80 else ())):
        at = f"*{kind}"
        norm = dict.fromkeys(("x", "out", "weight", "bias"), at) | {"partial": "*fp32"}
        compiled(group_norm._moments_kernel, kind, target, {"x": at, "partial": "*fp32"}, 4, **TILE)
        switches = {"CHUNKS": 64, "WEIGHT": True, "BIAS": True, "SILU": True}
        compiled(group_norm._normalise_kernel, kind, target, norm, 4, **switches, **TILE)
        compiled(geglu._geglu_kernel, kind, target, {"product": at, "out": at}, 4, BLOCK=256)
        affine = {"x": at, "out": at, "scale": "*fp32", "shift": "*fp32"}
        compiled(strip._strip_kernel, kind, target, affine, 4, **TILE)
        if kind not in TORCHS:
            continue
        tensors = dict.fromkeys(("q", "k", "v", "out", "mask"), at)
        for width in (64, 256) if size == 2 else (256,):
            rows, keys = attention._blocks(width, TORCHS[kind])
            widths = {"WIDTH": width, "VALUES": width}
            blocks = {"KIND": 2, "ROWS": rows, "KEYS": keys}
            compiled(attention._attention_kernel, kind, target, tensors, 4, **blocks, **widths)
        block = 16 if size == 4 else 32
        blocks = {"KIND": 0, "ROWS": block, "KEYS": block, "PART": 64, "VALUES": 512}
        compiled(wide_attention._wide_kernel, kind, target, tensors, 4, **blocks)


main(int(sys.argv[1]))
