"""A schedule of UNets as it is written, "small:10,full:15": who has how many steps, one after the other."""

from __future__ import annotations

import re
from collections.abc import Collection

from ..errors import BadInputError

OWN = "full"
"""The name of the model's own UNet."""
NAME = re.compile(r"[A-Za-z0-9_.-]+")

Turn = tuple[str, int]
"""A UNet's name and its steps."""


def parse_turns(text: str, served: Collection[str], what: str, remedy: str = "") -> tuple[Turn, ...]:
    """The turns in ``text``.

    Args:
        served: names of further UNets, in addition to "full".
        what: name of the text in its surface, such as "--schedule".
        remedy: what to do about an unknown name, with "{name}" in it.

    Raises:
        BadInputError: wrong form, an unknown or unused name, or fewer than one step.
    """
    turns = tuple(_turn(part.strip(), served, what, remedy) for part in text.split(","))
    unused = [name for name in served if name not in {name for name, _ in turns}]
    if unused:
        raise BadInputError(f"{unused[0]} is not in {what} {text!r}: name it there, or leave it out")
    return turns


def _turn(turn: str, allowed: Collection[str], what: str, remedy: str) -> Turn:
    name, _, count = turn.rpartition(":")
    if not NAME.fullmatch(name) or not re.fullmatch(r"-?\d{1,9}", count, re.ASCII):
        raise BadInputError(f"{what} has {turn!r} where NAME:STEPS is needed: small:10,full:15")
    if int(count) < 1:
        raise BadInputError(f"{what} {turn!r}: a UNet takes at least 1 step; leave it out, or give it some")
    if name != OWN and name not in allowed:
        served = ", ".join((OWN, *allowed))
        raise BadInputError(f"{what} names {name!r}, which is unknown: known are {served}{remedy.format(name=name)}")
    return name, int(count)
