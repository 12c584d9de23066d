"""Steps with streamed weights, recorded as CUDA graphs: copies from pinned memory are nodes of the graph.

The copy stream is a branch of the recording, which forks from the compute stream at its start and joins it at its end.
The ring holds the same blocks at a step's start and end, so a replay finds what the recorded step found. Recordings are
freed before the buffer that they read. No plan takes the knob: plans do not know the memory of the recordings, and no
card has shown yet what they gain. Fidelity: ``bitwise``, by the same kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...errors import NoSiteError, SettingsError
from ...models.anatomy import Anatomy
from ...patches import Patch, wrap
from ...streaming.engine import Stream
from .captured_calls import Call, Replay
from .cuda_graphs import Recordings, unrecordable


def check_recordable(anatomy: Anatomy, device: torch.device) -> None:
    """Refuse what has no streamed steps that could be recorded.

    Raises:
        NoSiteError: the target has no denoiser.
        SettingsError: the device has no CUDA graphs, or the model runs with a ControlNet.
    """
    if (why := unrecordable(anatomy, device, "streamed_graphs")) is not None:
        raise SettingsError(why)
    if anatomy.denoiser is None:
        raise NoSiteError("streamed_graphs: the model has no denoiser to record")


def record_stream(anatomy: Anatomy, stream: Stream) -> Iterator[Patch]:
    """Record the denoiser's calls with the weights that ``stream`` brings.

    Args:
        anatomy: its denoiser is recorded.
        stream: of the denoiser alone.

    Yields:
        A patch for each entry of the denoiser.
    """
    assert anatomy.denoiser is not None
    model = anatomy.components[anatomy.denoiser]
    recordings = _StreamedRecordings(model, stream)
    stream.before_evicting(recordings.forget)
    for entry in anatomy.entries[anatomy.denoiser]:
        yield wrap(model, entry, recordings.called, "streamed_graphs")


class _StreamedRecordings(Recordings):
    knob = "streamed_graphs"

    def __init__(self, model: torch.nn.Module, stream: Stream) -> None:
        super().__init__(model)
        self._stream = stream
        self._found: tuple[int, ...] | None = None  # the blocks that every recorded step finds on the device

    def takes(self, tensors: list[Tensor]) -> bool:
        """True if a call can be recorded, or finds on the device what recorded ones found."""
        if self._stream.running or not super().takes(tensors):
            return False
        found = self._stream.state()  # first, as looking at a changed model frees the recordings
        return not self._replays or found == self._found

    def forget(self) -> None:
        """Free the recordings, but never during a capture, which ends with an error then."""
        if not torch.cuda.is_current_stream_capturing():
            super().forget()

    def capture(self, call: Call) -> Replay:
        self._found = self._stream.state()
        if self._found is None:
            raise RuntimeError("its weights are not pinned, or the ring has no fixed places")
        try:
            return super().capture(call._replace(function=self._record_copies(call)))
        except BaseException:
            self._stream.abandon()
            raise

    def _record_copies(self, call: Call) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._stream.recorded():
                return call.function(*args, **kwargs)

        return run

    def _replay(self, *args: Any) -> Any:
        with self._stream.replayed():
            return super()._replay(*args)
