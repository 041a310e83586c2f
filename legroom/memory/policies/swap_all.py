"""Move every saved tensor to the nearest lower tier, and fetch each in time for its use."""

from legroom.memory.gaps import movable
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import Want, schedule, tighten


@POLICIES.register("swap_all")
def swap_all(problem: Problem) -> Choice:
    """Move all saved activations, nearest tier first, as far as each has room."""
    wants: list[Want] = []
    room = {tier: problem.budget[tier] for tier in problem.tiers()}
    for storage in movable(problem):
        size = problem.step.storages[storage].num_bytes
        tier = next((t for t in room if room[t] >= size), None)
        if tier is not None:
            room[tier] -= size
            wants.append(Want(storage, tier))
    moves = schedule(problem.simulator, wants, [])
    moves = tighten(problem.simulator, moves, [], problem.limit)
    return Choice(list(moves), f"{len(moves)} saved tensors moved")
