"""Keep a share of what blocks save, by the knapsack of torch's activation memory budget.

torch's partitioner is given a share of the bytes it would save, and keeps what is worth most: a
knapsack whose weight is bytes and whose value is the time that need not be run again. Here each
block brings its variants, the hull of time against bytes, and exactly one of them is taken; one
table over quantised bytes answers for all shares. A budget here is a peak and not a share, so the
share is searched: the largest of a row of shares whose choice fits, then more by halving up to the
next. A smaller share may need more at the peak, so halving alone would miss it.

What differs from the compiler's: variants take the place of the min-cut over single nodes and of
its list of what may never run again; fusion is not counted; the time of an op is the recorded one,
where torch guesses it from its operations unless told otherwise. A share is rounded against us.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from legroom.memory.actions import Action, Recompute
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.trace import Step

QUANTA = 10_000
"""Bytes are counted in about so many parts of all that can be kept."""
SHARES = 64
"""Shares that are looked at one by one, the largest first."""


class Way(NamedTuple):
    """One way to run a block: as it is, or as a variant."""

    variant: str
    """Empty where the block is kept."""
    kept_bytes: int
    """Of what could be dropped."""
    replay_s: float


@POLICIES.register("torch_budget")
def torch_budget(problem: Problem) -> Choice:
    """Keep the largest share of saved bytes that fits, so that least time is run again."""
    knapsack = Knapsack(problem.step)

    def fits(quanta: int) -> bool:
        return problem.fits(knapsack.actions(quanta))

    marks = sorted({knapsack.most * i // SHARES for i in range(SHARES + 1)})
    low = next((n for n in reversed(range(len(marks))) if fits(marks[n])), 0)
    between = range(marks[low], marks[low + 1] if low + 1 < len(marks) else marks[low] + 1)
    at = between[max(bisect_right(between, False, key=lambda n: not fits(n)) - 1, 0)]
    share = at / max(knapsack.most, 1)
    return Choice(knapsack.actions(at), f"{share:.1%} of what could be dropped may be kept")


def ways(step: Step) -> dict[int, list[Way]]:
    """By block that can run again: what each way to run it keeps, and takes."""
    found = {}
    for b, block in enumerate(step.blocks):
        variants = [v for v in block.variants if v.drops and not block.barred]
        most = max((v.dropped_bytes for v in variants), default=0)
        if most:
            rows = [Way(v.name, most - v.dropped_bytes, v.replay_s) for v in variants]
            found[b] = [Way("", most, 0.0), *rows]
    return found


class Knapsack:
    """The least time to run again for every number of quanta that may be kept."""

    def __init__(self, step: Step) -> None:
        self.ways = ways(step)
        total = sum(rows[0].kept_bytes for rows in self.ways.values())
        self.quantum = max(1, -(-total // QUANTA))
        self.most = sum(self._weight(rows[0]) for rows in self.ways.values())
        best = np.zeros(self.most + 1)
        self._taken: list[npt.NDArray[np.int8]] = []
        for rows in self.ways.values():
            options = np.stack([self._shifted(best, way) for way in rows])
            self._taken.append(options.argmin(axis=0).astype(np.int8))
            best = options.min(axis=0)
        self.replay_s = best
        """By quanta."""

    def _weight(self, way: Way) -> int:
        return -(-way.kept_bytes // self.quantum)

    def _shifted(self, best: npt.NDArray[np.float64], way: Way) -> npt.NDArray[np.float64]:
        weight = self._weight(way)
        found = np.full(len(best), np.inf)
        found[weight:] = best[: len(best) - weight] + way.replay_s
        return found

    def actions(self, quanta: int) -> list[Action]:
        """What is run again where so many quanta may be kept."""
        found: list[Action] = []
        for (b, rows), taken in zip(reversed(self.ways.items()), self._taken[::-1], strict=True):
            way = rows[taken[quanta]]
            quanta -= self._weight(way)
            if way.variant:
                found.append(Recompute(block=b, variant=way.variant))
        return found[::-1]
