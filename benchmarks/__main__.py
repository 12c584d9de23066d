"""The program: an interrupt is one from its first import on."""

from __future__ import annotations

_INTERRUPTED = 130


def main() -> None:
    """Run one measurement; exit codes are those of ``sd-lowvram``."""
    try:
        from sd_lowvram.commands.program import run

        from .cli import app

        run(app, "python -m benchmarks")
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


if __name__ == "__main__":
    main()
