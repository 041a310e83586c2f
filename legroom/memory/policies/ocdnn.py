"""Evict on pressure what was used longest ago, fetch one layer ahead (OC-DNN, Awan et al. 2018).

The paper keeps every buffer in unified memory and tells the driver two things of each layer: what
it is going to write, or backward to read, is fetched while the layer before runs; and what it has
used may go. Nothing goes until memory runs out; then the driver takes what was used longest ago. So
here: the inputs of a layer are fetched as backward of the next later one begins, and what leaves,
leaves in order of last use at the op that needs the room, with the step waiting for it.

Tensors move whole, and no faults are paid for. Buffers of files and copies between devices, which
the paper also puts there, are no part of a step.
"""

from collections.abc import Sequence

from legroom.memory.gaps import Gap, find_layers, nearest_tier
from legroom.memory.paging import evict_on_demand
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import tighten


@POLICIES.register("ocdnn")
def ocdnn(problem: Problem) -> Choice:
    """Evict on pressure what was used longest ago, and fetch one layer ahead."""
    room, moves = dict[str, int](), []
    for stay in evict_on_demand(problem, _fetches(problem), _oldest):
        tier = nearest_tier(problem, stay.gap.num_bytes, room)
        if tier is not None:
            moves.append(stay.move(problem, tier))
    moves = tighten(problem.simulator, moves, [], problem.limit)
    return Choice(list(moves), f"{len(moves)} tensors evicted on pressure, fetched a layer ahead")


def _oldest(op: int, gaps: Sequence[Gap]) -> list[Gap]:
    return sorted(gaps, key=lambda gap: (gap.start, gap.storage))


def _fetches(problem: Problem) -> dict[int, int]:
    """Where backward of the next later layer begins; what the last one holds comes on demand."""
    layers = find_layers(problem.step)
    pairs = zip(layers, layers[1:], strict=False)
    return {s: later.back for layer, later in pairs for s in layer.storages}
