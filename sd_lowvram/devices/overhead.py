"""What a GPU holds besides tensors: the driver's context, the libraries' workspaces, the allocator's rounding.

A budget holds peak and overhead together. The figures are stated defaults; a machine that was measured has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..units import KIB, MIB

ROUNDING_BYTES = 22 * MIB
"""The most that torch's caching allocator (CUDACachingAllocator.cpp) leaves unused: blocks of up to 1 MiB are cut from
segments of 2 MiB, those below 10 MiB from segments of 20 MiB, and the last one of each kind may be all but empty."""


@dataclass(frozen=True)
class Overhead:
    """Bytes of device memory that no tensor shows.

    Attributes:
        context_bytes: the CUDA context with the kernels that are loaded. Seen between 250 MiB (lazy loading of kernels)
            and 800 MiB (without); nothing reports it before it is there.
        matrix_bytes: cuBLAS' workspace, one for each stream; torch asks for 2 x 4 MiB + 8 x 16 KiB, and for 32 MiB on
            Hopper.
        convolution_bytes: cuDNN's workspace. It scales with the convolution; 32 MiB holds what its heuristics choose in
            fp16 on maps that fit a small GPU.
    """

    context_bytes: int = 450 * MIB
    matrix_bytes: int = 8 * MIB + 128 * KIB
    convolution_bytes: int = 32 * MIB

    def total(self) -> int:
        """All of it, with the allocator's rounding."""
        return self.context_bytes + self.matrix_bytes + self.convolution_bytes + ROUNDING_BYTES
