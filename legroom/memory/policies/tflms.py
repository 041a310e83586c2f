"""Move what is used far apart in the graph, fetched by control edges (TFLMS, Le et al. 2018).

A tensor whose uses lie more than a threshold of levels apart leaves as soon as it is made. It comes
back when a control op has ended: by the chain rule, the first backward op that belongs to what
forward made `LEAST_AHEAD` levels or more after it. An eager step has one op to a level. The graph
tells no sizes and no times, so the second version searches for settings with a simulator: for the
largest threshold that fits, first with copies that nobody waits for before a use, then with copies
out that are waited for at once, then with copies in on demand as well. The first version, all
tensors and no search, is `tflms_v1`.
"""

from bisect import bisect_left

from legroom.memory.actions import Move
from legroom.memory.gaps import Gap, fewest, find_gaps, link_s, make_move, nearest_tier
from legroom.memory.planner import POLICIES, Choice, Problem

LEAST_AHEAD = 1
"""Levels that the chain rule passes over."""
ASYNC, SYNC_OUT, SYNC = range(3)


@POLICIES.register("tflms_v1")
def tflms_v1(problem: Problem) -> Choice:
    """Move every saved tensor, and fetch each when the next layer's backward runs."""
    moves = _moves(problem, find_gaps(problem), ASYNC)
    return Choice(list(moves), f"{len(moves)} tensors moved, fetched by the chain rule")


@POLICIES.register("tflms")
def tflms(problem: Problem) -> Choice:
    """Move tensors whose uses are furthest apart, as few as fit, fetched by the chain rule."""
    gaps = sorted(find_gaps(problem), key=lambda gap: (gap.start - gap.end, gap.storage))
    for mode in (ASYNC, SYNC_OUT, SYNC):
        if problem.fits(_moves(problem, gaps, mode)):
            return _fewest(problem, gaps, mode)
    return Choice(list(_moves(problem, gaps, SYNC)), f"all {len(gaps)} tensors moved, in sync")


def _fewest(problem: Problem, gaps: list[Gap], mode: int) -> Choice:
    moves = fewest(problem, len(gaps), lambda n: _moves(problem, gaps[:n], mode))
    return Choice(list(moves), f"{len(moves)} of {len(gaps)} tensors moved, in sync mode {mode}")


def _moves(problem: Problem, gaps: list[Gap], mode: int) -> list[Move]:
    step, simulator, room = problem.step, problem.simulator, dict[str, int]()
    packed = sorted((step.packed(s), step.first_use(s)) for s in step.saves)
    places = [at for at, _ in packed]
    free_s, found = 0.0, []
    for gap in sorted(gaps, key=lambda gap: gap.start):
        tier = nearest_tier(problem, gap.num_bytes, room)
        if tier is None:
            continue
        later = packed[bisect_left(places, step.packed(gap.storage) + LEAST_AHEAD) :]
        trigger = next((use for _, use in later if gap.start <= use < gap.end), gap.end)
        free_s = max(free_s, gap.start_s) + link_s(simulator, tier, gap.num_bytes, out=True)
        leave = bisect_left(simulator.until_s, free_s) if mode == ASYNC else gap.start
        trigger = gap.end if mode == SYNC else trigger
        found.append(make_move(step, gap, tier, leave, trigger))
    return found
