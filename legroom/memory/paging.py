"""Tensors leave only when memory runs out, as a driver of unified memory has it, by some order.

The step is walked op by op. Where the device would be too full, tensors that nothing needs for now
leave, one after the other in the order asked for, until it is not; the step waits for each copy,
which begins no sooner. Each comes back where its policy fetches it, or on demand if it left later.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from legroom.memory.actions import Move
from legroom.memory.gaps import Gap, find_gaps, make_move, tick_at_or_after, tick_at_or_before
from legroom.memory.planner import Problem

Order = Callable[[int, Sequence[Gap]], Sequence[Gap]]
"""Who leaves first of those that can, at the op that needs the room."""


class Stay(NamedTuple):
    """A gap that is spent elsewhere."""

    gap: Gap
    leave: int
    """The step waits here for it to be gone."""
    fetch: int
    """Room is taken for it."""

    def move(self, problem: Problem, tier: str) -> Move:
        """The same as an action: the copy out begins only when its room is needed."""
        move = make_move(problem.step, self.gap, tier, self.leave, self.fetch)
        return msgspec.structs.replace(move, out_start=move.out_wait)


def evict_on_demand(problem: Problem, fetches: Mapping[int, int], order: Order) -> list[Stay]:
    """Who leaves where, and comes back; where `fetches` says for its storage, or on demand."""
    ticks = problem.step.ticks
    levels = problem.simulator.shape([]).during.astype(np.int64).copy()
    gaps = find_gaps(problem) if problem.tiers() else []
    free = {gap.storage: tick_at_or_after(ticks, gap.start) for gap in gaps}
    here, gone = dict.fromkeys(gaps), list[Stay]()
    for op in range(len(levels)):
        if levels[op] <= problem.limit:
            continue
        leave = tick_at_or_before(ticks, op)
        able = [gap for gap in here if free[gap.storage] <= leave and gap.end > op]
        for gap in order(op, able):
            fetch = fetches.get(gap.storage, gap.end)
            stay = Stay(gap, leave, fetch if fetch > op else gap.end)
            levels[leave : stay.fetch] -= gap.num_bytes
            gone.append(stay)
            del here[gap]
            if levels[op] <= problem.limit:
                break
    return gone
