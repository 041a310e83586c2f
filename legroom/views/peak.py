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
    """The fullest moment: the op (or the replay just before it) and who holds bytes there."""

    op: int
    holdings: tuple[Holding, ...]
    """Largest first."""

    @property
    def num_bytes(self) -> int:
        """Sum of the parts."""
        return sum(h.num_bytes for h in self.holdings)


def find_peak(step: Step, plan: Plan) -> Peak:
    """Follow the plan over the ops to the moment that its prediction names, or the fullest op.

    Raises RecordError when the plan names a variant that the step does not have.
    """
    holdings = [*_storages(step, plan), *_workspaces(step)]
    replay = _named_replay(step, plan)
    if replay is None:
        op = _fullest(step, plan, holdings)
        alive = [h for h in holdings if h.start <= op < h.stop]
    else:
        op = replay_position(step, find_variant(step, replay))
        alive = _at_replay(step, replay, holdings)
    return Peak(op, tuple(sorted(alive, key=lambda h: (-h.num_bytes, h.name))))


def _fullest(step: Step, plan: Plan, holdings: list[Holding]) -> int:
    levels = _levels(holdings, len(step.ops))
    named = _named_ops(step, plan.predicted.peak_at) or range(len(step.ops))
    return max(named, key=lambda i: (levels[i], -i), default=0)


def _levels(holdings: list[Holding], num_ops: int) -> list[int]:
    change = [0] * (num_ops + 1)
    for h in holdings:
        change[h.start] += h.num_bytes
        change[h.stop] -= h.num_bytes
    return list(accumulate(change[:num_ops]))


def _named_ops(step: Step, text: str) -> list[int]:
    """Ops that an outcome's `peak_at` may mean: "NAME in MODULE (PHASE)"."""
    return [
        i
        for i, op in enumerate(step.ops)
        if text.startswith(f"{op.name} in {op.module or 'the step'}")
        and text.endswith((f" ({op.phase.value})", op.module or "the step"))
    ]


def _named_replay(step: Step, plan: Plan) -> Recompute | None:
    """The replay that an outcome's `peak_at` names: "recomputing BLOCK"."""
    for action in plan.recomputes:
        find_variant(step, action)
        if plan.predicted.peak_at == f"recomputing {step.blocks[action.block].name}":
            return action
    return None


def _at_replay(step: Step, replay: Recompute, holdings: list[Holding]) -> list[Holding]:
    """Who holds bytes while a block runs again, before the op that asked for it begins."""
    variant, block = find_variant(step, replay), step.blocks[replay.block]
    op, inside = replay_position(step, variant), {*variant.drops, *block.inputs}
    alive = [
        h for h in holdings if h.start < op < h.stop or (h.storage in inside and _touches(h, op))
    ]
    size = variant.replay_peak_bytes - variant.dropped_bytes
    if size > 0:
        name = f"temporaries of recomputing {block.name}"
        alive.append(Holding(name, Kind.TEMPORARY.value, size, op, op + 1))
    return alive


def _touches(holding: Holding, op: int) -> bool:
    return holding.start <= op <= holding.stop


def _storages(step: Step, plan: Plan) -> Iterator[Holding]:
    away = _away(step, plan)
    held = held_inputs(step, plan.recomputes)
    for s, storage in enumerate(step.storages):
        first = max(storage.birth, 0)
        last = max(min(storage.death + 1, len(step.ops)), held[s][1] if s in held else 0)
        gone, back, note = away.get(s, (last, last, ""))
        gone = min(max(gone, storage.release + 1), last)
        for start, stop in ((first, gone), (max(back, gone), last)):
            if start < stop and storage.num_bytes:
                yield Holding(
                    storage.name, storage.kind.value, storage.num_bytes, start, stop, note, s
                )
    yield from _small_copies(step, plan)


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
