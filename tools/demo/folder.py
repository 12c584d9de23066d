"""Writes the demo model's training pictures as `sd-lowvram unet distil` and `evaluate` read them.

    python tools/demo/folder.py --work WORK --out FOLDER

FOLDER then has a PNG for each picture, on white, and next to it a text of the same name, a caption a line: each
of its names alone and with an article.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data import load
from PIL import Image
from train_unet import phrase


def write(work: Path, out: Path) -> None:
    pictures, _, captions = load(work)
    out.mkdir(parents=True, exist_ok=True)
    for picture, (short, names) in zip(pictures, captions.items(), strict=True):
        file = out / f"{short}.png"
        Image.fromarray(picture).save(file)
        lines = [text for name in names for text in (name, phrase("a {}", name))]
        file.with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(pictures)} pictures with captions in {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the data step")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    args = parser.parse_args()
    write(args.work, args.out)


if __name__ == "__main__":
    main()
