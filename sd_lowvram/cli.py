"""The command line. Each command is a file in commands/; nothing heavy is imported before one runs."""

from __future__ import annotations

from typing import Annotated

try:
    import typer
except ImportError:
    raise SystemExit('the command line needs more packages: pip install "sd-lowvram[standalone]"') from None

from . import doors
from .commands.doctor import doctor
from .commands.examples import GENERATE, PLAN, examples
from .commands.generate import generate
from .commands.install import install
from .commands.one_line import OneLine
from .commands.plan import plan
from .commands.program import run
from .commands.resume import resume

app = typer.Typer(
    name="sd-lowvram",
    cls=OneLine,
    help='Stable Diffusion in the memory that you have. Begin with: sd-lowvram generate "a red apple"',
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(epilog=examples(GENERATE))(generate)
app.command()(resume)
app.command(epilog=examples(PLAN))(plan)
app.command()(doctor)
app.command()(install)


def _add(app: typer.Typer) -> None:
    """Add the commands of those who registered some."""
    doors.find()
    for name, make_command in doors.COMMANDS.items():
        command = make_command()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)


_add(app)


def _version(wanted: bool) -> None:
    if wanted:
        from .files import __version__

        print(f"sd-lowvram {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; exit codes are those of commands/exit_codes.py."""
    run(app, "sd-lowvram")
