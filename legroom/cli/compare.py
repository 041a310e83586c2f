"""`legroom compare`: every policy on one job, one machine and one budget."""

import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.bar import Bar
from rich.table import Table

from legroom.cli.answer import Answer, in_fields, progress, verb
from legroom.cli.jobs import build, check_policy, machine_or_this, trace_job
from legroom.cli.options import (
    AsJson,
    BudgetText,
    MachineName,
    OptimizerName,
    Sizes,
    read_budget,
    read_sizes,
)
from legroom.cli.policies import policy_docs
from legroom.core.errors import BudgetError, InputError, LegroomError, in_short
from legroom.core.units import format_bytes, format_seconds
from legroom.machine.spec import Machine, find_machine
from legroom.memory.plan import Plan
from legroom.memory.planner import POLICIES, make_plan
from legroom.memory.trace import Step
from legroom.views.table import plans_table

if TYPE_CHECKING:
    from legroom.core.outcome import Outcome

BAR_WIDTH = 50
FEW = 4
"""Policies that are not worth processes of their own."""


@verb
def compare(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="A built-in example, module:function, file.py:function, or a saved trace file.",
        ),
    ],
    machine: MachineName = None,
    budget: BudgetText = "auto",
    policies: Annotated[
        str | None, typer.Option("--policies", help="Some of them: auto,every_nth. All if absent.")
    ] = None,
    optimizer: OptimizerName = "adamw",
    sizes: Sizes = None,
    as_json: AsJson = False,
) -> Answer:
    """Let every policy plan the same step, and put the plans side by side.

    All are judged by one simulator, and the fastest comes first; a policy that cannot keep the
    budget is a row that says so.

        legroom compare llama-1b --machine a100-40g --budget 30GiB

    A step recorded by `fit`, with times measured on your machine:

        legroom compare trace.json --budget 120MiB --policies auto,every_nth
    """
    from legroom.ahead import machine_budget
    from legroom.memory.simulate import Simulator

    step, found = _step(job, machine, optimizer, read_sizes(sizes))
    names = _names(policies)  # the job's own file may have some of its own
    limits = machine_budget(read_budget(budget), found)
    unlimited = Simulator(step, found).run([], "keep_all")
    results: dict[str, Plan | LegroomError] = {}
    with progress("planning", len(names)) as advance:
        for name, result in _plans(step, found, limits, names):
            results[name] = result
            advance(name)
    results = dict(sorted(results.items(), key=_in_order))
    plans = [x for x in results.values() if isinstance(x, Plan)]
    rows = [x if isinstance(x, Plan) else (name, _short(x)) for name, x in results.items()]
    table = plans_table(rows, unlimited.step_s)
    table.title = f"{step.model} on {found.name} in {format_bytes(limits['device'])}"
    document = {"job": job, "machine": found.name, "budget": limits, "unlimited": unlimited}
    document |= {"fits": bool(plans), "policies": [_fields(k, x) for k, x in results.items()]}
    return Answer(document, [table, _bars(plans, unlimited)], bool(plans))


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
    if not job.endswith((".json", ".json.gz")):
        found = machine_or_this(machine)
        return trace_job(build(job, "meta", sizes), found, optimizer), found
    if sizes:
        raise InputError(f"{job} is a saved trace: its sizes are fixed, so --set cannot be used")
    step = Step.load(Path(job))
    return step, machine_of(step.machine, machine)


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


Task = tuple[Step, Machine, dict[str, int]]
_task: list[Task] = []
"""In a process of its own: what to plan."""


def _plans(
    step: Step, machine: Machine, limits: dict[str, int], names: list[str]
) -> Iterator[tuple[str, Plan | LegroomError]]:
    """Each policy's plan or error, as they come: from several processes where there are many.

    Those of the user's own are known in this one only.
    """
    own = names if len(names) <= FEW else [name for name in names if not _is_ours(name)]
    yield from ((name, _plan(step, machine, limits, name)) for name in own)
    names = [name for name in names if name not in own]
    if not names:
        return
    pool = ProcessPoolExecutor(
        min(len(names), os.cpu_count() or 1),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_take_task,
        initargs=(step.to_json(), machine.to_json(), limits),
    )
    asked = {pool.submit(_plan_task, name): name for name in names}
    try:
        for done in as_completed(asked):
            yield asked[done], _result(done)
    except BaseException:  # somebody does not want to wait
        for process in list(pool._processes.values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _result(done: "Future[Plan | LegroomError]") -> Plan | LegroomError:
    try:
        return done.result()
    except Exception as error:  # its process ended, with all that were in it
        return LegroomError(f"failed: {in_short(error)}")


def _is_ours(name: str) -> bool:
    policy = POLICIES[name]
    return getattr(policy, "func", policy).__module__.startswith("legroom.")


def _take_task(step: str, machine: str, limits: dict[str, int]) -> None:
    _task[:] = [(Step.from_bytes(step.encode()), Machine.from_bytes(machine.encode()), limits)]


def _plan_task(policy: str) -> Plan | LegroomError:
    return _plan(*_task[0], policy)


def _plan(step: Step, machine: Machine, limits: dict[str, int], policy: str) -> Plan | LegroomError:
    try:
        return make_plan(step, machine, limits, policy)
    except BudgetError as error:
        missing, smallest = error.missing_bytes, error.smallest_bytes  # not its frames
        return BudgetError(str(error), missing_bytes=missing, smallest_bytes=smallest)
    except LegroomError as error:
        return LegroomError(str(error))
    except Exception as error:  # a policy that fails is a row, not a crash
        return LegroomError(f"failed: {in_short(error)}")


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
