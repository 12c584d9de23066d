"""Trains the demo model's UNet and text encoder, together, on the latents that `freeze` wrote.

    python tools/demo/train_unet.py --work WORK --steps 4500 --until 1000

Velocity prediction; noise levels stratified over the batch; 10 % empty prompts for guidance; exponential
moving average. Stops and resumes at any time, with another number of steps too; one process saves what it has
done when it is asked to end.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizer
import torch
from data import load
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from diffusers.training_utils import EMAModel
from torch.multiprocessing.spawn import spawn
from train_autoencoder import SCALING, autocast, save
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from sd_lowvram.commands.exit_codes import INTERRUPTED
from sd_lowvram.commands.interrupts import stop_between_steps
from sd_lowvram.unets.training import noise_levels, rate

WIDTH = 192
CHANNELS = (64, 96, 128, 160)
TEMPLATES = ("{}", "a {}", "{}", "a {}", "{}", "a {}", "the {}", "a picture of a {}", "an icon of a {}")


class Model(torch.nn.Module):
    def __init__(self, vocabulary: int, layers: int = 1, side: int = 16, channels: Sequence[int] = CHANNELS) -> None:
        super().__init__()
        self.text_encoder = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=vocabulary,
                hidden_size=WIDTH,
                intermediate_size=4 * WIDTH,
                projection_dim=WIDTH,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=tokenizer.LENGTH,
                bos_token_id=vocabulary - 2,
                eos_token_id=vocabulary - 1,
                pad_token_id=vocabulary - 1,
            )
        )
        self.unet = UNet2DConditionModel(
            sample_size=side,
            in_channels=4,
            out_channels=4,
            down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
            block_out_channels=tuple(channels),
            layers_per_block=layers,
            cross_attention_dim=WIDTH,
            attention_head_dim=4,  # the number of heads, as in SD1.5
            norm_num_groups=16,
        )


SCHEDULE = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
}


def phrase(template: str, caption: str) -> str:
    """The caption in the template, with "an" before a vowel."""
    return re.sub(r"\ba (?=[aeio]|um)", "an ", template.format(caption))


def batch(names: list[list[str]], size: int) -> tuple[torch.Tensor, list[str]]:
    """Which pictures, and a prompt for each: one of its captions in one of the forms, or nothing."""
    chosen = torch.randint(len(names), (size,))
    texts = [
        "" if random.random() < 0.1 else phrase(random.choice(TEMPLATES), random.choice(names[i]))
        for i in chosen.tolist()
    ]
    return chosen, texts


def velocity_loss(model: Model, clean: torch.Tensor, tokens: torch.Tensor, scheduler: DDPMScheduler) -> torch.Tensor:
    clean = clean.contiguous(memory_format=torch.channels_last)
    noise = torch.randn_like(clean)
    levels = noise_levels(len(clean), torch.default_generator)  # which seed() seeds
    noisy = scheduler.add_noise(clean, noise, levels)
    target = scheduler.get_velocity(clean, noise, levels)
    with autocast():
        out = model.unet(noisy, levels, model.text_encoder(tokens)[0]).sample
    alphas = scheduler.alphas_cumprod[levels]  # 1 - alpha is 1 / (snr + 1)
    weight = (6 * (1 - alphas)).clamp(max=1)  # nearly clean latents would otherwise rule the loss
    loss: torch.Tensor = ((out.float() - target).square().mean(dim=(1, 2, 3)) * weight).mean()
    return loss


def share_gradients(model: torch.nn.Module, processes: int) -> None:
    """Averages the gradients over the processes."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in gradients]) / processes
    torch.distributed.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)


def train(rank: int, args: argparse.Namespace, stopped: Callable[[], bool] = bool) -> int:
    """The step at which the training stands; where ``stopped`` says so it ends early, saved."""
    if args.processes > 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ends with its parent, under nohup too
        torch.distributed.init_process_group("gloo", args.meeting, rank=rank, world_size=args.processes)
    seed(args.seed)
    _, _, captions = load(args.work)
    tokenizer.write(captions, args.work / "tokenizer")
    tokenize = CLIPTokenizer.from_pretrained(args.work / "tokenizer")
    latents = torch.load(args.work / "latents.pt") * SCALING
    names = list(captions.values())
    model = Model(len(tokenize), args.layers, latents.shape[-1], args.channels)
    model.unet.set_attn_processor(AttnProcessor())  # its backward pass is the faster one on a CPU
    model.unet.to(memory_format=torch.channels_last)
    scheduler = DDPMScheduler(**SCHEDULE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.99), weight_decay=1e-3, fused=True)
    average = EMAModel(model.parameters(), 0.998)
    parts = [name for name, _ in model.named_parameters()]
    file, step = args.work / "unet.pt", 0
    if file.exists():
        state = torch.load(file)
        if state.get("layers", 1) != args.layers:
            raise SystemExit(f"{file} has {state.get('layers', 1)} layers a block: give --layers the same")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        average.shadow_params = [state["average"][name] for name in parts]
        average.optimization_step = step = state["step"]
        print(f"resumed at step {step}", flush=True)
    seed(args.seed + step * args.processes + rank)

    start, first, running = time.time(), step, 0.0
    while step < args.until and not stopped():
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args.steps, args.rate)
        chosen, texts = batch(names, args.batch)
        tokens = tokenize(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
        loss = velocity_loss(model, latents[chosen], tokens, scheduler)
        optimizer.zero_grad()
        loss.backward()
        if args.processes > 1:
            share_gradients(model, args.processes)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.step(model.parameters())
        step += 1
        running += loss.item()
        if rank == 0 and step % 50 == 0:
            pace = (time.time() - start) / (step - first)
            print(f"step {step} loss {running / 50:.4f} {pace:.2f} s/step", flush=True)
            running = 0.0
        if rank == 0 and (step % 200 == 0 or step == args.until or stopped()):
            averaged = {**model.state_dict(), **dict(zip(parts, average.shadow_params, strict=True))}
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "average": averaged}
            save(file, **state, layers=args.layers, channels=args.channels, step=step)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the data step and of `freeze`")
    parser.add_argument("--steps", type=int, default=4500, help="length of the rate's schedule")
    parser.add_argument("--until", type=int, help="stop at this step (default: the schedule's end)")
    parser.add_argument("--layers", type=int, default=1, help="residual units a block; SD1.5 has 2")
    parser.add_argument("--channels", type=int, nargs=4, default=CHANNELS, help="of each of its four levels")
    parser.add_argument("--batch", type=int, default=32, help="prompts a step in every process")
    parser.add_argument("--processes", type=int, default=2, help="one a core; gradients are averaged")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.until = min(args.until or args.steps, args.steps)
    if args.processes == 1:
        with stop_between_steps() as stopped:
            raise SystemExit(0 if train(0, args, stopped) >= args.until else INTERRUPTED)
    with tempfile.TemporaryDirectory() as folder:
        args.meeting = f"file://{folder}/meeting"
        spawn(train, (args,), nprocs=args.processes)


if __name__ == "__main__":
    main()
