"""`legroom papers`: what papers report of their policies, and ours for the same."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich import box
from rich.table import Table

from legroom.cli.answer import Answer, progress, verb
from legroom.cli.jobs import build, trace_job
from legroom.cli.many import spread
from legroom.cli.options import AsJson
from legroom.core.errors import LegroomError, UnknownName, in_short
from legroom.core.units import format_seconds
from legroom.machine.spec import find_machine
from legroom.memory.headlines import CLAIMS
from legroom.memory.papers import Bench, Claim, Measure, Ours
from legroom.views.table import NONE

if TYPE_CHECKING:
    from legroom.examples import Job
    from legroom.memory.trace import Step

FAR = 0.25
"""Figures further apart than this are explained in docs/papers.md."""
TIMES, SHARE = (Measure.TIME, Measure.GAIN, Measure.PACE), (Measure.SAVED,)


@verb
def papers(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="One of them, by its name; may be given several times."),
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """Put the figures that papers report beside ours, on presets of their cards.

    Steps are captured with fake tensors in float32, times come from a machine's rates, and nothing
    is fitted to match; docs/papers.md explains what differs. All of them take a minute or two:

        legroom papers

    One of them:

        legroom papers --only vdnn-vgg16
    """
    started = time.perf_counter()
    claims = _chosen(only)
    found: dict[str, Ours | LegroomError] = {}
    with progress("papers", len(claims)) as advance:
        for name, ours in _each([claim.name for claim in claims]):
            found[name] = ours
            advance(name)
    rows = [_fields(claim, found[claim.name]) for claim in claims]
    work = _work(list(found.values()), time.perf_counter() - started)
    return Answer({"papers": rows}, [_table(rows), *_notes(rows), work])


def _chosen(only: Sequence[str] | None) -> list[Claim]:
    names = [claim.name for claim in CLAIMS]
    for name in only or ():
        if name not in names:
            raise UnknownName("figure of a paper", name, names)
    return [claim for claim in CLAIMS if not only or claim.name in only]


def _each(names: list[str]) -> Iterator[tuple[str, Ours | LegroomError]]:
    """Ours for each, as they come: from several processes where there is more than one."""
    if len(names) > 1:
        yield from spread(reproduce, names)
    else:
        yield from ((name, reproduce(name)) for name in names)


def reproduce(name: str) -> Ours | LegroomError:
    """Ours for the claim of that name; one that fails is a row, not a crash."""
    from legroom.ahead import machine_budget

    claim = next(claim for claim in CLAIMS if claim.name == name)
    try:
        machine = find_machine(claim.machine)
        limits = machine_budget("auto", machine)
        return Bench(claim, machine, limits, _steps_of(claim)).ours()
    except LegroomError as error:
        return LegroomError(str(error))
    except Exception as error:
        return LegroomError(f"failed: {in_short(error)}")


def _steps_of(claim: Claim) -> "Callable[[int], Step]":
    """What captures the claim's step at a batch."""

    def step_at(batch: int) -> "Step":
        job = in_float32(build(claim.job, "meta", {**claim.sizes, "batch": batch}))
        return trace_job(job, find_machine(claim.machine), claim.optimizer)

    return step_at


def in_float32(job: "Job") -> "Job":
    """The job with float32 weights and no autocast, as these papers trained."""
    import dataclasses

    from legroom.examples.making import autocast_class_loss, class_loss

    plain = class_loss if job.loss_fn is autocast_class_loss else job.loss_fn
    return dataclasses.replace(job, model=job.model.float(), loss_fn=plain)


def _fields(claim: Claim, ours: Ours | LegroomError) -> dict[str, Any]:
    row = msgspec.structs.asdict(claim)
    if isinstance(ours, LegroomError):
        return row | {"ours": None, "ratio": None, "note": str(ours), "kept": False}
    alike = ours.figure is not None and ours.kept
    ratio = ours.figure / claim.figure if alike and ours.figure is not None else None
    found = {"ours": ours.figure, "ratio": ratio, "note": ours.note, "kept": ours.kept}
    return row | found | {"num_steps": ours.num_steps, "num_plans": ours.num_plans}


def _table(rows: list[dict[str, Any]]) -> Table:
    title = "Papers' figures, and ours"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for head in ("name", "policy", "measure"):
        table.add_column(head)
    for head in ("theirs", "ours", "ratio"):
        table.add_column(head, justify="right")
    for row in rows:
        cells = (row["name"], row["policy"], _measure(row))
        ours = _in_words(row, row["ours"])
        if not row["kept"] and row["ours"] is not None:
            ours = f"({ours})"
        table.add_row(*cells, _in_words(row, row["figure"]), ours, _ratio(row["ratio"]))
    return table


def _measure(row: dict[str, Any]) -> str:
    return f"{row['measure']} {row['rival']}".strip()


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return f"{NONE} *"
    return f"{ratio:.2f}" + (" *" if abs(ratio - 1) > FAR else "  ")


def _in_words(row: dict[str, Any], figure: float | None) -> str:
    if figure is None:
        return NONE
    if row["measure"] in TIMES:
        return f"{figure:.2f}x"
    if row["measure"] in SHARE:
        return f"{figure:.1%}"
    return f"{figure:.1f} GB" if row["measure"] == Measure.MEMORY else f"{figure:.0f}"


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    notes = []
    for row in rows:
        job = f"{row['job']} {row['batch']} on {row['machine']}"
        parts = (row["source"], job, row["unlike"], row["note"])
        notes.append(f"{row['name']}: " + "; ".join(part for part in parts if part))
    far = "* further apart than a quarter, or not alike: docs/papers.md says why."
    return [*notes, "(In brackets: in more memory than asked for.)", far]


def _work(found: list[Ours | LegroomError], seconds: float) -> str:
    done = [ours for ours in found if isinstance(ours, Ours)]
    steps, plans = sum(x.num_steps for x in done), sum(x.num_plans for x in done)
    return f"{steps} steps captured and {plans} plans made in {format_seconds(seconds)}."
