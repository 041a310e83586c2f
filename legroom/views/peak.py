"""What makes the peak: the tensors alive at the fullest op of a step under a plan."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from legroom.memory.actions import Move, compressed_bytes
from legroom.memory.plan import Plan, find_variant, held_inputs, replay_position
from legroom.memory.trace import Kind, Step


class Holding(NamedTuple):
    """Device bytes that something holds during ops `start`..`stop - 1`."""

    name: str
    kind: str
    num_bytes: int
    start: int
    stop: int
    note: str = ""
    """How the plan treats it."""


class Peak(NamedTuple):
    """The fullest op, and who holds bytes there, largest first."""

    op: int
    holdings: tuple[Holding, ...]

    @property
    def num_bytes(self) -> int:
        """Sum of the parts."""
        return sum(h.num_bytes for h in self.holdings)


def find_peak(step: Step, plan: Plan) -> Peak:
    """Follow the plan over the ops and look at the fullest one.

    The op that the prediction names counts before the one found here.
    """
    holdings = [*_storages(step, plan), *_replays(step, plan), *_workspaces(step)]
    levels = _levels(holdings, len(step.ops))
    named = _named(step, plan.predicted.peak_at) or range(len(step.ops))
    op = max(named, key=lambda i: (levels[i], -i), default=0)
    alive = [h for h in holdings if h.start <= op < h.stop and h.num_bytes]
    return Peak(op, tuple(sorted(alive, key=lambda h: (-h.num_bytes, h.name))))


def _levels(holdings: list[Holding], num_ops: int) -> list[int]:
    change = [0] * (num_ops + 1)
    for h in holdings:
        change[h.start] += h.num_bytes
        change[h.stop] -= h.num_bytes
    level, levels = 0, []
    for delta in change[:num_ops]:
        level += delta
        levels.append(level)
    return levels


def _named(step: Step, text: str) -> list[int]:
    """Ops whose name and module are words of `text`."""
    words = {word.strip(".,:") for word in re.split(r"[\s()\[\]'\"]+", text)}
    return [
        i
        for i, op in enumerate(step.ops)
        if op.name in words and (op.module in words or not op.module)
    ]


def _storages(step: Step, plan: Plan) -> Iterator[Holding]:
    away = {**_dropped(step, plan), **_moved(step, plan)}
    packed = _compressed(step, plan)
    held = held_inputs(step, plan.recomputes)
    for s, storage in enumerate(step.storages):
        end = max(storage.death, held[s][1] if s in held else -1)
        first, last = max(storage.birth, 0), min(end + 1, len(step.ops))
        gone, back, left, note = away.get(s) or packed.get(s) or (last, last, 0, "")
        gone = max(gone, storage.release + 1)
        for size, start, stop in (
            (storage.num_bytes, first, min(gone, last)),
            (left, gone, min(back, last)),
            (storage.num_bytes, max(back, gone), last),
        ):
            if start < stop:
                yield Holding(storage.name, storage.kind.value, size, start, stop, note)


Away = dict[int, tuple[int, int, int, str]]
"""For a storage: position it goes, position it is back, bytes left meanwhile, why."""


def _dropped(step: Step, plan: Plan) -> Away:
    away: Away = {}
    for action in plan.recomputes:
        variant = find_variant(step, action)
        back = replay_position(step, variant)
        for s in variant.drops:
            away[s] = (step.packed(s), back, 0, "recomputed")
    return away


def _moved(step: Step, plan: Plan) -> Away:
    return {m.storage: (m.out_wait, m.in_start, 0, f"moved to {m.tier}") for m in plan.moves}


def _compressed(step: Step, plan: Plan) -> Away:
    away: Away = {}
    for row in plan.compressions:
        storage = step.storages[row.storage]
        left = compressed_bytes(row.codec, storage.num_bytes, storage.dtype)
        note = f"stored as {row.codec}"
        away[row.storage] = (step.packed(row.storage), step.first_use(row.storage), left, note)
    return away


def _replays(step: Step, plan: Plan) -> Iterator[Holding]:
    """What a replay holds beside the storages it brings back."""
    for action in plan.recomputes:
        variant = find_variant(step, action)
        at, size = replay_position(step, variant), variant.replay_peak_bytes - variant.dropped_bytes
        if at < len(step.ops) and size > 0:
            name = f"{step.blocks[action.block].name}, temporaries of its replay"
            yield Holding(name, Kind.TEMPORARY.value, size, at, at + 1)


def _workspaces(step: Step) -> Iterator[Holding]:
    for i, op in enumerate(step.ops):
        if op.workspace_bytes:
            name = f"workspace of {op.name}"
            yield Holding(name, Kind.TEMPORARY.value, op.workspace_bytes, i, i + 1)


def moves_by_block(step: Step, plan: Plan) -> dict[int, list[Move]]:
    """The moves of tensors that each block call saved; -1 outside blocks."""
    owner = {s: rows[0].block for s, rows in step.saves.items()}
    moves: dict[int, list[Move]] = {}
    for move in plan.moves:
        moves.setdefault(owner.get(move.storage, -1), []).append(move)
    return moves
