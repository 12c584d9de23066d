"""Exact tiles: decode and encode in bounded memory, without approximation.

Other programs run tiles of the picture through the whole decoder, so that every tile is normalised by its own
statistics: colours shift and seams show. Here every layer runs over the whole picture in strips of rows, normalised by
the statistics of the whole map. The attention in the middle holds keys and values of all pixels and takes the queries
strip by strip. Fidelity: ``rounding``. Own idea; the shared statistics were first seen in ScaleCrafter's decoder.

Between layers the map is *held* on the device (at most half of the plain decoder's peak), *parked* in host memory (only
strips on the device), or at the largest level *recomputed* from the last smaller map, once for each normalisation. On a
CPU, device and host are one memory, so parking saves nothing by itself; a recomputed map parks the smaller maps too,
and the sum of both accounts is smallest.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import progress
from ...compat.private import FakeTensor
from ...errors import NoSiteError, NotFiniteError
from ...kernels.attention.bounded import fused_softmax
from ...kernels.cpu_convolutions import is_on_cpu
from ...memory import Parked
from ...memory.host_offload import parking_in_pairs
from ...memory.repeats import representatives, standing_for
from ...models.anatomy import Anatomy, Residual, layer
from ...models.autoencoder import Attention, Autoencoder, Conv, Downsample, Step, Upsample, dissect
from ...models.causal_autoencoder import is_causal
from ...models.interfaces import KLAutoencoder
from ...patches import Patch, replace
from ...settings import Settings
from ...streaming.weight_scopes import hold_weights
from ...units import MIB
from ...weights import needs_graph, place_part, room
from ..offers import Offer, OfferKind, Target
from .maps import AnyMap, Given, Map, Overwritten
from .operations import Operation, first_half, needed_rows, operations_of, run_strip, second_half
from .overflow import OverflowCheck, is_finite, piece
from .strips import Statistics, even_spans
from .vae_causal import causal_patches

_MOST_STRIP_BYTES = 16 * MIB
_STRIPS_A_MAP = {4: 16, 2: 24}  # half types pass through float32 where they are normalised
_RECOMPUTED_STRIPS = 2
"""Times as many where the map is recomputed and all else parked: they carry the rows around them through all layers."""
_PLAIN_MAPS = 3


def vae_exact(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run decoder and encoder of the target's autoencoder by exact strips.

    Args:
        anatomy: its autoencoder is patched.
        settings: ``vae_strip_mib`` bounds a strip, ``vae_map`` says where the unfinished map waits.
        device: not read.

    Yields:
        One patch for decoding and one for encoding, and patches that turn the model's own tiling off.

    Raises:
        NoSiteError: the target has no autoencoder, or one that is built in another way.
    """
    vae: Any = anatomy.vae
    if vae is None:
        raise NoSiteError("exact tiles: the target has no autoencoder")
    if is_causal(vae):
        yield from causal_patches(vae, settings)
    else:
        _steps(vae)
        for part, stage in ((vae.decoder, "decode"), (vae.encoder, "encode")):
            around = functools.partial(_exactly, vae, part, settings, stage)
            yield Patch(part, "forward", functools.partial(functools.partial, around), exclusive=True, hook="vae_exact")
    if getattr(vae, "use_tiling", False):
        yield replace(vae, "use_tiling", False, "vae_exact")
    if hasattr(vae, "enable_tiling"):
        yield replace(vae, "enable_tiling", _refuse_tiling, "vae_exact")


def offers(target: Target) -> Iterator[Offer]:
    """Offer exact strips, from the fastest way to the one that holds least.

    The map between two layers is held on the device; else it is parked in host memory, also with the smallest strips;
    else it is recomputed (on a CPU with the smallest strips, too). Autoencoders of frames hold no map and are at least
    as fast by strips as whole: they get strips of three sizes.
    """
    if target.anatomy.vae is None or not divides(target.anatomy.vae):
        return
    if is_causal(target.anatomy.vae):
        for level, mib in ((0, None), (1, 4), (2, 1)):
            ways = {"vae_tiles": "exact", **({} if mib is None else {"vae_strip_mib": mib})}
            yield Offer(OfferKind.INSTEAD, ways, level=level, stages=("encode", "decode"), least=mib == 1)
        return
    levels = [(1, "held", None), (2, "parked", None), (2, "parked", 4), (2, "recomputed", None)]
    least = levels[2] if target.on_gpu else (2, "recomputed", 4)
    for cell in dict.fromkeys([*levels, least]):
        level, place, mib = cell
        ways = {"vae_tiles": "exact", "vae_map": place, **({} if mib is None else {"vae_strip_mib": mib})}
        yield Offer(OfferKind.INSTEAD, ways, level=level, stages=("encode", "decode"), least=cell == least)


def divides(vae: Any) -> bool:
    """True if exact strips can run the autoencoder."""
    return is_causal(vae) or dissect(vae) is not None


def _steps(vae: KLAutoencoder) -> Autoencoder:
    steps = dissect(vae)
    if steps is None:
        raise NoSiteError(
            f"exact tiles: {type(vae).__name__} is not built like Stable Diffusion's autoencoder and has no layers "
            "that they could divide; leave vae_tiles to the plan, which runs it whole"
        )
    return steps


def _exactly(
    vae: Any,
    part: nn.Module,
    settings: Settings,
    stage: str,
    original: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    if needs_graph(part, x):  # strips that overwrite each other keep no graph
        return original(x, *args, **kwargs)
    steps = _steps(vae)  # at each call, as a LoRA may have been loaded since
    return run_exact(steps.decoder if stage == "decode" else steps.encoder, x, settings, stage)


def _refuse_tiling(*args: Any, **kwargs: Any) -> None:
    warnings.warn("exact tiles are attached and bound the memory already: enable_tiling() is ignored", stacklevel=3)


def run_exact(steps: Sequence[Step], x: Tensor, settings: Settings, stage: str = "decode") -> Tensor:
    """Run ``x`` (N, C, H, W) through ``steps`` by strips; the result equals the plain layers' up to rounding.

    Args:
        steps: the decoder's or encoder's steps, in order.
        x: (N, C, H, W).
        settings: as for :func:`vae_exact`.
        stage: "decode" or "encode", for progress and errors.

    Returns:
        (N, C', H', W') in the type of ``x``.

    Raises:
        NotFiniteError: ``x`` contains NaN or infinity, or the layers produce them even in float32.
    """
    fake = isinstance(x, FakeTensor)
    watch = OverflowCheck(stage, x, looks=x.device.type == "cpu" and not fake)
    with torch.no_grad():
        if watch.looks:
            _check(stage, x)
        result = _StripPass(steps, x, settings, stage, watch)()
        if not fake and not watch.looks and not is_finite(result):
            del result
            _check(stage, x)
            watch = OverflowCheck(stage, x, looks=True)
            result = _StripPass(steps, x, settings, stage, watch)()
    watch.tell()
    return result


def _check(stage: str, x: Tensor) -> None:
    if not is_finite(x):
        raise NotFiniteError(f"{stage}: its input has NaN or infinity")


class _StripPass:
    """A pass of a map through the steps."""

    def __init__(self, steps: Sequence[Step], x: Tensor, settings: Settings, stage: str, watch: OverflowCheck) -> None:
        self.groups = _group_steps(steps, settings.vae_map == "recomputed")
        self.input = x
        self.stage = stage
        self.watch = watch
        sparing = settings.vae_map == "recomputed" and is_on_cpu(x)
        self.parks = settings.vae_map == "parked" or sparing
        first = steps[0]
        self.wraps = isinstance(first, Conv) and getattr(layer(first.conv), "padding_mode", "zeros") == "circular"
        self.itemsize = x.element_size()
        self.largest = max(_map_bytes(steps, x))
        most = settings.vae_strip_mib * MIB if settings.vae_strip_mib else _MOST_STRIP_BYTES
        strips = _STRIPS_A_MAP.get(self.itemsize, 16)
        self.strip_bytes = min(most, max(MIB // 4, self.largest // strips)) // (_RECOMPUTED_STRIPS if sparing else 1)
        self.pair_bytes = _pair_bytes(steps, x) if self.parks and not self.wraps else 0
        self.buffers: Any = None
        self.done, self.shown = 0, 0
        self.silent = isinstance(x, FakeTensor)  # a plan's trace is not progress

    def __call__(self) -> Tensor:
        with parking_in_pairs(self.pair_bytes, self.input.device) as self.buffers:
            return self._run()

    def _run(self) -> Tensor:
        x: AnyMap = Given(self.input)
        del self.input
        statistics: Statistics | None = None
        for number, group in enumerate(self.groups):
            self.done = number
            after = _first_norm(self.groups[number + 1]) if number + 1 < len(self.groups) else None
            statistics, x = self._group(x, statistics, group, after)
        assert isinstance(x, Map)
        return x.data

    def _group(
        self, x: AnyMap, summary: Statistics | None, group: list[Step], after: nn.GroupNorm | None
    ) -> tuple[Statistics | None, AnyMap]:
        """The map after the steps of ``group``, with the statistics that the next group starts from."""
        if len(group) == 1 and isinstance(group[0], Attention):
            return self._attention(x, summary, group[0], after)
        if len(group) == 1 and isinstance(group[0], Residual):
            block = group[0]
            both = math.prod(x.shape) * self.itemsize * (1 + block.norm2.num_channels / block.norm1.num_channels)
            if self.parks or both <= _PLAIN_MAPS / 2 * self.largest:
                return self._two_maps(x, summary, block, after)
        operations = [operation for step in group for operation in operations_of(step)]
        statistics = [summary]
        for place in range(1, len(operations)):
            norm = operations[place].norm
            gathered = self._statistics_of(norm)
            if gathered is not None:
                self._sweep(x, None, operations[:place], statistics, None, gathered, operations[place].of_hidden)
            statistics.append(gathered)
        final = self.done == len(self.groups) - 1
        over = not final and not self.wraps and _keeps_shape(group)
        gathered = self._statistics_of(after)
        sink = self._sweep(x, None, operations, statistics, x if over else "held" if final else "new", gathered)
        return gathered, sink

    def _statistics_of(self, norm: nn.GroupNorm | None) -> Statistics | None:
        """Statistics to gather for a normalisation, where there is one."""
        return None if norm is None else Statistics(norm)

    def _two_maps(
        self, x: AnyMap, statistics: Statistics | None, block: Residual, after: nn.GroupNorm | None
    ) -> tuple[Statistics | None, AnyMap]:
        """A residual block with its inner map stored: every convolution runs once."""
        first, second = first_half(block), second_half(block)
        inner = Statistics(block.norm2)
        hidden = self._sweep(x, None, [first], [statistics], "new", inner, of_hidden=True)
        gathered = self._statistics_of(after)
        sink = self._sweep(x, hidden, [second], [inner], "new" if self.wraps else hidden, gathered)
        return gathered, sink

    @hold_weights()
    def _sweep(
        self,
        x: AnyMap,
        hidden: AnyMap | None,
        operations: list[Operation],
        statistics: list[Statistics | None],
        sink: Any,
        gathered: Statistics | None,
        of_hidden: bool = False,
    ) -> Any:
        """Run ``operations`` over all strips of ``x``; write to ``sink`` (a map, "new", "held" or None), add to
        ``gathered``."""
        resize = math.prod(operation.resize for operation in operations)
        height, width = int(x.shape[2] * resize), int(x.shape[3] * resize)
        halo = -needed_rows(0, 0, operations)[0]
        readers: list[Any] = [x, hidden]
        if sink is not None and sink in (x, hidden):
            place = 0 if sink is x else 1
            sink = readers[place] = Overwritten(sink, halo)
        rows = self._rows(
            x, [operation.norm for operation in operations] + [gathered.norm if gathered else None], resize
        )
        cuts = list(even_spans(height, max(rows, min(halo, height)) if len(operations) > 2 else rows))
        final, sweep = sink == "held", object()

        def compute(start: int, stop: int, wide: bool) -> Tensor:
            return run_strip(
                operations, statistics, (readers[0], readers[1]), (start, stop), self.wraps, of_hidden, wide
            )

        for number, (start, stop) in self._each(cuts, operations):
            if isinstance(sink, Overwritten):
                sink.mark_written(start)
            part = self.watch.rows(
                compute, start, stop, final, (sweep, _kind_in_float32(start, stop, operations, height, resize))
            )
            if isinstance(sink, str):
                sink = self._new((x.shape[0], part.shape[1], height, width), part, sink)
            if gathered is not None:
                gathered.add(part)
            if sink is not None:
                _store(sink, slice(start, stop), part)
            del part
            self._report((number + 1) / len(cuts))
        return sink.map if isinstance(sink, Overwritten) else sink

    def _rows(self, x: AnyMap, norms: Sequence[nn.GroupNorm | None], resize: float) -> int:
        """Rows of a strip: its widest map at the normalisations may take the bytes of a strip."""
        channels = max([x.shape[1], *(norm.num_channels for norm in norms if norm is not None)])
        width = int(x.shape[3] * resize)
        row_bytes = int(x.shape[0] * channels * width * self.itemsize * max(1, resize**-2))
        return max(1, self.strip_bytes // row_bytes)

    @hold_weights()
    def _attention(
        self, x: AnyMap, statistics: Statistics | None, step: Attention, after: nn.GroupNorm | None
    ) -> tuple[Statistics | None, AnyMap]:
        """Keys and values of all pixels are held, queries come by strips; the result is written over the map."""
        assert statistics is not None
        count, channels, height, width = x.shape
        rows = max(1, self.strip_bytes // (count * channels * width * self.itemsize))
        cuts = list(even_spans(height, rows))
        held = self.watch.whole(functools.partial(self._keys_and_values, x, statistics, step, rows))
        compute = functools.partial(self._mix, x, statistics, step, held)
        gathered = self._statistics_of(after)
        for number, (start, stop) in self._each(cuts):
            mixed = self.watch.rows(compute, start, stop)
            if gathered is not None:
                gathered.add(mixed)
            x = self._new(x.shape, mixed, "new") if isinstance(x, Given) else x  # never into the caller's tensor
            _store(x, slice(start, stop), mixed)
            del mixed
            self._report((number + 1) / len(cuts))
        return gathered, x

    def _keys_and_values(
        self, x: AnyMap, statistics: Statistics, step: Attention, rows: int, wide: bool
    ) -> tuple[Tensor, ...]:
        """Keys and values of all pixels, (N, heads, pixels, C / heads) each; ``wide``: from float32, stored in
        bfloat16.
        """
        _, _, height, width = x.shape
        cuts = list(even_spans(height, piece(0, rows) if wide else rows))
        keys: Tensor | None = None
        values: Tensor | None = None
        for _, (start, stop) in self._each(cuts):
            strip = x.load(slice(start, stop))
            tokens = _tokens(statistics.normalise(strip.float() if wide else strip))
            key, value_ = step.to_k(tokens), step.to_v(tokens)
            if wide:
                key, value_ = key.bfloat16(), value_.bfloat16()
            keys = place_part(keys, key, 1, start * width, height * width)
            values = place_part(values, value_, 1, start * width, height * width)
            del strip, tokens, key, value_
        assert keys is not None and values is not None
        return _heads(keys, step.heads), _heads(values, step.heads)

    def _mix(
        self,
        x: AnyMap,
        statistics: Statistics,
        step: Attention,
        held: tuple[Tensor, ...],
        start: int,
        stop: int,
        wide: bool,
    ) -> Tensor:
        """Rows ``start`` to ``stop`` of the map after its attention; ``wide``: its layers in float32."""
        strip = x.load(slice(start, stop))
        strip = strip.float() if wide else strip
        keys, values = held
        queries = _heads(step.to_q(_tokens(statistics.normalise(strip))), step.heads)
        mixed: Tensor = fused_softmax(queries.to(keys.dtype), keys, values, score_bytes=self.strip_bytes)
        del queries
        mixed = mixed.float() if wide else mixed
        mixed = step.to_out(mixed.transpose(1, 2).flatten(2))
        mixed = mixed.transpose(1, 2).unflatten(2, (stop - start, x.shape[3])) + strip
        return mixed if step.scale == 1.0 else mixed.div_(step.scale)

    def _each(
        self, cuts: list[tuple[int, int]], operations: Sequence[Operation] = ()
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield number and rows of every strip. On fake tensors one strip represents all with equal numbers of rows."""
        if not self.silent:
            yield from enumerate(cuts)
            return
        read = (needed_rows(start, stop, operations) for start, stop in cuts)
        kinds = [(stop - start, last - first) for (start, stop), (first, last) in zip(cuts, read, strict=True)]
        run, order = representatives(kinds)
        yield from standing_for([(number, cuts[number]) for number in run], order)

    def _new(self, shape: tuple[int, ...], like: Tensor, kind: str) -> AnyMap:
        if self.parks and kind == "new":
            return Parked.empty(shape, like.dtype, like=like, buffers=self.buffers)
        return Map(room(shape, like))

    def _report(self, share: float) -> None:
        self.shown = max(self.shown, int(1000 * (self.done + share) / len(self.groups)))
        if not self.silent:
            progress.report(self.stage, self.shown, 1000)


def _kind_in_float32(start: int, stop: int, operations: Sequence[Operation], height: int, resize: float) -> Hashable:
    """Key of the work for the first piece in float32 of rows ``start`` to ``stop`` of a sweep's result.

    Away from the edges of a map of ``height`` rows the work depends on numbers of rows alone.
    """
    rows = piece(start, stop)
    first, last = needed_rows(start, start + rows, operations)
    if first <= 0 or last >= int(height / resize):
        return start, start + rows
    return rows, last - first, start - int(first * resize), first % 2 if resize < 1 else 0


def _store(sink: Any, rows: slice, strip: Tensor) -> None:
    """Write ``strip`` into a map, which takes on its type."""
    if sink.dtype != strip.dtype:
        sink.convert(strip.dtype)
    sink.store(rows, strip)


def _group_steps(steps: Sequence[Step], recomputed: bool) -> list[list[Step]]:
    """Group steps: one each; with ``recomputed`` those at the largest size share one, up to the change of size."""
    each = [[step] for step in steps]
    changes = [place for place, step in enumerate(steps) if isinstance(step, Upsample | Downsample)]
    if not recomputed or not changes:
        return each
    if isinstance(steps[changes[-1]], Upsample):
        return [*each[: changes[-1]], list(steps[changes[-1] :])]
    return [list(steps[: changes[0] + 1]), *each[changes[0] + 1 :]]


def _first_norm(group: Sequence[Step]) -> nn.GroupNorm | None:
    """The normalisation that a group starts with."""
    step = group[0]
    if isinstance(step, Residual):
        return step.norm1
    return step.norm if isinstance(step, Attention | Conv) else None


def _keeps_shape(group: Sequence[Step]) -> bool:
    """True if the output can overwrite the input."""
    return all(isinstance(step, Residual) and step.norm1.num_channels == step.norm2.num_channels for step in group)


def _map_bytes(steps: Sequence[Step], x: Tensor) -> Iterator[int]:
    """The sizes of the maps between the steps."""
    yield x.nbytes
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    for step in steps:
        if isinstance(step, Upsample):
            pixels *= 4
        elif isinstance(step, Downsample):
            pixels //= 4
        norm = _first_norm([step])
        if norm is not None:
            yield norm.num_channels * pixels * x.element_size()


def _pair_bytes(steps: Sequence[Step], x: Tensor) -> int:
    """The most bytes of a map and the next one, where the last is not parked."""
    height, width = x.shape[2:]
    last = most = 0  # the input is on the device
    for step in steps[:-1]:
        if isinstance(step, Upsample | Downsample):
            resize = operations_of(step)[0].resize
            height, width = int(height * resize), int(width * resize)
        if isinstance(step, Attention):
            channels = step.norm.num_channels
        else:
            channels = step.norm2.num_channels if isinstance(step, Residual) else layer(step.conv).out_channels
        size = x.shape[0] * channels * height * width * x.element_size()
        both = size if isinstance(step, Attention) else last + size
        last, most = size, max(most, both)
    return most


def _tokens(x: Tensor) -> Tensor:
    """(N, C, H, W) as (N, pixels, C)."""
    return x.flatten(2).transpose(1, 2)


def _heads(tokens: Tensor, heads: int) -> Tensor:
    """(N, pixels, C) as (N, heads, pixels, C / heads)."""
    split: Tensor = tokens.unflatten(2, (heads, -1))
    return split.transpose(1, 2)
