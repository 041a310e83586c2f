"""Layout: device memory mapped for a whole step, in stretches that the allocator does not merge.

[Note: walls] Stretches lie one after the other, with small blocks around them that stay. The
allocator gives a block the smallest gap that fits, so a wall would lie in any gap that weights or
states left, and part nothing. So those gaps are filled first, all room is taken as one block and
given back, and stretches and walls are then cut from that in turn, it being the only gap there is.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from legroom.memory.arena import (
    EFFORT,
    ROUND_BYTES,
    WALL,
    WHOLE,
    Event,
    Placement,
    arrange,
    suits,
)
from legroom.memory.history import recorded

MOST_TIMES = 4
"""How often one layout is made: where plans take turns, making it anew costs more than it saves."""
LASTING = 16
"""Unless the one before it has served for so many steps."""
SHORT = (0.0, 0.01, 0.02, 0.04, 0.08)
"""Shares of itself by which a layout may be found too small."""
SPARE = (0.16, 0.12, 0.08, 0.06, 0.04, 0.02)
"""And those by which it may be found larger than it need be."""
Key = tuple[str, tuple[int, ...]]
"""Whose layout, and its stretches: steps of other shapes ask for other things in the same ones."""


class Layout:
    """The stretches that one device's memory is in now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stretches: tuple[int, ...] = ()
        self._mapped = self._freed = 0
        """Bytes of it, and those that the allocator had given back by then, since ever."""
        self._walls: list[torch.Tensor] = []
        self._given: dict[tuple[int, ...], int] = {}
        self._seen = {_key(WHOLE)}
        """Those in which a step was watched, or that were made by what one asked for."""
        self._asked: dict[Key, list[Event]] = {}
        """What those steps asked for, until it is made use of."""
        self._latest: list[Event] = []
        """What the last of them asked for, until what it left is told."""
        self._watches: Key | None = None
        """The one that the next step is watched for."""
        self._served = 0
        """Steps since it was made."""
        self.lost = 0
        """Bytes held for what stays, in segments that it does not fill, as found last."""

    def take_up(self, placement: Placement, limit: int) -> Placement:
        """Have memory lie as a placement wants it, where that wants anything, up to a limit.

        The first step in it is watched. If what that asked for finds no room in it but does in
        another, that is made; if in none, the answer says by how much the room is too small.

        [Note: room] A growing segment is refused at the cap as if all of a new block were new
        memory, even where most of it is mapped already; the allocator then gives all free memory
        back and maps it again, every step. With the whole room mapped it never has to grow.
        """
        self._watches = None
        before, placement = placement.missing_bytes, self._learned(placement)
        stretches = placement.stretches
        if placement.missing_bytes > before:
            return placement
        if self.stretches and self._count_freed() > self._freed:  # by whoever, between steps
            self._given.pop(self.stretches, None)
            self.give_up()
        if stretches == self.stretches:
            self._served += 1
        elif stretches:
            if self._served >= LASTING:
                self._given.clear()
            self._served, times = 0, self._given.get(stretches, 0)
            if times < MOST_TIMES:
                self._given[stretches] = times + 1
                short = self._map(stretches, limit)
                placement = placement._replace(missing_bytes=max(short, placement.missing_bytes))
        if stretches == self.stretches != () and _key(placement) not in self._seen:
            self._watches = _key(placement)
        return placement

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note what the step in here asks for, if it is the first in its layout."""
        key, self._watches = self._watches, None
        if key is None:
            yield
            return
        asked: list[Event] = []
        with recorded(self.device, asked):
            yield
        self._seen.add(key)
        self._asked[key] = asked

    def unlearn(self) -> None:
        """The last step was not like the others: if it was watched, that is forgotten."""
        self._asked.clear()

    def spare_bytes(self) -> int:
        """What the last step that was watched left of its layout; 0 if that was told before."""
        asked, self._latest = self._latest, []
        for share in SPARE if asked else ():
            if not arrange(asked, int(self._mapped * (1 - share)), WALL, 0).missing_bytes:
                return int(self._mapped * share)
        return 0

    @property
    def walls_bytes(self) -> int:
        """What its walls take."""
        return sum(wall.numel() for wall in self._walls)

    def look(self) -> None:
        """Find out what is lost: what segments have free when all that can be was given back."""
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated(self.device)
        self.lost = torch.cuda.memory_reserved(self.device) - allocated

    def give_up(self) -> None:
        """The allocator has given its free memory back, or others are free to take it."""
        self._walls.clear()
        self.stretches = ()

    def forget(self) -> None:
        """As before the first."""
        self.give_up()
        self._given.clear()
        self._asked.clear()
        self._latest = []

    def _learned(self, placement: Placement) -> Placement:
        """The same, or what suits better what a step in it asked for, or how short it is."""
        asked = self._asked.pop(_key(placement), [])
        if not asked:
            return placement
        self._latest = asked
        if suits(asked, placement.stretches):
            return placement
        for share in SHORT:
            effort = 0 if share else EFFORT
            real = arrange(asked, int(self._mapped * (1 + share)), WALL, effort)
            if not real.missing_bytes:
                break
        if not share:
            real = real._replace(whose=placement.whose)
            self._seen.add(_key(real))
            return real
        short = max(int(self._mapped * share), placement.missing_bytes)
        return placement._replace(missing_bytes=short)

    def _map(self, stretches: tuple[int, ...], limit: int) -> int:
        """Take memory for them, the last as large as may be; by how much that is too small."""
        self.give_up()
        self.stretches, small = stretches, self._count_small("peak")
        self.look()
        held = torch.cuda.memory_reserved(self.device) + (len(stretches) + 1) * WALL
        held += max(small - self._count_small("current"), 0)  # they come back in the next step
        last = limit - held - sum(stretches[:-1])
        sizes = [*stretches[:-1], last // ROUND_BYTES * ROUND_BYTES]
        if sizes[-1] < max(0, *sizes):  # more is held than the plan knows of
            sizes = [max(sum(sizes), 0)]
        self._mapped = 0
        blocks: list[torch.Tensor] = []
        with contextlib.suppress(torch.OutOfMemoryError):  # others may hold the memory
            self._fill_gaps(blocks)
            whole = sum(sizes) + (len(sizes) + 1) * WALL
            self._take(whole)
            self._mapped = whole
            self._walls.append(self._take(WALL))
            for size in sizes:
                blocks.append(self._take(size))
                self._walls.append(self._take(WALL))
        self._freed = self._count_freed()
        return stretches[-1] - last

    def _fill_gaps(self, blocks: list[torch.Tensor]) -> None:
        """Take all gaps that a wall could lie in; see [Note: walls]."""
        held = torch.cuda.memory_reserved(self.device)
        for _ in range((held - torch.cuda.memory_allocated(self.device)) // WALL):
            blocks.append(self._take(WALL))
            if torch.cuda.memory_reserved(self.device) > held:  # there was none left
                blocks.pop()
                return torch.cuda.empty_cache()

    def _count_freed(self) -> int:
        return int(self._reserved()["all"]["freed"])

    def _count_small(self, when: str) -> int:
        """Bytes held for small blocks, which lie apart from all others."""
        return int(self._reserved()["small_pool"][when])

    def _reserved(self) -> Any:
        return torch.cuda.memory_stats_as_nested_dict(self.device)["reserved_bytes"]

    def _take(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


def _key(placement: Placement) -> Key:
    return placement.whose, placement.stretches
