"""What a verb answers, and how it leaves: tables or one JSON document, and an exit code."""

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, ParamSpec, Protocol

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from legroom.core.errors import BudgetError, LegroomError

FITS, DOES_NOT_FIT, BAD_INPUT, BROKEN, INTERRUPTED = 0, 1, 2, 3, 130
PLAIN_WIDTH = 100
"""Columns of a table that is not printed on a terminal."""

P = ParamSpec("P")


class Advance(Protocol):
    """Moves a progress bar on, and says what is being done now."""

    def __call__(self, now: str = "", amount: float = 1.0) -> None:
        """Take `amount` of the total as done."""


class Answer(NamedTuple):
    """What a verb found: for programs, for people, and whether the job fits."""

    document: Any
    """Printed as JSON with `--json`; records in it become objects."""
    shown: Sequence[RenderableType] = ()
    """Printed without `--json`, one under the other."""
    fits: bool = True


def verb(run: Callable[P, Answer]) -> Callable[P, None]:
    """Make a command of a function: print its answer, and turn its errors into exit codes.

    While it works, what the user's own code prints goes to stderr: stdout holds the answer alone.
    """

    @functools.wraps(run)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        try:
            with contextlib.redirect_stdout(sys.stderr):
                answer = run(*args, **kwargs)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            _fail(error, as_json)
        _print(answer, as_json)
        if not answer.fits:
            raise typer.Exit(DOES_NOT_FIT)

    return command


def _print(answer: Answer, as_json: bool) -> None:
    if as_json:
        typer.echo(to_json(answer.document))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    for part in answer.shown:
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))


def _fail(error: Exception, as_json: bool) -> NoReturn:
    """Say what went wrong in one line (with a traceback if it is nobody's input), and leave."""
    code = exit_code(error)
    if code == BROKEN:
        traceback.print_exception(error)
    else:
        typer.echo("legroom: " + " ".join(str(error).split()), err=True)
    if as_json:
        typer.echo(to_json({"fits": None if code != DOES_NOT_FIT else False} | in_fields(error)))
    raise typer.Exit(code) from None


def exit_code(error: Exception) -> int:
    """The exit code an error stands for."""
    if isinstance(error, BudgetError) or type(error).__name__ == "OutOfMemoryError":
        return DOES_NOT_FIT
    return BAD_INPUT if isinstance(error, LegroomError | OSError) else BROKEN


def in_fields(error: Exception) -> dict[str, Any]:
    """An error as fields of a document."""
    fields: dict[str, Any] = {"error": str(error), "kind": type(error).__name__}
    if isinstance(error, BudgetError):
        fields |= {"missing_bytes": error.missing_bytes, "smallest_bytes": error.smallest_bytes}
    return fields


def to_json(document: Any) -> str:
    """A document as indented JSON; paths are texts, numpy's numbers are numbers."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value.item()

    return msgspec.json.format(msgspec.json.encode(document, enc_hook=plain), indent=2).decode()


@contextlib.contextmanager
def progress(what: str, total: float) -> Iterator[Advance]:
    """A bar on stderr for as long as the work lasts; off a terminal nothing is drawn."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    off = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=off) as bars:
        task = bars.add_task(what, total=total)

        def advance(now: str = "", amount: float = 1.0) -> None:
            bars.update(task, advance=amount, description=f"{what}: {now}" if now else what)

        yield advance
