"""Trains a smaller UNet to do what a larger one does, after A-SDM (2023); ended at any time, it goes on from a file.

The random numbers of a step come from the seed and the step's number: a checkpoint is weights, optimizer and average,
and on a CPU an ended run comes to the same weights as an unbroken one.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from .. import progress
from ..errors import BadInputError, CheckpointError
from ..files import temporary_beside
from .digests import digest_of
from .frozen import Features, frozen_features
from .supervision import check_match, clean_of, features_terms, maps_of, semantic_term
from .training import min_snr_weights, noise_levels, rate
from .training_pictures import Encoded

_UNCAPTIONED = 0.1
"""The share of samples without a text, for guidance."""
_DECAY = 0.998
_FEW_TOKENS = 1024
"""Largest number of tokens for which a CPU computes the attention matrix at once."""

Told = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class TrainingRun:
    """Options of a student's training.

    Attributes:
        steps, batch: number of steps, and of samples a step in every process.
        rate: peak learning rate (AdamW).
        seed: seed of samples, noise and levels.
        blocks: number of outermost blocks on each side that are trained; None: all.
        semantic: a network of :mod:`frozen` whose features are compared too, or None.
        precision: "no" (float32) or "bf16" for the computation; weights are trained in float32.
        every: steps between checkpoints, and between two reports of the terms.
    """

    steps: int
    batch: int = 8
    rate: float = 1e-4
    seed: int = 0
    blocks: int | None = None
    semantic: str | None = None
    precision: str = "no"
    every: int = 50


def distil(
    teacher: Any,
    student: Any,
    vae: Any,
    schedule: Any,
    data: Encoded,
    run: TrainingRun,
    checkpoint: Path,
    report: Told,
    stopped: Callable[[], bool] = bool,
) -> Any:
    """Train ``student``; return the average of its weights as a new UNet, in float32 on the CPU.

    Return None in all but the first process, if ``accelerate launch`` has started several.

    Args:
        teacher, student: UNets of diffusers; the teacher does not change.
        vae: autoencoder for the semantic term.
        schedule: a scheduler of diffusers; its betas and its prediction type are used.
        checkpoint: a file; an interrupted training with the same options resumes from it.
        report: called with a step's number and the means of the loss terms since the last call.
        stopped: called after each step; True stops the training and saves it.

    Raises:
        KeyboardInterrupt: ``stopped`` returned True.
        BadInputError: UNets that do not match, a kind of model that cannot be trained, or another training's
            checkpoint.
    """
    from accelerate import Accelerator

    _check_kind(teacher, student, schedule.config.prediction_type)
    accelerator = Accelerator(mixed_precision="no")  # another would be the process's from then on
    training = _prepare(teacher, student, vae, schedule, data, run, accelerator)
    identity = _identity(run, accelerator.num_processes, teacher, student, data)
    step = _load_checkpoint(checkpoint, identity, run.steps, training)
    since: list[dict[str, float]] = []
    progress.report("distil", step, run.steps)
    while step < run.steps:
        terms = _trained_step(step, training, data, run, accelerator)
        step += 1
        since.append({name: value.item() for name, value in terms.items()})
        ending = stopped()
        if step % run.every == 0 or step == run.steps or ending:
            if accelerator.is_main_process:
                _keep(checkpoint, identity, training, step)
                report(step, {name: fmean(each[name] for each in since) for name in terms})
            since.clear()
        progress.report("distil", step, run.steps)
        if ending and step < run.steps:
            raise KeyboardInterrupt
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return None
    student_unet = training.inner
    training.average.copy_to(student_unet.parameters())
    student_unet.set_attn_processor(training.processors)
    return student_unet.cpu().to(memory_format=torch.contiguous_format).eval().requires_grad_(False)


def _prepare(
    teacher: Any, student: Any, vae: Any, schedule: Any, data: Encoded, run: TrainingRun, accelerator: Any
) -> _Training:
    """Copies of the models where and as they are trained, the optimizer and the average."""
    from diffusers import DDPMScheduler
    from diffusers.training_utils import EMAModel

    device, levels = accelerator.device, DDPMScheduler.from_config(schedule.config)
    inner = copy.deepcopy(student).float().to(memory_format=torch.channels_last)
    _choose_trained(inner, run.blocks)
    processors = inner.attn_processors
    if device.type == "cpu" and data.latents[0, 0].numel() <= _FEW_TOKENS:
        _attend_plainly(inner)
    teacher = copy.deepcopy(teacher).float().to(device, memory_format=torch.channels_last).requires_grad_(False)
    features = frozen_features(run.semantic, device) if run.semantic else None
    vae = copy.deepcopy(vae).float().to(device).requires_grad_(False) if features else None
    weights = [weight for weight in inner.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=run.rate, betas=(0.9, 0.99), weight_decay=1e-3)
    trained, optimizer = accelerator.prepare(inner, optimizer)
    average = EMAModel(inner.parameters(), _DECAY)
    return _Training(teacher, trained, inner, processors, vae, features, levels, weights, optimizer, average)


def _trained_step(
    step: int, training: _Training, data: Encoded, run: TrainingRun, accelerator: Any
) -> dict[str, Tensor]:
    """The loss terms of a step, by which the weights have been changed, and their average."""
    optimizer = training.optimizer
    for group in optimizer.param_groups:
        group["lr"] = rate(step, run.steps, run.rate, min(200, run.steps // 10 + 1))
    place = step * accelerator.num_processes + accelerator.process_index
    samples = [part.to(accelerator.device) for part in _samples(data, run, place)]
    with _computing(accelerator.device, run.precision):
        terms = training.terms(*samples)
    optimizer.zero_grad()
    accelerator.backward(torch.stack([*terms.values()]).sum())
    accelerator.clip_grad_norm_(training.weights, 1.0)
    optimizer.step()
    training.average.step(training.inner.parameters())
    return terms


def _computing(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def _check_kind(unet: Any, student: Any, prediction: str) -> None:
    check_match(unet, student)
    if prediction not in ("epsilon", "v_prediction"):
        raise BadInputError(f"a model that predicts {prediction!r} cannot be distilled: epsilon and v_prediction can")
    if unet.config.get("addition_embed_type") is not None:
        raise BadInputError("SDXL cannot be distilled yet: SD1.x, SD2.x and the demo model can")
    if unet.config["in_channels"] != unet.config["out_channels"]:
        raise BadInputError(
            f"a UNet of {unet.config['in_channels']} input channels (inpainting, depth) cannot be distilled: give the "
            "plain text-to-image model"
        )


def _choose_trained(unet: Any, blocks: int | None) -> None:
    """Freeze all but the outermost ``blocks`` and the convolutions before and after them."""
    unet.requires_grad_(blocks is None)
    if blocks is None:
        return
    most = len(unet.down_blocks)
    if not 1 <= blocks <= most:
        raise BadInputError(f"{blocks} outermost blocks cannot be trained alone: this UNet has {most} on each side")
    outer = (*unet.down_blocks[:blocks], *unet.up_blocks[-blocks:], unet.conv_in, unet.conv_norm_out, unet.conv_out)
    for part in outer:
        part.requires_grad_(True)


def _attend_plainly(unet: Any) -> None:
    """Keep attention's matrices: on a CPU the way back through torch's fused attention takes half as long again."""
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    processors = unet.attn_processors
    plain = {
        key: AttnProcessor() if type(processor) is AttnProcessor2_0 else processor
        for key, processor in processors.items()
    }
    unet.set_attn_processor(plain)


def _samples(data: Encoded, run: TrainingRun, place: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Clean latents, texts, noise and levels of a step; ``place`` counts steps of all processes."""
    generator = torch.Generator().manual_seed((run.seed << 32) + place)
    chosen = torch.randint(len(data.latents), (run.batch,), generator=generator)
    lots = torch.rand(run.batch, 2, generator=generator)
    texts = [
        data.empty[0] if dropped < _UNCAPTIONED else data.texts[at][int(lot * len(data.texts[at]))]
        for at, (dropped, lot) in zip(chosen.tolist(), lots.tolist(), strict=True)
    ]
    clean = data.latents[chosen]
    noise = torch.randn(clean.shape, generator=generator)
    return clean, torch.stack(texts), noise, noise_levels(run.batch, generator)


@dataclass(frozen=True)
class _Training:
    """The models of a training, and the terms of a batch.

    Attributes:
        trained: the student as it is called; ``inner`` has its blocks.
        processors: the student's own, to be put back.
        schedule: the ``DDPMScheduler`` of the model's levels of noise.
        weights: those that ``optimizer`` changes.
        average: an ``EMAModel`` of diffusers over all of the student's weights.
    """

    teacher: Any
    trained: Any
    inner: Any
    processors: Any
    vae: Any
    features: Features | None
    schedule: Any
    weights: list[Any]
    optimizer: Any
    average: Any

    def terms(self, clean: Tensor, texts: Tensor, noise: Tensor, levels: Tensor) -> dict[str, Tensor]:
        schedule = self.schedule
        noisy = schedule.add_noise(clean, noise, levels)
        predicts_noise = schedule.config.prediction_type == "epsilon"
        wanted = noise if predicts_noise else schedule.get_velocity(clean, noise, levels)
        with torch.no_grad(), maps_of(self.teacher) as theirs:
            target = self.teacher(noisy, levels, texts).sample.float()
        with maps_of(self.inner) as ours:
            output = self.trained(noisy, levels, texts).sample.float()
        weights = min_snr_weights(schedule, levels).view(-1, 1, 1, 1)
        terms = {
            "task": ((output - wanted).square() * weights).mean(),
            "output": ((output - target).square() * weights).mean(),
            **features_terms(ours, theirs),
        }
        if self.features is not None:
            # The least noisy quarter, which comes first; at higher levels no picture is visible yet.
            few = max(1, len(clean) // 4)
            pictures = [self._pictures(noisy[:few], some[:few], levels[:few]) for some in (output, target)]
            terms["semantic"] = semantic_term(*(self.features(each) for each in pictures))
        return terms

    def _pictures(self, noisy: Tensor, output: Tensor, levels: Tensor) -> Tensor:
        alphas = self.schedule.alphas_cumprod.to(levels.device)[levels].view(-1, 1, 1, 1)
        clean = clean_of(noisy, output, alphas, self.schedule.config.prediction_type)
        latents = clean / self.vae.config.scaling_factor
        pictures: Tensor = self.vae.decode(latents).sample
        return pictures


def _identity(run: TrainingRun, processes: int, teacher: Any, student: Any, data: Encoded) -> dict[str, Any]:
    """Facts that must be equal for a run to resume; steps and checkpoint interval may differ."""
    named = asdict(run)
    del named["steps"], named["every"]
    models = {
        name: digest_of(model.state_dict().values()) for name, model in (("teacher", teacher), ("student", student))
    }
    return {**named, **models, "data": data.digest, "processes": processes}


def _keep(file: Path, identity: dict[str, Any], training: _Training, step: int) -> None:
    """Write the checkpoint as one file, atomically, readable without running code.

    accelerate's ``save_state`` writes a folder piece by piece, and its ``load_state`` unpickles registered objects."""
    state = {
        "course": identity,
        "student": training.inner.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "average": training.average.state_dict(),
        "step": step,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(file) as (opened, temporary):  # as it comes: of SD1.5 it is 13 GB
        torch.save(state, opened)
        opened.flush()
        os.fsync(opened.fileno())
        if os.name == "nt":
            opened.close()
        os.replace(temporary, file)


def _load_checkpoint(file: Path, identity: dict[str, Any], steps: int, training: _Training) -> int:
    """Load the checkpoint if there is one; return its step, at most ``steps``, or 0."""
    if not file.exists():
        return 0
    state = None
    with contextlib.suppress(Exception):  # any other file
        state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not {"course", "student", "optimizer", "average", "step"} <= state.keys():
        raise CheckpointError(f"{file} is not a checkpoint of distil: remove it, or name another --out")
    for name, value in identity.items():
        if state["course"].get(name) != value:
            raise BadInputError(
                f"{file} was made with {name} {state['course'].get(name)}, and {value} is asked for: give the same, or "
                "another --out"
            )
    if state["step"] > steps:
        raise BadInputError(
            f"{file} stands at step {state['step']}, and {steps} steps are asked for: give no fewer, or another --out"
        )
    training.inner.load_state_dict(state["student"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.average.load_state_dict(state["average"])
    training.average.to(next(training.inner.parameters()).device)
    return int(state["step"])
