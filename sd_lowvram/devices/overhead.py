"""What a GPU holds besides tensors: the driver's context, the libraries' workspaces, the allocator's rounding.

A budget holds peak and overhead together. The figures are stated defaults; a machine that was measured has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..units import KIB, MIB


@dataclass(frozen=True)
class Overhead:
    """Bytes of device memory that no tensor shows.

    Attributes:
        context_bytes: the CUDA context with the kernels that are loaded. Seen between 250 MiB (lazy loading of kernels)
            and 800 MiB (without); nothing reports it before it is there.
        matrix_bytes: cuBLAS' workspace, one for each stream; torch asks for 2 x 4 MiB + 8 x 16 KiB, and for 32 MiB on
            Hopper.
        convolution_bytes: cuDNN's workspace on maps of the denoiser's size; 32 MiB holds what its heuristics choose in
            fp16.
        convolution_share: its workspace on larger maps, as a share of what the convolution reads and writes. In fp16
            with maps channels last, as plans have them, none is expected.
    """

    context_bytes: int = 450 * MIB
    matrix_bytes: int = 8 * MIB + 128 * KIB
    convolution_bytes: int = 32 * MIB
    convolution_share: float = 0.0

    def total(self) -> int:
        """All of it, but for the workspace of large maps."""
        return self.context_bytes + self.matrix_bytes + self.convolution_bytes

    def more_for(self, convolved_bytes: int) -> int:
        """Bytes beyond the total where the largest convolution reads and writes so many."""
        return max(0, int(self.convolution_share * convolved_bytes) - self.convolution_bytes)
