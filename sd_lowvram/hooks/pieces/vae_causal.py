"""Exact decode and encode of the autoencoders of Qwen-Image and Wan in bounded memory.

Nothing of them but the attention in the middle sees more of a map than a few rows, so that strips of rows go through
all layers at once (:mod:`.causal_rows`): to the middle, from keys and values of the whole frame and queries by strips,
and on. Held whole is only the map in the middle, which is as small as the latents. Every row is made once, and of a
first frame, before which lie zeros, only what is not zero is multiplied: a picture takes a third of the operations.

Fidelity: ``rounding``; on a CPU the bits are mostly the plain ones. Own idea; rows that layers keep from strip to strip
are what hardware calls line buffers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import progress
from ...compat.private import FakeTensor
from ...errors import NotFiniteError
from ...memory.repeats import representative_pieces, representatives, standing_for
from ...models.anatomy import layer
from ...models.causal_autoencoder import (
    FRAMES,
    CausalStep,
    Enlarge,
    FrameAttention,
    Reduce,
    convolutions,
    dissect_causal,
    flatten_steps,
    hosted_patch,
    is_hosted,
    sees_pictures,
    takes_one_frame,
)
from ...patches import Patch
from ...settings import Settings
from ...streaming.weight_scopes import hold_weights
from ...units import MIB
from ...weights import needs_graph, place_part
from .causal_rows import Turn, call_like_whole, layers_of
from .overflow import is_finite

_STRIP_BYTES = 16 * MIB
_ATTENTION_MAPS = 4
"""Maps of a strip, some of them in float32, that are there at once where it is normalised before its attention."""
_BLOCK = 256
"""Queries that torch's attention on a CPU takes at once: strips of a multiple of them have the bits of the whole."""


def causal_patches(vae: Any, settings: Settings) -> Iterator[Patch]:
    """Yield patches that make ``vae`` decode and encode all frames of a strip of rows before the next strip.

    Args:
        vae: an autoencoder of frames (Qwen-Image, Wan).
        settings: ``vae_strip_mib`` bounds a strip.
    """
    hosted, pictures = is_hosted(vae), sees_pictures(vae)
    decode: Callable[..., Any] = _decoded_by_host if hosted else _decode
    encode: Callable[..., Any] = _encoded_by_host if hosted else _encode
    for part, name, whole in ((vae.decoder, "decode", decode), (vae.encoder, "encode", encode)):
        run = functools.partial(_through, vae, part, settings, name)
        yield Patch(part, "forward", functools.partial(functools.partial, run), exclusive=True, hook="vae_exact")
        if pictures:  # its own methods take them all at once
            continue
        around = functools.partial(functools.partial, functools.partial(whole, vae))
        yield Patch(vae, name if hosted else f"_{name}", around, exclusive=True, hook="vae_exact")


def _decode(vae: Any, original: Callable[..., Any], z: Tensor, return_dict: bool = True) -> Any:
    if needs_graph(vae, z) or (z.shape[2] > 1 and takes_one_frame(vae)):
        return original(z, return_dict=return_dict)
    from diffusers.models.autoencoders.vae import DecoderOutput

    pixels = _unpack(vae.decoder(vae.post_quant_conv(z)), _patch(vae)).clamp_(-1, 1)
    return DecoderOutput(sample=pixels) if return_dict else (pixels,)


def _encode(vae: Any, original: Callable[..., Tensor], x: Tensor) -> Tensor:
    if needs_graph(vae, x) or (x.shape[2] > 1 and takes_one_frame(vae)):
        return original(x)
    frames = 1 + (x.shape[2] - 1) // FRAMES * FRAMES
    moments: Tensor = vae.quant_conv(vae.encoder(_pack(x[:, :, :frames], _patch(vae))))
    return moments


def _decoded_by_host(vae: Any, original: Callable[..., Tensor], z: Tensor) -> Tensor:
    if needs_graph(vae, z):
        return original(z)
    return _unpack(vae.decoder(vae.conv2(z)), hosted_patch(vae))


def _encoded_by_host(vae: Any, original: Callable[..., Tensor], x: Tensor) -> Tensor:
    if needs_graph(vae, x) or (x.shape[2] - 1) % FRAMES:  # leftover frames are left to the model
        return original(x)
    moments = vae.conv1(vae.encoder(_pack(x, hosted_patch(vae))))
    mean: Tensor = moments.chunk(2, dim=1)[0]
    return mean


def _patch(vae: Any) -> int:
    return int(vae.config.get("patch_size") or 1)


def _pack(x: Tensor, side: int) -> Tensor:
    """Squares of ``side`` pixels as channels, column by column."""
    if side == 1:
        return x
    squares = x.unflatten(4, (-1, side)).unflatten(3, (-1, side))
    packed: Tensor = squares.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)
    return packed


def _unpack(x: Tensor, side: int) -> Tensor:
    if side == 1:
        return x
    squares = x.unflatten(1, (-1, side, side))
    unpacked: Tensor = squares.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)
    return unpacked


def _through(
    vae: Any,
    part: nn.Module,
    settings: Settings,
    stage: str,
    original: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    if args or kwargs or needs_graph(part, x):  # frame by frame, as its own methods call it
        return original(x, *args, **kwargs)
    steps = dissect_causal(vae)  # at each call, as layers may have been replaced since
    assert steps is not None
    frames = x.unsqueeze(2) if x.ndim == 4 else x
    with torch.no_grad():
        result = run_causal(steps.decoder if stage == "decode" else steps.encoder, frames, settings, stage)
    return result.squeeze(2) if x.ndim == 4 else result


def run_causal(steps: Sequence[CausalStep], x: Tensor, settings: Settings, stage: str = "decode") -> Tensor:
    """Run ``x`` (N, C, frames, H, W) through ``steps`` by strips; the result equals the plain layers' up to rounding.

    Args:
        steps: the decoder's or encoder's steps, in order.
        x: (N, C, frames, H, W).
        settings: as for :func:`causal_patches`.
        stage: "decode" or "encode", for progress and errors.

    Returns:
        (N, C', frames', H', W') in the type of ``x``.

    Raises:
        NotFiniteError: ``x`` contains NaN or infinity, or the layers produce them.
    """
    result = _StripPass(steps, settings, stage)(x)
    if not isinstance(x, FakeTensor) and not is_finite(result):
        if not is_finite(x):
            raise NotFiniteError(f"{stage}: its input has NaN or infinity")
        raise NotFiniteError(
            f"{stage}: the autoencoder's output for {tuple(x.shape)} in {x.dtype} has NaN or infinity: "
            "load it in float32 or bfloat16 (--precision fp32 or bf16), or another one if it is"
        )
    return result


class _StripPass:
    """A pass of all frames through the steps."""

    def __init__(self, steps: Sequence[CausalStep], settings: Settings, stage: str) -> None:
        self.parts: list[list[CausalStep]] = [[]]
        self.attentions: list[FrameAttention] = []
        for step in steps:
            if isinstance(step, FrameAttention):
                self.attentions.append(step)
                self.parts.append([])
            else:
                self.parts[-1].append(step)
        self.stage = stage
        self.shown = 0
        self.strip_bytes = settings.vae_strip_mib * MIB if settings.vae_strip_mib else _STRIP_BYTES

    def __call__(self, x: Tensor) -> Tensor:
        together = 1 if self.stage == "decode" else FRAMES
        frames = [1] + [together] * ((x.shape[2] - 1) // together)
        for number, steps in enumerate(self.parts):
            if number:
                self._attend(x, self.attentions[number - 1])
            x = self._sweep(x, steps, frames, number)
            frames = _frames_of(steps, frames)
        return x

    @hold_weights()
    def _sweep(self, x: Tensor, steps: Sequence[CausalStep], frames: Sequence[int], part: int) -> Tensor:
        """``steps`` over all strips of ``x``, of each strip all chunks of ``frames`` one after the other."""
        lag, row_bytes, least = _costs_of(steps, x, frames)
        rows = max(least, self.strip_bytes // row_bytes // least * least)
        layers, height, _ = layers_of(steps, x.shape[3], x.shape[4], rows)
        starts = list(range(0, x.shape[3], rows))
        counts = _frames_of(steps, frames)
        done = [0] * len(frames)
        out: Tensor | None = None
        for number in self._strips_to_run(len(starts), math.ceil(lag / rows) + 2, x):
            last = number == len(starts) - 1
            for chunk, count in enumerate(frames):
                first = sum(frames[:chunk])
                strip = x[:, :, first : first + count, starts[number] : starts[number] + rows]
                new = layers(strip, Turn(chunk, chunk == len(frames) - 1, last))
                del strip
                if new is None:
                    continue
                if out is None:
                    out = new.new_empty((*new.shape[:2], sum(counts), height, new.shape[4]))
                start = height - new.shape[3] if last else done[chunk]
                place = out.narrow(2, sum(counts[:chunk]), counts[chunk]).narrow(3, start, new.shape[3])
                place.copy_(new)
                done[chunk] += new.shape[3]
                del new, place
            self._report((part + (number + 1) / len(starts)) / len(self.parts), x)
        assert out is not None
        return out

    @staticmethod
    def _strips_to_run(count: int, filling: int, like: Tensor) -> Iterator[int]:
        """Yield the numbers of strips. On fake tensors one strip represents all but the last, once all layers are
        filled.
        """
        if not isinstance(like, FakeTensor):
            yield from range(count)
            return
        run, order = representatives([min(number, filling) for number in range(count)])
        yield from standing_for(run, order)

    @hold_weights()
    def _attend(self, x: Tensor, step: FrameAttention) -> None:
        """Write the map (N, C, frames, H, W) after its attention over ``x``."""
        count, channels, frames, height, width = x.shape
        whole = count * frames, channels, height, width
        rows = max(1, self.strip_bytes // (_ATTENTION_MAPS * count * channels * width * x.element_size()))
        aligned = _BLOCK // math.gcd(width, _BLOCK)
        rows = rows // aligned * aligned or rows
        cuts = [slice(start, min(start + rows, height)) for start in range(0, height, rows)]
        for frame in range(frames):
            image = x[:, :, frame]
            keys: Tensor | None = None
            values: Tensor | None = None
            for cut in representative_pieces(cuts, x):
                _, key, value = _queries_keys_values(step, image[:, :, cut], whole)
                keys = place_part(keys, key, 1, cut.start * width, height * width)
                values = place_part(values, value, 1, cut.start * width, height * width)
                del key, value
            assert keys is not None and values is not None
            for cut in representative_pieces(cuts, x):
                strip = image[:, :, cut]
                query = _queries_keys_values(step, strip, whole)[0].contiguous()
                mixed = F.scaled_dot_product_attention(query[:, None], keys[:, None], values[:, None])[:, 0]
                del query
                mixed = mixed.transpose(1, 2).unflatten(2, (-1, width)).contiguous()
                strip.add_(call_like_whole(step.proj, whole, mixed))
                del mixed

    def _report(self, share: float, like: Tensor) -> None:
        if not isinstance(like, FakeTensor):  # a plan's trace is not progress
            progress.report(self.stage, int(1000 * share), 1000)


def _queries_keys_values(step: FrameAttention, rows: Tensor, whole: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (N, pixels, C) of rows (N, C, rows, W) of a map of shape ``whole``."""
    joined = call_like_whole(step.to_qkv, whole, step.norm(rows))
    query, key, value = joined.flatten(2).transpose(1, 2).chunk(3, 2)
    return query, key, value


def _frames_of(steps: Sequence[CausalStep], frames: Sequence[int]) -> list[int]:
    """Number of frames that ``steps`` make of each chunk; the very first frame stays one."""
    factor = 1.0
    for step in flatten_steps(steps):
        if isinstance(step, Enlarge | Reduce) and step.time is not None:
            factor *= 2.0 if isinstance(step, Enlarge) else 0.5
    return [1, *(int(factor * count) for count in frames[1:])]


def _costs_of(steps: Sequence[CausalStep], x: Tensor, frames: Sequence[int]) -> tuple[float, int, int]:
    """Rows of ``x`` that its layers are behind their input, the most bytes of a map for one of them, and how many of
    them make whole rows of all maps."""
    lag, most, scale = 0.0, 1.0, 1.0
    count = float(frames[-1])
    for step in flatten_steps(steps):
        pixels = scale**2
        if isinstance(step, Enlarge):
            count *= 2 if step.time is not None and len(frames) > 1 else 1
            pixels *= 4
        for conv in convolutions(step):
            most = max(most, count * pixels * max(layer(conv).in_channels, layer(conv).out_channels))
            lag += 1 / scale
        if isinstance(step, Enlarge | Reduce):
            scale *= 2.0 if isinstance(step, Enlarge) else 0.5
        if isinstance(step, Reduce) and step.time is not None and len(frames) > 1:
            count /= 2
    return lag, int(most * len(x) * x.shape[4] * x.element_size()), max(1, round(1 / scale))
