"""Move by intervals of layers, what the next interval needs first (Sentinel, Ren et al. 2021).

A step is cut into intervals of equally many layers. What an interval has used and will not use
again leaves at once; what the next one needs is fetched while this one runs, and waited for where
it is used. Tensors that live within one layer never move. The length of intervals is chosen by
trying each in the simulator; the paper has a formula for it, of the same terms. That it counts
accesses by page faults, and lays tensors out in pages by their lives, is its kernel's work.
"""

from bisect import bisect_left, bisect_right

from legroom.memory.actions import Move
from legroom.memory.gaps import Layer, find_gaps, find_layers, link_s, make_move, nearest_tier
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import tighten

LONGEST = 6
"""Layers of an interval, at most: more are tried by doubling."""


@POLICIES.register("sentinel")
def sentinel(problem: Problem) -> Choice:
    """Move tensors between intervals of layers, whose length the simulator chooses."""
    layers = find_layers(problem.step)
    tried = sorted({*range(1, min(LONGEST, len(layers)) + 1), *_doubled(len(layers))})
    best: tuple[tuple[int, float], int, list[Move]] | None = None
    for length in tried:
        moves = _moves(problem, layers, length)
        over = max(problem.simulator.shape(moves).peak - problem.limit, 0)
        rank = (over, problem.simulator.time(moves))
        if best is None or rank < best[0]:
            best = rank, length, moves
    assert best is not None
    return Choice(list(best[2]), f"{len(best[2])} tensors moved, in intervals of {best[1]} layers")


def _doubled(count: int) -> list[int]:
    return [1 << k for k in range(3, 12) if 1 << k <= count // 2]


def _moves(problem: Problem, layers: list[Layer], length: int) -> list[Move]:
    step, simulator, until = problem.step, problem.simulator, problem.simulator.until_s
    there = [layer.first for layer in layers[::length]]
    back = sorted(layer.back for layer in layers[::length] if layer.back < len(step.ops))
    room, free_s, moves = dict[str, int](), 0.0, []
    for gap in find_gaps(problem):
        starts = bisect_right(there, gap.start) - 1
        begun = bisect_right(back, gap.end) - 1
        fetch = back[begun - 1] if begun > 0 else step.turn
        if starts == len(there) - 1 and begun <= 0:
            continue  # both uses lie around the turn, in one interval or two
        tier = nearest_tier(problem, gap.num_bytes, room)
        if tier is not None:
            free_s = max(free_s, gap.start_s) + link_s(simulator, tier, gap.num_bytes, out=True)
            moves.append(make_move(step, gap, tier, bisect_left(until, free_s), fetch))
    return tighten(simulator, moves, [], problem.limit)
