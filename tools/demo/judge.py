"""Trains the judge of the students' table: which thing, in which colour, at which place a picture shows.

    python tools/demo/judge.py --work WORK

It sees real pictures of training alone, never one that a model drew and none of a combination that is held out, so
that its score on the real held-out pictures, which is written with it, shows how far to trust it. Of a canvas of two
things it sees one half at a time. WORK/judge.pt is a TorchScript of pictures (count, 3, 64, 64) of -1..1 to three
tables of logits, and WORK/judge.json their words and its scores: on real held-out pictures, and on the same through
the teacher's autoencoder, beyond which no UNet can come.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from combinations import HUES, PLACES, SIDE, THINGS, Combination, read
from diffusers import AutoencoderKL
from torch import Tensor, nn

WORDS = ([*THINGS], [*HUES], [*PLACES])


def trunk(channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((channels, 32), (32, 64), (64, 96), (96, 96)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(8, after), nn.SiLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * (SIDE // 16) ** 2, 128), nn.SiLU(), nn.Dropout(0.3))


class Judge(nn.Module):
    """What a thing is and where it stands is judged without its colour: the judge, too, must not learn combinations."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes, self.colours = trunk(2), trunk(3)
        self.heads = nn.ModuleList(nn.Linear(128, len(words)) for words in WORDS)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ink = (1 - pictures) / 2
        cover, shade = ink.amax(dim=1, keepdim=True), ink.mean(dim=1, keepdim=True)
        shape = self.shapes(torch.cat([cover, shade / shade.amax(dim=(2, 3), keepdim=True).clamp_min(0.1)], dim=1))
        colour = self.colours(pictures)
        thing, place = self.heads[0](shape), self.heads[2](shape)
        return thing, self.heads[1](colour), place


def views(pictures: Tensor, parts: Sequence[tuple[Combination, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    """What is judged: each picture of one thing, and of two things the half of each, the other white; what it shall
    show (count, 3), and which picture it is of."""
    seen, shown, of = [], [], []
    for number, (picture, each) in enumerate(zip(pictures, parts, strict=True)):
        for part in each:
            view = picture
            if len(each) > 1:
                x, y = (at * SIDE // 4 for at in PLACES[part.place])
                view = torch.ones_like(picture)
                x_end, y_end = x + SIDE // 2, y + SIDE // 2
                rows, columns = (slice(y, y_end), slice(None)) if x == SIDE // 4 else (slice(None), slice(x, x_end))
                view[:, rows, columns] = picture[:, rows, columns]
            seen.append(view)
            shown.append([words.index(word) for words, word in zip(WORDS, part, strict=True)])
            of.append(number)
    return torch.stack(seen), torch.tensor(shown), torch.tensor(of)


@torch.no_grad()
def verdict(judge: nn.Module, pictures: Tensor, parts: Sequence[tuple[Combination, ...]]) -> Tensor:
    """(pictures, 3): whether the thing, the colour and the place are right, of all that the picture shall show."""
    seen, shown, of = views(pictures, parts)
    told = [torch.cat([judge(some)[head] for some in seen.split(64)]).argmax(dim=1) for head in range(3)]
    right = torch.stack(told, dim=1) == shown
    return torch.stack([right[of == number].all(dim=0) for number in range(len(pictures))])


def score(right: Tensor) -> dict[str, float]:
    """Shares of :func:`verdict`: "all" are the pictures with nothing wrong."""
    found = dict(zip(("thing", "colour", "place"), right.float().mean(dim=0).tolist(), strict=True))
    return {"all": right.all(dim=1).float().mean().item(), **found}


def blurred(pictures: Tensor) -> Tensor:
    """By lot up to two pixels away, and as soft and grainy as an autoencoder may leave them: none of it is judged."""
    side = pictures.shape[-1]
    x, y = torch.randint(5, (2,)).tolist()
    pictures = F.pad(pictures, (2, 2, 2, 2), value=1.0)[..., y : y + side, x : x + side]
    deviation = 0.1 + 1.7 * torch.rand(())
    taps = torch.exp(-0.5 * (torch.arange(-4.0, 5.0) / deviation).square())
    taps = (taps / taps.sum()).expand(3, 1, 1, 9)
    soft = F.conv2d(F.pad(pictures, (4, 4, 0, 0), value=1.0), taps, groups=3)
    soft = F.conv2d(F.pad(soft, (0, 0, 4, 4), value=1.0), taps.transpose(2, 3), groups=3)
    return soft + 0.06 * torch.rand(()) * torch.randn_like(soft)


def tensor(arrays: object) -> Tensor:
    return torch.as_tensor(arrays).permute(0, 3, 1, 2).float() / 127.5 - 1


def train(work: Path, steps: int) -> None:
    torch.manual_seed(0)
    arrays, parts = read(work, held=False)
    seen, shown, _ = views(tensor(arrays), parts)
    judge = Judge()
    optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-3, weight_decay=0.05)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(1, steps + 1):
        chosen = torch.randint(len(seen), (64,))
        told = judge(blurred(seen[chosen]))
        loss = torch.stack([F.cross_entropy(each, shown[chosen, head]) for head, each in enumerate(told)]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plan.step()
        if step % 100 == 0 or step == steps:
            print(f"judge, step {step}: loss {loss.item():.4f}", flush=True)
    judge.eval()
    arrays, parts = read(work, held=True)
    real = tensor(arrays)
    vae = AutoencoderKL.from_pretrained(work / "teacher" / "vae").float()
    with torch.no_grad():
        again = torch.cat([vae.decode(vae.encode(some).latent_dist.mean).sample for some in real.split(16)])
    scores = {name: score(verdict(judge, each, parts)) for name, each in (("real", real), ("autoencoder", again))}
    print(json.dumps(scores))
    torch.jit.trace(judge, real[:2]).save(work / "judge.pt")
    (work / "judge.json").write_text(json.dumps({"words": WORDS, "scores": scores}, indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of combinations.py and of the teacher")
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    train(args.work, args.steps)


if __name__ == "__main__":
    main()
