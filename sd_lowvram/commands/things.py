"""``sd-lowvram generate --list-things``: what the demo model can draw."""

from __future__ import annotations

import json
import shutil
import textwrap

_TIE = "\0"
"""Placeholder for a space at which no line may end."""


def show_things(as_json: bool) -> None:
    """Print the things that the demo model knows, group by group; other words mean nothing to it."""
    from ..demo.things import groups

    things = groups()
    if as_json:
        print(json.dumps(things, indent=2))
        return
    width = min(100, shutil.get_terminal_size().columns)
    for group, members in things.items():
        print(f"{group} ({len(members)})")
        whole = " ".join(" = ".join(names).replace(" ", _TIE) + "," for names in members).rstrip(",")
        filled = textwrap.fill(whole, max(20, width), initial_indent="  ", subsequent_indent="  ")
        print(filled.replace(_TIE, " "))
    print(f'{sum(map(len, things.values()))} things; one a picture: sd-lowvram generate "a red apple"')
