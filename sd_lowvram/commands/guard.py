"""Turns errors into a sentence and an exit code: 2 bad input, 3 a budget, 130 interrupted, 1 a fault of ours."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from ..errors import LowVRAMError

INTERRUPTED, BUDGET, OURS = 130, 3, 1


@contextlib.contextmanager
def guarded(debug: bool = False) -> Iterator[None]:
    """Within the block errors end the program with their exit code; with ``debug`` the traceback is shown before."""
    _quiet_libraries(debug)
    try:
        yield
    except KeyboardInterrupt:
        _end(INTERRUPTED, "interrupted", debug)
    except LowVRAMError as error:
        _end(error.exit_code, str(error), debug)
    except BrokenPipeError:
        # Whoever read our output has left (head, less): no fault, and nothing more to tell. Python would flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(OURS) from None
    except MemoryError as error:
        _end(BUDGET, f"host memory is full: give a smaller --ram or picture ({error})", debug)
    except Exception as error:
        if _is_out_of_memory(error):
            _end(
                BUDGET, "the device ran out of memory: give a smaller --vram, so that the plan leaves more free", debug
            )
        what = f"{type(error).__name__}: {error}"
        _end(OURS, f"a fault of sd-lowvram, please report it ({what}); --debug shows where", debug)


def _is_out_of_memory(error: Exception) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.cuda.OutOfMemoryError)


def _end(code: int, message: str, debug: bool) -> NoReturn:
    if debug:
        import traceback

        traceback.print_exc()
    print(f"sd-lowvram: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def _quiet_libraries(debug: bool) -> None:
    """Only our own warnings reach people, one line each; what libraries say about their future does not."""
    if debug:
        return

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"sd-lowvram: note: {message}", file=sys.stderr)

    warnings.showwarning = show
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"sd_lowvram(\.|$)")
