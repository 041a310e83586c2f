"""Online: blocks of powers of two, halved until they fit and joined with their other half again.

The pool is a row of chunks as large as the largest block takes, as many as are needed. The
smallest free block that is large enough is taken, the lowest of equal ones, and its lower half
where it is halved. What a block takes beyond its bytes is lost as long as it lives.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from legroom.memory.pool.lives import Life, moments
from legroom.memory.pool.place import ALLOCATORS, Pool


@ALLOCATORS.register("buddy")
def buddy(lives: Sequence[Life]) -> Pool:
    """Online: powers of two, halved until they fit and joined again when freed."""
    orders = [_order(life.num_bytes) for life in lives]
    halves, addresses = Halves(max(orders, default=0)), [0] * len(lives)
    for is_start, i in moments(lives):
        if is_start:
            addresses[i] = halves.take(orders[i])
        else:
            halves.give(addresses[i], orders[i])
    return Pool(tuple(addresses), halves.top)


def _order(num_bytes: int) -> int:
    """The power of two that holds so many bytes."""
    return max(num_bytes - 1, 0).bit_length()


class Halves:
    """Free blocks of each power of two, lowest address first."""

    def __init__(self, largest: int) -> None:
        self._largest, self._end = largest, 0
        self._free: list[list[int]] = [[] for _ in range(largest + 1)]
        self.top = 0
        """Where the highest block ever ended."""

    def take(self, order: int) -> int:
        """The address of a block of so many powers of two."""
        found = next((k for k in range(order, self._largest + 1) if self._free[k]), -1)
        if found < 0:
            found = self._largest
            self._free[found].append(self._end)
            self._end += 1 << found
        address = self._free[found].pop(0)
        for k in range(found - 1, order - 1, -1):
            insort(self._free[k], address + (1 << k))
        self.top = max(self.top, address + (1 << order))
        return address

    def give(self, address: int, order: int) -> None:
        """Free a block, and join it with its other half for as long as that is free."""
        while order < self._largest:
            row, other = self._free[order], address ^ (1 << order)
            at = bisect_left(row, other)
            if at == len(row) or row[at] != other:
                break
            del row[at]
            address, order = min(address, other), order + 1
        insort(self._free[order], address)
