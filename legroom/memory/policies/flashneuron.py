"""Move the first tensors of forward to the disk, as many as must (FlashNeuron, Bae et al. 2021).

Tensors leave in the order forward saves them until the rest fits, each right after its use, to the
SSD if there is one. Backward fetches the next ones whenever memory has become free, with room kept
for the largest op. The paper's second phase trades tensors for such that compress well on their way
to the SSD; a plan has one action for a tensor, so that is not built. Tensors below 1 MiB stay.
"""

import numpy as np

from legroom.memory.actions import Move
from legroom.memory.gaps import Gap, eager_prefetch, fewest, find_gaps
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import Want, schedule, tighten

LEAST_BYTES, LEAST_SHARE = 1 << 20, 1e-3
"""Of a tensor; of the unplanned peak, in small steps."""


@POLICIES.register("flashneuron")
def flashneuron(problem: Problem) -> Choice:
    """Move the tensors saved first, to the disk if there is one, as few as fit."""
    peak = int(problem.simulator.shape([]).during.max(initial=0))
    gaps = find_gaps(problem, min(LEAST_BYTES, int(LEAST_SHARE * peak)))
    gaps.sort(key=lambda gap: problem.step.packed(gap.storage))
    moves = fewest(problem, len(gaps), lambda n: _moves(problem, gaps[:n]))
    eager = eager_prefetch(problem.simulator, moves, problem.limit - _working_set(problem))
    moves = eager if problem.fits(eager) else moves
    return Choice(list(moves), f"the first {len(moves)} of {len(gaps)} tensors moved")


def _moves(problem: Problem, gaps: list[Gap]) -> list[Move]:
    room = {tier: problem.budget[tier] for tier in reversed(problem.tiers())}
    wants = []
    for gap in gaps:
        tier = next((t for t, left in room.items() if left >= gap.num_bytes), None)
        if tier is not None:
            room[tier] -= gap.num_bytes
            wants.append(Want(gap.storage, tier))
    moves = schedule(problem.simulator, wants, [])
    return tighten(problem.simulator, moves, [], problem.limit)


def _working_set(problem: Problem) -> int:
    """Most bytes that come into being with one op."""
    return int(np.max(problem.simulator.births + 0, initial=0))
