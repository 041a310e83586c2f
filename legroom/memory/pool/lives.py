"""What a step under a plan takes and gives back of device memory, in order, addresses left open.

The order is that of `arena.stays`, by which layouts are made: a storage that moves is two blocks,
what a block that runs again makes are blocks of their own, scratch is one for each op. What was
there before the step comes first; its parked states do not, but the windows they pass through do.

[Note: the same peak] The most bytes that live at once are those of the simulator's shape, to the
byte. Few plans could tell them apart: blocks that run again at one and the same position go side by
side here, one after the other there; an input that only the start of a replay needs is let go just
before it here; windows of parked states are cut in three, and lose up to two bytes; and scratch
below zero, where a result takes another's place, counts as none here.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from legroom.memory.actions import Action
from legroom.memory.arena import ROUND_BYTES, ordered, stays
from legroom.memory.parking import update_position
from legroom.memory.simulate import Simulator


class Life(NamedTuple):
    """One block: taken at a moment, given back at another, in between its bytes are nobody else's.

    What ends at a moment is gone before what begins there.
    """

    begins: int
    ends: int
    num_bytes: int
    lasts: bool = False
    """It is there as backward begins, or as the update does: long-lived, for who asks."""


def lives_of(simulator: Simulator, actions: Sequence[Action]) -> list[Life]:
    """All blocks of a step under these actions, in the order in which they are taken."""
    step = simulator.step
    spans = list(stays(simulator, actions, since=-1))
    marks = (step.turn, update_position(step))
    begins, found = dict[int, int](), list[Life]()
    for moment, (is_start, number, num_bytes) in enumerate(ordered(spans)):
        if is_start:
            begins[number] = moment
        else:
            start, end, _ = spans[number]
            lasts = any(start < mark < end for mark in marks)
            found.append(Life(begins[number], moment, num_bytes, lasts))
    return sorted(found)


def moments(lives: Sequence[Life]) -> list[tuple[bool, int]]:
    """(whether it begins, which) of all lives in order."""
    rows = [(life.begins, True, i) for i, life in enumerate(lives)]
    rows += [(life.ends, False, i) for i, life in enumerate(lives)]
    return [(is_start, i) for _, is_start, i in sorted(rows)]


def live_peak(lives: Sequence[Life]) -> int:
    """Most bytes at once: no pool is smaller."""
    level = most = 0
    for is_start, i in moments(lives):
        level += lives[i].num_bytes if is_start else -lives[i].num_bytes
        most = max(most, level)
    return most


def rounded(lives: Iterable[Life], unit: int = ROUND_BYTES) -> list[Life]:
    """The same in whole units, as a device hands them out."""
    return [life._replace(num_bytes=-(-life.num_bytes // unit) * unit) for life in lives]
