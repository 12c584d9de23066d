"""Pictures in rows, one row for each that drew them, one column for each prompt."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence

from PIL import Image, ImageDraw
from torch import Tensor

_LABELS, _LINE, _EDGE = 72, 13, 4
_TIMES = 2
"""So many pixels of the sheet along a side for one of a picture."""


def picture_rows_png(rows: Mapping[str, Tensor], heads: Sequence[str]) -> bytes:
    """The bytes of a PNG file.

    Args:
        rows: name -> pictures (count, 3, H, W) of -1..1.
        heads: what stands above each column, in as many lines as it takes.
    """
    first = next(iter(rows.values()))
    height, width = (_TIMES * side for side in first.shape[-2:])
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1))).textlength
    wrapped = [_lines(head, width - 2 * _EDGE, measure) for head in heads]
    above = max(map(len, wrapped)) * _LINE + 2 * _EDGE
    page = Image.new("RGB", (_LABELS + len(first) * width, above + len(rows) * height), "white")
    draw = ImageDraw.Draw(page)
    for column, lines in enumerate(wrapped):
        draw.text((_LABELS + column * width + _EDGE, _EDGE), "\n".join(lines), fill="black", spacing=2)
    for number, (name, pictures) in enumerate(rows.items()):
        top = above + number * height
        draw.text((_EDGE, top + height // 2), name, fill="black", anchor="lm")
        values = ((pictures.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
        for column, picture in enumerate(values):
            drawn = Image.fromarray(picture).resize((width, height), Image.Resampling.NEAREST)
            page.paste(drawn, (_LABELS + column * width, top))
    file = io.BytesIO()
    page.quantize(256).save(file, "PNG", optimize=True)
    return file.getvalue()


def _lines(text: str, width: int, measure: Callable[[str], float]) -> list[str]:
    """``text`` in lines of at most ``width`` pixels, broken between words."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if measure(longer) > width and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
