"""What can go wrong, each with the exit code that the command line gives it.

Every message says what was wrong, with the value that was given, and what would work.
"""

from __future__ import annotations


class LowVRAMError(Exception):
    """Base of every error that sd-lowvram raises on purpose."""

    exit_code = 1


class BadInputError(LowVRAMError, ValueError):
    """A value, a file or a folder that cannot be used; the message names it and the remedy."""

    exit_code = 2


class SettingsError(BadInputError):
    """A knob that does not exist, a value out of its range, or knobs that exclude each other."""


class CheckpointError(BadInputError):
    """A model that is missing, truncated, of an unknown kind, or a refused pickle."""


class UnsupportedModelError(BadInputError):
    """A model, or a part of one, that no plan can be made for; a host may tell it in its own words.

    Attributes:
        owner: the class of what was given.
        part: the name in it of what cannot be planned ("transformer"); empty where it is the target itself.
        kind: the class of that part.
        why: what the owner does with it: "denoises with a transformer".
        works: the names of the owner's parts that can be given by themselves ("vae").
    """

    def __init__(
        self,
        message: str,
        *,
        owner: str = "",
        part: str = "",
        kind: str = "",
        why: str = "",
        works: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.owner = owner
        self.part = part
        self.kind = kind
        self.why = why
        self.works = works


class OutputError(BadInputError):
    """A place that cannot be written to, or a full disk."""


class BudgetError(LowVRAMError):
    """A budget that cannot hold the run.

    ``needed_bytes`` is the smallest budget that would work (overhead counted) and ``stage`` the part of the run
    that needs it. ``limit`` names what is too small: "vram", "ram", "largest_mib", or the "ring" through which weights
    are streamed. ``by_size`` tells whether a smaller picture may need less.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, needed_bytes: int = 0, stage: str = "", limit: str = "vram", by_size: bool = True
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.stage = stage
        self.limit = limit
        self.by_size = by_size


class NoSiteError(LowVRAMError):
    """A hook found nothing in the model to act on, or cannot act on the device."""

    exit_code = 2


class ConflictError(LowVRAMError):
    """Two hooks, or a hook and somebody else's patch, want the same attribute for themselves."""
