"""Turns errors into a sentence and an exit code: 2 bad input, 3 a budget, 130 interrupted, 1 an internal error."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import NoReturn

from ..errors import BadInputError, LowVRAMError, host_ran_out, ran_out
from ..progress import capture_events
from ..settings import knobs
from .interrupts import is_interrupted
from .streams import give_up_stdout, note, tell

INTERRUPTED, BUDGET, OURS = 130, 3, 1


@contextlib.contextmanager
def exit_on_error(debug: bool = False) -> Iterator[None]:
    """Exit with the code of an error that the block raises; with ``debug`` show the traceback before."""
    _quiet_libraries(debug)
    try:
        with contextlib.nullcontext() if debug else capture_events(note):
            yield
        sys.stdout.flush()  # a full disk is reported here, and not by Python when it exits
    except KeyboardInterrupt:
        _end(INTERRUPTED, "interrupted", debug)
    except BrokenPipeError:  # whoever read our output has left with what was wanted (head, less)
        give_up_stdout()
        raise SystemExit(0) from None
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None:
            give_up_stdout()
        _end(*code_and_message(error), debug)


def code_and_message(error: Exception) -> tuple[int, str]:
    """The exit code for ``error``, and a sentence."""
    if isinstance(error, LowVRAMError):
        return error.exit_code, name_options(str(error))
    if host_ran_out(error):
        return BUDGET, f"RAM is full: give a smaller --ram or picture ({error})"
    if isinstance(error, OSError):
        what = "the output cannot be written" if error.filename is None else f"{error.filename} cannot be used"
        return BadInputError.exit_code, f"{what}: {error.strerror or error}"
    if ran_out(error):
        return BUDGET, "the GPU ran out of memory: give a smaller --vram, so that the plan leaves more free"
    if unfit := _unfit(error):
        return BadInputError.exit_code, unfit
    what = f"{type(error).__name__}: {error}"
    return OURS, f"{internal_error(what)}; --debug shows where"


def internal_error(what: str) -> str:
    """Sentence on ``what`` went wrong inside this program."""
    return f"internal error of sd-lowvram, please report it ({what})"


def _unfit(error: BaseException | None) -> str:
    """A sentence for a library that misses something in the version of another; empty for any other error."""
    while error is not None:
        named = error.name if isinstance(error, ImportError) else getattr(getattr(error, "obj", None), "__name__", "")
        lacking = "torch" if "requires the PyTorch library" in str(error) else str(named).partition(".")[0]
        frames = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
        packages = [name.partition(".")[0] for name in frames]
        asking = next((name for name in reversed(packages) if name not in (lacking, "importlib")), "")
        if lacking in ("torch", *_LIBRARIES) and asking in _LIBRARIES:
            pair = " cannot run with ".join(f"{name} {metadata.version(name)}" for name in (asking, lacking))
            reason = " ".join(str(error).split())
            return f"{pair} ({reason:.120}): update both, or {_FITS_ALL}"
        error = error.__cause__ or error.__context__
    return ""


_LIBRARIES = ("diffusers", "transformers", "accelerate", "peft")
_FITS_ALL = 'pip install "diffusers==0.31.*" "transformers==4.46.*", which run on torch 2.1 and newer'
"""The pair of ``make test-oldest``."""


def name_options(message: str) -> str:
    """``message`` with the knobs in it as the command line writes them: --vae-tiles for vae_tiles."""
    compound = [name for name in knobs() if "_" in name]
    return re.sub(rf"(?<![\w-])({'|'.join(compound)})\b", lambda match: "--" + match[1].replace("_", "-"), message)


def _end(code: int, message: str, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    if is_interrupted():  # whatever else went wrong came of it
        code, message = INTERRUPTED, "interrupted"
    tell(message)
    raise SystemExit(code)


def _quiet_libraries(debug: bool) -> None:
    """Only our own warnings reach people, one line each; what libraries say about their future does not."""
    if debug:
        return

    warnings.showwarning = lambda message, *_, **__: note(str(message))
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"sd_lowvram(\.|$)")
