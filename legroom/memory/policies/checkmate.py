"""Run again what is cheapest, by an exact program and by its relaxation (Checkmate, 2020).

The paper, by Jain et al., unrolls a graph into a stage for each op, and lets a mixed-integer
program say what is computed and carried in every one. Here stages are the blocks: one not kept runs
again when its backward begins, in one of its variants. Those are the hull of what it can drop by
running which of its ops again, so the program is: at most one variant each, least time, no position
of the step and no replay over the budget. Its rows are exact. `checkmate` solves it whole, within a
time limit; `checkmate_lp` divides variants for nine tenths of the budget, and rounds what is kept
by thresholds, each block then taking its cheapest variant that drops the rest. The cheapest that
the simulator says fits is taken. The paper's code goes through thresholds from 0.1 to 0.9; one more
drops all that can be, so that there is an answer wherever running all blocks again is one.

What cannot be expressed: several blocks as one segment, whose inner results are dropped too; an op
that runs more than twice; a value that is made again and then dropped once more. The program counts
the device's time, not what the host does for replays.
"""

import time
from collections.abc import Iterator

from legroom.memory.actions import Action, Recompute
from legroom.memory.plan import replay_position
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.policies.footprint import Footprint
from legroom.memory.policies.lazy import Lazy
from legroom.memory.policies.repair import repair
from legroom.memory.policies.rows import Values
from legroom.memory.trace import FULL, Step

RELAXED = (0.9, 1.0)
"""Shares of the budget for divided variants: the next where there is no answer for the first."""
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""A storage is kept if more than this share of it is."""
LP_SHARE = 0.3
"""Of the time, for the relaxation alone."""


@POLICIES.register("checkmate")
def checkmate(problem: Problem) -> Choice:
    """The variants that take least time, by an exact program; the best found in time."""
    if problem.fits([]):
        return Choice([], "everything fits as it is")
    started = time.monotonic()
    until = started + problem.time_limit_s
    stages = Stages(problem)
    rounded = stages.rounded(started + LP_SHARE * problem.time_limit_s)
    x = stages.program.cheapest(problem.limit, until=until)
    found = [rounded, *([] if x is None else [stages.actions(x)])]
    fitting = [actions for actions in found if problem.fits(actions)]
    if not fitting:
        mended = (repair(problem, actions) for actions in found)
        fitting = [actions for actions in mended if actions is not None]
    if not fitting:
        x = stages.program.smallest(until=started + 2 * problem.time_limit_s)
        return Choice(rounded if x is None else stages.actions(x), "the smallest peak found")
    best = min(fitting, key=problem.simulator.time)
    return Choice(best, _why(best, "" if stages.program.proven else "; the best found in time"))


@POLICIES.register("checkmate_lp")
def checkmate_lp(problem: Problem) -> Choice:
    """Variants divided by a linear program, and rounded by thresholds: the cheapest that fits."""
    if problem.fits([]):
        return Choice([], "everything fits as it is")
    best = Stages(problem).rounded(time.monotonic() + problem.time_limit_s)
    return Choice(best, _why(best, ", rounded"))


def _why(actions: list[Action], more: str) -> str:
    return f"{len(actions)} blocks recomputed in part or whole{more}"


class Stages:
    """The blocks of a step that can run again, as columns of a program."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.step = problem, problem.step
        self.columns = {pair: i for i, pair in enumerate(able(self.step))}
        groups: dict[int, list[int]] = {}
        for (b, _), column in self.columns.items():
            groups.setdefault(b, []).append(column)
        footprint = Footprint(problem.simulator, self.columns, len(self.columns))
        cost = [replay_cost_s(self.step, b, v) for b, v in self.columns]
        self.program = Lazy(footprint, cost, groups.values())

    def actions(self, x: Values) -> list[Action]:
        """The variants chosen."""
        blocks = self.step.blocks
        chosen = [(b, v) for (b, v), column in self.columns.items() if x[column] > 0.5]
        return [Recompute(block=b, variant=blocks[b].variants[v].name) for b, v in chosen]

    def rounded(self, until: float) -> list[Action]:
        """The cheapest of all roundings that fits; all blocks run again where none does."""
        shares = (
            self.program.cheapest(share * self.problem.limit, until=until, whole=False)
            for share in RELAXED
        )
        x = next((x for x in shares if x is not None), None)
        every = whole_blocks(self.step)
        if x is None:
            return every
        found = [self._rounded(self._kept(x), threshold) for threshold in THRESHOLDS]
        fitting = [actions for actions in found if self.problem.fits(actions)]
        return min(fitting, key=self.problem.simulator.time, default=every)

    def _kept(self, x: Values) -> dict[tuple[int, int], float]:
        """The share of each storage that each block keeps."""
        kept: dict[tuple[int, int], float] = {}
        for (b, v), column in self.columns.items():
            for s in self.step.blocks[b].variants[v].drops:
                kept[b, s] = kept.get((b, s), 1.0) - float(x[column])
        return kept

    def _rounded(self, kept: dict[tuple[int, int], float], threshold: float) -> list[Action]:
        """Each block's cheapest variant that drops all that is kept no more than a threshold."""
        wanted: dict[int, set[int]] = {}
        for (b, s), share in kept.items():
            if share <= threshold + 1e-9:
                wanted.setdefault(b, set()).add(s)
        found: list[Action] = []
        for b, storages in wanted.items():
            able = (v for v in self.step.blocks[b].variants if storages.issubset(v.drops))
            best = min(able, key=lambda v: v.replay_s, default=None)
            name = FULL if best is None else best.name
            found.append(Recompute(block=b, variant=name))
        return found


def able(step: Step) -> Iterator[tuple[int, int]]:
    """Blocks that can run again, each with the numbers of its variants that drop anything."""
    for b, block in enumerate(step.blocks):
        for v, variant in enumerate(block.variants):
            if variant.drops and not block.barred:
                yield b, v


def replay_cost_s(step: Step, block: int, variant: int) -> float:
    """What a variant adds to the step; nothing if its replay never happens."""
    chosen = step.blocks[block].variants[variant]
    return chosen.replay_s if replay_position(step, chosen) < len(step.ops) else 0.0


def whole_blocks(step: Step) -> list[Action]:
    """All blocks that can run again, in full."""
    return [Recompute(block=b, variant=FULL) for b in dict.fromkeys(b for b, _ in able(step))]
