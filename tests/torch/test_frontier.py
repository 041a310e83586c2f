"""The frontier of a step: every budget between the smallest that works and none at all."""

import pytest

from legroom.machine.spec import find_machine
from legroom.memory.frontier import frontier, next_steps, point_at, smallest
from legroom.memory.handmade import chain, natural_peak
from legroom.memory.plan import Plan
from legroom.memory.planner import make_plan
from tests.torch.nets import Mlp, rows, stack
from tests.torch.support import fitted

MIB = 1 << 20
STEP = chain(8, 100 * MIB, output_bytes=10 * MIB)
MACHINE = find_machine("h200")


def plan_at(limit: int) -> Plan:
    """A plan of the chain without moves."""
    return make_plan(STEP, MACHINE, {"device": limit}, "auto", quick=True)


def test_less_memory_takes_more_time() -> None:
    """Never less, and each point keeps its budget."""
    points = list(frontier(plan_at, natural_peak(STEP), 6))
    assert len(points) == 6
    assert [p.budget_bytes for p in points] == sorted(p.budget_bytes for p in points)
    assert all(a.step_s >= b.step_s for a, b in zip(points, points[1:], strict=False))
    assert all(p.peak_bytes <= p.budget_bytes for p in points)
    assert points[-1].step_s == pytest.approx(STEP.compute_s)


def test_it_begins_at_the_smallest_budget_that_works() -> None:
    """One byte less does not."""
    least = smallest(plan_at, natural_peak(STEP))
    assert point_at(plan_at, least) is not None
    assert point_at(plan_at, least // 2) is None


def test_what_a_little_more_buys_and_a_little_less_costs() -> None:
    """In words, with the sign of the change in time."""
    limit = (smallest(plan_at, natural_peak(STEP)) + natural_peak(STEP)) // 2
    more, less = next_steps(plan_at, limit).split("; ")
    assert more.startswith("+") and less.startswith("-")
    assert ": -" in more or "no change" in more
    assert ": +" in less or "no change" in less
    assert next_steps(plan_at, smallest(plan_at, natural_peak(STEP))).endswith("does not fit")


def test_a_job_tells_its_own() -> None:
    """From the recorded step, without running anything."""
    with fitted(stack(Mlp), "auto") as job:
        for _ in range(4):
            with job.step():
                job.model(rows()).sum().backward()
            job.model.zero_grad()
        points = job.frontier(4)
        assert points and points[-1].why == "everything fits as it is"
        assert "; -" in job.next_steps()
