"""Evict what was not used lately to host, then disk; read ahead (DRAGON, Markthub et al. 2018).

Files on a drive are mapped into the device's memory by way of the host's page cache. When the
device is full, what was not used since it last was full goes, in order of address, into the page
cache; the step waits. What the step makes and drops is written to the drive only once the cache is
filled to a mark, the oldest first. A use of what is away fetches it, and reads ahead what follows.

Here tensors move whole, addresses are the order in which tensors were made, and a tensor is either
in the cache or on the drive for all of its gap. The kernel reads ahead towards higher addresses;
backward walks to lower ones, so here the next tensors in order of use are read ahead, without which
nothing would be. Not run: faults and their cost, chunks of 2 MiB, hints on regions that are only
read or only written (a saved tensor is written once, and read).
"""

from collections.abc import Sequence

from legroom.memory.actions import Move
from legroom.memory.gaps import Gap
from legroom.memory.paging import Stay, evict_on_demand
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import tighten

AHEAD = 4
"""Tensors read ahead with one that is asked for."""
MARK = 0.9
"""Of the host's budget: what the page cache may hold before it writes to the drive."""


@POLICIES.register("dragon")
def dragon(problem: Problem) -> Choice:
    """Evict what was not used lately to the host, then to the disk, and read a few ahead."""
    stays = read_ahead(evict_on_demand(problem, {}, _Clock().order))
    moves = tighten(problem.simulator, _cached(problem, stays), [], problem.limit)
    disk = sum(move.tier == "disk" for move in moves)
    return Choice(list(moves), f"{len(moves)} tensors evicted on demand, {disk} of them to disk")


class _Clock:
    """Which tensors were used since memory last ran out."""

    def __init__(self) -> None:
        self.cleared = 0

    def order(self, op: int, gaps: Sequence[Gap]) -> list[Gap]:
        """Those not used lately first, and then by address; all marks are cleared."""
        lately, self.cleared = self.cleared, op
        return sorted(gaps, key=lambda gap: (gap.start > lately, gap.storage))


def read_ahead(stays: Sequence[Stay]) -> list[Stay]:
    """The first use of what is away fetches it; the next few then come with it."""
    found, begin = list[Stay](), 0
    for i, stay in enumerate(sorted(stays, key=lambda x: (x.gap.end, x.gap.storage))):
        if i % (AHEAD + 1) == 0:
            begin = stay.gap.end
        found.append(stay._replace(fetch=min(max(begin, stay.leave), stay.gap.end)))
    return found


def _cached(problem: Problem, stays: Sequence[Stay]) -> list[Move]:
    """The youngest in the page cache up to its mark, the others on the drive, if there is one."""
    room = {tier: problem.budget[tier] for tier in problem.tiers()}
    if len(room) > 1:
        room["host"] = int(MARK * room["host"])
    moves = []
    for stay in sorted(stays, key=lambda x: (-x.leave, x.gap.storage)):
        tier = next((t for t, left in room.items() if left >= stay.gap.num_bytes), None)
        if tier is not None:
            room[tier] -= stay.gap.num_bytes
            moves.append(stay.move(problem, tier))
    return moves
