"""Evict what is cheap, large and stale whenever memory is full (DTR, Kirisame et al. 2021).

An online rule, gone through the trace once and frozen to a plan. At each moment that is over the
budget it evicts what has least of h = cost / (bytes * staleness), until the moment fits. Cost is
that of running it again, and of what was evicted around it and would have to run again, too. Here
a block is evicted further, to one of its variants: its bytes are those that leave now, its cost
that of the whole variant, since what the block has lost before is its neighbourhood. Beyond the
block there is none, for what a block is given stays. Staleness is counted on the device's clock
from the last use of what leaves, replays so far included; what is running now is locked.

The prototype passes over small tensors and looks at a sample of the others; here all are looked
at, so there is nothing random in it. A block that runs again stays until its backward is through,
and is not evicted a second time. A frozen plan is kinder than the rule: what is evicted later was
dropped as soon as forward was done with it. Where the rule is left with nothing to evict it fails,
as it does in the paper; then all blocks run again, which may fit.
"""

from collections.abc import Iterator

import numpy as np

from legroom.memory.actions import Action, Recompute
from legroom.memory.plan import replay_position
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.policies.checkmate import able, whole_blocks


@POLICIES.register("dtr")
def dtr(problem: Problem) -> Choice:
    """Evict the variant with the least cost per byte and staleness, at each overflow."""
    rule = Eviction(problem)
    while (full := rule.overflow()) is not None:
        if not rule.evict(full):
            every = whole_blocks(problem.step)
            return Choice(every, "nothing left to evict; all blocks recomputed")
    return Choice(rule.actions(), f"{rule.count} evictions, {len(rule.chosen)} blocks")


class Eviction:
    """What has been evicted so far: a variant for each block."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.step, self.sim = problem, problem.step, problem.simulator
        self.able = list(able(self.step))
        self.chosen: dict[int, int] = {}
        self.count = 0

    def actions(self) -> list[Action]:
        """The plan."""
        blocks, rows = self.step.blocks, sorted(self.chosen.items())
        return [Recompute(block=b, variant=blocks[b].variants[v].name) for b, v in rows]

    def overflow(self) -> int | None:
        """The first position that is over the budget, by itself or by a replay."""
        shape = self.sim.shape(self.actions())
        over = [int(p) for p in np.flatnonzero(shape.during > self.problem.limit)[:1]]
        over += [r.position for r, peak in shape.replays if peak > self.problem.limit]
        return min(over, default=None)

    def evict(self, now: int) -> bool:
        """Evict what has the least h at a position; whether there was anything."""
        best = min(self._scores(now), default=None)
        if best is None:
            return False
        _, b, v = best
        self.chosen[b] = v
        self.count += 1
        return True

    def _scores(self, now: int) -> Iterator[tuple[float, int, int]]:
        storages, blocks = self.step.storages, self.step.blocks
        replayed = (r for r in self.sim.replays(self.actions()) if r.position < now)
        now_s = self.sim.until_s[now] + sum(r.variant.replay_s for r in replayed)
        for b, v in self.able:
            variant, has = blocks[b].variants[v], self.chosen.get(b)
            if now >= replay_position(self.step, variant):
                continue
            gone = blocks[b].variants[has].drops if has is not None else ()
            free = [s for s in variant.drops if storages[s].release < now]
            leave = [s for s in free if s not in gone]
            num_bytes = sum(storages[s].num_bytes for s in leave)
            back = sum(storages[s].num_bytes for s in gone if s not in variant.drops)
            if num_bytes > back and len(free) == len(variant.drops):
                used_s = max(self.sim.until_s[storages[s].release + 1] for s in leave)
                worth = (num_bytes - back) * max(now_s - used_s, 0.0)
                yield variant.replay_s / worth if worth else float("inf"), b, v
