"""Step, Op, Storage, Saved, Block, Variant: what ran, what lived, how long.

[Note: positions] Ops are numbered 0..N-1 in the order they ran. A *position* p is the moment just
before op p (N is the end of the step). A storage is alive during ops `birth`..`death`, so it is
allocated at position `birth` and freed at position `death + 1`; `birth` -1 was there before the
step, `death` N stays after it. Hooks of autograd fire at positions: a tensor is *packed* when
autograd saves it and *unpacked* when backward asks for it. Those moments, and no others, are where
a runtime that stays outside the framework can act: they are the step's *ticks*.

[Note: release] `release` is the last op before which something else than autograd's saved list
still holds the storage. If the saved copy goes away, the bytes are free from `release + 1` on.
"""

from bisect import bisect_left
from enum import StrEnum
from functools import cached_property
from typing import Self

import msgspec

from legroom.core.errors import RecordError
from legroom.core.files import Record

FULL = "full"
"""The variant that drops all it can and runs the whole block again."""


class Kind(StrEnum):
    """What a storage is for."""

    ACTIVATION = "activation"  # made in forward, saved for backward
    WEIGHT = "weight"  # parameters and buffers
    GRADIENT = "gradient"  # ends the backward as some parameter's .grad
    STATE = "state"  # held by the optimizer between steps
    INPUT = "input"  # was there before the step, and is none of the above
    OTHER = "other"  # not the step's: libraries' scratch, other models on the same device
    TEMPORARY = "temporary"  # all else


class Phase(StrEnum):
    """Which part of the step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"  # after backward: clipping, optimizer


class Op(msgspec.Struct, frozen=True, array_like=True):
    """One thing that ran, with its time."""

    name: str
    module: str
    phase: Phase
    block: int
    """Index of the block call it ran in, -1 outside blocks."""
    time_s: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    """Storages made or changed."""
    workspace_bytes: int = 0
    """Bytes allocated and freed inside the op, on top of what it leaves; below zero where a result
    takes the place of a saved storage."""
    flops: float = 0.0
    traffic_bytes: int = 0
    random: bool = False
    """It draws from a random generator."""


class Storage(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that live and die together; views share it."""

    name: str
    num_bytes: int
    kind: Kind
    birth: int
    release: int
    death: int
    """Last position, if autograd keeps it for backward."""
    dtype: str = ""
    done: int = -1
    """Last position of a copy that came back for backward: no one holds it on; -1 if not known."""

    @property
    def last(self) -> int:
        """Last position of a copy that came back."""
        return self.death if self.done < 0 else self.done


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """One tensor that autograd saved: which storage, when, and when it was asked for."""

    storage: int
    block: int
    """The block call that was running, -1 outside blocks."""
    ordinal: int
    """Its number among those saved in this block call (or outside all)."""
    packed: int
    unpacked: tuple[int, ...]
    """Positions in backward; empty if never asked for."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a block: which saved storages go, and which ops bring them back."""

    name: str
    drops: tuple[int, ...] = ()
    replays: tuple[int, ...] = ()
    """Ops of the block's forward that run again; the others up to `last` only allocate."""
    last: int = -1
    """The op of the forward after which the replay stops."""
    dropped_bytes: int = 0
    replay_s: float = 0.0
    replay_peak_bytes: int = 0
    """Most bytes the replay holds at once, dropped storages included."""
    noting_s: float = 0.0
    """About how long the host is busy in forward because the block will run again."""
    again_s: float = 0.0
    """And in backward, with running it again, whatever the device does."""

    @property
    def host_s(self) -> float:
        """Both."""
        return self.noting_s + self.again_s


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a module that the plan treats as a unit."""

    module: str
    call: int = 0
    """0 for the module's first call in the step, 1 for its second."""
    group: int = 0
    """Blocks of one group ran the same ops on the same shapes."""
    first: int
    last: int
    """First and last op of the forward."""
    inputs: tuple[int, ...] = ()
    """Storages that came in as arguments."""
    barred: str = ""
    """Why it cannot be recomputed; empty if it can."""
    variants: tuple[Variant, ...] = ()
    build: str = ""
    """How it was compiled; empty where it runs as it is."""
    price: str = ""
    """What that build takes and saves next to the fastest one, in words."""

    @property
    def name(self) -> str:
        """The module's path, with the call where it is not the first."""
        return self.module if self.call == 0 else f"{self.module} (call {self.call + 1})"


ROOT = ""
"""The path of the model itself."""


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The one call of the model itself."""

    first: int
    last: int
    """First and last op of its forward."""
    back: int
    """First op of its backward, which is all of the backward from there on."""
    first_saved: int
    last_saved: int
    """Its rows of saved tensors."""


class Step(Record, frozen=True, kw_only=True, dict=True):
    """The trace of one step: ops in order, storages, saved tensors, blocks."""

    kind = "step"

    model: str
    signature: str = ""
    """Shapes and phase this step stands for."""
    machine: str
    """Whose times these are."""
    capture: str
    """"fake" or "real"."""
    host_s: float = 0.0
    """How long the host is busy with the unplanned step; 0 where it is not a matter."""
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saved: tuple[Saved, ...]
    blocks: tuple[Block, ...] = ()
    root: Root | None = None
    """None where the model is called more than once, or runs builds."""

    @cached_property
    def ticks(self) -> tuple[int, ...]:
        """Positions where a runtime can act, in order."""
        marks = {0, len(self.ops)}
        for row in self.saved:
            marks.add(row.packed)
            marks.update(row.unpacked)
        return tuple(sorted(marks))

    @cached_property
    def _tick_blocks(self) -> list[tuple[int, int]]:
        marks = ((p, row.block) for row in self.saved for p in (row.packed, *row.unpacked))
        return sorted(set(marks))

    def block_of_tick(self, position: int) -> int | None:
        """The block (-1: outside all) with the first save or use at or after a position, if any."""
        at = bisect_left(self._tick_blocks, (position, -1))
        return self._tick_blocks[at][1] if at < len(self._tick_blocks) else None

    @cached_property
    def saves(self) -> dict[int, list[Saved]]:
        """For each saved storage, its rows in order of packing."""
        rows: dict[int, list[Saved]] = {}
        for row in self.saved:
            rows.setdefault(row.storage, []).append(row)
        return rows

    @cached_property
    def unsettled(self) -> frozenset[int]:
        """Saved storages that some op still writes after they were saved."""
        last: dict[int, int] = {}
        for i, op in enumerate(self.ops):
            last.update(dict.fromkeys(op.writes, i))
        return frozenset(s for s in self.saves if last.get(s, -1) >= self.packed(s))

    @cached_property
    def _rows_by_block(self) -> dict[int, list[Saved]]:
        rows: dict[int, list[Saved]] = {}
        for row in self.saved:
            rows.setdefault(row.block, []).append(row)
        return rows

    def saved_in(self, block: int) -> list[Saved]:
        """Rows saved while a block call ran (-1: outside all), in order."""
        return self._rows_by_block.get(block, [])

    @cached_property
    def compute_s(self) -> float:
        """Time of all ops."""
        return sum(op.time_s for op in self.ops)

    @cached_property
    def turn(self) -> int:
        """The position where backward begins."""
        return next(
            (i for i, op in enumerate(self.ops) if op.phase != Phase.FORWARD), len(self.ops)
        )

    def packed(self, storage: int) -> int:
        """Position where the storage is first saved."""
        return self.saves[storage][0].packed

    @cached_property
    def _first_uses(self) -> dict[int, int]:
        end = len(self.ops)
        return {
            storage: min((p for row in rows for p in row.unpacked), default=end)
            for storage, rows in self.saves.items()
        }

    def first_use(self, storage: int) -> int:
        """Position of the first backward use of a saved storage; N if it has none."""
        return self._first_uses[storage]

    def check(self) -> Self:
        """Lifetimes in order, ops touch only living storages, saved rows and blocks in range."""
        for i, op in enumerate(self.ops):
            if not (op.time_s >= 0 and op.flops >= 0 and op.traffic_bytes >= 0):
                raise RecordError(f"op {i} ({op.name}): a time or size is below zero")
            for s in (*op.reads, *op.writes):
                self._check_touch(i, s)
        for s, storage in enumerate(self.storages):
            if storage.num_bytes < 0 or not -1 <= storage.birth <= storage.death <= len(self.ops):
                raise RecordError(f"storage {s} ({storage.name}): lifetime or size out of range")
            if not -1 <= storage.done <= storage.death:
                raise RecordError(f"storage {s} ({storage.name}): done outside its life")
            if not storage.birth - 1 <= storage.release <= storage.death:
                raise RecordError(f"storage {s} ({storage.name}): release outside its lifetime")
        for k, row in enumerate(self.saved):
            if not 0 <= row.storage < len(self.storages) or row.block >= len(self.blocks):
                raise RecordError(f"saved row {k}: no such storage or block")
            if any(p < row.packed or p > len(self.ops) for p in row.unpacked):
                raise RecordError(f"saved row {k}: asked for before it was saved")
        self._check_blocks()
        return self

    def _check_touch(self, i: int, s: int) -> None:
        if not 0 <= s < len(self.storages):
            raise RecordError(
                f"op {i} ({self.ops[i].name}) touches storage {s}, which is not there"
            )
        storage = self.storages[s]
        if not storage.birth <= i <= storage.death:
            raise RecordError(
                f"op {i} ({self.ops[i].name}) touches storage {s} ({storage.name}) "
                f"outside its life {storage.birth}..{storage.death}"
            )

    def _check_blocks(self) -> None:
        end = -1
        for b, block in enumerate(self.blocks):
            if not end < block.first <= block.last < len(self.ops):
                raise RecordError(f"block {b} ({block.name}): op range overlaps or is out of range")
            end = block.last
            for variant in block.variants:
                if any(not block.first <= o <= block.last for o in variant.replays):
                    raise RecordError(f"block {b} variant {variant.name}: replays a foreign op")
                if any(s not in self.saves for s in variant.drops):
                    raise RecordError(f"block {b} variant {variant.name}: drops what is not saved")
