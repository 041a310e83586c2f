"""Move what is hidden, then move or recompute, whichever is cheaper (Capuchin, Peng et al. 2020).

Candidates are idle while the step is over its budget, and come by the time that is left between
their two copies, the most of it first. One moves if its copies are hidden, by the simulator. If
not, the cheaper is taken of its move, at the time that nothing hides, and of a block that runs
again, at the time that takes, each by the byte. The paper runs single tensors again, by their
lineage: here the variants of blocks are what can run again, at their own price. Its feedback, to
fetch late tensors sooner in the next step, is what calibration does for all plans.
"""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from legroom.memory.actions import Action, Recompute
from legroom.memory.gaps import Gap, find_gaps, link_s, nearest_tier
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import Want, schedule, tighten

DEADLINE_S = 8.0
HIDDEN = 1e-4
"""A move that adds no more than this share to the step is hidden."""


class Rerun(NamedTuple):
    """A way to run a block again."""

    action: Recompute
    drops: frozenset[int]
    num_bytes: int
    seconds: float

    @property
    def price_s(self) -> float:
        """Of a byte."""
        return self.seconds / self.num_bytes


@POLICIES.register("capuchin")
def capuchin(problem: Problem) -> Choice:
    """Move tensors whose copies are hidden, then move or recompute by cost per byte."""
    time_s = problem.simulator.time
    chosen, reruns, actions = list[Gap](), list[Rerun](), list[Action]()
    gaps = sorted(_candidates(problem), key=lambda gap: (_free_s(problem, gap), -gap.storage))
    open_reruns = sorted(_reruns(problem), key=lambda rerun: rerun.price_s)
    now_s = time_s(actions)
    until = time.monotonic() + DEADLINE_S
    while not problem.fits(actions):
        if time.monotonic() > until:  # the rest at once: a plan is better than none
            return Choice(_rest(problem, chosen, gaps, reruns), "cut short: all else moved")
        dropped, moved = {s for r in reruns for s in r.drops}, {gap.storage for gap in chosen}
        taken = {r.action.block for r in reruns}
        able = (r for r in open_reruns if r.action.block not in taken and not r.drops & moved)
        rerun = next(able, None)
        while gaps and (gaps[-1].storage in dropped or not _has_room(problem, chosen, gaps[-1])):
            gaps.pop()
        if not gaps and rerun is None:
            break
        swapped = _actions(problem, [*chosen, *gaps[-1:]], reruns) if gaps else actions
        more_s = time_s(swapped) - now_s
        hidden = more_s <= HIDDEN * now_s
        if gaps and (rerun is None or hidden or more_s / gaps[-1].num_bytes <= rerun.price_s):
            chosen.append(gaps.pop())
            actions = swapped
        elif rerun is not None:
            reruns.append(rerun)
            actions = _actions(problem, chosen, reruns)
        now_s = time_s(actions)
    return Choice(actions, f"{len(chosen)} tensors moved, {len(reruns)} blocks recomputed")


def _rest(
    problem: Problem, chosen: list[Gap], gaps: Sequence[Gap], reruns: Sequence[Rerun]
) -> list[Action]:
    dropped = {s for r in reruns for s in r.drops}
    return _actions(problem, [*chosen, *(g for g in gaps if g.storage not in dropped)], reruns)


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


def _has_room(problem: Problem, chosen: Sequence[Gap], gap: Gap) -> bool:
    room: dict[str, int] = {}
    for other in chosen:
        nearest_tier(problem, other.num_bytes, room)
    return nearest_tier(problem, gap.num_bytes, room) is not None


def _reruns(problem: Problem) -> Iterator[Rerun]:
    for b, block in enumerate(problem.step.blocks):
        for variant in block.variants if not block.barred else ():
            if variant.dropped_bytes > 0:
                action = Recompute(block=b, variant=variant.name)
                drops = frozenset(variant.drops)
                yield Rerun(action, drops, variant.dropped_bytes, variant.replay_s)


def _actions(problem: Problem, gaps: Sequence[Gap], reruns: Sequence[Rerun]) -> list[Action]:
    recomputes = [r.action for r in reruns]
    room: dict[str, int] = {}
    found = ((gap, nearest_tier(problem, gap.num_bytes, room)) for gap in gaps)
    wants = [Want(gap.storage, tier) for gap, tier in found if tier is not None]
    moves = schedule(problem.simulator, wants, recomputes)
    return [*recomputes, *tighten(problem.simulator, moves, recomputes, problem.limit)]
