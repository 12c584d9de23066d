"""Data step of the students' table: pictures of a thing in a colour at a place, some of which training never sees.

    python tools/demo/combinations.py --work WORK            # needs the archives of data.py, fetched the same way

Derived of the pictures of the demo model: 24 things, their hue turned to one of 6, mirrored or not, in one of 4 halves
of a 64x64 canvas, alone or two on one canvas. :func:`held_out` says which combinations training never sees, whole or
as one of two. WORK then holds what the other scripts here read, of training alone, and WORK/held.npz and held.json with
the pictures and combinations of the test. The same archives give the same bits.
"""

from __future__ import annotations

import argparse
import colorsys
import hashlib
import json
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from data import NAMES, PICTURES, fetch, read_list, read_pictures
from PIL import Image

SIDE = 64
THINGS = {
    "apple": "apple",
    "car": "car",
    "tree": "evergreen_tree",
    "house": "house",
    "key": "key",
    "guitar": "guitar",
    "umbrella": "umbrella",
    "crown": "crown",
    "fish": "tropical_fish",
    "butterfly": "butterfly",
    "rabbit": "rabbit",
    "mushroom": "mushroom",
    "cactus": "cactus",
    "bell": "bell",
    "anchor": "anchor",
    "rocket": "rocket",
    "sailboat": "sailboat",
    "star": "star",
    "hammer": "hammer",
    "teapot": "teapot",
    "trophy": "trophy",
    "shoe": "athletic_shoe",
    "bicycle": "bike",
    "airplane": "airplane",
}
"""What a caption says -> the picture's short name."""
HUES = {"red": 0, "yellow": 50, "green": 125, "cyan": 180, "blue": 225, "purple": 290}
PLACES = {"on the left": (0, 1), "on the right": (2, 1), "at the top": (1, 0), "at the bottom": (1, 2)}
"""Where in quarters of the side the thing's half begins, from the left and from the top, halved."""
OPPOSITE = (("on the left", "on the right"), ("at the top", "at the bottom"))


class Combination(NamedTuple):
    thing: str
    colour: str
    place: str

    def __str__(self) -> str:
        return f"{self.colour} {self.thing} {self.place}"


def _lot(*words: str) -> int:
    return hashlib.sha256(" ".join(words).encode()).digest()[0]


def unseen_pair(one: Combination) -> bool:
    """Whether training never sees the thing in this colour, wherever it is."""
    return _lot(one.thing, one.colour) % 10 == 0


def held_out(one: Combination) -> bool:
    """Whether training never sees the combination: an :func:`unseen_pair`, or one whose own lot falls so."""
    return unseen_pair(one) or _lot(*one) % 10 == 0


def every() -> list[Combination]:
    return [Combination(*each) for each in product(THINGS, HUES, PLACES)]


def coloured(picture: Image.Image, colour: str) -> Image.Image:
    """The thing in shades of one hue: its own lightness, evenly over what it has of it."""
    red, green, blue, alpha = (np.asarray(part, dtype=np.float64) / 255 for part in picture.split())
    light = 0.3 * red + 0.6 * green + 0.1 * blue
    low, high = np.percentile(light[alpha > 0.5], (2, 98))
    light = ((light - low) / max(high - low, 0.1)).clip(0, 1)[..., None]
    pure = np.array(colorsys.hsv_to_rgb(HUES[colour] / 360, 0.9, 0.95))
    shades = np.where(light < 0.6, pure * (0.4 + light), pure + (1 - pure) * (light - 0.6) * 1.5)
    return Image.fromarray((np.dstack([shades.clip(0, 1), alpha]) * 255).round().astype(np.uint8), "RGBA")


def drawn(parts: tuple[Combination, ...], pictures: dict[str, Image.Image], random: np.random.Generator) -> np.ndarray:
    """The canvas, each thing within its half; mirroring, size and shift are drawn by lot."""
    canvas = Image.new("RGBA", (SIDE, SIDE), "white")
    for part in parts:
        thing = coloured(pictures[part.thing], part.colour)
        thing = thing.crop(thing.getchannel("A").getbbox())
        if random.integers(2):
            thing = thing.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        side = int(random.integers(28, 32))
        thing.thumbnail((side, side), Image.Resampling.LANCZOS)
        free = [SIDE // 2 - length for length in thing.size]
        shift = [int(random.integers(max(0, room // 2 - 1), min(room, room // 2 + 1) + 1)) for room in free]
        start = [at * SIDE // 4 + by for at, by in zip(PLACES[part.place], shift, strict=True)]
        canvas.alpha_composite(thing, (start[0], start[1]))
    return np.asarray(canvas.convert("RGB"))


def chosen(held: bool, alone: int, together: int, random: np.random.Generator) -> list[tuple[Combination, ...]]:
    """Each combination ``alone`` times, then so many canvases of two in opposite halves, all of them (not) held out."""
    some = [one for one in every() if held_out(one) == held]
    found: list[tuple[Combination, ...]] = [(one,) for one in some for _ in range(alone)]
    for turn in range(together):
        halves = [[one for one in some if one.place == place] for place in OPPOSITE[turn % 2]]
        found.append(tuple(half[random.integers(len(half))] for half in halves))
    return found


def caption(parts: tuple[Combination, ...]) -> str:
    return " and a ".join(map(str, parts))


def write(work: Path, pictures: dict[str, Image.Image], alone: int, together: int, held: int) -> None:
    """Write the pictures of training as data.py does, and next to them those of the test."""
    random = np.random.default_rng(0)
    kinds = {"": chosen(False, alone, together, random), "held": chosen(True, 1, held, random)}
    for name, all_parts in kinds.items():
        arrays = np.stack([drawn(parts, pictures, random) for parts in all_parts])
        if name:
            np.savez_compressed(work / f"{name}.npz", pictures=arrays)
            (work / f"{name}.json").write_text(json.dumps(all_parts), encoding="utf-8")
        else:
            cover = np.full(arrays.shape[:3], 255, np.uint8)
            np.savez_compressed(work / "pictures.npz", pictures=arrays, alpha=cover)
            captions = {f"{number:05}": [caption(parts)] for number, parts in enumerate(all_parts)}
            (work / "captions.json").write_text(json.dumps(captions, indent=0), encoding="utf-8")
            (work / "combinations.json").write_text(json.dumps(all_parts), encoding="utf-8")
        print(f"{len(arrays)} pictures {name or 'to train on'}, of {len({p for ps in all_parts for p in ps})} kinds")


def read(work: Path, held: bool) -> tuple[np.ndarray, list[tuple[Combination, ...]]]:
    """Pictures (count, SIDE, SIDE, 3) of training or of the test, and what they show."""
    names = ("held.npz", "held.json") if held else ("pictures.npz", "combinations.json")
    parts = json.loads((work / names[1]).read_text(encoding="utf-8"))
    return np.load(work / names[0])["pictures"], [tuple(Combination(*one) for one in each) for each in parts]


def things(archives: tuple[Path, Path]) -> dict[str, Image.Image]:
    listed = read_list()
    return dict(zip(THINGS, read_pictures(*archives, {short: listed[short] for short in THINGS.values()}), strict=True))


def make(work: Path, alone: int, together: int, held: int) -> None:
    """Fetch what is not at hand, and :func:`write`."""
    work.mkdir(parents=True, exist_ok=True)
    write(work, things((fetch(PICTURES, work / "npm"), fetch(NAMES, work / "npm"))), alone, together, held)


def add_counts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alone", type=int, default=4, help="pictures of each combination to train on")
    parser.add_argument("--together", type=int, default=2000, help="pictures of two things to train on")
    parser.add_argument("--held", type=int, default=100, help="pictures of two things in the test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that is not committed")
    add_counts(parser)
    args = parser.parse_args()
    make(args.work, args.alone, args.together, args.held)


if __name__ == "__main__":
    main()
