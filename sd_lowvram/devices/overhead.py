"""What a GPU holds besides tensors: the driver's context, the libraries' workspaces, the allocator's rounding.

A budget holds peak and overhead together. The figures are stated defaults; a machine that was measured has its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..units import KIB, MIB

# torch's caching allocator (CUDACachingAllocator.cpp): blocks are multiples of 512 bytes; blocks of up to 1 MiB are
# cut from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones are segments of their own.
_BLOCK = 512
_SMALL, _SMALL_SEGMENT = MIB, 2 * MIB
_MEDIUM, _MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
_LARGE_STEP = 2 * MIB


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

    def total(self, live_bytes: Iterable[int] = ()) -> int:
        """All of it, with the allocator's rounding for tensors of these sizes alive at once."""
        return self.context_bytes + self.matrix_bytes + self.convolution_bytes + rounding_bytes(live_bytes)


def block_bytes(nbytes: int) -> int:
    """What an allocation of ``nbytes`` counts in ``torch.cuda.memory_allocated``."""
    return _up(nbytes, _BLOCK)


def reserved_bytes(live_bytes: Iterable[int]) -> int:
    """What torch's allocator takes from the driver for tensors of these sizes, if it packs each pool without gaps.

    Fragmentation comes on top; segments that expand (``expandable_segments:True``) avoid most of it.
    """
    small = medium = large = 0
    for nbytes in live_bytes:
        block = block_bytes(nbytes)
        if block <= _SMALL:
            small += block
        elif block < _MEDIUM:
            medium += block
        else:
            large += _up(block, _LARGE_STEP)
    return _up(small, _SMALL_SEGMENT) + _up(medium, _MEDIUM_SEGMENT) + large


def rounding_bytes(live_bytes: Iterable[int]) -> int:
    """How much more the allocator reserves than tensors of these sizes hold.

    Without sizes: the most that the last segments of the two pools leave unused.
    """
    sizes = list(live_bytes)
    return reserved_bytes(sizes) - sum(sizes) if sizes else _SMALL_SEGMENT + _MEDIUM_SEGMENT


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
