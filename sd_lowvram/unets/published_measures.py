"""FID, inception score and CLIP score as papers have them, by torchmetrics; nothing is fetched.

They are meaningful for thousands of pictures: FID of a hundred says little, and the inception score uses ten groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BadInputError
from ..patches import Answered

CLIP = "openai/clip-vit-large-patch14"
"""The model of torchmetrics' CLIPScore, where none is named."""
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_AT_ONCE = 16

Measures = Callable[[Tensor, Sequence[str]], dict[str, float]]
"""Pictures (count, 3, H, W) of -1..1 and their prompts to "fid", "inception_score" and "clip_score"."""


class AtHand(NamedTuple):
    """The file with the weights of the Inception network, and the folder of the CLIP model."""

    inception: Path
    clip: Path


def weight_paths() -> AtHand:
    """Paths of the weights.

    Raises:
        BadInputError: a package or weights are missing; the message says which, and where they are expected.
    """
    try:
        import torchmetrics  # noqa: F401
        from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3
    except ImportError as error:
        raise BadInputError(
            f"FID, inception score and CLIP score need torchmetrics and torch-fidelity, and here {error}: "
            'pip install "torchmetrics>=1.8" torch-fidelity'
        ) from None
    file = Path(torch.hub.get_dir()) / "checkpoints" / URL_INCEPTION_V3.rsplit("/", 1)[1]
    folder, missing = _clip_folder(), []
    if not file.is_file():
        missing.append(f"those of the Inception network are looked for at {file} ({URL_INCEPTION_V3})")
    if folder is None:
        missing.append(f"those of {CLIP} are looked for in Hugging Face's cache (hf download {CLIP})")
    if missing or folder is None:
        raise BadInputError(f"weights are not at hand: {'; '.join(missing)}")
    return AtHand(file, folder)


def published_measures(originals: Iterable[Tensor], weights: AtHand) -> Measures:
    """The three measures.

    Args:
        originals: the real pictures that FID compares with, in batches (count, 3, H, W) of -1..1.

    Raises:
        BadInputError: weights cannot be read.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.inception import InceptionScore
    from torchmetrics.multimodal.clip_score import CLIPScore

    model, processor = clip_of(weights.clip)
    file = str(weights.inception)
    score, clip = InceptionScore(_classes(file), normalize=True), CLIPScore(lambda: (model, processor))
    fid = FrechetInceptionDistance(normalize=True, reset_real_features=False, feature_extractor_weights_path=file)
    for some in originals:
        _run_in_parts(some, lambda part, _: fid.update(part / 2 + 0.5, real=True))

    def measures(pictures: Tensor, prompts: Sequence[str]) -> dict[str, float]:
        _run_in_parts(pictures, lambda part, _: fid.update(part / 2 + 0.5, real=False))
        _run_in_parts(pictures, lambda part, _: score.update(part / 2 + 0.5))
        _run_in_parts(pictures, lambda part, at: clip.update(_bytes(part), [*prompts[at : at + len(part)]]))
        scores = {"fid": fid.compute(), "inception_score": _score_of(score), "clip_score": clip.compute()}
        for each in (fid, score, clip):
            each.reset()
        return {name: float(value) for name, value in scores.items()}

    return measures


@torch.inference_mode()
def _run_in_parts(pictures: Tensor, take: Callable[[Tensor, int], Any]) -> None:
    for start in range(0, len(pictures), _AT_ONCE):
        take(pictures[start : start + _AT_ONCE].clamp(-1, 1), start)


def _bytes(pictures: Tensor) -> Tensor:
    return ((pictures + 1) * 127.5).round().byte()


def _classes(file: str) -> Any:
    """The Inception network up to the classes of the inception score."""
    from torchmetrics.image.fid import NoTrainInceptionV3

    try:
        return NoTrainInceptionV3("inception-v3-compat", ["logits_unbiased"], file)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        raise BadInputError(f"the Inception network's weights {file} cannot be read: {error}") from None


def _score_of(score: Any) -> Tensor:
    """The mean over its ten groups, which are drawn by lot: the same lot every time."""
    drawn = functools.partial(torch.randperm, generator=torch.Generator().manual_seed(0))
    with Answered({torch.randperm: drawn}):
        mean_score: Tensor = score.compute()[0]
    return mean_score


def _clip_folder() -> Path | None:
    """The folder of the CLIP model in Hugging Face's cache; None: it is not there, or without weights."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(CLIP, local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if any((folder / name).is_file() for name in _WEIGHTS) else None


def clip_of(folder: Path) -> tuple[Any, Any]:
    """The CLIP model and what prepares its inputs, as torchmetrics takes them.

    Raises:
        BadInputError: the folder cannot be read.
    """
    from transformers import CLIPModel, CLIPProcessor

    try:
        model = CLIPModel.from_pretrained(folder, local_files_only=True).eval()
        processor = CLIPProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise BadInputError(f"the model {CLIP} in {folder} cannot be read: {error}") from None
    for name in ("get_image_features", "get_text_features"):
        setattr(model, name, _return_tensor(getattr(model, name)))
    return model, processor


def _return_tensor(features: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return the tensor alone, as torchmetrics takes it; transformers 5 puts it into an output of several."""

    def pooled_output(*args: Any, **kwargs: Any) -> Tensor:
        output = features(*args, **kwargs)
        alone: Tensor = getattr(output, "pooler_output", output)
        return alone

    return pooled_output
