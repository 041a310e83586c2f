"""The ways a block can run: which saved storages to drop, and the least work to bring them back.

[Note: closure] Dropping a storage means running the ops that wrote it again; an op that runs again
needs what it reads: from outside the block, from a kept storage, or from another op that runs
again. "Work to do again less a price per byte dropped" over such sets is a linear program whose
corners are whole numbers, so each price gives an exact best set, and all prices together give the
lower hull of time against bytes. Those hull points are the variants.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from legroom.memory.host import again_s, noting_s
from legroom.memory.trace import FULL, Block, Kind, Op, Step, Variant

MAX_VARIANTS = 8
Points = dict[tuple[int, float], tuple[tuple[int, ...], tuple[int, ...]]]
"""Hull points found: (bytes, seconds) to (drops, replays)."""


def with_variants(step: Step) -> Step:
    """The step with variants filled in for every block that can be recomputed."""
    known: dict[tuple[int, int], list[_Shape]] = {}
    blocks = []
    for b, block in enumerate(step.blocks):
        drops = droppable(step, b)
        if block.barred or not drops:
            blocks.append(msgspec.structs.replace(block, variants=()))
            continue
        key = (block.group, len(drops))
        if key not in known:
            known[key] = _shapes(_Graph(step, block, drops))
        graph = _Graph(step, block, drops)
        variants = tuple(_variant(graph, shape) for shape in known[key])
        blocks.append(msgspec.structs.replace(block, variants=variants))
    return msgspec.structs.replace(step, blocks=tuple(blocks)).check()


def droppable(step: Step, b: int) -> list[int]:
    """Saved storages that only this block made and only this block's backward asks for."""
    block = step.blocks[b]
    found = []
    for s, rows in step.saves.items():
        storage = step.storages[s]
        inside = block.first <= storage.birth <= block.last
        own = all(row.block == b for row in rows)
        if (
            inside
            and own
            and s not in step.unsettled
            and storage.kind == Kind.ACTIVATION
            and storage.release < step.first_use(s)
        ):
            found.append(s)
    return found


class _Shape(NamedTuple):
    """A variant by op offsets and drop ranks, good for every block of a group."""

    name: str
    drops: tuple[int, ...]
    replays: tuple[int, ...]


class _Graph:
    """One block's ops and storages as the closure program sees them."""

    def __init__(self, step: Step, block: Block, drops: list[int]) -> None:
        self.step, self.block, self.drops = step, block, drops
        self.ops: list[Op] = list(step.ops[block.first : block.last + 1])
        self.saved_here = {
            s
            for s, rows in step.saves.items()
            if any(step.blocks[r.block] is block for r in rows if r.block >= 0)
        }
        self.writers: dict[int, list[int]] = {}
        for i, op in enumerate(self.ops):
            for s in op.writes:
                if step.storages[s].birth >= block.first:
                    self.writers.setdefault(s, []).append(i)

    def implications(self) -> Iterable[tuple[int, int]]:
        """Pairs (a, b) of variables with a <= b; ops come first, then drops."""
        for rank, s in enumerate(self.drops):
            for w in self.writers.get(s, []):
                yield len(self.ops) + rank, w
        for group in self.writers.values():
            for one, two in zip(group, group[1:], strict=False):
                yield one, two
                yield two, one
        for i, op in enumerate(self.ops):
            for s in op.reads:
                writers = self.writers.get(s, [])
                final = s in self.saved_here and all(w < i for w in writers)
                if not final:
                    yield from ((i, w) for w in writers if w < i)
        draws = [i for i, op in enumerate(self.ops) if op.random]
        yield from ((two, one) for one, two in zip(draws, draws[1:], strict=False))

    def solve(self, price: float) -> tuple[tuple[int, ...], tuple[int, ...], float, int]:
        """Best drops and replays when a dropped byte is worth `price` seconds."""
        times = [op.time_s + 1e-9 for op in self.ops]
        sizes = [self.step.storages[s].num_bytes for s in self.drops]
        cost = np.array(times + [-price * n for n in sizes]) * 1e6
        pairs = np.array(list(dict.fromkeys(self.implications())), dtype=int)
        rows = np.repeat(np.arange(len(pairs)), 2)
        signs = np.tile([1.0, -1.0], len(pairs))
        matrix = coo_matrix((signs, (rows, pairs.ravel())), shape=(len(pairs), len(cost)))
        found = linprog(cost, A_ub=matrix.tocsr(), b_ub=np.zeros(len(pairs)), bounds=(0, 1))
        ones = found.x > 0.5
        replays = tuple(int(i) for i in np.flatnonzero(ones[: len(times)]))
        drops = tuple(int(i) for i in np.flatnonzero(ones[len(times) :]))
        return drops, replays, sum(times[i] for i in replays), sum(sizes[i] for i in drops)


def _shapes(graph: _Graph) -> list[_Shape]:
    """The hull of time against bytes, thinned; the last one drops everything."""
    everything = graph.solve(1.0)
    points: Points = {(0, 0.0): ((), ())}
    _hull(graph, (0, 0.0), (everything[3], everything[2]), points, depth=5)
    points[everything[3], everything[2]] = everything[:2]
    total = max(everything[3], 1)
    hull = sorted(p for p in points if 0 < p[0] < total)
    kept: list[tuple[int, float]] = []
    for point in hull:
        if not kept or point[0] - kept[-1][0] > total * 0.03:
            kept.append(point)
    shapes = [
        _Shape(f"drop {round(100 * p[0] / total)}%", points[p][0], points[p][1])
        for p in kept[: MAX_VARIANTS - 1]
    ]
    last = tuple(range(len(graph.ops)))
    return [*shapes, _Shape(FULL, tuple(range(len(graph.drops))), last)]


def _hull(
    graph: _Graph,
    low: tuple[int, float],
    high: tuple[int, float],
    points: Points,
    depth: int,
) -> None:
    """Fill in the hull between two known points: the price at which both are worth the same."""
    if depth == 0 or high[0] <= low[0]:
        return
    price = (high[1] - low[1]) / (high[0] - low[0])
    drops, replays, time_s, size = graph.solve(price)
    point = (size, time_s)
    gain = price * size - time_s - (price * low[0] - low[1])
    if point in points or gain <= 1e-12:
        return
    points[point] = (drops, replays)
    _hull(graph, low, point, points, depth - 1)
    _hull(graph, point, high, points, depth - 1)


def _variant(graph: _Graph, shape: _Shape) -> Variant:
    """The shape filled in for one block: storages, ops, time and peak of the replay."""
    drops = tuple(graph.drops[rank] for rank in shape.drops)
    last = max(graph.step.packed(s) for s in drops) - 1
    first = graph.block.first
    replays = tuple(first + i for i in shape.replays if first + i <= last)
    ops = graph.step.ops
    return Variant(
        name=shape.name,
        drops=drops,
        replays=replays,
        last=last,
        dropped_bytes=sum(graph.step.storages[s].num_bytes for s in drops),
        replay_s=sum(ops[i].time_s for i in replays),
        replay_peak_bytes=_replay_peak(graph, shape.name, set(drops), set(replays), last),
        noting_s=noting_s(shape.name, len(graph.ops)),
        again_s=again_s(shape.name, len(replays)),
    )


def _replay_peak(graph: _Graph, shape: str, drops: set[int], replays: set[int], last: int) -> int:
    """Most bytes a replay holds: what it brings back, and temporaries."""
    first, ops = graph.block.first, graph.step.ops
    level = np.zeros(last - first + 2, dtype=np.int64)
    for s, birth, end in replayed(graph.step, shape, replays, first, last):
        size = graph.step.storages[s].num_bytes
        level[birth - first] += size
        level[(last if s in drops else end) - first + 1] -= size
    scratch = [ops[i].workspace_bytes if i in replays else 0 for i in range(first, last + 1)]
    return int((np.cumsum(level)[:-1] + np.array(scratch, dtype=np.int64)).max())


def replayed(
    step: Step, shape: str, replays: Collection[int], first: int, last: int
) -> Iterator[tuple[int, int, int]]:
    """(storage, op that makes it, op after which it can go) of what ops that run again make.

    A whole block holds a temporary as long as its forward does; a tape until its last op is done.
    """
    ends, written = dict[int, int](), set[int]()
    for i in sorted(replays):
        written.update(step.ops[i].writes)
        ends.update(dict.fromkeys((*step.ops[i].reads, *step.ops[i].writes), i))
    for s in sorted(written):
        storage = step.storages[s]
        if first <= storage.birth <= last:
            yield s, storage.birth, min(storage.release, last) if shape == FULL else ends[s]
