"""Pool, the registry of allocators, the law that their addresses keep, and what a pool loses."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from legroom.core.errors import RecordError
from legroom.core.registry import Registry
from legroom.memory.actions import Action
from legroom.memory.pool.lives import Life, live_peak, lives_of, moments, rounded
from legroom.memory.simulate import Simulator


class Pool(NamedTuple):
    """Where each of some lives lies, and how large a pool that takes."""

    addresses: tuple[int, ...]
    num_bytes: int

    def check(self, lives: Sequence[Life]) -> Self:
        """Raise RecordError for a block outside the pool, or two in one place at one time."""
        live: list[tuple[int, int, int]] = []
        for is_start, i in moments(lives):
            row = (self.addresses[i], self.addresses[i] + lives[i].num_bytes, i)
            if not is_start:
                live.remove(row)
                continue
            if row[0] < 0 or row[1] > self.num_bytes:
                raise RecordError(f"pool: block {i} lies outside of {self.num_bytes} bytes")
            at = bisect_left(live, row)
            for low, high, other in live[max(at - 1, 0) : at + 1]:
                if low < row[1] and row[0] < high:
                    raise RecordError(f"pool: block {i} lies in block {other}, which still lives")
            insort(live, row)
        return self


Allocator = Callable[[Sequence[Life]], Pool]
ALLOCATORS: Registry[Allocator] = Registry("allocator")


class Figures(NamedTuple):
    """What a plan keeps alive at its peak, and the pool that each allocator needs for it."""

    live_bytes: int
    pool_bytes: dict[str, int]

    def overhead(self, allocator: str) -> float:
        """What a pool is larger than what lives in it, as a share of that."""
        return self.pool_bytes[allocator] / self.live_bytes - 1 if self.live_bytes else 0.0


def figures(simulator: Simulator, actions: Sequence[Action]) -> Figures:
    """Each allocator's pool for a plan; blocks are rounded up first, as a device's are."""
    lives = lives_of(simulator, actions)
    whole = rounded(lives)
    pools = {name: ALLOCATORS[name](whole).check(whole).num_bytes for name in ALLOCATORS}
    return Figures(live_peak(lives), pools)
