"""Search for size classes by genes, evict by Belady in each (SwapAdvisor, Huang et al. 2020).

Every tensor takes an object of its size class; objects are as large as the largest of the class,
and there are so many of each. Where a class has no object left, the tensor of that class goes that
is needed last, of those idle for twice their copy. It starts to leave after its last use, and who
comes into its object starts when it is gone, however early that is. Genes are the classes of the
sizes and the numbers of objects; they cross and mutate as in the paper, four children to a pair,
and who lives on is drawn by how much slower than the best its step is, by the simulator.

Order is fixed: an eager step runs as it runs, so the genes of the schedule are left out. Weights
and states stay, since a plan moves saved tensors alone; so residency has nothing to carry from step
to step. Scratch counts as a tensor. The real allocator is not one of classes: they only say who
goes. Chosen here: a small population; tensors below a share of the budget are one size; what is
taken from too many objects is as many bytes of each class; Belady by bytes, without classes, if no
genes fit.
"""

import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from legroom.memory.actions import Move
from legroom.memory.belady import Residency, Tenant, belady_steady
from legroom.memory.gaps import (
    Gap,
    find_gaps,
    link_s,
    make_move,
    nearest_tier,
    tick_at_or_after,
    tick_at_or_before,
)
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import tighten

POPULATION, CHILDREN, EVALUATIONS = 12, 4, 160
MUTATION = 0.1
IDLE_COPIES = 2.0
"""A tensor may go if it has been idle for so many times as long as its copy takes."""
SMALL = 1e-3
"""Of the budget: smaller tensors are one size."""
QUICK_S = 0.5


class Genes(NamedTuple):
    """Size classes and their objects."""

    classes: tuple[int, ...]
    """For each size, from the smallest, its class: each as the one before, or the next."""
    counts: tuple[int, ...]
    """Objects of each class."""


Rank = tuple[int, float]
"""Bytes over the budget, and the step's time."""


@POLICIES.register("swapadvisor")
def swapadvisor(problem: Problem) -> Choice:
    """Move by Belady's rule within size classes that are searched by genes."""
    if problem.fits([]):
        return Choice([], "everything fits as it is")
    nursery = Nursery(problem)
    best = nursery.search() if nursery.gaps else None
    moves = nursery.moves(best) if best is not None else []
    if best is not None and problem.fits(moves):
        return Choice(list(moves), f"{len(moves)} tensors moved, {len(best.counts)} size classes")
    moves = tighten(problem.simulator, nursery.moves(None), [], problem.limit)
    return Choice(list(moves), f"{len(moves)} tensors moved, without size classes")


class Nursery:
    """Genes over the sizes of a step, and what becomes of them."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.draw = problem, random.Random(0)
        ticks, tiers = problem.step.ticks, problem.tiers()
        gaps = find_gaps(problem) if tiers else []
        leaves = {gap.storage: tick_at_or_after(ticks, gap.start) for gap in gaps}
        self.gaps = {gap.storage: gap for gap in gaps if leaves[gap.storage] < gap.end}
        self.sizes, self.spans, self.owners = list[int](), list[_Spans](), list[int]()
        self.room = problem.limit
        self._tenants(leaves)
        self._idle_s = [self._copy_s(s) * IDLE_COPIES if s >= 0 else 0.0 for s in self.owners]
        small = max(SMALL * self.room, 1)
        self.steps = sorted({max(size, math.ceil(small)) for size in self.sizes})
        """The sizes there are."""
        places = {size: i for i, size in enumerate(self.steps)}
        self.size_of = [places[max(size, self.steps[0])] for size in self.sizes]
        self._known: dict[Genes, Rank] = {}

    def _tenants(self, leaves: Mapping[int, int]) -> None:
        """All that comes and goes in the step, when it has to be there, and what is left for it."""
        step = self.problem.step
        for s, storage in enumerate(step.storages):
            gap, birth = self.gaps.get(s), max(storage.birth, 0)
            if gap is None and storage.birth < 0 and storage.death >= len(step.ops):
                self.room -= storage.num_bytes
            elif gap is not None and leaves[s] > birth:
                spans = ((birth, leaves[s] - 1), (gap.end, max(storage.last, gap.end)))
                self._add(storage.num_bytes, spans, s)
            else:
                self._add(storage.num_bytes, ((birth, storage.death),), -1)
        for i, op in enumerate(step.ops):
            self._add(op.workspace_bytes, ((i, i),), -1)

    def _add(self, size: int, spans: "_Spans", owner: int) -> None:
        if size > 0:
            self.sizes.append(size)
            self.spans.append(spans)
            self.owners.append(owner)

    def _copy_s(self, storage: int) -> float:
        tier, gap = self.problem.tiers()[0], self.gaps[storage]
        return link_s(self.problem.simulator, tier, gap.num_bytes, out=True)

    # -- what genes mean ---------------------------------------------------------------------

    def moves(self, genes: Genes | None) -> list[Move]:
        """What genes ask for; without, Belady's rule over bytes."""
        return self._made(self._residency(genes))

    def _residency(self, genes: Genes | None) -> Residency:
        if genes is None:
            rooms = {0: max(self.room, 0)}
            tenants = [Tenant(0, *given) for given in zip(self.sizes, self.spans, strict=True)]
        else:
            rooms = dict(enumerate(genes.counts))
            kinds = [genes.classes[i] for i in self.size_of]
            tenants = [
                Tenant(kind, 1, spans) for kind, spans in zip(kinds, self.spans, strict=True)
            ]
        times = [*self.problem.simulator.until_s, self.problem.simulator.until_s[-1]]
        return belady_steady(tenants, rooms, times, self._idle_s)

    def _made(self, residency: Residency) -> list[Move]:
        """Moves as early as their rooms allow: out after the last use, in when that is done."""
        step, simulator, room = self.problem.step, self.problem.simulator, dict[str, int]()
        fetches = {fetch.tenant: fetch for fetch in residency.fetches}
        leaves, moves, free_s = dict[int, int](), list[Move](), 0.0
        until_s = simulator.until_s
        for eviction in sorted(residency.evictions, key=lambda x: self._gap(x.tenant).start):
            gap = self._gap(eviction.tenant)
            free_s = max(free_s, gap.start_s) + self._copy_s(gap.storage)
            done = next((p for p in step.ticks if until_s[p] >= free_s), len(step.ops))
            leaves[eviction.tenant] = min(done, tick_at_or_before(step.ticks, eviction.op))
        for eviction in residency.evictions:
            gap, fetch = self._gap(eviction.tenant), fetches[eviction.tenant]
            tier = nearest_tier(self.problem, gap.num_bytes, room)
            if tier is not None:
                others = (leaves.get(other, 0) for other in fetch.after)
                since = tick_at_or_after(step.ticks, max(fetch.since, *others, 0))
                move = make_move(step, gap, tier, leaves[eviction.tenant], min(since, gap.end))
                moves.append(move)
        return moves

    def _gap(self, tenant: int) -> Gap:
        return self.gaps[self.owners[tenant]]

    def rank(self, genes: Genes) -> Rank:
        """How good they are."""
        if genes not in self._known:
            moves, simulator = self.moves(genes), self.problem.simulator
            over = max(simulator.shape(moves).peak - self.problem.limit, 0)
            self._known[genes] = over, simulator.time(moves)
        return self._known[genes]

    # -- the search --------------------------------------------------------------------------

    def search(self) -> Genes:
        """The best genes that were met."""
        limit = self.problem.time_limit_s
        until = time.monotonic() + (min(limit, QUICK_S) if self.problem.quick else limit)
        living = list[Genes]()
        for genes in self._founders():
            living.append(genes)
            self.rank(genes)
            if time.monotonic() > until:
                break
        tried = 0
        while len(living) > 1 and len(self._known) < EVALUATIONS and tried < EVALUATIONS:
            one, two = self.draw.sample(living, 2)
            children = [self._mutated(self._crossed(one, two)) for _ in range(CHILDREN)]
            for child in children:
                if time.monotonic() > until:
                    return min(self._known, key=self.rank)
                self.rank(child)
                tried += 1
            living = self._survivors([*living, *children])
        return min(self._known, key=self.rank)

    def _founders(self) -> list[Genes]:
        """All sizes apart, all in one class, and classes drawn by lot."""
        rest = range(len(self.steps) - 1)
        rows = [[1 for _ in rest], [0 for _ in rest]]
        while len(rows) < POPULATION:
            share = self.draw.random()
            rows.append([int(self.draw.random() < share) for _ in rest])
        return [self._fitted(_classes(row), None) for row in rows]

    def _crossed(self, one: Genes, two: Genes) -> Genes:
        """The classes of one up to a cut, and the steps of the other from there; so of objects."""
        cut = self.draw.randrange(len(self.steps) + 1)
        steps = [*_steps(one.classes)[: max(cut - 1, 0)], *_steps(two.classes)[max(cut - 1, 0) :]]
        cut = self.draw.randrange(len(self.steps) + 1)
        wished = [one.counts[k] for k in one.classes][:cut]
        wished += [two.counts[k] for k in two.classes][cut:]
        return self._fitted(_classes(steps), wished)

    def _mutated(self, genes: Genes) -> Genes:
        """Now and then a class one higher or lower, with all later ones, and counts a bit off."""
        steps = _steps(genes.classes)
        steps = [1 - x if self.draw.random() < MUTATION else x for x in steps]
        wished = [float(genes.counts[k]) for k in genes.classes]
        for i, count in enumerate(wished):
            if self.draw.random() < MUTATION:
                wished[i] = self.draw.gauss(count, max(0.25 * count, 1.0))
        return self._fitted(_classes(steps), wished)

    def _survivors(self, living: Sequence[Genes]) -> list[Genes]:
        """As many as before, drawn by how much slower than the best each is."""
        left = sorted(dict.fromkeys(living), key=self.rank)
        kept = [left.pop(0)]
        best_s = self.rank(kept[0])[1] or 1.0
        while left and len(kept) < POPULATION:
            weights = [math.exp(max(self._fitness(x, best_s), -50.0)) for x in left]
            kept.append(left.pop(self.draw.choices(range(len(left)), weights)[0]))
        return kept

    def _fitness(self, genes: Genes, best_s: float) -> float:
        """Zero for the best; bytes over the budget count as if they took a step each budget."""
        over, seconds = self.rank(genes)
        return (best_s - seconds) / best_s - 10.0 * over / max(self.problem.limit, 1)

    def _fitted(self, classes: tuple[int, ...], wished: Sequence[float] | None) -> Genes:
        """Counts as wished, an average for each class, or all that could be used; as fits."""
        most, least = self._demand(classes)
        counts = most
        if wished is not None:
            by_class: list[list[float]] = [[] for _ in most]
            for kind, count in zip(classes, wished, strict=True):
                by_class[kind].append(count)
            asked = [round(sum(row) / len(row)) for row in by_class]
            counts = [
                min(max(a, low), high) for a, low, high in zip(asked, least, most, strict=True)
            ]
        sizes = [self.steps[i] for i in _largest(classes)]
        return Genes(classes, tuple(_shrunk(counts, least, sizes, self.room)))

    def _demand(self, classes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Objects of each class that are in use at once: with nothing away, and with all."""
        count = classes[-1] + 1
        changes = [[dict[int, int]() for _ in range(count)] for _ in range(2)]
        for size, spans in zip(self.size_of, self.spans, strict=True):
            whole = ((spans[0][0], spans[-1][1]),)
            for found, stays in zip(changes, (whole, spans), strict=True):
                row = found[classes[size]]
                for begin, end in stays:
                    row[begin] = row.get(begin, 0) + 1
                    row[end + 1] = row.get(end + 1, 0) - 1
        most, least = ([_highest(row) for row in found] for found in changes)
        return most, least


_Spans = tuple[tuple[int, int], ...]


def _steps(classes: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip(classes, classes[1:], strict=False)]


def _classes(steps: Sequence[int]) -> tuple[int, ...]:
    found = [0]
    for step in steps:
        found.append(found[-1] + step)
    return tuple(found)


def _largest(classes: Sequence[int]) -> list[int]:
    """For each class, the last of its sizes."""
    return [i for i, kind in enumerate(classes) if classes[i + 1 : i + 2] != (kind,)]


def _highest(changes: Mapping[int, int]) -> int:
    level = most = 0
    for at in sorted(changes):
        level += changes[at]
        most = max(most, level)
    return most


def _shrunk(
    counts: Sequence[int], least: Sequence[int], sizes: Sequence[int], room: int
) -> list[int]:
    """Fewer objects until all fit, as many bytes of each class; never fewer than must be."""
    counts = list(counts)
    while True:
        over = sum(n * size for n, size in zip(counts, sizes, strict=True)) - room
        spare = [i for i, n in enumerate(counts) if n > least[i]]
        if over <= 0 or not spare:
            return counts
        for i in spare:
            share = math.ceil(over / len(spare) / sizes[i])
            counts[i] -= min(share, counts[i] - least[i])
