"""The verbs under one name, and the options of the command itself."""

from typing import Annotated

import typer

from legroom import __version__
from legroom.cli.compare import compare
from legroom.cli.demo import demo
from legroom.cli.estimate import estimate
from legroom.cli.fit import fit
from legroom.cli.papers import papers
from legroom.cli.policies import policies
from legroom.cli.probe import probe
from legroom.cli.show import show

EPILOG = "Exit codes: 0 it fits, 1 it does not fit, 2 bad input, 3 something broke."

app = typer.Typer(
    name="legroom",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (probe, estimate, fit, compare, papers, policies, show, demo):
    app.command(epilog=EPILOG)(verb)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"legroom {__version__}")
        raise typer.Exit


@app.callback(epilog=EPILOG)
def _legroom(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Make a PyTorch training job fit the machine it has, and run fast there.

    Will it fit, and on which card?

        legroom estimate llama-1b --machine l4 --machine a100-40g

    Run it here, in less memory than it would take:

        legroom fit transformer --budget 120MiB --verify

    See it work, with nothing to prepare:

        legroom demo
    """
