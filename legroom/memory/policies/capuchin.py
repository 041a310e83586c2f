"""Move what is hidden, then move or recompute, whichever is cheaper (Capuchin, Peng et al. 2020).

Candidates are idle while the step is over its budget, and come by the time that is left between
their two copies, the most of it first. They move if their copies are hidden, by the simulator. If
not, the cheaper is taken of their move, at the time that nothing hides, and of a block that runs
again, at the time that takes, each by the byte. The paper runs single tensors again, by their
lineage: here the variants of blocks are what can run again, one in place of a smaller one at the
price of what it adds. Of many candidates a few are taken at a time. Its feedback, to fetch late
tensors sooner in the next step, is what calibration does for all plans.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from legroom.memory.actions import Action, Move, Recompute
from legroom.memory.gaps import Gap, find_gaps, link_s, nearest_tier
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import Want, schedule, tighten

HIDDEN = 1e-4
"""A move that adds no more than this share to the step is hidden."""
PARTS = 64
"""Candidates are taken in about so many parts."""


class Rerun(NamedTuple):
    """A way to run a block again."""

    action: Recompute
    drops: frozenset[int]
    seconds: float


Reruns = dict[int, Rerun]
"""By block."""


@POLICIES.register("capuchin")
def capuchin(problem: Problem) -> Choice:
    """Move tensors whose copies are hidden, then move or recompute by cost per byte."""
    chosen, reruns, next_gaps, price_s = list[Gap](), Reruns(), list[Gap](), 0.0
    gaps = sorted(_candidates(problem), key=lambda gap: (_free_s(problem, gap), -gap.storage))
    part, able = -(-len(gaps) // PARTS), list(_reruns(problem))
    while not _fits(problem, chosen, reruns):
        dropped = _dropped(reruns)
        if not next_gaps or any(gap.storage in dropped for gap in next_gaps):
            gaps = [gap for gap in gaps if gap.storage not in dropped]
            next_gaps = _with_room(problem, chosen, gaps[: -part - 1 : -1])
            price_s = _price_s(problem, chosen, reruns, next_gaps)
        again = _cheapest(problem, able, reruns, {gap.storage for gap in chosen})
        if next_gaps and (again is None or price_s <= again[0]):
            chosen, next_gaps = chosen + next_gaps, []
            del gaps[-part:]
        elif again is not None:
            reruns[again[1].action.block] = again[1]
        elif gaps:  # no tier has room for these, but smaller ones may follow
            del gaps[-part:]
        else:
            break
    actions = _actions(reruns)
    moves = tighten(problem.simulator, _moves(problem, chosen, reruns), actions, problem.limit)
    why = f"{len(moves)} tensors moved, {len(reruns)} blocks recomputed"
    return Choice([*actions, *moves], why)


def _dropped(reruns: Reruns) -> set[int]:
    return {s for rerun in reruns.values() for s in rerun.drops}


def _actions(reruns: Reruns) -> list[Action]:
    return [rerun.action for rerun in reruns.values()]


def _cheapest(
    problem: Problem, able: Sequence[Rerun], reruns: Reruns, moved: set[int]
) -> tuple[float, Rerun] | None:
    """What costs least to run again, by the byte that it frees beside what is gone already."""
    best: tuple[float, Rerun] | None = None
    for rerun in able:
        has = reruns.get(rerun.action.block)
        gone = moved | has.drops if has else moved
        more = sum(problem.step.storages[s].num_bytes for s in rerun.drops - gone)
        if more <= 0 or (has and not has.drops <= rerun.drops):
            continue
        price_s = (rerun.seconds - (has.seconds if has else 0.0)) / more
        if best is None or price_s < best[0]:
            best = price_s, rerun
    return best


def _fits(problem: Problem, gaps: Sequence[Gap], reruns: Reruns) -> bool:
    again = _actions(reruns)
    moves = tighten(problem.simulator, _moves(problem, gaps, reruns), again, 0)
    return problem.fits([*again, *moves])


def _price_s(problem: Problem, chosen: Sequence[Gap], reruns: Reruns, more: Sequence[Gap]) -> float:
    """Of a byte that moves besides; nothing where the copies are hidden."""
    if not more:
        return 0.0
    again, time_s = _actions(reruns), problem.simulator.time
    now_s = time_s([*again, *_moves(problem, chosen, reruns)])
    then_s = time_s([*again, *_moves(problem, [*chosen, *more], reruns)])
    hidden = then_s - now_s <= HIDDEN * now_s * len(more)
    return 0.0 if hidden else (then_s - now_s) / sum(gap.num_bytes for gap in more)


def _candidates(problem: Problem) -> list[Gap]:
    """Tensors that are idle somewhere over the budget."""
    if not problem.tiers():
        return []
    over = problem.simulator.shape([]).during > problem.limit
    return [gap for gap in find_gaps(problem) if over[gap.start : gap.end].any()]


def _free_s(problem: Problem, gap: Gap) -> float:
    """Idle time beyond both copies; below zero, what of them is not hidden."""
    tier = problem.tiers()[0]
    there = link_s(problem.simulator, tier, gap.num_bytes, out=True)
    return gap.seconds - there - link_s(problem.simulator, tier, gap.num_bytes, out=False)


def _with_room(problem: Problem, chosen: Sequence[Gap], more: Sequence[Gap]) -> list[Gap]:
    """Those that some tier has room for beside those chosen."""
    room: dict[str, int] = {}
    for gap in chosen:
        nearest_tier(problem, gap.num_bytes, room)
    return [gap for gap in more if nearest_tier(problem, gap.num_bytes, room) is not None]


def _reruns(problem: Problem) -> Iterator[Rerun]:
    for b, block in enumerate(problem.step.blocks):
        for variant in block.variants if not block.barred else ():
            if variant.dropped_bytes > 0:
                action = Recompute(block=b, variant=variant.name)
                yield Rerun(action, frozenset(variant.drops), variant.replay_s)


def _moves(problem: Problem, gaps: Sequence[Gap], reruns: Reruns) -> list[Move]:
    room: dict[str, int] = {}
    dropped = _dropped(reruns)
    found = ((gap, nearest_tier(problem, gap.num_bytes, room)) for gap in gaps)
    wants = [Want(g.storage, tier) for g, tier in found if tier and g.storage not in dropped]
    return schedule(problem.simulator, wants, [rerun.action for rerun in reruns.values()])
