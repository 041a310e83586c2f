"""Device bytes at every position, and in every replay, as linear functions of choices: exact.

A choice is a column of a program: a block runs in a variant, or whatever else takes bytes away at
one position and brings them back at another. Each is a list of changes, as in the simulator, so the
height of a position is the trace's own plus what the chosen changes add up to there. A replay is a
height of its own: what is there just before it, plus what it takes.

[Note: neighbours] What a block is given is held until its replay needs it no more. One block's hold
is its own change; where two blocks may hold the same storage, or one holds what another drops, the
bytes follow from several choices at once. Each such stretch is a column of its own, at least as
large as its blocks' choices demand; it only adds bytes, so a program that wants fewer of them sets
it to exactly that.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from legroom.memory.actions import Recompute
from legroom.memory.plan import held_inputs, replay_position
from legroom.memory.policies.rows import Rows, Values
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Storage, Variant

Columns = Mapping[tuple[int, int], int]
"""The column of each variant of each block; blocks that are chosen together share theirs."""
Demand = tuple[int, int, int]
"""Until when a storage is held, by which block, for which column."""


class Link(NamedTuple):
    """A column that is as large as other columns demand; see [Note: neighbours]."""

    column: int
    holders: tuple[tuple[int, ...], ...]
    """Columns of each block that may hold the storage."""
    droppers: tuple[int, ...]
    """Columns of the block that may drop it; none where it has died by then."""

    def add_rows(self, rows: Rows) -> None:
        """One for each block that may hold it."""
        for holder in self.holders:
            terms = dict.fromkeys(self.droppers, 1.0)
            for column in holder:
                terms[column] = terms.get(column, 0.0) + 1.0
            rows.add(terms | {self.column: -1.0}, float(bool(self.droppers)))

    def least(self, x: Values) -> float:
        """How large the choices want it."""
        held = max(sum(float(x[c]) for c in holder) for holder in self.holders)
        if not self.droppers:
            return held
        return max(0.0, held + sum(float(x[c]) for c in self.droppers) - 1.0)


class Redo(NamedTuple):
    """A height in a replay: the position, and what is there on top of it."""

    position: int
    base: int
    terms: dict[int, float]


class Footprint:
    """Heights of a step: those of its positions, then those of its replays."""

    def __init__(self, simulator: Simulator, columns: Columns, count: int) -> None:
        self.sim, self.step, self.count = simulator, simulator.step, count
        during = simulator.shape([]).during
        self.levels = during - simulator.scratch
        self.base, self._num_positions = during, len(during)
        self.links: list[Link] = []
        self.redos: list[Redo] = []
        self._changes: list[tuple[int, int, int]] = []
        self._arrays: tuple[npt.NDArray[np.int64], ...] | None = None
        used: dict[int, list[Demand]] = {}
        drops: dict[int, dict[int, list[int]]] = {}
        for (b, v), column in columns.items():
            variant = self.step.blocks[b].variants[v]
            self._drop(column, variant)
            action = Recompute(block=b, variant=variant.name)
            for s, (_, until) in held_inputs(self.step, [action]).items():
                used.setdefault(s, []).append((until, b, column))
            for s in variant.drops:
                drops.setdefault(s, {}).setdefault(b, []).append(column)
        for s, demands in used.items():
            self._hold(self.step.storages[s], demands, drops.get(s, {}))
        self._add_redos(columns)

    def __len__(self) -> int:
        return self._num_positions + len(self.redos)

    # -- changes -----------------------------------------------------------------------------

    def change(self, column: int, num_bytes: int, start: int, end: int) -> None:
        """A choice adds so many bytes from one position up to another."""
        if start < end and num_bytes:
            self._changes += [(column, start, num_bytes), (column, end, -num_bytes)]
            self._arrays = None

    def take_away(self, column: int, storage: Storage, left: int, back: int) -> None:
        """A choice takes a storage away at a position and brings it back at another.

        Then it goes as soon as nobody needs it, which may be sooner than in the trace.
        """
        size, death = storage.num_bytes, storage.death + 1
        self.change(column, -size, left, death)
        self.change(column, size, min(back, storage.last + 1), storage.last + 1)

    def _drop(self, column: int, variant: Variant) -> None:
        position = replay_position(self.step, variant)
        for s in variant.drops:
            storage = self.step.storages[s]
            self.take_away(column, storage, storage.release + 1, position)

    def _hold(
        self, storage: Storage, demands: list[Demand], drops: Mapping[int, list[int]]
    ) -> None:
        """Until the last that needs it, whoever drops it and though it would have died."""
        ends, start = sorted({until for until, _, _ in demands}), 0
        for end in ends:
            holders: dict[int, list[int]] = {}
            for until, b, column in demands:
                if until >= end:
                    holders.setdefault(b, []).append(column)
            self._stretch(storage, max(storage.death + 1, start), end, holders, [])
            for droppers in drops.values():
                self._stretch(storage, max(storage.release + 1, start), end, holders, droppers)
            start = end

    def _stretch(
        self,
        storage: Storage,
        start: int,
        end: int,
        holders: Mapping[int, list[int]],
        droppers: list[int],
    ) -> None:
        if start >= end or not storage.num_bytes:
            return
        if len(holders) == 1 and not droppers:
            for column in next(iter(holders.values())):
                self.change(column, storage.num_bytes, start, end)
            return
        groups = tuple(tuple(group) for group in holders.values())
        self.links.append(Link(self.count, groups, tuple(droppers)))
        self.change(self.count, storage.num_bytes, start, end)
        self.count += 1

    # -- heights -----------------------------------------------------------------------------

    def _add_redos(self, columns: Columns) -> None:
        """A row for each block and position where it may run again.

        Its variants add what they take. Where it does not run again the row says no more than that
        of the position, since `spare` makes up for an op that leaves less than it takes.
        """
        places: dict[tuple[int, int], list[tuple[int, Variant]]] = {}
        for (b, v), column in columns.items():
            variant = self.step.blocks[b].variants[v]
            position = replay_position(self.step, variant)
            if position < len(self.step.ops):
                places.setdefault((b, position), []).append((column, variant))
        births, scratch = self.sim.births, self.sim.scratch
        for (b, p), found in places.items():
            spare = max(0, -int(scratch[p]) - int(births[p]))
            terms = {c: float(self._more(b, p, v) + spare) for c, v in found}
            self.redos.append(Redo(p, int(self.levels[p] - births[p]) - spare, terms))
        self.base = np.append(self.base, [redo.base for redo in self.redos]).astype(np.int64)

    def _more(self, block: int, position: int, variant: Variant) -> int:
        """What a replay has beyond the bytes there are: itself, and arguments let go just then."""
        storages, again = self.step.storages, Recompute(block=block, variant=variant.name)
        held = held_inputs(self.step, [again])
        ends = ((s, held[s][1]) for s in self.step.blocks[block].inputs)
        kept = sum(storages[s].num_bytes for s, end in ends if end == position > storages[s].death)
        return variant.replay_peak_bytes - variant.dropped_bytes + kept

    def _sorted(self) -> tuple[npt.NDArray[np.int64], ...]:
        if self._arrays is None:
            rows = np.array(sorted(self._changes, key=lambda row: row[1]), dtype=np.int64)
            columns, positions, sizes = rows.reshape(-1, 3).T
            self._arrays = columns, positions, sizes
        return self._arrays

    def terms(self, height: int) -> dict[int, float]:
        """What each column adds to a height."""
        columns, positions, sizes = self._sorted()
        redo = self.redos[height - self._num_positions] if height >= self._num_positions else None
        until = int(np.searchsorted(positions, redo.position if redo else height, side="right"))
        added = np.bincount(columns[:until], sizes[:until], minlength=self.count)
        if redo:
            for column, more in redo.terms.items():
                added[column] += more
        return {int(c): float(added[c]) for c in np.flatnonzero(added)}

    def complete(self, x: Values) -> Values:
        """The same choices, with the columns that follow from them."""
        x = np.append(x, np.zeros(max(self.count - len(x), 0)))[: self.count]
        for link in self.links:
            x[link.column] = link.least(x)
        return x

    def heights(self, x: Values) -> Values:
        """All heights under these choices, which are complete."""
        columns, positions, sizes = self._sorted()
        inside = positions < self._num_positions
        weights = (sizes * x[columns])[inside]
        changes = np.bincount(positions[inside], weights, minlength=self._num_positions)
        added = np.cumsum(changes, dtype=np.float64)
        found: Values = self.base + np.append(added, list(self._redone(x, added)))
        return found

    def _redone(self, x: Values, added: Values) -> Iterator[float]:
        for redo in self.redos:
            yield added[redo.position] + sum(x[c] * more for c, more in redo.terms.items())

    def runs(self) -> list[npt.NDArray[np.int64]]:
        """Heights side by side: of positions where block and phase are the same, and each replay's.

        Of each, the highest one says most.
        """
        ops = self.step.ops
        kinds = [(op.phase, op.block) for op in ops]
        edges = [i for i in range(1, len(ops)) if kinds[i] != kinds[i - 1]]
        ends = [*edges, *range(self._num_positions, len(self))]
        return [run for run in np.split(np.arange(len(self)), ends) if len(run)]
