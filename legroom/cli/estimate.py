"""`legroom estimate`: will it fit, how fast, on which card; with no card present."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich import box
from rich.table import Table

from legroom.cli.answer import Answer, progress, verb
from legroom.cli.jobs import PlanFor, build, check_policy, machine_or_this, plans_of
from legroom.cli.options import (
    AsJson,
    CompileWhat,
    JobName,
    OptimizerName,
    PolicyName,
    Sizes,
    read_budget,
    read_sizes,
)
from legroom.core.errors import BudgetError
from legroom.core.outcome import Outcome
from legroom.core.units import format_bytes, format_seconds
from legroom.machine.spec import Machine, find_machine
from legroom.views.table import NONE

if TYPE_CHECKING:
    from legroom.memory.trace import Step

AS_IT_IS, PLANNED, NO = "as it is", "with a plan", "no"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One machine: the step as it is, and under a plan where one was asked for or is needed."""

    machine: str
    fits: str
    """"as it is", "with a plan" or "no"."""
    budget: dict[str, int]
    unlimited: Outcome
    planned: Outcome | None = None
    how: str = ""
    why_not: str = ""


@verb
def estimate(
    job: JobName,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            "--machine",
            "-m",
            help="A preset (h100-80g, l4, ...) or a machine file; give several to compare cards.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", "-b", help="Memory to plan for: 16GiB. All there is if absent."),
    ] = None,
    policy: PolicyName = "auto",
    optimizer: OptimizerName = "adamw",
    sizes: Sizes = None,
    compile_what: CompileWhat = None,
    as_json: AsJson = False,
) -> Answer:
    """Say whether a job fits and how fast it is, with no such card present.

    Nothing is trained and nothing is allocated; times come from a machine's rates. What does not
    fit as it is gets a plan. Which card?

        legroom estimate llama-1b -m l4 -m a100-40g -m h100-80g

    Your own model, and how it does in half the memory:

        legroom estimate train.py:job -m rtx4090 --budget 12GiB --set batch=8

    The same with its blocks compiled:

        legroom estimate train.py:job -m rtx4090 --budget 12GiB --compile blocks
    """
    check_policy(policy)
    wanted = None if budget is None else read_budget(budget)
    machines = [find_machine(name) for name in machine or ()] or [machine_or_this(None)]
    made = build(job, "meta", read_sizes(sizes))
    rows = []
    with progress("estimating", len(machines)) as advance:
        for found in machines:
            plans = plans_of(made, found, optimizer, compile_what)
            rows.append(_row(*plans, found, wanted, policy, compile_what is not None))
            advance(found.name)
    fits = any(row.fits != NO for row in rows)
    document = {"job": job, "policy": policy, "optimizer": optimizer, "fits": fits}
    return Answer(document | {"machines": rows}, [_table(job, rows), *_notes(rows)], fits)


def _row(
    step: "Step",
    plan_for: PlanFor,
    machine: Machine,
    budget: str | dict[str, str] | None,
    policy: str,
    compiled: bool,
) -> Row:
    from legroom.ahead import machine_budget
    from legroom.memory.simulate import Simulator

    limits = machine_budget("auto" if budget is None else budget, machine)
    unlimited = Simulator(step, machine).run([], "keep_all")
    fits, planned, how, why_not = AS_IT_IS, None, "", ""
    if budget is not None or compiled or unlimited.device_bytes > limits["device"]:
        fits = AS_IT_IS if unlimited.device_bytes <= limits["device"] else PLANNED
        try:
            plan = plan_for(limits, policy)
            planned, how = plan.predicted, plan.why
        except BudgetError as error:
            fits, why_not = NO, str(error)
    return Row(
        machine=machine.name,
        fits=fits,
        budget=limits,
        unlimited=unlimited,
        planned=planned,
        how=how,
        why_not=why_not,
    )


def _table(job: str, rows: list[Row]) -> Table:
    table = Table(title=job, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("machine")
    for head in ("memory", "peak as it is", "step as it is", "fits", "peak", "step", "ratio"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row.machine,
            format_bytes(row.budget["device"]),
            format_bytes(row.unlimited.device_bytes),
            format_seconds(row.unlimited.step_s),
            row.fits,
            *_planned_cells(row),
        )
    return table


def _planned_cells(row: Row) -> tuple[str, str, str]:
    if row.planned is None:
        return NONE, NONE, NONE
    ratio = row.planned.step_s / row.unlimited.step_s if row.unlimited.step_s else 1.0
    peak = format_bytes(row.planned.device_bytes)
    return peak, format_seconds(row.planned.step_s), f"{ratio:.2f}x"


def _notes(rows: list[Row]) -> list[str]:
    first = rows[0].unlimited
    parts = sorted(first.peak_parts.items(), key=lambda part: -part[1])
    made_of = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in parts)
    notes = [f"The peak as it is: {made_of}; at {first.peak_at}."]
    for row in rows:
        if row.planned or row.why_not:
            notes.append(f"{row.machine}: {row.why_not or row.how + '.'}")
    return [*notes, "Times come from each machine's rates, not from runs."]
