"""Move inputs of convolutions, pools and activations, fetched two ahead (Dymem, HPDC 2020).

No layer waits for another's copies: compute goes on until memory is short. When backward of a layer
begins, what lies ahead is fetched until the inputs of two convolutions are there. Those of dropout,
softmax and linear layers stay. Its order of layers, depth first from each fork, is the eager step's
own here; its pools by mobility (movable low, waiting high, small apart) are an address plan that
the runtime's allocator does not take. In models without convolutions, products stand for them.
"""

from legroom.memory.gaps import (
    find_gaps,
    find_layers,
    is_heavy,
    link_s,
    make_move,
    nearest_tier,
    read_in_forward,
)
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import tighten
from legroom.memory.trace import Phase

MOVED = ("conv", "pool", "relu", "gelu", "silu", "sigmoid", "tanh", "elu", "threshold")
AHEAD = 2
"""Convolutions whose inputs are fetched before they are needed."""


@POLICIES.register("dymem")
def dymem(problem: Problem) -> Choice:
    """Move inputs of convolutions, pools and activations, fetched two convolutions ahead."""
    step, simulator, layers = problem.step, problem.simulator, find_layers(problem.step)
    wanted = read_in_forward(step, MOVED)
    convolves = [layer.convolves for layer in layers]
    if not any(convolves):
        heavy = (op for op in step.ops if op.phase is Phase.FORWARD and is_heavy(op.name))
        wanted |= {s for op in heavy for s in op.reads}
        convolves = [True] * len(layers)
    owner = {s: n for n, layer in enumerate(layers) for s in layer.storages}
    room, moves, free_s = dict[str, int](), [], 0.0
    for gap in find_gaps(problem):
        tier = nearest_tier(problem, gap.num_bytes, room) if gap.storage in wanted else None
        if tier is None:
            continue
        free_s = max(free_s, gap.start_s) + link_s(simulator, tier, gap.num_bytes, out=True)
        leave = int(simulator.until.searchsorted(free_s))
        fetch = layers[_ahead(convolves, owner[gap.storage])].back
        moves.append(make_move(step, gap, tier, leave, fetch))
    moves = tighten(simulator, moves, [], problem.limit)
    return Choice(list(moves), f"{len(moves)} inputs moved, two convolutions ahead")


def _ahead(convolves: list[bool], layer: int) -> int:
    """The layer whose backward begins when this one's inputs are fetched."""
    seen = 0
    for n in range(layer + 1, len(convolves)):
        seen += convolves[n]
        if seen == AHEAD:
            return n
    return len(convolves) - 1
