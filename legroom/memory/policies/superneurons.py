"""Keep convolutions' results, or move them; run all else again (SuperNeurons, Wang et al. 2018).

Results of convolutions are checkpoints. What other layers save is dropped and made again from the
nearest checkpoint: here a block runs again in the variant that drops most of those that convolve
nothing again. The paper makes a segment again at once if that stays below what the backward of the
largest layer needs, and else once for each of its layers, which takes more time and less memory. A
layer is an op here, and a block always runs again at once: where its best variant would take more
than that, the next smaller one is taken that does not, or the one that takes least. A block keeps
all it saves if each of its variants convolves something again: variants are the cheapest by the
byte, and for some residual blocks on fast machines that is a convolution.

Checkpoints move only when the simulated device is full: then those used least recently go, except
what is in use. A plan knows which ones, so their copies begin as soon as they are saved. They are
fetched as backward of the next convolution begins, and later if there is no room. In models without
convolutions, products and attentions are taken for them. The paper also picks convolutions'
algorithms by the memory there is, and has a pool of its own: neither is modelled.
"""

from legroom.memory.actions import Action, Move, Recompute
from legroom.memory.gaps import (
    Gap,
    find_gaps,
    find_layers,
    is_convolution,
    is_heavy,
    make_move,
    nearest_tier,
    tick_at_or_before,
)
from legroom.memory.plan import find_variant, first_need, held_inputs
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import tighten
from legroom.memory.trace import Phase, Step, Variant


@POLICIES.register("superneurons")
def superneurons(problem: Problem) -> Choice:
    """Run all but convolutions again; move their results where the device is still full."""
    if problem.fits([]):
        return Choice([], "everything fits as it is")
    dear, again = checkpoints(problem.step), list[Recompute]()
    most = largest_backward(problem.step)
    for b, block in enumerate(problem.step.blocks):
        cheap = [v for v in block.variants if v.drops and dear.isdisjoint(v.replays)]
        if cheap and not block.barred:
            again.append(Recompute(block=b, variant=_best(cheap, most).name))
    moves = _evicted(problem, again, _movable(problem, dear, again))
    why = f"{len(again)} blocks recomputed from checkpoints, {len(moves)} checkpoints moved"
    return Choice([*again, *tighten(problem.simulator, moves, again, problem.limit)], why)


def checkpoints(step: Step) -> set[int]:
    """Ops of forward that convolve; products and attentions if none does."""
    forward = [i for i, op in enumerate(step.ops) if op.phase is Phase.FORWARD]
    found = {i for i in forward if is_convolution(step.ops[i].name)}
    return found or {i for i in forward if is_heavy(step.ops[i].name)}


def largest_backward(step: Step) -> int:
    """Most bytes that an op of backward reads and writes."""
    ops = (op for op in step.ops if op.phase is Phase.BACKWARD)
    touched = ({*op.reads, *op.writes} for op in ops)
    return max((sum(step.storages[s].num_bytes for s in row) for row in touched), default=0)


def _best(cheap: list[Variant], most: int) -> Variant:
    """What drops most without more than so many bytes while it runs again."""
    small = [v for v in cheap if v.replay_peak_bytes <= most]
    if not small:
        return min(cheap, key=lambda v: v.replay_peak_bytes)
    return max(small, key=lambda v: (v.dropped_bytes, -v.replay_s))


def _movable(problem: Problem, dear: set[int], again: list[Recompute]) -> list[tuple[Gap, int]]:
    """Checkpoints that nothing drops, and where each is fetched; the least recently used first."""
    step, layers = problem.step, find_layers(problem.step)
    made = {s for i in dear for s in step.ops[i].writes}
    gone = {s for a in again for s in find_variant(step, a).drops}
    held = held_inputs(step, again)
    found = []
    for gap in find_gaps(problem):
        if gap.storage in made and gap.storage not in gone:
            need = min(gap.end, first_need(step, gap.storage, held))
            after = [x.back for x in layers if x.first in dear and x.first > gap.start]
            fetch = min(after[0] if after else need, need)
            found.append((gap._replace(end=need), fetch))
    return found


def _evicted(problem: Problem, again: list[Recompute], able: list[tuple[Gap, int]]) -> list[Move]:
    """Moves of the least recently used that are there and not in use, wherever memory is full."""
    step, sim, left = problem.step, problem.simulator, list(able)
    moves, room, now = list[Move](), dict[str, int](), 0
    while True:
        actions: list[Action] = [*again, *moves]
        shape = sim.shape(actions)
        over = {r.position for r, peak in shape.replays if peak > problem.limit}
        over |= {p for p, level in enumerate(shape.during.tolist()) if level > problem.limit}
        now = min((p for p in over if p >= now), default=len(step.ops) + 1)
        if now > len(step.ops):
            return moves
        at = next((i for i, (gap, _) in enumerate(left) if gap.start <= now < gap.end), None)
        if at is None:
            now += 1
            continue
        gap, fetch = left.pop(at)
        tier = nearest_tier(problem, gap.num_bytes, room)
        if tier is not None:
            leave = max(tick_at_or_before(step.ticks, now), step.packed(gap.storage))
            moves.append(make_move(step, gap, tier, leave, fetch))
