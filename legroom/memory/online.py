"""Decide as memory fills: send away what was saved first, for steps that have no plan.

Backward asks for saved tensors in about the reverse order of their saving, so what was saved
first is needed last: evicting the oldest is what a look into the future would choose.
"""

import weakref
from collections import deque
from collections.abc import Mapping

from legroom.core.errors import BudgetError, TierError
from legroom.core.units import format_bytes
from legroom.memory.mechanisms.entry import Entry, State
from legroom.memory.mechanisms.mover import Mover
from legroom.memory.mechanisms.pool import FreeList
from legroom.memory.mechanisms.tickets import Place

PAGE_BYTES = 4096


SHARE = 0.5
"""Share of the free budget that saved tensors may take; the rest is for work in progress."""


LEAST_ROOM = 256 << 20
"""A budget this small says little of what steps save."""


class Evictor:
    """Bounds the bytes of saved tensors on the device."""

    def __init__(self, limit_bytes: int, tier: str, tier_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.tier = tier
        self.tier_bytes = tier_bytes
        self._free = FreeList(tier_bytes, align=PAGE_BYTES)
        self._here: deque[weakref.ref[Entry]] = deque()
        self._sizes: dict[int, int] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of saved tensors on the device now."""
        return sum(self._sizes.values())

    def add(self, entry: Entry, mover: Mover) -> None:
        """A storage was saved: take it in, and make room for it if need be."""
        self._here.append(weakref.ref(entry))
        self._sizes[id(entry)] = entry.num_bytes
        weakref.finalize(entry, self._sizes.pop, id(entry), None)
        while self.held_bytes > self.limit_bytes and len(self._here) > 1:  # not what was just saved
            oldest = self._here.popleft()()
            if oldest is not None and oldest.state is State.HERE:
                self._evict(oldest, mover)

    def _evict(self, entry: Entry, mover: Mover) -> None:
        offset = self._free.take(entry.num_bytes)
        if offset is None:
            raise TierError(
                f"the {self.tier} tier is full: no room for {format_bytes(entry.num_bytes)} more. "
                f"Give it a larger budget (budget={{'device': ..., '{self.tier}': ...}})"
            )
        entry.place = Place(self.tier, offset, entry.num_bytes)
        weakref.finalize(entry, self._free.give, offset)
        mover.copy_out(entry)
        mover.leave(entry)
        self._sizes.pop(id(entry), None)


def make_evictor(budget: Mapping[str, int], static_bytes: int, saved_bytes: int = 0) -> Evictor:
    """A rule for a budget of which weights and states already take so much.

    `saved_bytes` is what a step was seen to save, if one was: others may save four times that.
    Raises BudgetError when they leave nothing, or when there is no lower tier to move to.
    """
    tier = "host" if budget.get("host") else "disk"
    room = min(budget.get(tier, 0), 4 * (saved_bytes or max(budget["device"], LEAST_ROOM)))
    if room <= 0:
        raise BudgetError(
            "a step without a plan sends what was saved first to a lower tier, and none has a "
            f"budget: give one, budget={{'device': {budget['device']}, '{tier}': '8GiB'}}",
            missing_bytes=0,
        )
    free_bytes = budget["device"] - static_bytes
    if free_bytes <= 0:
        raise BudgetError(
            f"weights and optimizer states take {format_bytes(static_bytes)} of the budget of "
            f"{format_bytes(budget['device'])}: give more, or train fewer weights",
            missing_bytes=-free_bytes,
        )
    return Evictor(int(free_bytes * SHARE), tier, room)
