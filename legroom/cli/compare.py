"""`legroom compare`: every policy on one job, one machine and one budget, or many."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.bar import Bar
from rich.console import RenderableType
from rich.table import Table

from legroom.cli.answer import Answer, in_fields, progress, verb
from legroom.cli.jobs import build, check_policy, machine_or_this, trace_job
from legroom.cli.many import Order, Task, plan_all
from legroom.cli.options import (
    AsJson,
    BudgetText,
    MachineName,
    OptimizerName,
    Sizes,
    check_folders,
    read_budget,
    read_sizes,
)
from legroom.cli.policies import policy_docs
from legroom.cli.pools import into_rows, pools_of, pools_shown
from legroom.cli.rerun import run_policy
from legroom.core.errors import BudgetError, InputError, LegroomError
from legroom.core.outcome import Comparison
from legroom.core.units import format_bytes, format_seconds
from legroom.machine.spec import Machine, find_machine
from legroom.memory.plan import Plan
from legroom.memory.planner import TIME_LIMIT_S
from legroom.memory.retime import retimed
from legroom.memory.shipped import load_shipped
from legroom.memory.trace import Step
from legroom.views.policies import in_order, policies_chart, ratios_table
from legroom.views.table import plans_table, runs_table

if TYPE_CHECKING:
    from legroom.core.outcome import Outcome

BAR_WIDTH = 50
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Of the peak with no budget: what is planned for with `--frontier`."""
TRACES = (".json", ".json.gz")


@verb
def compare(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="A built-in example, module:function, file.py:function, a saved trace file, or a "
            "recorded step that comes with legroom: `legroom show traces` lists them.",
        ),
    ],
    machine: MachineName = None,
    budget: BudgetText = "auto",
    policies: Annotated[
        str | None, typer.Option("--policies", help="Some of them: auto,every_nth. All if absent.")
    ] = None,
    optimizer: OptimizerName = "adamw",
    sizes: Sizes = None,
    run: Annotated[
        bool, typer.Option("--run", help="Also train here under each plan, and show the errors.")
    ] = False,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Plan for 90 to 20 % of what the step takes.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the frontier as an SVG file.", dir_okay=False),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0.1, help="Seconds that a search may take.")
    ] = TIME_LIMIT_S,
    pool: Annotated[
        bool, typer.Option("--pool", help="Also say how large a pool each allocator needs.")
    ] = False,
    as_json: AsJson = False,
) -> Answer:
    """Let every policy plan the same step, and put the plans side by side.

    All are judged by one simulator, and the fastest comes first; a policy that cannot keep the
    budget is a row that says so.

        legroom compare llama-1b --machine a100-40g --budget 30GiB

    A recorded step of a well-known model (`legroom show traces` lists them), with the rates of any
    machine:

        legroom compare resnet152-256 --machine rtx4090 --budget 8GiB

    A step recorded by `fit`, with times measured on your machine:

        legroom compare trace.json --budget 120MiB --policies auto,every_nth

    Over many budgets, as a table and a figure:

        legroom compare resnet50 --machine l4 --frontier --plot frontier.svg

    With the address space that five allocators need for each plan:

        legroom compare gpt2-medium-16 --machine rtx4090 --budget 16GiB --pool

    Run for real, each in a process of its own:

        legroom compare transformer --budget 120MiB --run
    """
    from legroom.ahead import machine_budget
    from legroom.memory.simulate import Simulator

    frontier = frontier or plot is not None
    _check(job, budget, run, frontier, plot)
    if frontier and pool:
        raise InputError("--pool lays out plans for one budget: leave --frontier and --plot out")
    step, found = _step(job, machine, optimizer, read_sizes(sizes))
    names = _names(policies)  # the job's own file may have some of its own
    task = Task(step, found, machine_budget(read_budget(budget), found), time_limit)
    unlimited = Simulator(step, found).run([], "keep_all")
    if frontier:
        return _frontier(job, task, names, unlimited, plot)
    results = _plan_each(task, names)
    plans = [x for x in results.values() if isinstance(x, Plan)]
    rows = [x if isinstance(x, Plan) else (name, _short(x)) for name, x in results.items()]
    table = plans_table(rows, unlimited.step_s)
    table.title = f"{step.model} on {found.name} in {format_bytes(task.limits['device'])}"
    document = {"job": job, "machine": found.name, "budget": task.limits, "unlimited": unlimited}
    fields = [_fields(k, x) for k, x in results.items()]
    document |= {"fits": bool(plans), "policies": fields}
    shown: list[RenderableType] = [table, _bars(plans, unlimited)]
    if pool:
        pools = pools_of(step, found, plans)
        into_rows(fields, pools)
        shown.append(pools_shown(pools))
    if run:
        given = [job, "--budget", budget, "--optimizer", optimizer]
        given += ["--machine", machine] if machine else []
        given += [part for size in sizes or () for part in ("--set", size)]
        shown += _run_each(document, [plan.policy for plan in plans], given)
    return Answer(document, shown, bool(plans))


def _check(job: str, budget: str, run: bool, frontier: bool, plot: Path | None) -> None:
    """Raise InputError for options that do not go together, before any work."""
    check_folders([plot])
    if frontier and budget != "auto":
        raise InputError("--frontier plans for one budget after the other: leave --budget out")
    if frontier and run:
        raise InputError("--run trains under one budget: leave --frontier and --plot out")
    if run and not _is_job(job):
        raise InputError(f"{job} is a saved trace, which cannot be trained: name the job to --run")


def _plan_each(task: Task, names: list[str]) -> dict[str, Plan | LegroomError]:
    """Each policy's plan or error, the fastest first."""
    results = {}
    orders = [Order(name, task.limits["device"]) for name in names]
    with progress("planning", len(orders)) as advance:
        for order, result in plan_all(task, orders):
            results[order.policy] = result
            advance(order.policy)
    return dict(sorted(results.items(), key=_in_order))


def _run_each(document: dict[str, Any], names: list[str], given: list[str]) -> list[RenderableType]:
    """Measure those that fit, one after the other; puts what came of it into their rows."""
    rows: dict[str, dict[str, Any]] = {row["policy"]: row for row in document["policies"]}
    found: dict[str, Comparison | None] = {}
    notes = list[RenderableType]()
    with progress("training", len(names)) as advance:
        for name in names:
            result = run_policy(name, given)
            failed = isinstance(result, LegroomError)
            rows[name]["run"] = in_fields(result) if isinstance(result, LegroomError) else result
            found[name] = None if isinstance(result, LegroomError) else result
            notes += [f"{name}: {result}"] if failed else []
            advance(name)
    return [runs_table(found), *notes]


def _frontier(
    job: str, task: Task, names: list[str], unlimited: "Outcome", plot: Path | None
) -> Answer:
    """Every policy at one budget after the other."""
    natural = unlimited.device_bytes
    budgets = [int(share * natural) for share in SHARES]
    ratios: dict[str, list[float | None]] = {name: [None] * len(budgets) for name in names}
    orders = [Order(name, size) for size in budgets for name in names]
    with progress("planning", len(orders)) as advance:
        for order, result in plan_all(task, orders):
            if isinstance(result, Plan):
                at = budgets.index(order.device_bytes)
                ratios[order.policy][at] = result.predicted.step_s / unlimited.step_s
            advance(f"{order.policy} in {format_bytes(order.device_bytes)}")
    title = f"{task.step.model} on {task.machine.name}: step time against that with no budget"
    table = ratios_table(title, budgets, ratios, natural)
    shown: list[RenderableType] = [table]
    if plot is not None:
        plot.write_text(policies_chart(title, budgets, ratios))
        shown.append(f"figure written to {plot}")
    fits = any(x is not None for row in ratios.values() for x in row)
    document = {"job": job, "machine": task.machine.name, "unlimited": unlimited, "fits": fits}
    document |= {"budgets": budgets, "ratios": in_order(ratios)}
    return Answer(document, shown, fits)


def _names(given: str | None) -> list[str]:
    if given is None:
        return list(policy_docs())
    names = list(dict.fromkeys(x.strip() for x in given.split(",") if x.strip()))
    if not names:
        raise InputError("--policies names none: write --policies auto,every_nth")
    for name in names:
        check_policy(name)
    return names


def _step(
    job: str, machine: str | None, optimizer: str, sizes: dict[str, Any]
) -> tuple[Step, Machine]:
    """The step of a saved trace, or of a job captured here; and the machine to plan for."""
    step = _recorded(job)
    if step is None:
        found = machine_or_this(machine)
        return trace_job(build(job, "meta", sizes), found, optimizer), found
    if sizes:
        raise InputError(f"{job} is a saved trace: its sizes are fixed, so --set cannot be used")
    found = machine_of(step.machine, machine)
    return retimed(step, found), found


def _recorded(job: str) -> Step | None:
    """The step of a trace file, or of one that comes with legroom; None if it names a job."""
    from legroom.examples import EXAMPLES

    if job.endswith(TRACES):
        return Step.load(Path(job))
    return None if _is_job(job) else load_shipped(job, others=EXAMPLES)


def _is_job(job: str) -> bool:
    from legroom.examples import EXAMPLES

    return ":" in job or job.endswith(".py") or job in EXAMPLES


def machine_of(recorded: str, given: str | None) -> Machine:
    """The machine given, else the one a record names, which is a preset or this one."""
    if given is not None:
        return find_machine(given)
    try:
        return find_machine(recorded)
    except InputError:
        here = machine_or_this(None)
    if here.name != recorded:
        raise InputError(
            f"the record was made for {recorded}, which is not this machine ({here.name}): "
            "name one with --machine"
        )
    return here


def _in_order(row: tuple[str, Plan | LegroomError]) -> tuple[float, str]:
    """The fastest first, those that do not fit last."""
    name, result = row
    return (result.predicted.step_s if isinstance(result, Plan) else math.inf), name


def _short(error: LegroomError) -> str:
    if isinstance(error, BudgetError) and error.smallest_bytes is not None:
        needs, over = format_bytes(error.smallest_bytes), format_bytes(error.missing_bytes)
        return f"needs {needs}, {over} over the budget"
    return str(error)


def _fields(name: str, result: Plan | LegroomError) -> dict[str, Any]:
    if not isinstance(result, Plan):
        return {"policy": name, "fits": False} | in_fields(result)
    return {
        "policy": name,
        "fits": True,
        "why": result.why,
        "planning_s": result.planning_s,
        "outcome": result.predicted,
    }


def _bars(plans: list[Plan], unlimited: "Outcome") -> Table:
    """Step times as bars on one scale, the step with no budget first."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    times = {"no budget": unlimited.step_s} | {p.policy: p.predicted.step_s for p in plans}
    longest = max(times.values()) or 1.0
    for name, seconds in times.items():
        table.add_row(name, Bar(longest, 0, seconds, width=BAR_WIDTH), format_seconds(seconds))
    return table
