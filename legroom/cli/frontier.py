"""What each budget would give: the answer of `legroom fit --frontier`."""

from typing import TYPE_CHECKING, Any

from legroom.cli.answer import Answer, progress
from legroom.cli.jobs import build, machine_or_this, plans_of
from legroom.core.units import format_bytes

if TYPE_CHECKING:
    from legroom.memory.plan import Plan


def frontier_answer(
    job: str,
    machine: str | None,
    policy: str,
    optimizer: str,
    sizes: dict[str, Any],
    compile_what: str | None = None,
) -> Answer:
    """Budgets from the smallest that works to one that needs no plan, each planned."""
    from legroom.ahead import machine_budget
    from legroom.memory.frontier import NUM_POINTS, frontier
    from legroom.memory.simulate import Simulator
    from legroom.views.budgets import budgets_table

    found = machine_or_this(machine)
    step, plan_for = plans_of(build(job, "meta", sizes), found, optimizer, compile_what)
    limits = machine_budget("auto", found)
    natural = Simulator(step, found).run([], "keep_all")

    def plan_at(limit: int) -> "Plan":
        return plan_for({**limits, "device": limit}, policy, quick=True)

    points = []
    with progress("planning", NUM_POINTS) as advance:
        for point in frontier(plan_at, natural.device_bytes):
            points.append(point)
            advance(format_bytes(point.budget_bytes))
    document = {"job": job, "machine": found.name, "policy": policy, "unlimited": natural}
    document |= {"frontier": [point._asdict() for point in points], "fits": bool(points)}
    table = budgets_table(points, natural.step_s)
    table.title = f"{step.model} on {found.name}, by {policy}"
    return Answer(document, [table, "Times come from the machine's rates, not from runs."])
