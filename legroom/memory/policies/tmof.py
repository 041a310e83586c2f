"""Move what is reused last, until the step fits (TMOF, Chen et al. 2023, its online engine).

The first step tells the distance between the uses of each tensor; tensors leave in order of falling
distance. Its contention avoidance deals such sets over devices that share a root, and is not built;
nor is the offline program.
"""

from legroom.memory.gaps import assign, fewest, find_gaps
from legroom.memory.planner import POLICIES, Choice, Problem


@POLICIES.register("tmof")
def tmof(problem: Problem) -> Choice:
    """Move the tensors with the largest reuse distance, as few as fit."""
    gaps = sorted(find_gaps(problem), key=lambda gap: (-gap.seconds, gap.storage))
    moves = fewest(problem, len(gaps), lambda n: assign(problem, gaps[:n]))
    return Choice(list(moves), f"{len(moves)} of {len(gaps)} tensors moved, the longest idle")
