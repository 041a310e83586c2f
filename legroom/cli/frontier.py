"""What each budget would give: the answer of `legroom fit --frontier`."""

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from legroom.cli.answer import Answer, progress
from legroom.cli.jobs import build, machine_or_this, trace_job
from legroom.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from legroom.memory.frontier import Point
    from legroom.memory.plan import Plan


def frontier_answer(
    job: str, machine: str | None, policy: str, optimizer: str, sizes: dict[str, Any]
) -> Answer:
    """Budgets from the smallest that works to one that needs no plan, each planned."""
    from legroom.api import machine_budget
    from legroom.memory.frontier import NUM_POINTS, frontier
    from legroom.memory.planner import make_plan
    from legroom.memory.simulate import Simulator

    found = machine_or_this(machine)
    step = trace_job(build(job, "meta", sizes), found, optimizer)
    limits = machine_budget("auto", found)
    natural = Simulator(step, found).run([], "keep_all")

    def plan_at(limit: int) -> "Plan":
        return make_plan(step, found, {**limits, "device": limit}, policy, quick=True)

    points = []
    with progress("planning", NUM_POINTS) as advance:
        for point in frontier(plan_at, natural.device_bytes):
            points.append(point)
            advance(format_bytes(point.budget_bytes))
    document = {"job": job, "machine": found.name, "policy": policy, "unlimited": natural}
    document |= {"frontier": [point._asdict() for point in points], "fits": bool(points)}
    table = _table(points, natural.step_s)
    table.title = f"{step.model} on {found.name}, by {policy}"
    return Answer(document, [table, "Times come from the machine's rates, not from runs."])


def _table(points: "list[Point]", natural_s: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for head in ("budget", "peak", "step", "against no limit"):
        table.add_column(head, justify="right")
    table.add_column("how")
    for point in points:
        ratio = point.step_s / natural_s if natural_s else 1.0
        size, peak = format_bytes(point.budget_bytes), format_bytes(point.peak_bytes)
        table.add_row(size, peak, format_seconds(point.step_s), f"{ratio:.2f}x", point.why)
    return table
