"""A plug-in for pytest: every call of a diffusers pipeline, in tests that are not ours, runs with our hooks attached.

``SD_LOWVRAM_ATTACH`` names what is attached ("off", "bitwise", "rounding"), ``SD_LOWVRAM_ATTACHED`` the file for the
counts. Nothing of the project's own tests imports this.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HOOKS: dict[str, dict[str, Any]] = {
    "off": {},
    "bitwise": {"offload": "blocks", "weights_mib": 1, "park_skips": True, "inference_mode": False},
    "rounding": {
        "attention": "fused-softmax",
        "attention_mib": 1,
        "feed_forward_chunks": 4,
        "guidance_in_turn": True,
        "offload": "layer",
        "park_skips": True,
        "residual_strips": 4,
        "transformer_chunks": 4,
        "vae_map": "parked",
        "vae_slices": True,
        "vae_strip_mib": 1,
        "vae_tiles": "exact",
    },
}
"""Knobs by the fidelity that they keep; of a pipeline what finds something to act on."""

_TOKENIZER = "hf-internal-testing/tiny-random-clip"
"""What most tests ask the Hub for."""


class Attaching:
    """Wraps the pipelines' calls, and counts them."""

    def __init__(self, hooks: dict[str, Any], counts: Path | None) -> None:
        self._hooks, self._file = hooks, counts
        self._counts: Counter[str] = Counter()
        self._busy: set[int] = set()

    def pytest_collection_finish(self) -> None:
        self._wrap()

    def pytest_runtest_setup(self) -> None:
        self._wrap()  # pipelines are imported when they are first asked for

    def pytest_sessionfinish(self) -> None:
        if self._file is not None:
            self._file.write_text(json.dumps(self._counts))

    def _wrap(self) -> None:
        from diffusers import DiffusionPipeline

        waiting = [DiffusionPipeline]
        while waiting:
            kind = waiting.pop()
            waiting += kind.__subclasses__()
            call = vars(kind).get("__call__")
            if call is not None and not hasattr(call, "attaches"):
                kind.__call__ = self._wrapped(call)

    def _wrapped(self, call: Any) -> Any:
        @functools.wraps(call)
        def attached_call(pipe: Any, *args: Any, **kwargs: Any) -> Any:
            with self._attached(pipe):
                return call(pipe, *args, **kwargs)

        attached_call.attaches = True  # type: ignore[attr-defined]
        return attached_call

    @contextlib.contextmanager
    def _attached(self, pipe: Any) -> Iterator[None]:
        """Hooks on ``pipe``, unless they are there already or it is a kind that is refused, which is counted."""
        from sd_lowvram import attached
        from sd_lowvram.errors import LowVRAMError
        from sd_lowvram.settings import Preset

        if not self._hooks or id(pipe) in self._busy:
            yield
            return
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(attached(pipe, Preset(**self._hooks), device="cpu"))
                self._counts["attached"] += 1
            except LowVRAMError as error:
                self._counts[f"refused: {type(pipe).__name__}: {error}"] += 1
            self._busy.add(id(pipe))
            stack.callback(self._busy.discard, id(pipe))
            yield


def byte_tokenizer(folder: Path) -> None:
    """Files of a tokenizer that knows single bytes, in place of the Hub's."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in shown] + [chr(256 + number) for number in range(256 - len(shown))]
    vocabulary = ["<|startoftext|>", "<pad>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    ends = {
        "bos_token": vocabulary[0],
        "pad_token": vocabulary[1],
        "eos_token": vocabulary[2],
        "unk_token": vocabulary[2],
    }
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, **ends}
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _use_it(folder: str) -> None:
    """Let transformers load the tokenizer in ``folder`` where tests name the Hub's."""
    from transformers import CLIPTokenizer

    plain = CLIPTokenizer.from_pretrained.__func__

    @classmethod  # type: ignore[misc]
    def from_pretrained(kind: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(kind, folder if name == _TOKENIZER else name, *args, **kwargs)

    CLIPTokenizer.from_pretrained = from_pretrained


def pytest_configure(config: pytest.Config) -> None:
    place = tempfile.TemporaryDirectory(prefix="sd-lowvram-tokenizer-")
    config.add_cleanup(place.cleanup)
    byte_tokenizer(Path(place.name))
    _use_it(place.name)
    counts = os.environ.get("SD_LOWVRAM_ATTACHED")
    hooks = HOOKS[os.environ.get("SD_LOWVRAM_ATTACH", "off")]
    config.pluginmanager.register(Attaching(hooks, Path(counts) if counts else None))
