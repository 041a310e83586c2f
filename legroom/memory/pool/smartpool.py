"""Offline: the largest block first, into the smallest hole (SmartPool, Zhang et al. 2019).

All lives are known before the first is placed, for a step repeats: intervals are coloured with
addresses, weighted by bytes. Blocks go by size, of equal ones the earlier first; each looks at
those placed that live when it does, and takes the smallest gap between them that is large enough,
the lowest of equal ones, or the end. What lives all along, across steps, lies at the bottom and is
in nobody's way. The paper's first fit instead of best fit is left out.
"""

from collections.abc import Sequence

import numpy as np

from legroom.memory.pool.lives import Life
from legroom.memory.pool.place import ALLOCATORS, Pool

BEGINS, ENDS, LOW, HIGH = range(4)


@ALLOCATORS.register("smartpool")
def smartpool(lives: Sequence[Life]) -> Pool:
    """Offline: largest block first, into the smallest hole among those that live when it does."""
    addresses, floor, rest = [0] * len(lives), 0, list[int]()
    first_end = min((life.ends for life in lives), default=0)
    last_begin = max((life.begins for life in lives), default=0)
    for i, life in enumerate(lives):
        if life.begins < first_end and life.ends > last_begin:
            addresses[i] = floor
            floor += life.num_bytes
        else:
            rest.append(i)
    shelf = Shelf(len(rest), floor)
    for i in sorted(rest, key=lambda i: (-lives[i].num_bytes, lives[i].begins)):
        addresses[i] = shelf.put(lives[i])
    return Pool(tuple(addresses), shelf.top)


class Shelf:
    """Blocks placed so far, in order of address, above a floor."""

    def __init__(self, most: int, floor: int) -> None:
        self._rows = np.zeros((4, most + 1), dtype=np.int64)
        self._count, self._floor = 0, floor
        self.top = floor

    def put(self, life: Life) -> int:
        """Place a block; its address."""
        address, n = self._hole(life), self._count
        at = int(np.searchsorted(self._rows[LOW, :n], address))
        self._rows[:, at + 1 : n + 1] = self._rows[:, at:n].copy()
        end = address + life.num_bytes
        self._rows[:, at] = (life.begins, life.ends, address, end)
        self._count, self.top = n + 1, max(self.top, end)
        return address

    def _hole(self, life: Life) -> int:
        rows = self._rows[:, : self._count]
        beside = rows[:, (rows[BEGINS] < life.ends) & (rows[ENDS] > life.begins)]
        tops = np.maximum.accumulate(np.concatenate(([self._floor], beside[HIGH])))
        gaps = beside[LOW] - tops[:-1]
        large = np.flatnonzero(gaps >= life.num_bytes)
        return int(tops[large[gaps[large].argmin()]] if large.size else tops[-1])
