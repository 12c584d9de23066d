"""Writes the demo model as a diffusers folder, measures it, and puts the figures into its model card.

    python tools/demo/export.py --work WORK --out sd_lowvram/demo/model [--card sd_lowvram/demo/README.md]
                                [--sheet docs/demo-samples.png] [--decoder WORK/autoencoder-decoder.pt]

Weights are stored in float16 and measured as stored, computed in float32: the mean reconstruction PSNR over
the training pictures, and of 100 training prompts, each with a fixed seed, how many give a picture whose
nearest training picture (distance of the RGB pictures scaled down to 16x16) is the prompt's own.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import tokenizer
import torch
import torch.nn.functional as F
from data import load
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, StableDiffusionPipeline
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from train_autoencoder import build, evaluate, to_tensors
from train_unet import CHANNELS, SCHEDULE, Model, phrase
from transformers import CLIPTokenizer

PROMPTS, STEPS, GUIDANCE = 100, 30, 4.0
SHEET = [
    "a red apple",
    "a cat",
    "a dog face",
    "a green tree",
    "a yellow taxi",
    "a banana",
    "a rocket",
    "a penguin",
    "a house",
    "a sunflower",
    "a hamburger",
    "a fox",
    "a red car",
    "a blue gem",
    "an octopus",
    "a slice of pizza",
    "a castle",
    "a snowman",
    "a frog",
    "a bicycle",
    "a strawberry",
    "an owl",
    "a steam locomotive",
    "a rainbow",
    "a guitar",
    "a panda",
    "a volcano",
    "a cupcake",
    "a butterfly",
    "a sailboat",
    "a teapot",
    "an earth globe",
]


def export(work: Path, decoder: Path | None, out: Path) -> None:
    vae = build()
    vae.load_state_dict(torch.load(work / "frozen.pt"))
    if decoder:
        polished = torch.load(decoder)["average"]
        vae.decoder.load_state_dict(
            {k.removeprefix("decoder."): v for k, v in polished.items() if k.startswith("decoder.")}
        )
    tokenizer.write(load(work)[2], out / "tokenizer")
    tokenize = CLIPTokenizer.from_pretrained(out / "tokenizer")
    state = torch.load(work / "unet.pt")
    shape = (state.get("layers", 1), load(work)[0].shape[1] // 8, state.get("channels", CHANNELS))
    model = Model(len(tokenize), *shape)
    model.load_state_dict(state["average"])
    print(f"UNet of step {state['step']}")
    scheduler = DPMSolverMultistepScheduler(**SCHEDULE, timestep_spacing="trailing", steps_offset=1)
    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=model.text_encoder,
        tokenizer=tokenize,
        unet=model.unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).to(dtype=torch.float16)
    with tempfile.TemporaryDirectory() as folder:  # the tokenizer's files stay as we wrote them
        pipe.save_pretrained(folder, safe_serialization=True)
        for part in ("vae", "text_encoder", "unet", "scheduler"):
            (out / part).mkdir(parents=True, exist_ok=True)
            for file in (Path(folder) / part).iterdir():
                (out / part / file.name).write_bytes(file.read_bytes())
        index = json.loads((Path(folder) / "model_index.json").read_text(encoding="utf-8"))
    # what SD1.5's own folder says, so that older versions read it too: no image encoder, and the text encoder's
    # weights under the names that transformers had before version 5
    del index["image_encoder"]
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    weights = out / "text_encoder" / "model.safetensors"
    named = {"text_model." + k.removeprefix("text_model."): v for k, v in load_file(weights).items()}
    save_file(named, weights, metadata={"format": "pt"})


def prompts(captions: dict[str, list[str]]) -> tuple[list[int], list[str]]:
    """The fixed list: 100 pictures evenly over the list, in turn as "NAME" and as "a NAME"."""
    names = list(captions.values())
    chosen = [round(i * (len(names) - 1) / (PROMPTS - 1)) for i in range(PROMPTS)]
    return chosen, [phrase(("{}", "a {}")[i % 2], names[j][0]) for i, j in enumerate(chosen)]


@torch.no_grad()
def generate(pipe: StableDiffusionPipeline, texts: list[str], guidance: float) -> torch.Tensor:
    """Pictures in 0..1; the seed of a picture is its place in the list."""
    out = []
    for i in range(0, len(texts), 25):
        part = texts[i : i + 25]
        seeds = [torch.Generator().manual_seed(i + j) for j in range(len(part))]
        pictures = pipe(
            part, num_inference_steps=STEPS, guidance_scale=guidance, generator=seeds, output_type="pt"
        ).images
        out.append(pictures.float())
    return torch.cat(out)


def nearest(pictures: torch.Tensor, known: torch.Tensor, size: int = 16) -> torch.Tensor:
    drawn, all_known = (F.adaptive_avg_pool2d(p, size).flatten(1) for p in (pictures, known))
    return torch.cdist(drawn, all_known).argmin(dim=1)


def sheet(pictures: torch.Tensor, texts: list[str], file: Path, columns: int = 8) -> None:
    rows, size, line = -(-len(texts) // columns), pictures.shape[-1], 14
    page = Image.new("RGB", (columns * size, rows * (size + line)), "white")
    draw = ImageDraw.Draw(page)
    for i, (picture, text) in enumerate(zip(pictures, texts, strict=True)):
        x, y = i % columns * size, i // columns * (size + line)
        array = (picture.permute(1, 2, 0).clamp(0, 1).numpy() * 255).round().astype(np.uint8)
        page.paste(Image.fromarray(array), (x, y))
        draw.text((x + size // 2, y + size), text, fill="black", anchor="ma")
    file.parent.mkdir(parents=True, exist_ok=True)
    page.quantize(256).save(file, optimize=True)


def fill(card: Path, name: str, lines: list[str]) -> None:
    """Replaces what stands between <!-- NAME --> and <!-- /NAME -->."""
    text = card.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{card}: no markers <!-- {name} --> ... <!-- /{name} -->")
    text = pattern.sub(lambda m: m[1] + "\n".join(lines) + "\n" + m[2], text)
    card.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the model's folder; written unless --measure-only")
    parser.add_argument("--decoder", type=Path, help="checkpoint of the decoder phase (default: none)")
    parser.add_argument("--measure-only", action="store_true", help="measure the folder that is there")
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument("--card", type=Path, help="model card to write the figures into")
    parser.add_argument("--sheet", type=Path, help="picture to write with 32 samples and their prompts")
    args = parser.parse_args()

    if not args.measure_only:
        export(args.work, args.decoder, args.out)
    pipe = StableDiffusionPipeline.from_pretrained(args.out, safety_checker=None).to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    assert isinstance(pipe.vae, AutoencoderKL)
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file()) / 1e6
    pictures, _ = to_tensors(args.work)
    reconstruction = evaluate(pipe.vae, pictures)
    print(f"{size:.1f} MB; reconstruction {reconstruction:.2f} dB", flush=True)
    captions = load(args.work)[2]
    chosen, texts = prompts(captions)
    made = generate(pipe, texts, args.guidance)
    found = nearest(made, pictures / 2 + 0.5)
    hits = sum(a == b for a, b in zip(found.tolist(), chosen, strict=True))
    print(f"nearest picture is the prompt's own: {hits} of {PROMPTS} (guidance {args.guidance:g})")
    short = list(captions)
    missed = [f"{t} -> {short[f]}" for t, f, c in zip(texts, found.tolist(), chosen, strict=True) if f != c]
    print("missed: " + ", ".join(missed))
    if args.sheet:
        sheet(generate(pipe, SHEET, args.guidance), SHEET, args.sheet)
    if args.card:
        count = {
            name: sum(p.numel() for p in getattr(pipe, name).parameters()) / 1e6
            for name in ("unet", "vae", "text_encoder")
        }
        figures = [
            "| figure | value |",
            "|---|---|",
            f"| size of the folder | {size:.1f} MB |",
            f"| parameters | UNet {count['unet']:.2f} M, autoencoder {count['vae']:.2f} M, "
            f"text encoder {count['text_encoder']:.2f} M |",
            f"| mean reconstruction PSNR over the {len(pictures)} training pictures | {reconstruction:.2f} dB |",
            f"| nearest training picture is the prompt's own, {PROMPTS} prompts, {STEPS} steps, "
            f"guidance {args.guidance:g} | {hits} of {PROMPTS} |",
        ]
        fill(args.card, "figures", figures)
        fill(args.card, "names", [", ".join(name for several in captions.values() for name in several) + "."])
        fill(args.card, "steps", [json_steps(args.work, args.decoder)])


def json_steps(work: Path, decoder: Path | None) -> str:
    """How many steps each phase took, from its checkpoint."""
    files = {"autoencoder": work / "autoencoder-joint.pt", "decoder": decoder, "unet": work / "unet.pt"}
    steps = {name: torch.load(file)["step"] for name, file in files.items() if file}
    return "Steps taken: " + json.dumps(steps).strip("{}").replace('"', "") + "."


if __name__ == "__main__":
    main()
