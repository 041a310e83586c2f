"""Plan: the chosen actions as a record, checked against its trace."""

from collections.abc import Sequence
from typing import Self

from legroom.core.errors import RecordError
from legroom.core.files import Record
from legroom.core.outcome import Outcome
from legroom.memory.actions import CODECS, ITEM_BYTES, Action, Compress, Move, Park, Recompute
from legroom.memory.parking import param_states
from legroom.memory.trace import FULL, Step, Variant

Held = dict[int, tuple[int, int]]


class Plan(Record, frozen=True, kw_only=True):
    """What to do with each storage and block of one step, who chose it and why."""

    kind = "plan"

    policy: str
    why: str = ""
    machine: str
    model: str
    signature: str = ""
    """The step it was made for."""
    budget: dict[str, int]
    """Most bytes per tier; "device" is always there."""
    actions: tuple[Action, ...] = ()
    predicted: Outcome
    planning_s: float = 0.0
    simulate_only: tuple[str, ...] = ()
    """What this plan asks that no runtime of ours carries out, by name."""

    @property
    def moves(self) -> list[Move]:
        """The moves, in order."""
        return [a for a in self.actions if isinstance(a, Move)]

    @property
    def recomputes(self) -> list[Recompute]:
        """The block variants, in order."""
        return [a for a in self.actions if isinstance(a, Recompute)]

    @property
    def compressions(self) -> list[Compress]:
        """The compressions, in order."""
        return [a for a in self.actions if isinstance(a, Compress)]

    @property
    def park(self) -> Park | None:
        """The optimizer states to be kept on the host, if any."""
        return next((a for a in self.actions if isinstance(a, Park)), None)

    @property
    def exact(self) -> bool:
        """Whether gradients are bit-identical to those of the unplanned step."""
        return all(CODECS[a.codec].exact for a in self.compressions)

    def check(self) -> Self:
        """Budget named, storages and blocks acted on once, positions of moves in order."""
        if "device" not in self.budget:
            raise RecordError("plan: the budget must name the device tier")
        for tier, size in self.budget.items():
            if size < 0:
                raise RecordError(f"plan: the budget of {tier} is below zero")
        self.predicted.check()
        seen: set[tuple[str, int]] = set()
        for i, action in enumerate(self.actions):
            target = _target(action)
            if target in seen:
                raise RecordError(f"plan action {i}: {target[0]} {target[1]} is acted on twice")
            seen.add(target)
            if isinstance(action, Move) and not (
                action.out_start <= action.out_wait <= action.in_start <= action.in_wait
            ):
                raise RecordError(
                    f"plan action {i}: the four positions of the move are not in order"
                )
            if isinstance(action, Compress) and action.codec not in CODECS:
                raise RecordError(f"plan action {i}: unknown codec {action.codec!r}")
        return self

    def check_against(self, step: Step) -> Self:
        """Raise RecordError when an action does not fit the trace it was made for."""
        self.check()
        dropped: set[int] = set()
        for action in self.recomputes:
            dropped.update(_check_recompute(action, step))
        for move in self.moves:
            _check_move(move, step, dropped, held_inputs(step, self.recomputes))
        for row in self.compressions:
            _check_compress(row, step, dropped)
        known = param_states(step) if self.park is not None else {}
        for name in self.park.params if self.park is not None else ():
            if name not in known:
                raise RecordError(f"plan parks states of {name}, of which the step has none")
        return self


def _target(action: Action) -> tuple[str, int]:
    """What an action acts on."""
    if isinstance(action, Recompute):
        return "block", action.block
    return ("states", 0) if isinstance(action, Park) else ("storage", action.storage)


def find_variant(step: Step, action: Recompute) -> Variant:
    """The variant an action names; raises RecordError if the block has none of that name."""
    if not 0 <= action.block < len(step.blocks):
        raise RecordError(f"plan recomputes block {action.block}, which the step does not have")
    block = step.blocks[action.block]
    for variant in block.variants:
        if variant.name == action.variant:
            return variant
    raise RecordError(f"block {block.name} has no variant {action.variant!r}")


def replay_position(step: Step, variant: Variant) -> int:
    """Where the replay of a variant happens: the first use of anything it dropped."""
    return min((step.first_use(s) for s in variant.drops), default=len(step.ops))


def held_inputs(step: Step, actions: list[Recompute]) -> Held:
    """What replays need: storages with the first position that needs each, and where it may go.

    Kept storages that a replay reads may go once it is done; the block's arguments when autograd
    has let go of all that was dropped, for until then it could ask again.
    """
    held: Held = {}
    for action in actions:
        variant = find_variant(step, action)
        position = replay_position(step, variant)
        over = max((step.storages[s].death + 1 for s in variant.drops), default=position)
        ends = dict.fromkeys(sources(step, action.block, variant), position)
        until = max(over, position) if position < len(step.ops) else over  # it may never run
        ends |= dict.fromkeys(step.blocks[action.block].inputs, until)
        for s, end in ends.items():
            first, last = held.get(s, (position, end))
            held[s] = (min(first, position), max(last, end))
    return held


def sources(step: Step, block: int, variant: Variant) -> list[int]:
    """Kept storages that the ops of a selective replay read."""
    if variant.name == FULL:
        return []
    read = {s for i in variant.replays for s in step.ops[i].reads}.difference(variant.drops)
    first, last = step.blocks[block].first, variant.last
    rows = step.saved_in(block)
    found = (r.storage for r in rows if r.storage in read)
    return [s for s in found if first <= step.storages[s].birth <= last]


def away_span(step: Step, move: Move) -> tuple[int, int]:
    """Where the bytes of a move are gone from the device, and where there is room for them again.

    The step may hold them for longer than that. A save in forward is told of while its op still has
    what it made for itself, and a fetch that is due then takes its room beside that.
    """
    left = max(step.storages[move.storage].release + 1, move.out_wait)
    return left, max(move.out_wait, move.in_start - (move.in_start < step.turn))


def moving_blocks(step: Step, actions: Sequence[Move | Compress]) -> set[int]:
    """Blocks that save what is moved or compressed, or whose saves tell that a copy is due."""
    found = {row.block for a in actions for row in step.saves.get(a.storage, ())}
    for a in actions:
        if isinstance(a, Move):
            due = {step.block_of_tick(p) for p in (a.out_start, a.out_wait, a.in_start)}
            found |= {b for b in due if b is not None}
    return found


def _check_recompute(action: Recompute, step: Step) -> tuple[int, ...]:
    variant = find_variant(step, action)
    block = step.blocks[action.block]
    if block.barred and variant.drops:
        raise RecordError(f"block {block.name} cannot be recomputed: {block.barred}")
    return variant.drops


def _check_move(move: Move, step: Step, dropped: set[int], held: Held) -> None:
    if not 0 <= move.storage < len(step.storages):
        raise RecordError(f"plan moves storage {move.storage}, which the step does not have")
    name = step.storages[move.storage].name
    if move.storage in dropped:
        raise RecordError(f"plan moves {name}, which a recomputed block drops")
    if move.storage not in step.saves and move.storage not in held:
        raise RecordError(f"plan moves {name}, which nothing saves for backward")
    if move.storage in step.unsettled:
        raise RecordError(f"plan moves {name}, which is still written after it was saved")
    if move.in_wait > first_need(step, move.storage, held):
        raise RecordError(f"plan fetches {name} after its first use")


def first_need(step: Step, storage: int, held: Held) -> int:
    """First position in backward that needs a saved or held storage."""
    uses = [step.first_use(storage)] if storage in step.saves else []
    return min((*uses, held.get(storage, (len(step.ops), 0))[0]))


def _check_compress(row: Compress, step: Step, dropped: set[int]) -> None:
    storage = step.storages[row.storage]
    if row.storage in dropped or row.storage not in step.saves:
        raise RecordError(f"plan compresses {storage.name}, which is not kept for backward")
    if storage.dtype not in CODECS[row.codec].dtypes or storage.dtype not in ITEM_BYTES:
        raise RecordError(f"codec {row.codec} does not take {storage.name} of {storage.dtype}")
