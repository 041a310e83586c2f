"""Move what layers were given while they run, and fetch one layer ahead (vDNN, Rhu et al. 2016).

Each layer's input leaves while the layer's forward runs, and the next layer waits until it is gone.
When backward of a layer begins, one input is fetched: that of the nearest layer before it that is
away, looked for no further than the nearest convolution. `all` moves the inputs of all layers but
the last, `conv` those that convolutions read; the dynamic form takes the first of nothing, `conv`
and `all` that fits. The paper also chooses among cuDNN's algorithms by their workspace: here the
ones that were recorded stay. In models without convolutions, products are taken for them.
"""

from collections.abc import Collection

from legroom.memory.actions import Move
from legroom.memory.gaps import (
    CONVOLUTIONS,
    Layer,
    find_gaps,
    find_layers,
    is_heavy,
    make_move,
    nearest_tier,
    read_in_forward,
)
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.trace import Phase


@POLICIES.register("vdnn_all")
def vdnn_all(problem: Problem) -> Choice:
    """Move the inputs of all layers but the last, each before the next layer begins."""
    moves = _moves(problem, set(problem.step.saves))
    return Choice(list(moves), f"inputs of all layers moved: {len(moves)} tensors")


@POLICIES.register("vdnn_conv")
def vdnn_conv(problem: Problem) -> Choice:
    """Move the inputs of convolutions alone, each before the next layer begins."""
    moves = _moves(problem, _convolved(problem))
    return Choice(list(moves), f"inputs of convolutions moved: {len(moves)} tensors")


@POLICIES.register("vdnn")
def vdnn(problem: Problem) -> Choice:
    """Move nothing, inputs of convolutions, or inputs of all layers: the first that fits."""
    if problem.fits([]):
        return Choice([], "everything fits as it is")
    choice = vdnn_conv(problem)
    return choice if problem.fits(choice.actions) else vdnn_all(problem)


def _convolved(problem: Problem) -> set[int]:
    found = read_in_forward(problem.step, CONVOLUTIONS)
    if found:
        return found
    ops = (op for op in problem.step.ops if op.phase is Phase.FORWARD and is_heavy(op.name))
    return {s for op in ops for s in op.reads}


def _moves(problem: Problem, wanted: Collection[int]) -> list[Move]:
    step, layers = problem.step, find_layers(problem.step)
    owner = {s: n for n, layer in enumerate(layers) for s in layer.storages}
    room: dict[str, int] = {}
    away: dict[int, list[Move]] = {}
    fetches = _fetches(layers, {n for s, n in owner.items() if s in wanted})
    for gap in find_gaps(problem):
        n = owner[gap.storage]
        if gap.storage in wanted and n < len(layers) - 1:
            tier = nearest_tier(problem, gap.num_bytes, room)
            if tier is not None:
                leave = max(gap.start, layers[n].last + 1)  # a fork is freed by its last reader
                move = make_move(step, gap, tier, leave, fetches.get(n, gap.end))
                away.setdefault(n, []).append(move)
    return [move for n in sorted(away) for move in away[n]]


def _fetches(layers: list[Layer], away: set[int]) -> dict[int, int]:
    """Where each layer's input is fetched: as backward of a later layer begins, one for each."""
    found: dict[int, int] = {}
    convolutions = any(layer.convolves for layer in layers)
    for m in reversed(range(len(layers))):
        for n in reversed(range(m)):
            if n in away and n not in found:
                found[n] = layers[m].back
                break
            if layers[n].convolves or not convolutions:
                break
    return found
