"""Quality of a student's pictures, compared with its teacher's and with the training pictures.

The measures are those of A-SDM (2023), Frechet distance and inception score, over the features of a network of
:mod:`frozen` in place of Inception's: the figures compare models here, not with published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import progress
from ..checkpoints.load import load_pipeline
from ..devices.pairs import compare
from ..errors import BadInputError
from ..models import anatomy_of_components
from ..models.latents import native_size, scale_factor
from .frozen import Features
from .layers import own_side
from .published_measures import Measures
from .training_pictures import Captioned, read_pictures

AT_ONCE = 8
STEPS_TIMED = 5
"""Pictures of a call."""
_SEEN = 16
"""The side of the small pictures by which a prompt's own is found again."""


@dataclass(frozen=True)
class Draw:
    """Options for drawing the pictures of an evaluation.

    Attributes:
        pictures: number of prompts, spread evenly over the training pictures.
        steps, guidance: steps and guidance scale of each picture.
        seed: seed of the first picture; each next picture has the next seed.
    """

    pictures: int = 32
    steps: int = 25
    guidance: float = 4.0
    seed: int = 0


@dataclass(frozen=True)
class Ground:
    """Reference of an evaluation.

    Attributes:
        prompts: prompts of the pictures to draw; ``places``: index of each prompt's training picture.
        known: the training pictures, small (pictures, 3, 16, 16) of -1..1; ``seen``: their features (pictures,
            channels), at full size.
    """

    prompts: list[str]
    places: Tensor
    known: Tensor
    seen: Tensor
    features: Features


def pipeline_to_draw(model: str | None, dtype: torch.dtype = torch.float32) -> Any:
    """The pipeline of ``model`` in ``dtype``, without a progress bar of its own.

    Raises:
        BadInputError: SDXL, or a UNet that takes more than latents.
        CheckpointError: missing, unreadable, truncated, or of an unknown kind.
    """
    pipe: Any = load_pipeline(model, dtype=dtype)
    config = pipe.unet.config
    if config.get("addition_embed_type") is not None:
        raise BadInputError("SDXL cannot be evaluated yet: SD1.x, SD2.x and the demo model can")
    if config["in_channels"] != config["out_channels"]:
        raise BadInputError(
            f"a UNet of {config['in_channels']} input channels (inpainting, depth) cannot be evaluated: give the "
            "plain text-to-image model"
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ground_of(teacher: Any, items: list[Captioned], features: Features, draw: Draw) -> Ground:
    """Prompts of ``draw`` and their reference, at the teacher's own size.

    Raises:
        BadInputError: as :func:`prompts_of`; a file that is not a picture.
    """
    prompts, places = prompts_of(items, draw)
    originals, seen = [], []
    for part in read_pictures(items, own_side(teacher.unet)):  # a few at a time: thousands would not fit
        originals.append(_small(part))
        seen.append(_pool(features, part))
        progress.report("training pictures", sum(map(len, originals)), len(items))
    return Ground(prompts, places, torch.cat(originals), torch.cat(seen), features)


def prompts_of(items: list[Captioned], draw: Draw) -> tuple[list[str], Tensor]:
    """The prompts of ``draw``, evenly over ``items``, and their places there.

    Raises:
        BadInputError: more pictures are asked for than there are, or fewer than two.
    """
    if not 2 <= draw.pictures <= len(items):
        raise BadInputError(f"{draw.pictures} pictures cannot be compared: from 2 to {len(items)} can, one a caption")
    places = torch.linspace(0, len(items) - 1, draw.pictures).round().long()
    return [items[place].captions[0] for place in places.tolist()], places


def evaluate_unets(
    teacher: Any, student: Any, ground: Ground, draw: Draw, more: Measures | None = None
) -> dict[str, dict[str, float]]:
    """:func:`measures` of the "student", of the "teacher", and of the teacher from "other seeds", the yardstick.

    Args:
        teacher, student: pipelines of diffusers.
        more: other measures, of pictures and their prompts.
    """
    runs = {"teacher": (teacher, 0), "student": (student, 0), "other seeds": (teacher, draw.pictures)}
    drawn = {
        name: draw_pictures(pipe, ground.prompts, draw, offset, (turn, len(runs)))
        for turn, (name, (pipe, offset)) in enumerate(runs.items())
    }
    names = ("student", "teacher", "other seeds")
    extra_measures = {name: more(drawn[name], ground.prompts) if more else {} for name in names}
    return {name: {**measures(drawn[name], drawn["teacher"], ground), **extra_measures[name]} for name in names}


def measures(pictures: Tensor, teacher: Tensor, ground: Ground) -> dict[str, float]:
    """Return how near pictures are to the teacher's pictures and to the training pictures.

    Args:
        pictures: (N, 3, H, W), of the seeds of ``teacher``.
        teacher: the teacher's pictures, of the same shape.
        ground: prompts and reference.

    Returns:
        "psnr" (dB, mean over pictures) and "difference" (mean, of 255) from the teacher's pictures; "retrieved", the
        share of pictures to which the prompt's own training picture is the nearest; "frechet" and "score" of
        :func:`frechet_distance` and :func:`picture_score`.
    """
    maps = _pool(ground.features, pictures)
    return {
        **agreement(pictures, teacher),
        "retrieved": float((nearest(pictures, ground.known) == ground.places).float().mean()),
        "frechet": frechet_distance(maps, ground.seen),
        "score": picture_score(maps, ground.seen),
    }


@torch.inference_mode()
def draw_pictures(
    pipe: Any, prompts: Sequence[str], draw: Draw, offset: int = 0, turn: tuple[int, int] = (0, 1)
) -> Tensor:
    """The pictures of a pipeline (prompts, 3, H, W) of -1..1, on the CPU.

    Args:
        offset: added to the seed of every picture.
        turn: the number of this run, and of how many, for progress.
    """
    parts = []
    for start in range(0, len(prompts), AT_ONCE):
        some = [*prompts[start : start + AT_ONCE]]
        seeds = [draw.seed + offset + start + place for place in range(len(some))]
        output = pipe(
            some,
            num_inference_steps=draw.steps,
            guidance_scale=draw.guidance,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="pt",
        )
        parts.append(output.images.float().cpu() * 2 - 1)
        count = len(prompts)
        progress.report("pictures", turn[0] * count + start + len(some), turn[1] * count)
    return torch.cat(parts)


def agreement(pictures: Tensor, references: Tensor) -> dict[str, float]:
    """ "psnr" in dB, the mean over pictures (200 where they are the same), and "difference", of 255."""
    apart = (pictures - references).double() / 2
    squares = apart.square().mean(dim=(1, 2, 3)).clamp_min(1e-20)
    return {"psnr": float((-10 * squares.log10()).mean()), "difference": 255 * float(apart.abs().mean())}


def nearest(pictures: Tensor, originals: Tensor) -> Tensor:
    """Return the index of the nearest original for each picture, both scaled down to 16x16.

    Args:
        pictures: (N, 3, H, W).
        originals: (M, 3, H, W).

    Returns:
        (N,) indices.
    """
    return torch.cdist(_small(pictures).flatten(1), _small(originals).flatten(1)).argmin(dim=1)


def _small(pictures: Tensor) -> Tensor:
    return functional.adaptive_avg_pool2d(pictures, _SEEN)


@torch.inference_mode()
def _pool(features: Features, pictures: Tensor) -> Tensor:
    """(pictures, channels): the means of the deepest maps."""
    return torch.cat([features(some)[-1].mean(dim=(2, 3)) for some in pictures.split(AT_ONCE)]).double().cpu()


def frechet_distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the distance of two normal distributions with the means and covariances of two sets; after Heusel et al.
    (2017).

    The trace of the root of the product of the covariances is the sum of the singular values of the product of the
    centred sets, which holds for fewer pictures than channels, too.

    Args:
        ours, theirs: features (pictures, channels).
    """
    means = ours.mean(dim=0), theirs.mean(dim=0)
    centred = [(each - mean) / (len(each) - 1) ** 0.5 for each, mean in zip((ours, theirs), means, strict=True)]
    spread = sum(float(each.square().sum()) for each in centred)
    shared = float(torch.linalg.matrix_norm(centred[0] @ centred[1].T, "nuc"))
    return float((means[0] - means[1]).square().sum()) + spread - 2 * shared


def picture_score(ours: Tensor, originals: Tensor) -> float:
    """An inception score (Salimans et al. 2016) whose classes are the training pictures.

    It is 1 if all pictures are similar, or each is similar to all classes, and the number of pictures if each has its
    own class. The probability of a class falls with the squared distance of features (pictures, channels), in units of
    a tenth of the median distance between a training picture and its nearest neighbour.

    Args:
        ours, originals: features (pictures, channels).
    """
    among = torch.cdist(originals, originals).fill_diagonal_(torch.inf)
    unit = among.min(dim=1).values.square().median().clamp_min(1e-12) / 10
    logs = (-torch.cdist(ours, originals).square() / unit).log_softmax(dim=1)
    mean = logs.exp().mean(dim=0).clamp_min(1e-300).log()
    return float((logs.exp() * (logs - mean)).sum(dim=1).mean().exp())


def step_times(teacher: Any, student: Any, pairs: int) -> dict[str, Any]:
    """:func:`compare` of guided steps on the CPU: seconds of one step each; a pair is of several steps of both."""
    config = teacher.config
    kind = {"dtype": teacher.dtype}
    anatomy = anatomy_of_components("diffusers", {"unet": teacher})
    side = native_size(anatomy) // scale_factor(anatomy)
    latents = torch.zeros(2, config["in_channels"], side, side, **kind)
    text = torch.zeros(2, 77, config["cross_attention_dim"], **kind)

    def steps(unet: Any) -> Callable[[], Tensor]:
        return lambda: [unet(latents, 500, text).sample for _ in range(STEPS_TIMED)][-1]

    with torch.inference_mode():
        comparison = compare(steps(teacher), steps(student), pairs, torch.device("cpu"))
    return {**comparison, **{name: comparison[name] / STEPS_TIMED for name in ("plain_seconds", "seconds")}}
