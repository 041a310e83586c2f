"""Rotate layers' data through a small region, fetched one layer ahead (Layrub, Jin et al. 2018).

A layer's inputs leave once no later layer of the forward reads them, and the next layer waits until
they are gone. While backward of a layer runs, those of the one before it come back. The first and
the last two layers keep theirs, and so do layers that work in place (activations, normalisations,
dropout). That gradients overwrite activations, and masks take a byte, are features of its runtime
which an eager step does not have; so is the order of gradients within a layer.
"""

from legroom.memory.gaps import find_gaps, find_layers, is_heavy, make_move, nearest_tier
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.trace import Phase

RESTING = 2
"""Layers at the end that keep their data; one at the beginning does."""
OTHERS = ("pool", "cat", "add.Tensor")
"""Ops beside those of layers whose inputs leave."""


@POLICIES.register("layrub")
def layrub(problem: Problem) -> Choice:
    """Move the inputs of every layer but the outermost, fetched one layer ahead."""
    step, layers = problem.step, find_layers(problem.step)
    read = {
        s
        for op in step.ops
        if op.phase is Phase.FORWARD and (is_heavy(op.name) or any(x in op.name for x in OTHERS))
        for s in op.reads
    }
    owner = {s: n for n, layer in enumerate(layers) for s in layer.storages}
    ends = [layer.last for layer in layers]
    room, moves = dict[str, int](), []
    for gap in find_gaps(problem):
        n = owner[gap.storage]
        if gap.storage not in read or not 0 < n < len(layers) - RESTING:
            continue
        tier = nearest_tier(problem, gap.num_bytes, room)
        if tier is not None:
            leave = next((end + 1 for end in ends if end + 1 >= gap.start), gap.start)
            moves.append(make_move(step, gap, tier, leave, layers[n + 1].back))
    return Choice(list(moves), f"{len(moves)} inputs of layers moved")
