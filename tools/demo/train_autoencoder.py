"""Trains the demo model's autoencoder, in two phases that can be stopped and resumed at any time.

    python tools/demo/train_autoencoder.py --work WORK joint      # encoder and decoder
    python tools/demo/train_autoencoder.py --work WORK freeze     # fixes the encoder, writes the latents
    python tools/demo/train_autoencoder.py --work WORK decoder    # the decoder alone, on those latents (optional)
    python tools/demo/train_autoencoder.py --work WORK shipped    # none of these: the autoencoder of the shipped model

`freeze` folds the per-channel mean and deviation of the latents into the two 1x1 convolutions beside
the bottleneck, exactly, so that the scaling factor is SD1.5's 0.18215. The UNet trains on WORK/latents.pt,
so it may train while the decoder is still being polished.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from data import load
from diffusers import AutoencoderKL
from diffusers.training_utils import EMAModel

from sd_lowvram.unets.training import rate

SCALING = 0.18215
SHIPPED = Path(__file__).resolve().parents[2] / "sd_lowvram" / "demo" / "model"


def build() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 128, 128),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=128,
        scaling_factor=SCALING,
    )


def to_tensors(work: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures in -1..1 (count, 3, H, W) and coverage in 0..1 (count, 1, H, W)."""
    loaded, alpha, _ = load(work)
    pictures = torch.from_numpy(loaded).permute(0, 3, 1, 2).float() / 127.5 - 1
    return pictures, torch.from_numpy(alpha)[:, None].float() / 255


def crops(pictures: torch.Tensor, alpha: torch.Tensor, batch: int, size: int, coloured: float = 0.2) -> torch.Tensor:
    """Random crops and flips; a part of them stands on a coloured gradient instead of on white."""
    out = []
    for i in torch.randint(len(pictures), (batch,)).tolist():
        y, x = torch.randint(pictures.shape[-1] - size + 1, (2,)).tolist()
        crop = pictures[i, :, y : y + size, x : x + size]
        if torch.rand(()) < coloured:
            corners = torch.rand(1, 3, 2, 2) * 2 - 1
            ground = F.interpolate(corners, size=(size, size), mode="bilinear", align_corners=True)[0]
            crop = crop + (1 - alpha[i, :, y : y + size, x : x + size]) * (ground - 1)
        out.append(crop.flip(-1) if torch.rand(()) < 0.5 else crop)
    return torch.stack(out).contiguous(memory_format=torch.channels_last)


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """L1 and squared error, L1 of the gradients, and both L1 terms at a half and a quarter of the size."""
    loss = 2 * F.mse_loss(a, b)
    for _ in range(3):
        loss = loss + F.l1_loss(a, b)
        loss = loss + 0.5 * F.l1_loss(a.diff(dim=-1), b.diff(dim=-1))
        loss = loss + 0.5 * F.l1_loss(a.diff(dim=-2), b.diff(dim=-2))
        a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
    return loss


def psnr(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio of every picture, for values in -1..1."""
    return 10 * torch.log10(4 / (a.clamp(-1, 1) - b).square().mean(dim=(1, 2, 3)).clamp_min(1e-10))


@torch.no_grad()
def evaluate(vae: AutoencoderKL, pictures: torch.Tensor, latents: torch.Tensor | None = None) -> float:
    """Mean PSNR over the pictures, from their latents' means, in float32."""
    out = []
    for i in range(0, len(pictures), 16):
        part = pictures[i : i + 16]
        mean = vae.encode(part).latent_dist.mean if latents is None else latents[i : i + 16]
        out.append(psnr(vae.decode(mean).sample, part))
    return torch.cat(out).mean().item()


def has_bf16() -> bool:
    """Whether this processor multiplies in bfloat16; one that emulates it is several times slower than in float32."""
    return any(torch.cpu.get_capabilities().get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bf16())


def save(file: Path, **state: object) -> None:
    torch.save(state, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)


def joint_loss(vae: AutoencoderKL, target: torch.Tensor) -> torch.Tensor:
    with autocast():
        posterior = vae.encode(target).latent_dist
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        out = vae.decode(mean + (0.5 * logvar).exp() * torch.randn_like(mean)).sample
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    loss: torch.Tensor = distance(out.float(), target) + 3e-4 * kl
    return loss


def decoder_loss(vae: AutoencoderKL, latents: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half of the latents carry a little noise, so that the decoder forgives what the UNet leaves."""
    strength = 0.1 / SCALING * torch.rand(len(latents), 1, 1, 1) * (torch.rand(len(latents), 1, 1, 1) < 0.5)
    with autocast():
        out = vae.decode(latents + strength * torch.randn_like(latents)).sample
    return distance(out.float(), target)


@torch.no_grad()
def evaluate_average(
    vae: AutoencoderKL, average: EMAModel, pictures: torch.Tensor, latents: torch.Tensor | None
) -> float:
    average.store(vae.parameters())
    average.copy_to(vae.parameters())
    result = evaluate(vae, pictures, latents)
    average.restore(vae.parameters())
    return result


def train(args: argparse.Namespace, stopped: Callable[[], bool] = bool) -> int:
    """The step at which the phase stands; where ``stopped`` says so it ends early, saved."""
    joint = args.phase == "joint"
    torch.manual_seed(args.seed)
    pictures, alpha = to_tensors(args.work)
    vae = build().to(memory_format=torch.channels_last)
    latents = None
    if not joint:
        vae.load_state_dict(torch.load(args.work / "frozen.pt"))
        latents = torch.load(args.work / "latents.pt")
        vae.requires_grad_(False)
        vae.decoder.requires_grad_(True)
    trained = [p for p in vae.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    average = EMAModel(vae.parameters(), 0.998)
    parts = [name for name, _ in vae.named_parameters()]
    file, step = args.work / f"autoencoder-{args.phase}.pt", 0
    if file.exists():
        state = torch.load(file)
        vae.load_state_dict(state["vae"])
        optimizer.load_state_dict(state["optimizer"])
        average.shadow_params = [state["average"][name] for name in parts]
        average.optimization_step = step = state["step"]
        torch.manual_seed(args.seed + step)
        print(f"resumed at step {step}", flush=True)

    start, first, running = time.time(), step, 0.0
    while step < args.steps and not stopped():
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args.steps, args.rate)
        if latents is None:
            loss = joint_loss(vae, crops(pictures, alpha, args.batch, 64))
        elif step % 4 == 3:  # not only whole pictures on white
            target = crops(pictures, alpha, 16, 64, coloured=0.8)
            with torch.no_grad(), autocast():
                code = vae.encode(target).latent_dist.mean.float()
            loss = decoder_loss(vae, code, target)
        else:
            chosen = torch.randint(len(pictures), (args.batch,))
            target = pictures[chosen].contiguous(memory_format=torch.channels_last)
            loss = decoder_loss(vae, latents[chosen], target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        average.step(vae.parameters())
        step += 1
        running += loss.item()
        if step % 50 == 0:
            pace = (time.time() - start) / (step - first)
            print(f"step {step} loss {running / 50:.4f} {pace:.2f} s/step", flush=True)
            running = 0.0
        if step % 500 == 0 or step == args.steps or stopped():
            averaged = {**vae.state_dict(), **dict(zip(parts, average.shadow_params, strict=True))}
            save(file, vae=vae.state_dict(), optimizer=optimizer.state_dict(), average=averaged, step=step)
            if not stopped():
                print(f"step {step} PSNR {evaluate_average(vae, average, pictures, latents):.2f} dB", flush=True)
    return step


@torch.no_grad()
def freeze(args: argparse.Namespace) -> None:
    pictures, _ = to_tensors(args.work)
    vae = build()
    vae.load_state_dict(torch.load(args.work / "autoencoder-joint.pt")["average"])
    before = evaluate(vae, pictures)
    mean = torch.cat([vae.encode(p).latent_dist.mean for p in pictures.split(16)])
    shift, scale = mean.mean(dim=(0, 2, 3)), SCALING * mean.std(dim=(0, 2, 3))
    # quant_conv: mean' = (mean - shift) / scale, logvar' = logvar - 2 log(scale); post_quant_conv undoes it
    vae.quant_conv.weight[:4] /= scale[:, None, None, None]
    vae.quant_conv.bias[:4] = (vae.quant_conv.bias[:4] - shift) / scale
    vae.quant_conv.bias[4:] -= 2 * scale.log()
    vae.post_quant_conv.bias += vae.post_quant_conv.weight[:, :, 0, 0] @ shift
    vae.post_quant_conv.weight *= scale[None, :, None, None]
    vae.half().float()  # what is stored is float16, so the latents are those of the stored encoder
    write_frozen(vae, pictures, args.work)
    print(f"PSNR {before:.2f} dB before, {evaluate(vae, pictures):.2f} dB folded and in float16")


@torch.no_grad()
def shipped(args: argparse.Namespace) -> None:
    """Write what `freeze` does, of the autoencoder in the package."""
    write_frozen(AutoencoderKL.from_pretrained(SHIPPED / "vae").float(), to_tensors(args.work)[0], args.work)


def write_frozen(vae: AutoencoderKL, pictures: torch.Tensor, work: Path) -> None:
    latents = torch.cat([vae.encode(p).latent_dist.mean for p in pictures.split(16)])
    torch.save(vae.state_dict(), work / "frozen.pt")
    torch.save(latents, work / "latents.pt")
    scaled = latents * SCALING
    print(f"scaled latents: means {scaled.mean((0, 2, 3)).tolist()}, deviations {scaled.std((0, 2, 3)).tolist()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the data step")
    parser.add_argument("phase", choices=("joint", "freeze", "decoder", "shipped"))
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch", type=int, help="default: 16 crops of 64x64, or 6 whole pictures")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.batch = args.batch or (16 if args.phase == "joint" else 6)
    {"freeze": freeze, "shipped": shipped}.get(args.phase, train)(args)


if __name__ == "__main__":
    main()
