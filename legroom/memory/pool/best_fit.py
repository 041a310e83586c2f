"""Online: the smallest gap that fits, the lowest of equal ones; neighbours merge when freed.

What a caching allocator does within one segment that may grow. The free end of the pool is taken
only where no gap fits, and given up as soon as it is free: the pool is as large as the highest
block ever reached.
"""

from collections.abc import Sequence

from legroom.memory.arena import Arena
from legroom.memory.pool.lives import Life, moments
from legroom.memory.pool.place import ALLOCATORS, Pool


@ALLOCATORS.register("best_fit")
def best_fit(lives: Sequence[Life]) -> Pool:
    """Online: the smallest gap that fits; neighbours merge when freed."""
    end, addresses, most = OpenEnd(), [0] * len(lives), 0
    for is_start, i in moments(lives):
        if is_start:
            addresses[i] = end.take(lives[i].num_bytes)
            most = max(most, end.num_bytes)
        else:
            end.give(addresses[i], lives[i].num_bytes)
    return Pool(tuple(addresses), most)


class OpenEnd:
    """Addresses from 0 as far as needed, by best fit."""

    def __init__(self) -> None:
        self._arena = Arena((0,), unit=1)

    @property
    def num_bytes(self) -> int:
        """Where the highest block ends."""
        return self._arena.stretches[0]

    def take(self, num_bytes: int) -> int:
        """The address of a new block."""
        return self._arena.take(num_bytes)[0]

    def give(self, address: int, num_bytes: int) -> None:
        """Free a block, and the end of the pool with it where nothing is left there."""
        self._arena.give(address, num_bytes)
        self._arena.trim()
