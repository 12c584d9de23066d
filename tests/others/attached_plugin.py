"""A plug-in for pytest: every call of a diffusers pipeline, in tests that are not ours, runs with our hooks attached.

``SD_LOWVRAM_ATTACH`` names what is attached (one of ``HOOKS``), ``SD_LOWVRAM_ATTACHED`` the file for the counts.
Nothing of the project's own tests imports this.
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
import todays  # of tests/support: the package "tests" is theirs here

HOOKS: dict[str, dict[str, Any]] = {
    "off": {},
    "bitwise": {"offload": "blocks", "weights_mib": 1, "park_skips": True, "inference_mode": False},
    "layers": {"offload": "layer", "inference_mode": False},
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

_STAND_INS = {"clip": "clip", "t5": "t5", "Qwen2VLForConditionalGeneration": "qwen"}
"""What tests ask the Hub for, after its "tiny-random-", and what is made here in its place."""


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


def _stand_ins(place: Path) -> dict[str, str]:
    """Folders of tokenizers that know letters, and of a small T5's configuration, by the Hub's names."""
    for name, made in (
        ("clip", todays.clip_tokenizer()),
        ("t5", todays.t5_tokenizer()),
        ("qwen", todays.qwen_tokenizer()),
    ):
        made.save_pretrained(place / name)
    todays.t5(d_model=32, d_ff=37, num_layers=5).config.save_pretrained(place / "t5")
    return {f"hf-internal-testing/tiny-random-{kind}": str(place / name) for kind, name in _STAND_INS.items()}


def _use_them(folders: dict[str, str]) -> None:
    """Let transformers load what lies in ``folders`` where tests name the Hub's."""
    import transformers

    for kind in (transformers.AutoConfig, transformers.AutoTokenizer, transformers.PreTrainedTokenizerBase):
        kind.from_pretrained = _looked_up(kind.from_pretrained.__func__, folders)


def _looked_up(plain: Any, folders: dict[str, str]) -> Any:
    @functools.wraps(plain)
    def from_pretrained(kind: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(kind, folders.get(str(name), name), *args, **kwargs)

    return classmethod(from_pretrained)


def pytest_configure(config: pytest.Config) -> None:
    place = tempfile.TemporaryDirectory(prefix="sd-lowvram-tokenizer-")
    config.add_cleanup(place.cleanup)
    _use_them(_stand_ins(Path(place.name)))
    counts = os.environ.get("SD_LOWVRAM_ATTACHED")
    hooks = HOOKS[os.environ.get("SD_LOWVRAM_ATTACH", "off")]
    config.pluginmanager.register(Attaching(hooks, Path(counts) if counts else None))
