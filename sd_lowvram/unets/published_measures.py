"""FID, inception score and CLIP score as papers have them, by torchmetrics; nothing is fetched.

They are of use for thousands of pictures: of a hundred FID tells little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadInputError

CLIP = "openai/clip-vit-large-patch14"
"""The model of torchmetrics' CLIPScore, where none is named."""
_AT_ONCE = 16

Measures = Callable[[Tensor, Sequence[str]], dict[str, float]]
"""Pictures (count, 3, H, W) of -1..1 and their prompts to "fid", "inception_score" and "clip_score"."""


def published_measures(known: Tensor) -> Measures:
    """The three measures, with what they need at hand.

    Args:
        known: the real pictures that FID compares with (count, 3, H, W) of -1..1.

    Raises:
        BadInputError: a package or a file of weights is missing; it says which, and where it is looked for.
    """
    inception, (model, processor) = _inception(), _clip()
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.inception import InceptionScore
    from torchmetrics.multimodal.clip_score import CLIPScore

    fid = FrechetInceptionDistance(normalize=True, reset_real_features=False, feature_extractor_weights_path=inception)
    _in_parts(known, lambda part, _: fid.update(part / 2 + 0.5, real=True))

    def measures(pictures: Tensor, prompts: Sequence[str]) -> dict[str, float]:
        score, clip = InceptionScore(normalize=True), CLIPScore(lambda: (model, processor))
        _in_parts(pictures, lambda part, _: fid.update(part / 2 + 0.5, real=False))
        _in_parts(pictures, lambda part, _: score.update(part / 2 + 0.5))
        _in_parts(pictures, lambda part, at: clip.update(_bytes(part), [*prompts[at : at + len(part)]]))
        found = {"fid": fid.compute(), "inception_score": score.compute()[0], "clip_score": clip.compute()}
        fid.reset()
        return {name: float(value) for name, value in found.items()}

    return measures


@torch.inference_mode()
def _in_parts(pictures: Tensor, take: Callable[[Tensor, int], Any]) -> None:
    for start in range(0, len(pictures), _AT_ONCE):
        take(pictures[start : start + _AT_ONCE].clamp(-1, 1), start)


def _bytes(pictures: Tensor) -> Tensor:
    return ((pictures + 1) * 127.5).round().byte()


def _inception() -> str:
    """The file with the weights of the Inception network that FID and the inception score are of."""
    try:
        import torchmetrics  # noqa: F401
        from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3
    except ImportError as error:
        raise BadInputError(
            f"FID, inception score and CLIP score need torchmetrics and torch-fidelity, and here {error}: "
            "pip install torchmetrics torch-fidelity"
        ) from None
    file = Path(torch.hub.get_dir()) / "checkpoints" / URL_INCEPTION_V3.rsplit("/", 1)[1]
    if not file.is_file():
        raise BadInputError(f"the Inception network's weights are not at hand: {file} is missing ({URL_INCEPTION_V3})")
    return str(file)


def _clip() -> tuple[Any, Any]:
    """The CLIP model and what prepares its inputs, from Hugging Face's cache."""
    from huggingface_hub import snapshot_download
    from transformers import CLIPModel, CLIPProcessor

    try:
        folder = snapshot_download(CLIP, local_files_only=True)
        model = CLIPModel.from_pretrained(folder, local_files_only=True)
        return model.eval(), CLIPProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise BadInputError(f"the weights of {CLIP} are not in Hugging Face's cache: {error}") from None
