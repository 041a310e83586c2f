"""`legroom show`: print a saved record, or write a plan's page."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.table import Table

from legroom.cli.answer import Answer, verb
from legroom.cli.compare import machine_of
from legroom.cli.options import AsJson, MachineName, PagePath, PerfettoPath
from legroom.core.errors import InputError, RecordError, UnknownName
from legroom.core.files import Record
from legroom.core.outcome import Comparison, Outcome, Timeline
from legroom.machine.spec import Machine, find_machine, preset_names
from legroom.memory.plan import Plan
from legroom.memory.shipped import ShippedSteps, load_shipped, shipped_names, shipped_steps
from legroom.memory.trace import Step
from legroom.views.records import (
    outcome_tables,
    plan_tables,
    shipped_tables,
    step_tables,
    timeline_tables,
)
from legroom.views.table import machine_table


class View(NamedTuple):
    """A kind of record, and how it is printed."""

    record: type[Record]
    tables: Callable[[Any], list[Table]]


VIEWS = {
    view.record.kind: view
    for view in (
        View(Machine, lambda machine: [machine_table(machine)]),
        View(Step, step_tables),
        View(Plan, plan_tables),
        View(Outcome, outcome_tables),
        View(Timeline, timeline_tables),
        View(ShippedSteps, shipped_tables),
    )
}


@verb
def show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A saved machine, step, plan, outcome or timeline; a preset; `traces`, or the "
            "name of one.",
        ),
    ],
    page: PagePath = None,
    perfetto: PerfettoPath = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="The step a plan was made for, saved by `fit --save-trace`."),
    ] = None,
    machine: MachineName = None,
    as_json: AsJson = False,
) -> Answer:
    """Print any saved record as a table.

    A machine that was probed, or one that comes with legroom:

        legroom show h100-80g

    The recorded steps of well-known models that come with legroom, and one of them:

        legroom show traces

        legroom show vgg16-128

    A plan, and its page for a browser; that needs the step the plan was made for:

        legroom show plan.json --trace trace.json --page plan.html
    """
    record = read_record(file)
    notes: list[str] = []
    if page is not None or perfetto is not None:
        notes = _draw(record, trace, machine, page, perfetto)
    elif trace is not None:
        raise InputError("--trace is for a plan's --page or --perfetto: name one of them")
    document = msgspec.Raw(record.to_json().encode())
    return Answer(document, [*VIEWS[record.kind].tables(record), *notes])


def read_record(file: str) -> Record:
    """Whatever record a file holds; or what comes with legroom, by its name."""
    path = Path(file)
    if file in preset_names() or (path.suffix == ".toml" and path.is_file()):
        return find_machine(file)
    if file == ShippedSteps.kind:
        return shipped_steps()
    if file in shipped_names():
        return load_shipped(file)
    if not path.is_file():
        if path.suffix or "/" in file:
            raise InputError(f"no file at {file}")
        known = [*preset_names(), ShippedSteps.kind, *shipped_names()]
        raise UnknownName("file, machine or recorded step", file, known)
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        head = msgspec.json.decode(data, type=dict[str, Any])
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise RecordError(f"{file} is no legroom file, or damaged: {error}") from None
    kind = head.get("legroom")
    if kind not in VIEWS:
        raise RecordError(f"{file} is no legroom file: it holds none of {', '.join(VIEWS)}")
    return VIEWS[kind].record.from_bytes(data, file)


def _draw(
    record: Record,
    trace: Path | None,
    machine: str | None,
    page: Path | None,
    perfetto: Path | None,
) -> list[str]:
    """Write what was asked for; the files in words."""
    from legroom.views.timeline import write_perfetto

    written = []
    if isinstance(record, Timeline) and page is None and perfetto is not None:
        written.append(write_perfetto(perfetto, record))
    elif isinstance(record, Plan) and trace is not None:
        written = _draw_plan(record, Step.load(trace), machine, page, perfetto)
    elif isinstance(record, Plan):
        raise InputError("the page of a plan needs the step it was made for: add --trace FILE")
    else:
        raise InputError(f"a {record.kind} has no page: give a plan and its --trace")
    return [f"written to {path}" for path in written]


def _draw_plan(
    plan: Plan, step: Step, machine: str | None, page: Path | None, perfetto: Path | None
) -> list[Path]:
    from legroom.memory.simulate import Simulator
    from legroom.memory.timeline import predicted_timeline
    from legroom.views.page import write_page
    from legroom.views.timeline import write_perfetto

    plan.check_against(step)
    simulator = Simulator(step, machine_of(plan.machine, machine))
    timeline = predicted_timeline(simulator, plan.actions)
    unlimited = simulator.run([], "keep_all")
    comparison = Comparison(predicted=plan.predicted, unlimited=unlimited)
    written = []
    if page is not None:
        written.append(write_page(page, step, plan, comparison, timeline))
    if perfetto is not None:
        written.append(write_perfetto(perfetto, timeline))
    return written
