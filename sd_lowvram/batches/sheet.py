"""The contact sheet: one HTML file with small copies of all pictures inside, which names nothing of the machine."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from ..files import write_whole
from .journal import Journal

NAME = "index.html"
_FILES = ("model", "init_image", "mask")
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2rem; background: #fff; color: #222 }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(256px, 1fr)); gap: 1.5rem }
figure { margin: 0 } img { max-width: 100%; background: #eee } figcaption { overflow-wrap: anywhere }
small { color: #666; display: block } .failed { border-left: 4px solid #b00; padding-left: .6rem }
"""


def write_sheet(folder: Path, title: str, journal: Journal) -> Path:
    """Write the contact sheet of a batch into its folder, whole or not at all."""
    jobs = journal.summary()
    done = sum(job["state"] == "done" for job in jobs)
    body = "\n".join(figure for job in jobs for figure in _figures(job, journal))
    html = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n"
        f"<h1>{escape(title)}</h1>\n<p>{done} of {len(jobs)} jobs done</p>\n<main>\n{body}\n</main>\n</html>\n"
    )
    write_whole(html.encode("utf-8", "replace"), folder / NAME)
    return folder / NAME


def _figures(job: dict[str, Any], journal: Journal) -> list[str]:
    if not job["pictures"]:
        # Not why it failed: such a sentence may name the machine's folders.
        caption = f"{escape(job['options']['prompt'])}<small>line {job['line']}: {job['state']}</small>"
        return [f'<figure class="{job["state"]}"><figcaption>{caption}</figcaption></figure>']
    return [_figure(job, picture, number, journal) for number, picture in enumerate(job["pictures"])]


def _figure(job: dict[str, Any], picture: dict[str, Any], number: int, journal: Journal) -> str:
    prompt = job["options"]["prompt"]
    data = base64.b64encode(journal.thumbnail(picture["file"])).decode()
    shown = {name: value for name, value in job["options"].items() if name not in ("prompt", "output", "seed")}
    options = [f"{name.replace('_', ' ')} {_plain(name, value)}" for name, value in shown.items()]
    words = ", ".join([f"seed {job['seed'] + number}", *options])
    return (
        f'<figure><a href="{quote(picture["file"])}"><img loading="lazy" alt="{escape(prompt)}" '
        f'src="data:image/jpeg;base64,{data}"></a><figcaption>{escape(prompt)}'
        f"<small>{escape(picture['file'])}, {escape(words)}</small></figcaption></figure>"
    )


def _plain(name: str, value: Any) -> str:
    return PurePath(value).name if name in _FILES else str(value)
