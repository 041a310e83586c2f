"""Relief: where the allocator finds less room than a plan saw, plan with less or stay as before."""

import contextlib
import warnings
from collections.abc import Callable, Iterator

from legroom.core.errors import BudgetError
from legroom.core.units import format_bytes
from legroom.memory.arena import NOWHERE
from legroom.memory.device import Meter
from legroom.memory.kinds import Kind
from legroom.memory.profile import Capture

PRESSED, OFF_BY = 0.015, 0.04
"""Shares of the budget that go to an allocator that had to tidy up, and to one without room."""
GIVEN_UP = 3
"""Most often that a signature is recorded in vain."""
SCALARS = 1 << 10
"""Bytes that numbers take which become tensors for a moment; no plan knows of those."""


@contextlib.contextmanager
def or_as_before(kind: Kind, meter: Meter) -> Iterator[None]:
    """Plan in here with more left to the allocator; where nothing fits, all is as it was."""
    slack, force = meter.slack, kind.force
    try:
        yield
    except BudgetError:
        meter.slack = slack
        kind.put_back(force)


@contextlib.contextmanager
def or_first(kind: Kind, capture: Capture | None, capped: bool) -> Iterator[None]:
    """Plan a recorded step in here; where nothing fits, the plan it has run under so far stays.

    That was made for what was captured first. A device that is capped has seen to it that it keeps
    the budget; others have not.
    """
    first = (capture, kind.plan, kind.script)
    try:
        yield
    except BudgetError as error:
        kind.capture, kind.plan, kind.script = first
        kind.outfit, kind.plain, kind.placement = kind.base, None, NOWHERE
        if kind.script is None or not capped:  # None: it ran under an online rule
            kind.recorded = False
            raise
        kind.still = True
        missing = format_bytes(error.missing_bytes)
        warnings.warn(
            f"legroom: as recorded, the step needs {missing} more than its budget has; the plan "
            "made before it ran, which has kept the budget so far, stays",
            stacklevel=6,
        )


def make_room(kind: Kind, meter: Meter, budget: int, plan: Callable[[Kind], None]) -> None:
    """Have the room made that a kind's plan is laid out in; where it is too small, plan anew."""
    overhead = meter.overhead(budget)
    found = meter.make_room(kind.placement)
    if found.missing_bytes > kind.placement.missing_bytes:
        laid_out = kind.placement
        with or_as_before(kind, meter):
            meter.leave(overhead + found.missing_bytes, budget)
            plan(kind)
        if kind.placement is not laid_out:
            found = meter.make_room(kind.placement)
    kind.placement = found


def waits(kind: Kind) -> bool:
    """A step that was to be recorded ran no backward: whether to record the next one instead."""
    kind.given_up += 1
    if kind.given_up == 1:
        warnings.warn(
            "legroom: a step ran forward but no backward; plans are made from steps that run both, "
            "inside of `with job.step():`",
            stacklevel=7,
        )
    return kind.given_up <= GIVEN_UP


def is_over(peak: int, limit: int) -> bool:
    """Whether a step took more than its budget; if so, the user is told."""
    over = peak > limit + SCALARS
    if over:
        text = f"a step took {format_bytes(peak)} of device memory, over the budget of "
        warnings.warn(f"legroom: {text}{format_bytes(limit)}", stacklevel=6)
    return over


def after_failure(kind: Kind | None, meter: Meter, plan: Callable[[Kind], None]) -> str:
    """A step found no room: leave the allocator more from now on; what to say of it."""
    visits, foreseen = 0, "no plan yet"
    if kind is not None and kind.plan is not None:
        visits, size = kind.visits, format_bytes(kind.plan.predicted.device_bytes)
        foreseen = f"the plan ({kind.plan.why}) foresaw {size} at most"
    if kind is not None and kind.recorded and not kind.restless:
        with or_as_before(kind, meter):
            meter.give_way(OFF_BY)
            plan(kind)
    else:
        meter.give_way(OFF_BY)
    return (
        f"legroom: in step {visits + 1} of its kind; {foreseen}. From the next step on the plan "
        "leaves the allocator more room; run this step again, or give a larger budget or a "
        "smaller batch"
    )
