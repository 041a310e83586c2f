"""States on the host, blocks run again, inputs below (ZeRO-Infinity, Rajbhandari et al. 2021).

The paper's rule is of bandwidth: what computes for t while b bytes of it move at a rate r keeps the
device busy for t / (t + b / r) of the time. Activations that checkpoints keep, the inputs of
blocks, go where that is at least a half: here to the host, or to the disk where the host is full.
For t the block's own forward, its replay and its backward are taken, as recorded, in place of
formulas for transformers. Optimizer states go to the host, all of them. What goes does not depend
on the budget, but when copies are waited for and fetched does.

Inputs that autograd does not save itself, such as those that a block casts first, stay: the runtime
moves what is saved. Not run: parameters and gradients that live below and come layer by layer, with
the fetches 3, 2 and 1 ops ahead that this takes; states on the disk; products in tiles; links of
many devices together.
"""

from collections.abc import Iterator, Sequence

from legroom.memory.actions import Action, Recompute
from legroom.memory.parking import TIER
from legroom.memory.plan import find_variant, first_need, held_inputs
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.policies.zero_offload import all_blocks, all_states
from legroom.memory.schedule import Want, schedule, tighten
from legroom.memory.trace import Phase

EFFICIENT = 0.5
"""Share of the time the device has to be busy."""


@POLICIES.register("zero_infinity")
def zero_infinity(problem: Problem) -> Choice:
    """Keep states and the inputs of blocks below, where bandwidth allows, and run blocks again."""
    actions, why = all_states(problem)
    again = all_blocks(problem)
    wants = _wants(problem, again, sum(a.num_bytes for a in actions))
    others: list[Action] = [*actions, *again]
    moves = schedule(problem.simulator, wants, again)
    moves = tighten(problem.simulator, moves, others, problem.limit)
    told = f"{len(again)} blocks recomputed, {len(moves)} of their inputs moved"
    return Choice([*others, *moves], f"{why}; {told}")


def _wants(problem: Problem, again: Sequence[Recompute], parked_bytes: int) -> list[Want]:
    """Where each input of a block goes, in order of forward; those that no tier suits stay."""
    room = {tier: problem.budget[tier] for tier in problem.tiers()}
    if TIER in room:
        room[TIER] -= parked_bytes
    found, seconds = dict[int, Want](), busy_s(problem, again)
    for b, s in _inputs(problem, again):
        size = problem.step.storages[s].num_bytes
        able = (t for t in room if efficiency(problem, t, size, seconds[b]) >= EFFICIENT)
        tier = next((t for t in able if room[t] >= size), None)
        if tier is not None and s not in found:
            room[tier] -= size
            found[s] = Want(s, tier)
    return list(found.values())


def _inputs(problem: Problem, again: Sequence[Recompute]) -> Iterator[tuple[int, int]]:
    """Blocks that run again, each with those inputs that are saved and free in between."""
    step, held = problem.step, held_inputs(problem.step, list(again))
    dropped = {s for a in again for s in find_variant(step, a).drops}
    for a in again:
        for s in step.blocks[a.block].inputs:
            if s in step.saves and s not in dropped | step.unsettled and step.storages[s].num_bytes:
                need = first_need(step, s, held)
                if step.packed(s) < need < len(step.ops) and step.storages[s].release < need:
                    yield a.block, s


def busy_s(problem: Problem, again: Sequence[Recompute]) -> dict[int, float]:
    """What each of these blocks computes for: forward, its replay and backward."""
    step = problem.step
    found = {a.block: find_variant(step, a).replay_s for a in again}
    for op in step.ops:
        if op.block in found and op.phase is not Phase.UPDATE:
            found[op.block] += op.time_s
    return found


def efficiency(problem: Problem, tier: str, num_bytes: int, seconds: float) -> float:
    """Share of its time a device is busy that works for so long and moves this there and back."""
    route = problem.simulator.routes[tier]
    assert route is not None
    copies = sum(num_bytes / min(hop.bytes_per_s for hop in way) for way in route)
    return seconds / (seconds + copies) if seconds + copies > 0 else 0.0
