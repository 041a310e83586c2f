"""Programs over choices whose rows of memory are added where an answer is found to be over.

Of the thousands of heights of a step a few decide. The program begins with the highest of each run
of positions; each answer is held against all heights, and those that are over become rows. Every
row is exact, so the first answer that is nowhere over is the best of all.
"""

import time
from collections.abc import Iterable, Sequence

import numpy as np

from legroom.memory.policies.footprint import Footprint
from legroom.memory.policies.rows import Rows, Values

TOLERANCE = 1e-5
"""Divided choices may be so far over, as a share of the highest of all heights: solvers are."""
LEAST_S = 0.02
"""A solver that is called at all is given so long."""
COST = 1e3
"""What all choices cost together: solvers stop at differences of a millionth."""


class Lazy:
    """Choices with their prices, at most one of each group, other rows, and heights to be kept."""

    def __init__(
        self,
        footprint: Footprint,
        cost: Sequence[float],
        groups: Iterable[Sequence[int]],
        others: Iterable[tuple[dict[int, float], float]] = (),
    ) -> None:
        self.footprint, self.groups, self.others = footprint, list(groups), list(others)
        self.proven = False
        """Whether the last answer is the best there is, rather than the best found in time."""
        self.price = COST / (sum(cost) or 1.0)
        """Of a second."""
        self.cost = np.zeros(footprint.count + 1)
        self.cost[: len(cost)] = np.array(cost) * self.price
        self.whole = np.arange(footprint.count + 1) < len(cost)
        self.scale = 1.0 / max(float(footprint.base.max()), 1.0)
        self._runs = footprint.runs()
        self._spots = {int(run[footprint.base[run].argmax()]): 0.0 for run in self._runs}
        """Heights that are rows, with what an answer was over though it was one."""
        self._terms: dict[int, dict[int, float]] = {}

    def cheapest(self, limit: float, *, until: float, whole: bool = True) -> Values | None:
        """The cheapest choices that keep a limit, in part if not `whole`; None if there are none.

        If the clock passes `until`, what was found last, which may be over.
        """
        return self._settled(limit, until, whole)

    def smallest(self, *, until: float) -> Values | None:
        """The choices with the lowest peak, the cheapest of them; None if time was too short."""
        return self._settled(None, until, True)

    def _settled(self, limit: float | None, until: float, whole: bool) -> Values | None:
        count = self.footprint.count
        while True:
            left = until - time.monotonic()
            seconds, begun = max(left / 2, LEAST_S), time.monotonic()
            found = self._once(limit, whole, seconds)
            in_time = time.monotonic() - begun < seconds
            if found is None:
                return None
            most = found[count] / self.scale if limit is None else limit
            x = self.footprint.complete(np.round(found[:count]) if whole else found[:count])
            exact = whole and limit is not None
            over = self._cut(x, most, exact)
            self.proven = in_time and not over
            if not over or time.monotonic() > until:
                return x

    def _once(self, limit: float | None, whole: bool, seconds: float) -> Values | None:
        rows, peak = Rows(), self.footprint.count
        for spot, over in self._spots.items():
            bound = (limit or 0.0) - over - float(self.footprint.base[spot])
            terms = self._row(spot) if limit is not None else self._row(spot) | {peak: -1.0}
            rows.add(terms, bound * self.scale)
        for terms, bound in self.others:
            rows.add(terms, bound)
        for group in self.groups:
            rows.add(dict.fromkeys(group, 1.0), 1.0)
        for link in self.footprint.links:
            link.add_rows(rows)
        cost = self.cost if limit is not None else np.append(self.cost[:-1] * 1e-6, COST)
        upper = [*[1.0] * peak, np.inf]
        return rows.cheapest(cost, upper, self.whole & whole, time_limit_s=seconds, gap=0.0)

    def _row(self, spot: int) -> dict[int, float]:
        if spot not in self._terms:
            terms = self.footprint.terms(spot)
            self._terms[spot] = {column: n * self.scale for column, n in terms.items()}
        return self._terms[spot]

    def _cut(self, x: Values, most: float, exact: bool) -> bool:
        """Add what is over to the rows; whether there was any."""
        heights, cut = self.footprint.heights(x), False
        slack = 0.5 if exact else TOLERANCE / self.scale
        for run in self._runs:
            spot = int(run[heights[run].argmax()])
            over = heights[spot] - most
            if over <= slack or (spot in self._spots and not exact):
                continue
            # A solver may be over by its tolerance; then it is told to stay below by that much.
            self._spots[spot] = self._spots[spot] + 1.02 * over if spot in self._spots else 0.0
            cut = True
        return cut
