"""Keep, run again or page out each block, by one exact program (POET, Patil et al. 2022).

The paper adds pages to Checkmate's stages: a value may be written to a lower tier in one stage and
read back in another, and a mixed-integer program finds the plan with the least energy. Here stages
are blocks, each of which is kept, run again in one of its variants, or paged out as a whole to the
first lower tier; time takes the place of energy. Pages move by stages as in the paper: a block's
leave while the next one runs, and come back while the backward of that one does. The paper has no
overlap, which no device with copy engines can afford: here a page costs only what its copies take
beyond the stage that hides them. Memory, and the tier's, are rows as in `checkmate`, exact for
these positions. A last block has no stage to leave in, and is not paged.

The program is for small graphs. Of steps with more than sixty blocks that can run again, blocks
beside each other that ran the same ops are put in groups of equal choice.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from legroom.memory.actions import Action, Move, Recompute
from legroom.memory.gaps import find_gaps, link_s, make_move
from legroom.memory.plan import away_span, first_need, held_inputs
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.policies.checkmate import able, replay_cost_s, whole_blocks
from legroom.memory.policies.footprint import Footprint
from legroom.memory.policies.lazy import Lazy
from legroom.memory.policies.repair import repair
from legroom.memory.policies.rows import Values

MOST = 60
"""Blocks that are chosen for one by one."""


class Page(NamedTuple):
    """A block's tensors on their way to a lower tier and back."""

    moves: tuple[Move, ...]
    num_bytes: int
    seconds: float
    """What the stages beside do not hide."""


@POLICIES.register("poet")
def poet(problem: Problem) -> Choice:
    """Keep, run again or page out each block: the least time, by an exact program."""
    if problem.fits([]):
        return Choice([], "everything fits as it is")
    started, paging = time.monotonic(), Paging(problem)
    until = started + problem.time_limit_s
    x = paging.program.cheapest(problem.limit, until=until)
    found = None if x is None else repair(problem, paging.actions(x))
    if found is None:
        x = paging.program.smallest(until=until + problem.time_limit_s / 2)
        others = [whole_blocks(problem.step), *([] if x is None else [paging.actions(x)])]
        found = min(others, key=lambda actions: problem.simulator.shape(actions).peak)
    again = sum(isinstance(a, Recompute) for a in found)
    why = f"{again} blocks recomputed, {len(found) - again} tensors paged"
    return Choice(found, why if paging.program.proven else f"{why}; the best found in time")


def units(problem: Problem) -> list[list[int]]:
    """Blocks that are chosen together: neighbours that ran the same, where there are many."""
    blocks, found = problem.step.blocks, list[list[int]]()
    longest = -(-len(blocks) // MOST)
    for b, block in enumerate(blocks):
        last = found[-1] if found else []
        alike = last and blocks[last[0]].group == block.group
        same = alike and _names(problem, last[0]) == _names(problem, b)
        if same and len(last) < longest:
            last.append(b)
        else:
            found.append([b])
    return found


def _names(problem: Problem, b: int) -> tuple[list[str], str]:
    block = problem.step.blocks[b]
    return [v.name for v in block.variants], block.barred


class Paging:
    """Columns for variants and pages of each unit."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.step = problem, problem.step
        pages = find_pages(problem)
        ways = list(able(self.step))
        self.variants: dict[tuple[int, int], int] = {}
        self.pages: dict[int, tuple[int, Page]] = {}
        cost, groups = list[float](), list[list[int]]()
        for unit in units(problem):
            group = []
            for v in [v for b, v in ways if b == unit[0]]:
                group.append(len(cost))
                self.variants |= {(b, v): len(cost) for b in unit}
                cost.append(sum(replay_cost_s(self.step, b, v) for b in unit))
            paged = [b for b in unit if b in pages]
            if paged:
                group.append(len(cost))
                self.pages |= {b: (len(cost), pages[b]) for b in paged}
                cost.append(sum(pages[b].seconds for b in paged))
            groups.append(group)
        self.program = Lazy(self._footprint(len(cost)), cost, groups, self._room())

    def _footprint(self, count: int) -> Footprint:
        found = Footprint(self.problem.simulator, self.variants, count)
        for column, page in self.pages.values():
            for move in page.moves:
                left, back = away_span(self.step, move)
                found.take_away(column, self.step.storages[move.storage], left, back)
        return found

    def _room(self) -> list[tuple[dict[int, float], float]]:
        """What the tier has room for."""
        terms: dict[int, float] = {}
        room = sum(self.problem.budget[tier] for tier in self.problem.tiers()[:1])
        for column, page in self.pages.values():
            terms[column] = terms.get(column, 0.0) + page.num_bytes / max(room, 1)
        return [(terms, 1.0)] if terms else []

    def actions(self, x: Values) -> list[Action]:
        """What was chosen; what is paged comes back when the blocks that run again need it."""
        blocks = self.step.blocks
        chosen = [(b, v) for (b, v), column in self.variants.items() if x[column] > 0.5]
        again = [Recompute(block=b, variant=blocks[b].variants[v].name) for b, v in chosen]
        moves = [m for c, page in self.pages.values() if x[c] > 0.5 for m in page.moves]
        held = held_inputs(self.step, again)
        due = [(m, first_need(self.step, m.storage, held)) for m in moves]
        return [*again, *(structs.replace(m, in_wait=need) for m, need in due)]


def find_pages(problem: Problem) -> dict[int, Page]:
    """By block that can be paged: out while the next runs, back while its backward does."""
    step, until = problem.step, problem.simulator.until_s
    tiers, blocks = problem.tiers()[:1], step.blocks
    needs = _needs(problem)
    found: dict[int, Page] = {}
    gaps = {gap.storage: gap for gap in find_gaps(problem)}
    for b, stage in enumerate(blocks[1:] if tiers else ()):
        uses = [step.first_use(row.storage) for row in step.saved_in(b + 1)]
        back, end = min(uses, default=0), stage.last + 1
        mine = dict.fromkeys(row.storage for row in step.saved_in(b))
        able = [gaps[s] for s in mine if s in gaps and step.saves[s][0].block == b]
        moves = []
        for gap in able:
            gap = gap._replace(end=min(gap.end, needs.get(gap.storage, gap.end)))
            move = make_move(step, gap, tiers[0], max(end, gap.start), back)
            if move.out_wait < move.in_start:
                moves.append(move)
        if moves:
            hidden_s = until[end] - until[stage.first]
            due_s = until[min(m.in_wait for m in moves)] - until[min(m.in_start for m in moves)]
            seconds = _beyond(problem, moves, hidden_s, due_s)
            size = sum(step.storages[m.storage].num_bytes for m in moves)
            found[b] = Page(tuple(moves), size, seconds)
    return found


def _needs(problem: Problem) -> dict[int, int]:
    """The first position where any way to run any block again may need a storage."""
    found: dict[int, int] = {}
    for b, v in able(problem.step):
        action = Recompute(block=b, variant=problem.step.blocks[b].variants[v].name)
        for s, (first, _) in held_inputs(problem.step, [action]).items():
            if problem.step.saves.get(s) and problem.step.saves[s][0].block != b:
                found[s] = min(found.get(s, first), first)
    return found


def _beyond(problem: Problem, moves: Sequence[Move], out_s: float, in_s: float) -> float:
    """What copies take beyond the times that hide them."""
    sizes = [(m.tier, problem.step.storages[m.storage].num_bytes) for m in moves]
    there = sum(link_s(problem.simulator, tier, size, out=True) for tier, size in sizes)
    back = sum(link_s(problem.simulator, tier, size, out=False) for tier, size in sizes)
    return max(there - out_s, 0.0) + max(back - in_s, 0.0)
