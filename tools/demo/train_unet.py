"""Trains the demo model's UNet and text encoder, together, on the latents that `freeze` wrote.

    python tools/demo/train_unet.py --work WORK --steps 6000

Velocity prediction; noise levels stratified over the batch; 10 % empty prompts for guidance; exponential
moving average. Stops and resumes at any time, with another number of steps too.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import tokenizer
import torch
from data import load
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from train_autoencoder import SCALING, Average, rate, save
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

WIDTH = 192
TEMPLATES = ("{}", "a {}", "{}", "a {}", "{}", "a {}", "the {}", "a picture of a {}", "an icon of a {}")


class Model(torch.nn.Module):
    def __init__(self, vocabulary: int) -> None:
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
            sample_size=16,
            in_channels=4,
            out_channels=4,
            down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
            block_out_channels=(64, 96, 128, 160),
            layers_per_block=1,
            cross_attention_dim=WIDTH,
            attention_head_dim=4,  # the number of heads, as in SD1.5
            norm_num_groups=16,
        )


SCHEDULE = dict(
    num_train_timesteps=1000,
    beta_start=0.00085,
    beta_end=0.012,
    beta_schedule="scaled_linear",
    prediction_type="v_prediction",
)


def phrase(template: str, caption: str) -> str:
    text = template.format(caption)
    for article in ("a ", "picture of a ", "icon of a "):
        if text.startswith(article) or f" {article}" in text:
            for vowel in "aeiou":
                text = text.replace(f"a {vowel}", f"an {vowel}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the data step and of `freeze`")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    random.seed(args.seed)
    _, _, captions = load(args.work)
    tokenizer.write(captions, args.work / "tokenizer")
    tokenize = CLIPTokenizer.from_pretrained(args.work / "tokenizer")
    latents = torch.load(args.work / "latents.pt") * SCALING
    names = list(captions.values())
    model = Model(len(tokenize))
    model.unet.set_attn_processor(AttnProcessor())  # its backward pass is the faster one on a CPU
    model.unet.to(memory_format=torch.channels_last)
    print(f"{sum(p.numel() for p in model.unet.parameters()) / 1e6:.2f} M parameters in the UNet,")
    print(f"{sum(p.numel() for p in model.text_encoder.parameters()) / 1e6:.2f} M in the text encoder", flush=True)
    scheduler = DDPMScheduler(**SCHEDULE)
    snr = scheduler.alphas_cumprod / (1 - scheduler.alphas_cumprod)
    weight = (6 / (snr + 1)).clamp(max=1)  # nearly clean latents would otherwise rule the loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.99), weight_decay=1e-3)
    average = Average(model, 0.998)
    file, step = args.work / "unet.pt", 0
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        average.shadow, average.steps, step = state["average"], state["step"], state["step"]
        torch.manual_seed(args.seed + step)
        random.seed(args.seed + step)
        print(f"resumed at step {step}", flush=True)

    start, first, running = time.time(), step, 0.0
    while step < args.steps:
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args.steps, args.rate)
        chosen = torch.randint(len(latents), (args.batch,))
        texts = [
            "" if random.random() < 0.1 else phrase(random.choice(TEMPLATES), random.choice(names[i]))
            for i in chosen.tolist()
        ]
        tokens = tokenize(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
        clean = latents[chosen].contiguous(memory_format=torch.channels_last)
        noise = torch.randn_like(clean)
        levels = (torch.arange(args.batch) + torch.rand(args.batch)) * (1000 / args.batch)
        levels = levels.long().clamp(max=999)
        noisy = scheduler.add_noise(clean, noise, levels)
        target = scheduler.get_velocity(clean, noise, levels)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.text_encoder(tokens)[0]
            out = model.unet(noisy, levels, hidden).sample
        loss = ((out.float() - target).square().mean(dim=(1, 2, 3)) * weight[levels]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update()
        step += 1
        running += loss.item()
        if step % 50 == 0:
            pace = (time.time() - start) / (step - first)
            print(f"step {step} loss {running / 50:.4f} {pace:.2f} s/step", flush=True)
            running = 0.0
        if step % 200 == 0 or step == args.steps:
            save(file, model=model.state_dict(), optimizer=optimizer.state_dict(), average=average.shadow, step=step)


if __name__ == "__main__":
    main()
