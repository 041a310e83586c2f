"""Evict what came first, fetch what the next ops will ask for (DeepUM, Jung et al. 2023).

The driver learns which blocks follow each other; once it has, it fetches what the next N kernels
will touch, and evicts what was brought in longest ago and is not among that. With a step that is
known, the tables are the step itself. Here whole saved tensors move, the oldest first, as few as
fit, and each is fetched N ops before its use or as soon after that as there is room. Faults, and
pages of 2 MiB, belong to its driver.
"""

from bisect import bisect_left

from legroom.memory.actions import Move
from legroom.memory.gaps import Gap, fewest, find_gaps, link_s, make_move, nearest_tier
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import tighten

AHEAD = 32
"""Kernels."""


@POLICIES.register("deepum")
def deepum(problem: Problem) -> Choice:
    """Move the oldest tensors, as few as fit, each fetched 32 ops ahead."""
    gaps = find_gaps(problem)
    moves = fewest(problem, len(gaps), lambda n: _moves(problem, gaps[:n]))
    return Choice(list(moves), f"the oldest {len(moves)} of {len(gaps)} tensors moved")


def _moves(problem: Problem, gaps: list[Gap]) -> list[Move]:
    simulator, room, free_s, moves = problem.simulator, dict[str, int](), 0.0, []
    for gap in gaps:
        tier = nearest_tier(problem, gap.num_bytes, room)
        if tier is not None:
            free_s = max(free_s, gap.start_s) + link_s(simulator, tier, gap.num_bytes, out=True)
            leave = bisect_left(simulator.until_s, free_s)
            moves.append(make_move(problem.step, gap, tier, leave, gap.end - AHEAD))
    return tighten(simulator, moves, [], problem.limit)
