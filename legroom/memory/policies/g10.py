"""Move idle periods by benefit over cost, on a ledger of the links (G10, Zhang et al. 2023).

An idle period's benefit is its bytes times how long the device would be over its target meanwhile;
its cost, the time of both copies. The best is taken if the ledger, which knows for each op what a
link can still carry while it runs, finds room for both copies. Long periods go to the disk while it
can take them, then to the host; others to the host. Fetches then begin as early as room allows. The
paper also plans weights, and lets pages fault; an eager step holds its weights, and never faults.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from legroom.machine.spec import Link
from legroom.memory.actions import Move
from legroom.memory.gaps import Gap, eager_prefetch, fewest, find_gaps, make_move
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import tighten
from legroom.memory.simulate import Simulator

Floats = npt.NDArray[np.float64]
TARGET = 0.99
"""Of the budget."""
SPARE = 1.25
"""A period has to last so many times as long as both copies to the disk."""


class Ledger:
    """For each link and op, the bytes that it can still carry while the op runs."""

    def __init__(self, simulator: Simulator) -> None:
        self.routes = simulator.routes
        times = np.diff(simulator.until)
        links = {hop for route in self.routes.values() if route for way in route for hop in way}
        self.free: dict[str, Floats] = {hop.name: hop.bytes_per_s * times for hop in links}

    def finish_out(self, tier: str, num_bytes: int, start: int) -> int | None:
        """The op after which a copy out that begins with one op is done on all its links."""
        ends = [self._forward(hop, num_bytes, start) for hop in self._hops(tier, out=True)]
        return None if None in ends else max(end for end in ends if end is not None)

    def latest_in(self, tier: str, num_bytes: int, end: int) -> int | None:
        """The op with which a copy in has to begin to be done before another one."""
        starts = [self._backward(hop, num_bytes, end) for hop in self._hops(tier, out=False)]
        return None if None in starts else min(x for x in starts if x is not None)

    def commit(self, gap: Gap, tier: str, start: int) -> None:
        """Both copies are made."""
        for hop in self._hops(tier, out=True):
            _take(self.free[hop], gap.num_bytes, range(gap.start, start))
        for hop in self._hops(tier, out=False):
            _take(self.free[hop], gap.num_bytes, range(gap.end - 1, start - 1, -1))

    def is_full(self, tier: str, num_bytes: int, start: int, seconds: int) -> bool:
        """Whether the last link to a tier has no room for this much within so many ops."""
        last = self._hops(tier, out=True)[-1]
        return bool(self.free[last][start : start + seconds].sum() < num_bytes)

    def way(self, tier: str) -> Sequence[Link]:
        """The links to a tier."""
        route = self.routes[tier]
        assert route is not None
        return route[0]

    def _hops(self, tier: str, out: bool) -> list[str]:
        route = self.routes[tier]
        assert route is not None
        return [hop.name for hop in (route[0] if out else route[1])]

    def _forward(self, link: str, num_bytes: int, start: int) -> int | None:
        carried = np.cumsum(self.free[link][start:])
        at = int(np.searchsorted(carried, num_bytes))
        return start + at if at < len(carried) else None

    def _backward(self, link: str, num_bytes: int, end: int) -> int | None:
        carried = np.cumsum(self.free[link][:end][::-1])
        at = int(np.searchsorted(carried, num_bytes))
        return end - 1 - at if at < len(carried) else None


def _take(free: Floats, num_bytes: int, ops: range) -> None:
    left = float(num_bytes)
    for k in ops:
        taken = min(left, float(free[k]))
        free[k] -= taken
        left -= taken
        if left <= 0:
            return


@POLICIES.register("g10")
def g10(problem: Problem) -> Choice:
    """Move idle periods by benefit over cost, to disk or host, with early fetches."""
    simulator, step = problem.simulator, problem.step
    target, ledger = int(TARGET * problem.limit), Ledger(simulator)
    levels, times = simulator.shape([]).during.astype(np.int64).copy(), np.diff(simulator.until)
    open_gaps, room = find_gaps(problem), {t: problem.budget[t] for t in problem.tiers()}
    moves: list[Move] = []
    while open_gaps and room and levels.max(initial=0) > target:
        over = np.concatenate(([0.0], np.cumsum((levels[: len(times)] > target) * times)))
        ranks = [
            gap.num_bytes
            * (over[gap.end] - over[gap.start])
            / _cost_s(simulator, gap, next(iter(room)))
            for gap in open_gaps
        ]
        best = int(np.argmax(ranks))
        if ranks[best] <= 0:
            break
        gap = open_gaps.pop(best)
        found = _placed(problem, ledger, gap, room)
        if found is None:
            continue
        tier, leave, fetch = found
        ledger.commit(gap, tier, fetch)
        room[tier] -= gap.num_bytes
        levels[leave + 1 : fetch] -= gap.num_bytes
        moves.append(make_move(step, gap, tier, leave + 1, fetch))
    moves = tighten(simulator, eager_prefetch(simulator, moves, target), [], problem.limit)
    planned = len(moves)
    moves = moves if problem.fits(moves) else _with_evictions(problem, moves, room)
    why = f"{planned} idle periods moved, by benefit over cost"
    if len(moves) > planned:
        why += f"; {len(moves) - planned} evicted as memory ran out"
    return Choice(list(moves), why)


def _with_evictions(problem: Problem, moves: list[Move], room: dict[str, int]) -> list[Move]:
    """What its runtime does where the plan does not reach: evict what was used longest ago."""
    moved = {move.storage for move in moves}
    others = [gap for gap in find_gaps(problem) if gap.storage not in moved]

    def evicted(count: int) -> list[Move]:
        left, more = dict(room), []
        for gap in others[:count]:
            tier = next((t for t, size in left.items() if size >= gap.num_bytes), None)
            if tier is not None:
                left[tier] -= gap.num_bytes
                more.append(make_move(problem.step, gap, tier, gap.start, gap.end))
        return tighten(problem.simulator, [*moves, *more], [], problem.limit)

    return fewest(problem, len(others), evicted)


def _cost_s(simulator: Simulator, gap: Gap, tier: str) -> float:
    """Time of both copies, on all their links."""
    route = simulator.routes[tier]
    assert route is not None
    return sum(
        sum(hop.latency_s for hop in way) + gap.num_bytes / min(hop.bytes_per_s for hop in way)
        for way in route
    )


def _placed(
    problem: Problem, ledger: Ledger, gap: Gap, room: dict[str, int]
) -> tuple[str, int, int] | None:
    """A tier, the op after which a period's bytes are gone, and the op they come back with."""
    order = []
    if "disk" in room and gap.seconds > SPARE * _cost_s(problem.simulator, gap, "disk"):
        until = problem.simulator.until_s
        ahead_s = gap.num_bytes / min(hop.bytes_per_s for hop in ledger.way("disk"))
        ops = bisect_left(until, gap.start_s + ahead_s) - gap.start + 1
        full = ledger.is_full("disk", gap.num_bytes, gap.start, ops)
        order = ["host", "disk"] if full else ["disk", "host"]
    elif "host" in room and gap.seconds > _cost_s(problem.simulator, gap, "host"):
        order = ["host"]
    for tier in order:
        if room.get(tier, 0) >= gap.num_bytes:
            leave = ledger.finish_out(tier, gap.num_bytes, gap.start)
            fetch = ledger.latest_in(tier, gap.num_bytes, gap.end)
            if leave is not None and fetch is not None and leave < fetch:
                return tier, leave, fetch
    return None
