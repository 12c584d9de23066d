"""Pictures in rows, one row for each that drew them, one column for each prompt."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_LABELS, _LINE = 112, 16


def picture_rows_png(rows: Mapping[str, Tensor], heads: Sequence[str]) -> bytes:
    """The bytes of a PNG file.

    Args:
        rows: name -> pictures (count, 3, H, W) of -1..1.
        heads: what stands above each column.
    """
    from PIL import Image, ImageDraw

    first = next(iter(rows.values()))
    height, width = first.shape[-2:]
    page = Image.new("RGB", (_LABELS + len(first) * width, _LINE + len(rows) * height), "white")
    draw = ImageDraw.Draw(page)
    for column, head in enumerate(heads):
        draw.text((_LABELS + column * width + width // 2, 2), head, fill="black", anchor="ma")
    for number, (name, pictures) in enumerate(rows.items()):
        top = _LINE + number * height
        draw.text((4, top + height // 2), name, fill="black", anchor="lm")
        values = ((pictures.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
        for column, picture in enumerate(values):
            page.paste(Image.fromarray(picture), (_LABELS + column * width, top))
    file = io.BytesIO()
    page.quantize(256).save(file, "PNG", optimize=True)
    return file.getvalue()
