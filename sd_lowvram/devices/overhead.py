"""Memory of a GPU in addition to tensors: the driver's context and the libraries' workspaces.

The context is outside of torch's allocator. Workspaces come from that allocator, between tensors, and fragment it, so
they are counted at the places where they are allocated. The figures are defaults; a calibrated machine has its own.
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
        matrix_bytes: cuBLAS' workspace, one for each stream, which stays; torch asks for 2 x 4 MiB + 8 x 16 KiB, and
            for 32 MiB on Hopper.
        convolution_bytes: cuDNN's workspace for one convolution; 32 MiB holds what its heuristics choose in fp16 on
            maps of the denoiser's size. An H100 takes none or 15 MiB, by the map's height and width.
        convolution_share: its workspace on larger maps, as a share of what the convolution reads and writes. In fp16
            with maps channels last, as plans have them, none is expected.
        attention_share: cuDNN's workspace for attention, as a share of what that reads and writes; None: it
            was not measured on this card, and no plan leaves attention to that kernel unasked.
    """

    context_bytes: int = 450 * MIB
    matrix_bytes: int = 8 * MIB + 128 * KIB
    convolution_bytes: int = 32 * MIB
    convolution_share: float = 0.0
    attention_share: float | None = None

    def workspace(self, moved_bytes: int) -> int:
        """Bytes that a convolution takes while it runs, which reads and writes so many."""
        return max(self.convolution_bytes, int(self.convolution_share * moved_bytes))

    def attention_workspace(self, moved_bytes: int) -> int:
        """Bytes that cuDNN's attention takes while it runs, which reads and writes so many; 0 where it is not known."""
        return int((self.attention_share or 0.0) * moved_bytes)


NONE = Overhead(0, 0, 0)
"""Overhead of a device that is not a GPU."""
