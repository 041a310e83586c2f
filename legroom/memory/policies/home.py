"""Keep, move or recompute each block, by a particle swarm (HOME, Chen et al. 2022).

A particle has one of three choices for each layer, here for each block: retain, swap, recompute. In
turn each particle takes, choice by choice, the better of that in the best particle of the round
before and of that in its own best. The paper has 500 particles and rounds and an evaluator of its
own; here the simulator evaluates, so there are fewer of both, and a swarm that stalls is shaken by
one random choice, which the paper does not do.
"""

import random
import time
from collections.abc import Sequence

from legroom.memory.actions import Action, Recompute
from legroom.memory.gaps import find_gaps
from legroom.memory.plan import find_variant
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import Want, schedule, tighten
from legroom.memory.trace import FULL

RETAIN, SWAP, RECOMPUTE = range(3)
PARTICLES, ROUNDS, EVALUATIONS = 12, 60, 240
Particle = tuple[int, ...]
Rank = tuple[int, float]
"""Bytes over the budget, and the step's time."""


@POLICIES.register("home")
def home(problem: Problem) -> Choice:
    """Keep, move or recompute each block, by a particle swarm over the simulator."""
    swarm = _Swarm(problem)
    best = swarm.search()
    counts = [best.count(choice) for choice in (SWAP, RECOMPUTE)]
    why = f"{counts[0]} blocks swapped, {counts[1]} recomputed of {len(best)}"
    return Choice(swarm.actions(best), why)


class _Swarm:
    """Particles over the blocks of a step."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.draw = problem, random.Random(0)
        blocks = problem.step.blocks
        self.able = [bool(block.variants) and not block.barred for block in blocks]
        inside: list[list[int]] = [[] for _ in blocks]
        gaps = {gap.storage: gap for gap in find_gaps(problem)}
        for b in range(len(blocks)):
            inside[b] = sorted({r.storage for r in problem.step.saved_in(b) if r.storage in gaps})
        self.inside = inside
        self._until = time.monotonic() + problem.time_limit_s
        self._known: dict[Particle, Rank] = {}

    def actions(self, particle: Sequence[int]) -> list[Action]:
        """What a particle asks for."""
        problem = self.problem
        recomputes = [
            Recompute(block=b, variant=FULL)
            for b, choice in enumerate(particle)
            if choice == RECOMPUTE and self.able[b]
        ]
        gone = {s for a in recomputes for s in find_variant(problem.step, a).drops}
        room = {tier: problem.budget[tier] for tier in problem.tiers()}
        wants = []
        for b, choice in enumerate(particle):
            for s in self.inside[b] if choice == SWAP else ():
                size = problem.step.storages[s].num_bytes
                tier = next((t for t, left in room.items() if left >= size), None)
                if tier is not None and s not in gone:
                    room[tier] -= size
                    gone.add(s)  # another block may save it, too
                    wants.append(Want(s, tier))
        moves = schedule(problem.simulator, wants, recomputes)
        return [*recomputes, *tighten(problem.simulator, moves, recomputes, problem.limit)]

    def rank(self, particle: Particle) -> Rank:
        """How good it is."""
        if particle not in self._known:
            actions, simulator = self.actions(particle), self.problem.simulator
            over = max(simulator.shape(actions).peak - self.problem.limit, 0)
            self._known[particle] = over, simulator.time(actions)
        return self._known[particle]

    @property
    def _over(self) -> bool:
        return len(self._known) >= EVALUATIONS or time.monotonic() > self._until

    def search(self) -> Particle:
        """The best particle that was met."""
        count = len(self.able)
        if not count:
            return ()
        swarm = [tuple([choice] * count) for choice in (RETAIN, SWAP, RECOMPUTE)]
        while len(swarm) < PARTICLES:
            swarm.append(tuple(self.draw.choices((RETAIN, SWAP, RECOMPUTE), k=count)))
        own, best = list(swarm), min(swarm, key=self.rank)
        for _ in range(ROUNDS):
            leader = best
            for i in range(PARTICLES):
                swarm[i] = self._follow(swarm[i], leader, own[i])
                own[i] = min(own[i], swarm[i], key=self.rank)
                best = min(best, own[i], key=self.rank)
                if self._over:
                    return best
            if best == leader:
                i = self.draw.randrange(PARTICLES)
                swarm[i] = own[i] = self._shaken(best)
        return best

    def _follow(self, particle: Particle, leader: Particle, own: Particle) -> Particle:
        for j in range(len(particle)):
            if particle[j] == leader[j] == own[j]:
                continue
            asked = [(*particle[:j], other[j], *particle[j + 1 :]) for other in (leader, own)]
            particle = min(asked, key=self.rank)
            if self._over:
                break
        return particle

    def _shaken(self, particle: Particle) -> Particle:
        j = self.draw.randrange(len(particle))
        return (*particle[:j], self.draw.randrange(3), *particle[j + 1 :])
