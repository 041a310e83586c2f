"""What makes the peak: the tensors alive at the fullest op of a step under a plan."""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from legroom.memory.actions import Recompute, compressed_bytes
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
    storage: int = -1
    """Its number in the step, -1 for bytes that are no storage."""


class Peak(NamedTuple):
    """The fullest moment: an op, or the replay of a block just before it."""

    op: int
    where: str
    """The moment in words."""
    holdings: tuple[Holding, ...]
    """Who holds bytes there, largest first."""

    @property
    def num_bytes(self) -> int:
        """Sum of the parts."""
        return sum(h.num_bytes for h in self.holdings)


def find_peak(step: Step, plan: Plan) -> Peak:
    """Follow the plan over the ops and replays to the moment with most device bytes.

    Raises RecordError when the plan names a variant that the step does not have.
    """
    held = [*_storages(step, plan), *_small_copies(step, plan)]
    moments = [_at_op(step, [*held, *_workspaces(step)])]
    moments += [_at_replay(step, replay, held) for replay in plan.recomputes]
    return max(moments, key=lambda moment: moment.num_bytes)


def _peak(op: int, where: str, alive: list[Holding]) -> Peak:
    return Peak(op, where, tuple(sorted(alive, key=lambda h: (-h.num_bytes, h.name))))


def _at_op(step: Step, holdings: list[Holding]) -> Peak:
    """The fullest op."""
    change = [0] * (len(step.ops) + 1)
    for h in holdings:
        change[h.start] += h.num_bytes
        change[h.stop] -= h.num_bytes
    levels = list(accumulate(change[:-1]))
    if not levels:
        return _peak(0, "no op", [])
    at = levels.index(max(levels))
    op = step.ops[at]
    where = f"{op.name} in {op.module or 'the step'} ({op.phase.value})"
    return _peak(at, where, [h for h in holdings if h.start <= at < h.stop])


def _at_replay(step: Step, replay: Recompute, holdings: list[Holding]) -> Peak:
    """While a block runs again: inputs still there, the op that asked for it not yet begun."""
    variant, block = find_variant(step, replay), step.blocks[replay.block]
    at = replay_position(step, variant)
    born = {s for s, storage in enumerate(step.storages) if storage.birth == at}
    alive = [
        h
        for h in holdings
        if (h.start <= at < h.stop and h.storage not in born)
        or (h.stop == at and h.storage in block.inputs)
    ]
    size = variant.replay_peak_bytes - variant.dropped_bytes
    if size > 0:
        name = f"temporaries of recomputing {block.name}"
        alive.append(Holding(name, Kind.TEMPORARY.value, size, at, at + 1))
    return _peak(at, f"recomputing {block.name}", alive)


def _storages(step: Step, plan: Plan) -> Iterator[Holding]:
    away = _away(step, plan)
    held = held_inputs(step, plan.recomputes)
    for s, storage in enumerate(step.storages):
        first = max(storage.birth, 0)
        last = min(max(storage.death + 1, held[s][1] if s in held else 0), len(step.ops))
        gone, back, note = away.get(s, (last, last, ""))
        gone = min(max(gone, storage.release + 1), last)
        until = min(storage.last + 1, last) if s in away else last
        for start, stop in ((first, gone), (max(back, gone), until)):
            if start < stop and storage.num_bytes:
                yield Holding(
                    storage.name, storage.kind.value, storage.num_bytes, start, stop, note, s
                )


def _away(step: Step, plan: Plan) -> dict[int, tuple[int, int, str]]:
    """For a storage: the position it may go, the position it is back, and why."""
    away: dict[int, tuple[int, int, str]] = {}
    for action in plan.recomputes:
        variant = find_variant(step, action)
        for s in variant.drops:
            away[s] = (0, replay_position(step, variant), "recomputed")
    for move in plan.moves:
        away[move.storage] = (move.out_wait, move.in_start, f"moved to {move.tier}")
    for row in plan.compressions:
        away[row.storage] = (0, step.first_use(row.storage), f"stored as {row.codec}")
    return away


def _small_copies(step: Step, plan: Plan) -> Iterator[Holding]:
    for row in plan.compressions:
        storage = step.storages[row.storage]
        size = compressed_bytes(row.codec, storage.num_bytes, storage.dtype)
        name, stop = f"{storage.name} as {row.codec}", min(storage.death + 1, len(step.ops))
        yield Holding(name, storage.kind.value, size, step.packed(row.storage), stop, "shrunk")


def _workspaces(step: Step) -> Iterator[Holding]:
    for i, op in enumerate(step.ops):
        if op.workspace_bytes:
            name = f"workspace of {op.name}"
            yield Holding(name, Kind.TEMPORARY.value, op.workspace_bytes, i, i + 1)
