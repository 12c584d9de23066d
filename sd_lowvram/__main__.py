"""The program: an interrupt is one from its first import on."""

from __future__ import annotations

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; exit codes are those of commands/exit_codes.py."""
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


if __name__ == "__main__":
    main()
