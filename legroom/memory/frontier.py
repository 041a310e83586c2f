"""The frontier of one step: what it takes at one budget after another, by the simulator."""

from collections.abc import Callable, Iterator

from legroom.core.errors import BudgetError
from legroom.core.outcome import Point
from legroom.core.units import format_bytes, format_seconds
from legroom.memory.plan import Plan

NUM_POINTS = 8
SHARE = 0.05
"""A step along the frontier is a GiB, or this share of a small budget."""
NO_CHANGE = 5e-4
GIB = 1 << 30

PlanAt = Callable[[int], Plan]
"""A plan for so many bytes of the device; raises BudgetError if there is none."""


def frontier(plan_at: PlanAt, natural_bytes: int, num_points: int = NUM_POINTS) -> Iterator[Point]:
    """From the smallest budget that works to the one that needs no plan, evenly spread."""
    least = smallest(plan_at, natural_bytes)
    for i in range(num_points):
        limit = least + (natural_bytes - least) * i // max(num_points - 1, 1)
        point = point_at(plan_at, limit)
        if point is not None:
            yield point


def smallest(plan_at: PlanAt, natural_bytes: int) -> int:
    """The smallest budget that a plan is known for."""
    try:
        plan_at(1)
    except BudgetError as error:
        return min(1 + error.missing_bytes, natural_bytes)
    return 1


def point_at(plan_at: PlanAt, limit: int) -> Point | None:
    """What a budget gives; None if nothing keeps it."""
    try:
        plan = plan_at(limit)
    except BudgetError:
        return None
    return Point(limit, plan.predicted.device_bytes, plan.predicted.step_s, plan.why)


def next_steps(plan_at: PlanAt, limit: int) -> str:
    """What a little more memory would buy, and a little less would cost, in a line."""
    little = GIB if limit >= GIB / SHARE else int(limit * SHARE)
    less, here, more = (point_at(plan_at, limit + n) for n in (-little, 0, little))
    now_s = min((p.step_s for p in (less, here) if p is not None), default=0.0)
    parts = []
    for sign, point in (("+", more), ("-", less)):
        gain = "does not fit" if point is None else _signed(point.step_s - now_s, now_s)
        parts.append(f"{sign}{format_bytes(little)}: {gain}")
    return "; ".join(parts)


def _signed(seconds: float, step_s: float) -> str:
    if abs(seconds) < NO_CHANGE * step_s:
        return "no change"
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"
