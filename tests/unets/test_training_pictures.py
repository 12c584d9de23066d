"""Pictures to train on are read as people see them, captions as they wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from sd_lowvram.errors import BadInputError
from sd_lowvram.unets.training_pictures import captioned_pictures, read_pictures


def one(folder: Path, name: str, picture: Image.Image, **more: object) -> torch.Tensor:
    picture.save(folder / name, **more)
    (folder / name).with_suffix(".txt").write_text("a box", encoding="utf-8")
    return next(read_pictures(captioned_pictures(folder), 32))[0]


def test_a_photograph_that_lies_on_its_side_is_put_upright(tmp_path: Path) -> None:
    upright = Image.new("RGB", (32, 32), "white")
    upright.paste("black", (0, 0, 32, 16))
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by a quarter, as phones write it
    found = one(tmp_path, "a.png", upright.transpose(Image.Transpose.ROTATE_90), exif=turned)
    assert found[:, :12].max() < -0.9 and found[:, 20:].min() > 0.9


def test_of_a_wide_picture_the_middle_is_taken(tmp_path: Path) -> None:
    wide = Image.new("RGB", (96, 32), "black")
    wide.paste("white", (32, 0, 64, 32))
    assert one(tmp_path, "a.png", wide).min() > 0.9


def test_what_is_clear_is_white(tmp_path: Path) -> None:
    assert one(tmp_path, "a.png", Image.new("RGBA", (8, 8), (0, 0, 0, 0))).min() == 1


def test_a_mark_at_the_beginning_of_captions_is_none_of_them(tmp_path: Path) -> None:
    one(tmp_path, "a.png", Image.new("RGB", (8, 8)))
    (tmp_path / "a.txt").write_text("a cat\r\n\r\nit\r\n", encoding="utf-8-sig")
    assert captioned_pictures(tmp_path)[0].captions == ("a cat", "it")


def test_damaged_pictures_are_told(tmp_path: Path) -> None:
    one(tmp_path, "a.png", Image.effect_noise((64, 64), 50))
    whole = (tmp_path / "a.png").read_bytes()
    for data in (b"", whole[: len(whole) // 2], whole.replace(b"IDAT", b"ID\0T")):
        (tmp_path / "a.png").write_bytes(data)
        with pytest.raises(BadInputError, match=r"a\.png"):
            list(read_pictures(captioned_pictures(tmp_path), 32))
