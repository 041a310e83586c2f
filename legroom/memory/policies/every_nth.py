"""Recompute blocks, keeping one each time a share of bytes is used up (Chen et al. 2016).

The paper's budget form walks the graph, adds up bytes, and keeps a result whenever the sum passes
a bound b; then it searches over b. Here the units are blocks: within each run of blocks whose
saved bytes add up to b, all but the last are recomputed. The largest set of kept blocks that fits
the budget wins; the paper scores plans with a static allocator, we with the simulator.
"""

from bisect import bisect_left

from legroom.memory.actions import Action, Recompute
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.trace import FULL


@POLICIES.register("every_nth")
def every_nth(problem: Problem) -> Choice:
    """Recompute all but each n-th block, with the fewest recomputed that fit."""
    sizes = {
        b: block.variants[-1].dropped_bytes
        for b, block in enumerate(problem.step.blocks)
        if block.variants
    }
    bounds = sorted({0, *_bounds(sizes)})
    # A larger bound recomputes more, so the least that fits is found by halving.
    place = bisect_left(bounds, True, key=lambda bound: problem.fits(_walk(sizes, bound)))
    actions = _walk(sizes, bounds[min(place, len(bounds) - 1)])
    return Choice(actions, f"{len(actions)} of {len(sizes)} blocks recomputed in full")


def _bounds(sizes: dict[int, int]) -> list[int]:
    """Every sum of neighbouring blocks: between two of them the walk does not change."""
    values, sums = list(sizes.values()), []
    for i in range(len(values)):
        total = 0
        for size in values[i:]:
            total += size
            sums.append(total)
    return sums


def _walk(sizes: dict[int, int], bound: int) -> list[Action]:
    actions: list[Action] = []
    run = 0
    for b, size in sizes.items():
        run += size
        if run > bound:
            run = 0
        else:
            actions.append(Recompute(block=b, variant=FULL))
    return actions
