"""Move what is reused last, until the step fits (TMOF, Chen et al. 2023, its online engine).

The first step tells the distance between the uses of each tensor; tensors leave in order of falling
distance. Its contention avoidance deals such sets over devices that share a root, and is not built;
nor is the offline program.
"""

from bisect import bisect_left

from legroom.memory.gaps import assign, find_gaps
from legroom.memory.planner import POLICIES, Choice, Problem


@POLICIES.register("tmof")
def tmof(problem: Problem) -> Choice:
    """Move the tensors with the largest reuse distance, as few as fit."""
    gaps = sorted(find_gaps(problem), key=lambda gap: (-gap.seconds, gap.storage))
    counts = range(len(gaps) + 1)
    least = bisect_left(counts, True, key=lambda n: problem.fits(assign(problem, gaps[:n])))
    moves = assign(problem, gaps[: min(least, len(gaps))])
    return Choice(list(moves), f"{len(moves)} of {len(gaps)} tensors moved, the longest idle")
