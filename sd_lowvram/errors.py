"""Errors, each with its exit code on the command line.

Every message names the error, the value that was given, and what would work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

_LONGEST = 1500
"""Characters of a message: values that it repeats come from strangers, too."""

_CODE = (
    (re.compile(r"\b(?:sd_lowvram\.)?Settings\(([^()]*)\)"), r"\1"),
    (re.compile(r"(?<![\w/.\\-])([a-z]\w*)=(?:(['\"])([\w.-]+)\2|(?=\S))"), r"\1 \3"),
    (re.compile(r"\bTrue\b"), "on"),
    (re.compile(r"\bFalse\b"), "off"),
)
"""Patterns of settings in Python, and their form in a control."""


def _plain_words(text: str) -> str:
    """``text`` with settings as controls show them: their labels, and values without Python."""
    for code, words in _CODE:
        text = code.sub(words, text)
    return re.sub(r"(?<![\w-])[a-z]+(?:_[a-z]+)+\b", _label_of, text)


def _label_of(name: re.Match[str]) -> str:
    """The label of a setting in quotes; any other name as it is."""
    label = LowVRAMError.labels.get(name[0])
    return f'"{label}"' if label else name[0]


class LowVRAMError(Exception):
    """Base of every error that sd-lowvram raises on purpose.

    Args:
        plainly: the sentence for people who see no code, see :func:`speak_plainly`; left out: the message, with
            settings as controls show them.
    """

    exit_code = 1
    spoken_plainly: ClassVar[bool] = False
    labels: ClassVar[Mapping[str, str]] = {}

    def __init__(self, message: str = "", *, plainly: str = "") -> None:
        super().__init__(message)
        self.plainly = plainly

    def __str__(self) -> str:
        text = super().__str__()
        text = (self.plainly or _plain_words(text)) if self.spoken_plainly else text
        half = _LONGEST // 2
        return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"


def speak_plainly(plain: bool = True, labels: Mapping[str, str] | None = None) -> None:
    """Leave Python out of the sentences of all errors from now on, for programs whose users draw pictures.

    Args:
        plain: False to undo this.
        labels: labels of settings by name, as the program's controls show them.
    """
    LowVRAMError.spoken_plainly = plain
    LowVRAMError.labels = labels or {}


class BadInputError(LowVRAMError, ValueError):
    """A value, a file or a folder that cannot be used; the message names it and the remedy."""

    exit_code = 2


class SettingsError(BadInputError):
    """A knob that does not exist, a value out of its range, or knobs that exclude each other."""


class CheckpointError(BadInputError):
    """A model that is missing, truncated, of an unknown kind, or a refused pickle."""


_SAYS_LITTLE = ("is a model of another kind", "has a part")


class UnsupportedModelError(BadInputError):
    """A model, or a part of one, that cannot be planned; hosts may word the error in their own way.

    Attributes:
        owner: class of the target.
        part: name of the part that cannot be planned ("transformer"); empty if it is the target itself.
        kind: class of that part.
        why: what the owner does with the part: "denoises with a transformer".
        works: names of parts that can be planned by themselves ("vae").
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
        does = why if why and why not in _SAYS_LITTLE else "is of another kind"
        super().__init__(message, plainly=f"this model {does}, which sd-lowvram does not plan: use it without")
        self.owner = owner
        self.part = part
        self.kind = kind
        self.why = why
        self.works = works


class OutputError(BadInputError):
    """A place that cannot be written to, or a full disk."""


class BudgetError(LowVRAMError):
    """A budget that cannot hold the run.

    Attributes:
        needed_bytes: the smallest budget that works, overhead included.
        stage: the part of the run that needs it.
        limit: the limit that is too small: "vram", "ram", "largest_mib", or the "ring" through which weights are
            streamed.
        by_size: True if a smaller picture may need less.
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


class PlanningError(LowVRAMError):
    """An error of a model while it is planned: the message names the part and the picture, the cause is that error."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            plainly="this model cannot be planned as it is: take off the changes of other extensions, or load it again",
        )


class NotFiniteError(LowVRAMError):
    """NaN or infinity in a result, which would become a black picture."""


class NoSiteError(LowVRAMError):
    """A hook found nothing in the model to act on, or cannot act on the device."""

    exit_code = 2


class ConflictError(LowVRAMError):
    """Two hooks, or a hook and a third-party patch, need the same attribute exclusively."""


_OF_A_DEVICE = ("out of memory", "ALLOC_FAILED")
_OF_THE_HOST = ("DefaultCPUAllocator", "bad_alloc", "Cannot allocate memory")
"""Messages of torch and its libraries for a failed allocation, for which they have no common exception."""


def ran_out(error: BaseException) -> bool:
    """True if ``error`` reports that the device or the host is out of memory."""
    of_torch = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return of_torch or host_ran_out(error) or (isinstance(error, RuntimeError) and _says(error, _OF_A_DEVICE))


def host_ran_out(error: BaseException) -> bool:
    """True if ``error`` reports that the host is out of memory; on a CPU that is the device too."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _says(error, _OF_THE_HOST))


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    message = str(error)
    return any(each in message for each in words)
