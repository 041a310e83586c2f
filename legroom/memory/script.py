"""A plan made ready to run: what to do at each save, and what is due at each position."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from legroom.memory.actions import Move
from legroom.memory.plan import Plan, find_variant, moving_blocks, sources
from legroom.memory.trace import FULL, Step, Variant

ALIGN = 4096
"""Slots begin at pages, as direct disk access wants."""
OUT_WAIT, IN_START, OUT_START = range(3)


class Row(NamedTuple):
    """One save the runtime expects."""

    storage: int
    num_bytes: int
    packed: int
    unpacked: tuple[int, ...]


class Due(NamedTuple):
    """Something to do once the step has come to a position."""

    position: int
    rank: int
    storage: int


class Replay(NamedTuple):
    """How a block runs again."""

    name: str
    forms: tuple[Any, ...]
    """What each op of the block looked like; empty where nothing is skipped."""
    runs: frozenset[int] | None
    """Offsets of the ops that run; None for all."""
    wants: frozenset[int]
    """Kept storages that stand in for ops that do not run."""
    draws: bool
    """Some op draws random numbers."""


class Script:
    """Look-up tables of one plan on its step; holds no tensors and decides nothing."""

    def __init__(self, step: Step, plan: Plan, forms: Mapping[int, Any] | None = None) -> None:
        self.step, self.plan = step, plan
        self._forms = forms or {}
        blocks = range(-1, len(step.blocks))
        self.rows: dict[int, list[Row]] = {b: self._rows(b) for b in blocks}
        self.moves: Mapping[int, Move] = {m.storage: m for m in plan.moves}
        self.codecs: Mapping[int, str] = {c.storage: c.codec for c in plan.compressions}
        self.variants: dict[int, Variant] = {
            a.block: find_variant(step, a) for a in plan.recomputes
        }
        self.dropped = {s: b for b, v in self.variants.items() for s in v.drops}
        self.acted = self.moves.keys() | self.codecs.keys() | self.dropped.keys()
        self.block_at = {(b.module, b.call): i for i, b in enumerate(step.blocks)}
        self.due = sorted(self._due())
        self.replays: dict[int, Replay] = {b: self._replay(b) for b in self.variants}
        self.moving = moving_blocks(step, [*plan.moves, *plan.compressions])
        """Blocks all of whose saves tell what is due."""
        self.watched = self.moving | self.variants.keys()
        self.patterns: dict[int, tuple[Row | None, ...]] = {}
        """The saves of a block that matter, by their number: filled in as steps show it."""
        self.offsets, self.tier_bytes = self._layout()

    def _rows(self, block: int) -> list[Row]:
        storages = self.step.storages
        return [
            Row(r.storage, storages[r.storage].num_bytes, r.packed, r.unpacked)
            for r in self.step.saved_in(block)
        ]

    def _due(self) -> list[Due]:
        due = []
        for m in self.plan.moves:
            due.append(Due(m.out_start, OUT_START, m.storage))
            due.append(Due(m.out_wait, OUT_WAIT if m.out_wait > m.out_start else 3, m.storage))
            due.append(Due(m.in_start, IN_START, m.storage))
        return due

    def _replay(self, b: int) -> "Replay":
        block, variant = self.step.blocks[b], self.variants[b]
        span = range(block.first, block.last + 1)
        selective = variant.name != FULL and all(i in self._forms for i in span)
        read = {s for i in variant.replays for s in self.step.ops[i].reads}
        return Replay(
            name=block.name,
            forms=tuple(self._form(i, variant, read) for i in span) if selective else (),
            runs=frozenset(i - block.first for i in variant.replays) if selective else None,
            wants=frozenset(sources(self.step, b, variant)),
            draws=any(op.random for op in self.step.ops[block.first : block.last + 1]),
        )

    def _form(self, i: int, variant: Variant, read: set[int]) -> Any:
        """An op as a tape looks for it; storages that nothing of the replay reads are left out."""
        form = self._forms[i]
        if i in variant.replays or not read.isdisjoint(form.storages):
            return form
        return form._replace(storages=())

    def _layout(self) -> tuple[dict[int, int], dict[str, int]]:
        """A slot of its own for each move: a graph kept for a second backward stays readable."""
        offsets: dict[int, int] = {}
        used: dict[str, int] = {}
        for m in self.plan.moves:
            offsets[m.storage] = used.get(m.tier, 0)
            size = self.step.storages[m.storage].num_bytes
            used[m.tier] = offsets[m.storage] + (size + ALIGN - 1) // ALIGN * ALIGN
        return offsets, used

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do at all."""
        return not (self.moves or self.codecs or self.variants)
