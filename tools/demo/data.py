"""Data step of the demo model: fetches the pictures and their names, and writes what training reads.

    python tools/demo/data.py --work WORK            # fetches both npm packages with `npm pack`
    python tools/demo/data.py --work WORK --pictures A.tgz --names B.tgz    # or takes archives at hand

WORK/pictures.npz then holds the 128x128 pictures, composited on white, and WORK/captions.json their
captions (the first is the picture's own name). --collage FILE also writes the test collage.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent
PICTURES = "@lobehub/fluent-emoji-3d@1.1.0"  # MIT, (c) Microsoft Corporation and LobeHub
NAMES = "emoji-datasource@16.0.0"  # MIT, (c) Cal Henderson
SIZE = 128


def fetch(package: str, folder: Path) -> Path:
    """The package's archive, fetched with npm unless it is there already."""
    file = folder / (package.lstrip("@").replace("/", "-").replace("@", "-") + ".tgz")
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True)
    return file


def read_list(file: Path = HERE.parents[1] / "sd_lowvram" / "demo" / "things.txt") -> dict[str, list[str]]:
    """short name -> captions, in the order of the list."""
    chosen = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        name, colon, captions = line.partition(":")
        if colon and not line.startswith("#"):
            chosen[name.strip()] = [caption.strip() for caption in captions.split(",")]
    return chosen


def content(tar: tarfile.TarFile, name: str) -> bytes:
    """What the archive's file ``name`` holds.

    Raises:
        SystemExit: it is a folder or a link.
    """
    file = tar.extractfile(name)
    if file is None:
        raise SystemExit(f"{name} is no file in the archive {tar.name!r}")
    return file.read()


def read_pictures(pictures: Path, names: Path, chosen: dict[str, list[str]]) -> list[Image.Image]:
    """The chosen pictures, 256x256 with an alpha channel."""
    with tarfile.open(names) as tar:
        table = json.loads(content(tar, "package/emoji.json"))
    entries = {short: entry for entry in table for short in entry["short_names"]}
    found = []
    with tarfile.open(pictures) as tar:
        members = {Path(name).stem: name for name in tar.getnames() if name.endswith(".webp")}
        for short in chosen:
            if short not in entries:
                raise SystemExit(f"things.txt: no such short name: {short}")
            codes = [entries[short]["unified"], entries[short]["non_qualified"] or ""]
            code = next((c.lower() for c in codes if c.lower() in members), None)
            if code is None:
                raise SystemExit(f"no picture for {short} ({codes[0]}) in {pictures}")
            picture = Image.open(io.BytesIO(content(tar, members[code])))
            found.append(picture.convert("RGBA"))
    return found


def on_white(picture: Image.Image, size: int = SIZE) -> Image.Image:
    canvas = Image.new("RGBA", picture.size, "white")
    canvas.alpha_composite(picture)
    return canvas.convert("RGB").resize((size, size), Image.Resampling.LANCZOS)


def coverage(picture: Image.Image, size: int = SIZE) -> Image.Image:
    return picture.getchannel("A").resize((size, size), Image.Resampling.LANCZOS)


def collage(pictures: list[Image.Image], width: int = 1000, height: int = 1400, cell: int = 200) -> Image.Image:
    """Real pictures on varied grounds, for tests of the autoencoder: gradients, stripes and checks."""
    random = np.random.default_rng(0)
    page = Image.new("RGB", (width, height))
    order = random.permutation(len(pictures))
    y, x = np.mgrid[0:cell, 0:cell] / cell
    for i in range((width // cell) * (height // cell)):
        one, two = random.integers(0, 256, (2, 3))
        angle, period = random.uniform(0, np.pi), random.uniform(0.1, 0.4)
        ramp = x * np.cos(angle) + y * np.sin(angle)
        mix = [(ramp - ramp.min()) / np.ptp(ramp), ramp / period % 1 > 0.5, (x // period + y // period) % 2][i % 3]
        ground = (one + (two - one) * mix[..., None].astype(float)).astype(np.uint8)
        size = int(random.integers(cell * 3 // 4, cell + 1))
        picture = pictures[order[i]].resize((size, size), Image.Resampling.LANCZOS)
        tile = Image.fromarray(ground)
        tile.paste(picture, tuple(random.integers(0, cell - size + 1, 2)), picture)
        page.paste(tile, (i % (width // cell) * cell, i // (width // cell) * cell))
    return page.point(lambda value: value // 2 * 2)  # seven bits a channel keep the file small


def load(work: Path) -> tuple[np.ndarray, np.ndarray, dict[str, list[str]]]:
    """What main() wrote, in one order: pictures (count, SIZE, SIZE, 3) on white and their coverage
    (count, SIZE, SIZE), both uint8, and short name -> captions."""
    arrays = np.load(work / "pictures.npz")
    captions = json.loads((work / "captions.json").read_text(encoding="utf-8"))
    return arrays["pictures"], arrays["alpha"], captions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that is not committed")
    parser.add_argument("--pictures", type=Path, help=f"archive of {PICTURES} (default: npm pack)")
    parser.add_argument("--names", type=Path, help=f"archive of {NAMES} (default: npm pack)")
    parser.add_argument("--collage", type=Path, help="write the test collage (1000x1400, PNG) here")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    chosen = read_list()
    pictures = read_pictures(
        args.pictures or fetch(PICTURES, args.work / "npm"), args.names or fetch(NAMES, args.work / "npm"), chosen
    )
    if args.collage:
        collage(pictures).save(args.collage, optimize=True)
    array = np.stack([np.asarray(on_white(picture)) for picture in pictures])
    alpha = np.stack([np.asarray(coverage(picture)) for picture in pictures])
    np.savez_compressed(args.work / "pictures.npz", pictures=array, alpha=alpha)
    (args.work / "captions.json").write_text(json.dumps(chosen, indent=0), encoding="utf-8")
    print(f"{len(array)} pictures of {SIZE}x{SIZE}, {sum(map(len, chosen.values()))} captions, in {args.work}")


if __name__ == "__main__":
    main()
