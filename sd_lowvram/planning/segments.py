"""Segments of torch's allocator that a run reserves in addition to those of its traced stages."""

from __future__ import annotations

import functools
import math

from ..memory.caching_allocator import PAGE, ROUND, SMALL
from ..memory.reserved import segment
from ..models.anatomy import Anatomy
from ..models.calls import Stage
from ..models.latents import latent_channels, latent_size
from ..models.recorded import given_bytes
from ..tracing.tracer import Figures
from ..units import MIB
from .request import Request


class Segments:
    """Bytes of segments that lie next to the activations of a stage, for one request."""

    def __init__(self, anatomy: Anatomy, request: Request) -> None:
        """
        Args:
            anatomy: parts of the target.
            request: the picture and the device.
        """
        self._anatomy = anatomy
        self._request = request
        self._on_gpu = request.device.type != "cpu"

    def buffers(self, *sizes: int) -> int:
        """Return the bytes that the device reserves for weight buffers of these sizes; on a CPU, their sum."""
        return sum(map(segment, sizes)) if self._on_gpu else sum(sizes)

    def held(self, stage: Stage) -> int:
        """Return the bytes of segments that a pipeline holds during a stage."""
        return self._pipeline_bytes + (self._rounding_waste if stage.repeats or stage.name == "decode" else 0)

    def of_recordings(self, recorded: bool) -> int:
        """Return the bytes that recorded passes reserve in addition to their maps.

        cuBLAS' workspace for the stream that records stays after the recordings are freed, and during other stages.

        Args:
            recorded: True in the stage that is recorded.
        """
        workspace = self._request.overhead.matrix_bytes
        return self._pipeline_bytes + workspace if recorded else segment(workspace)

    def of_step(self, stage: Stage, figures: Figures, stays: int = 0) -> int:
        """Return the bytes of one segment for the tensors over 1 MiB that a step makes, or 0.

        Args:
            stage: any stage.
            figures: its trace.
            stays: traced bytes of weights that stay from step to step, in segments of their own like ControlNet maps.
        """
        if not stage.repeats:
            return 0
        return max(0, figures.segment_bytes - sum(size // ROUND * ROUND for size in (stays, self._maps_bytes[0])))

    @property
    def joins(self) -> bool:
        """True if steps may share one segment for tensors over 1 MiB. Larger latents would stay in it afterwards."""
        return self._on_gpu and self._anatomy.family.known and self._latent_bytes <= SMALL

    @functools.cached_property
    def _pipeline_bytes(self) -> int:
        """Segments for prompt embeddings (1 MiB) and four fp32 latents, which a pipeline holds during a stage."""
        latents = self._latent_bytes
        return -(-(4 * latents + MIB) // segment(latents)) * segment(latents) if self._on_gpu else 0

    @functools.cached_property
    def _latent_bytes(self) -> int:
        """Bytes of the latents in fp32."""
        pixels = math.prod(latent_size(self._anatomy, self._request.shape)) * self._request.batch
        return 4 * latent_channels(self._anatomy) * pixels

    @functools.cached_property
    def _rounding_waste(self) -> int:
        """Rounding waste: each of these maps may pin a segment of its own, and so may the pictures of a ControlNet,
        which are there before the steps begin: SD1.5 at 768x512 repeated a call in the 616 MiB planned without it."""
        pictures = PAGE if self._maps_bytes[0] else 0
        return pictures + sum(segment(size) - size for size in self._maps_bytes if size > SMALL) if self._on_gpu else 0

    @functools.cached_property
    def _maps_bytes(self) -> tuple[int, ...]:
        """Bytes of maps that stay from step to step: those of ControlNets in one buffer, and each of an adapter."""
        record = self._anatomy.rehearsal
        rows = [] if record is None else [row for row in record.rows if row.component == record.denoiser]
        adapters = max((row.adapter_maps for row in rows), key=given_bytes, default=[])
        return (given_bytes(record.control_maps) if record else 0), *(one.bytes for one in adapters)
