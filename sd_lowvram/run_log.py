"""What happens in a run and is no error: a leaner plan, strips computed anew, a model recorded anew.

It goes to the log, each event once. What the caller can change (gradients left on, a package that is missing) goes
through `warnings`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PACKAGE = __name__.rpartition(".")[0]
_NAME = "sd-lowvram: "


def happened(module: str, sentence: str) -> None:
    """Log ``sentence`` as a warning of the logger ``module``.

    The name stands before it, as many programs show the bare message, and Python does where no logging is set up.
    """
    logging.getLogger(module).warning(_NAME + sentence)


@contextmanager
def heard(hear: Callable[[str], None]) -> Iterator[None]:
    """Within the block ``hear(sentence)`` is called for what happens, in place of the log.

    What ``hear`` raises is raised in the run.
    """
    logger = logging.getLogger(_PACKAGE)
    handlers, propagate = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [_Hearing(hear)], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate


class _Hearing(logging.Handler):
    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__()
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(record.getMessage().removeprefix(_NAME))
