"""Latents in a file before they are decoded: a decode that fails, or takes the host with it, loses no picture."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..sd_lowvram.saved_latents.hosted import CHOICES, Hosted, new_place, write_hosted

HIDDEN = {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO", "unique_id": "UNIQUE_ID"}
_FILES = {"ckpt_name": "checkpoints", "vae_name": "vae"}
"""The input by which loaders name a file, and the host's name for the folders of such files."""


@dataclass(frozen=True)
class Workflow:
    """The running workflow: the prompt, the metadata of its pictures, and the node in it."""

    prompt: dict[str, Any]
    extra: dict[str, Any]
    node: str | None


@contextlib.contextmanager
def saved_first(latents: Tensor, choice: str, workflow: Workflow) -> Iterator[None]:
    """Save ``latents`` to a file within the block, if ``choice`` says so; the file stays if the block fails."""
    path = None if choice == CHOICES[0] else _save_latents(latents, workflow)
    try:
        yield
    except BaseException:
        if path is not None:
            logging.warning(f"sd-lowvram: the latents are in {path}: sd-lowvram resume FILE decodes them")
        raise
    if path is not None and choice != CHOICES[-1]:
        path.unlink(missing_ok=True)


def _save_latents(latents: Tensor, workflow: Workflow) -> Path | None:
    """Save ``latents`` and return the file; a failure is reported, and the decode goes on."""
    import folder_paths

    path = new_place(Path(folder_paths.get_output_directory()))
    texts = {name: json.dumps(value) for name, value in (("prompt", workflow.prompt), *workflow.extra.items())}
    texts = {name: text for name, text in texts.items() if name in ("prompt", "workflow")}
    try:
        write_hosted(Hosted("ComfyUI", latents, _autoencoder_of(workflow), [texts] * len(latents)), path)
    except OSError as error:
        logging.warning(f"sd-lowvram: the latents cannot be saved to {path}: {error.strerror or error}")
        return None
    return path


def _autoencoder_of(workflow: Workflow) -> str | None:
    """The file that the node's VAE was loaded from, if the loader is one of the host's own."""
    import folder_paths

    node, seen = workflow.node, set()
    while node in workflow.prompt and node not in seen:
        seen.add(node)
        inputs = workflow.prompt[node].get("inputs", {})
        for name, kind in _FILES.items():
            if isinstance(inputs.get(name), str):
                path: str | None = folder_paths.get_full_path(kind, inputs[name])
                return path
        link = inputs.get("vae")
        node = link[0] if isinstance(link, list) and link else None
    return None
