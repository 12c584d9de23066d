"""The answer to a generation that cannot be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fastapi import HTTPException

from sd_lowvram.errors import LowVRAMError


class Refused(HTTPException):
    """A generation that cannot be; the page shows the reason, and an API call is answered with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(422, reason)

    def __str__(self) -> str:
        return str(self.detail)


@contextlib.contextmanager
def refuse_errors() -> Iterator[None]:
    """Turn our errors in the block, which the host calls itself, into the host's kind of answer."""
    try:
        yield
    except LowVRAMError as error:
        raise Refused(str(error)) from error
