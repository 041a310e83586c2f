"""Make a trace of what a recorder saw."""

from collections.abc import Callable

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from legroom.machine.spec import Machine
from legroom.memory.mechanisms.tape import OpForm
from legroom.memory.raw import RawCall, RawOp, RawStorage
from legroom.memory.recorder import LEFTOVER, Recorder
from legroom.memory.roofline import op_time
from legroom.memory.trace import Block, Kind, Op, Phase, Root, Saved, Step, Storage


def assemble_step(
    recorder: Recorder,
    calls: list[RawCall],
    *,
    model: str,
    machine: Machine,
    capture: str = "fake",
    signature: str = "",
) -> Step:
    """The trace of a recorded step, with these calls as its blocks (variants not yet made)."""
    end = len(recorder.ops)
    _forget_bystanders(recorder)
    _accumulate_in_place(recorder)
    saved, block_of_row = _saved_rows(recorder, calls)
    held: dict[int, int] = {}
    for raw in recorder.saved:
        gone = end if raw.gone is None else raw.gone
        held[raw.storage] = max(gone, held.get(raw.storage, 0))
    storages = tuple(_storage(s, held.get(i, -1), end) for i, s in enumerate(recorder.storages))
    block_of_op = _block_of_op(calls)
    ops = tuple(
        _op(raw, storages, machine, block_of_op.get(i, block_of_row(raw)), capture)
        for i, raw in enumerate(recorder.ops)
    )
    blocks = _blocks(recorder, calls, storages)
    return Step(
        model=model,
        signature=signature,
        machine=machine.name,
        capture=capture,
        ops=ops,
        storages=storages,
        saved=saved,
        blocks=blocks,
        root=_root(recorder),
    ).check()


def _root(recorder: Recorder) -> Root | None:
    """The model's own call, if it is the only one and there is a backward to it."""
    calls = [call for call in recorder.calls if not call.path and call.grad]
    if len(calls) != 1 or calls[0].last_op < calls[0].first_op:
        return None
    call, end = calls[0], len(recorder.ops)
    ops = recorder.ops[call.first_op : call.last_op + 1]
    ours = (i for i, op in enumerate(recorder.ops) if op.phase == Phase.BACKWARD)
    back = next((i for i in ours if recorder.ops[i].node in call.nodes), end)
    if back == end or any(op.phase == Phase.BACKWARD for op in ops):
        return None
    return Root(
        first=call.first_op,
        last=call.last_op,
        back=back,
        first_saved=call.first_saved,
        last_saved=call.last_saved,
    )


_INTO_ZEROS = ("aten.index_put", "aten.index_add", "aten.scatter_add")
"""Backwards of a choice of rows: they add to zeros of their own, in place where nobody watches."""


def _accumulate_in_place(recorder: Recorder) -> None:
    """Let gradients that meet be added in place, as autograd does when nobody watches its ops.

    It adds a gradient to one that waits for it, made by another node, and needed no more; or to
    zeros that its node has just made.
    """
    storages, saved = recorder.storages, {row.storage for row in recorder.saved}
    sums: dict[int, int] = {}
    for i, op in enumerate(recorder.ops):
        op.reads[:] = dict.fromkeys(sums.get(s, s) for s in op.reads)
        op.writes[:] = dict.fromkeys(sums.get(s, s) for s in op.writes)
        into_zeros = op.phase == Phase.BACKWARD and op.name in _INTO_ZEROS
        if not op.reads or not (into_zeros or (op.sums and len(op.reads) == 2)):
            continue
        made, waiting = op.results[0], op.reads[0]
        if made < 0 or made in saved or waiting in saved:
            continue
        new, old = storages[made], storages[waiting]
        fresh = new.birth == i and new.num_bytes == old.num_bytes and not old.role
        if not fresh or old.birth < 0 or old.death != i or old.lives:
            continue
        maker = recorder.ops[old.birth]
        zeros = maker.name == "aten.new_zeros" and maker.node == op.node
        if zeros if into_zeros else maker.node != op.node:
            old.death, old.lives = new.death, new.lives
            old.role, old.name = new.role, new.name
            op.writes.append(waiting)
            new.num_bytes, new.role = 0, ""
            sums[made] = waiting


def _forget_bystanders(recorder: Recorder) -> None:
    """What lay there before the step, stayed, and was touched by no op is no matter of the step."""
    touched = {s for op in recorder.ops for s in (*op.reads, *op.writes)}
    touched.update(row.storage for row in recorder.saved)
    for i, row in enumerate(recorder.storages):
        if row.name == LEFTOVER and row.lives and not row.role and i not in touched:
            row.num_bytes = 0


def _saved_rows(
    recorder: Recorder, calls: list[RawCall]
) -> tuple[tuple[Saved, ...], Callable[[RawOp], int]]:
    owner = [-1] * len(recorder.saved)
    for b, call in enumerate(calls):
        for row in range(call.first_saved, call.last_saved + 1):
            owner[row] = b
    counts: dict[int, int] = {}
    rows = []
    for raw, block in zip(recorder.saved, owner, strict=True):
        ordinal = counts.get(block, 0)
        counts[block] = ordinal + 1
        rows.append(Saved(raw.storage, block, ordinal, raw.packed, tuple(raw.unpacked)))

    forwards = [call.nodes for call in recorder.calls if call.depth == 0]
    """Other nodes were made in backward, or outside of the model."""

    def block_of(raw: RawOp) -> int:
        if raw.phase != Phase.BACKWARD:
            return -1
        if any(raw.node in nodes for nodes in forwards):
            return next((b for b, call in enumerate(calls) if raw.node in call.nodes), -1)
        return owner[raw.unpacked] if raw.unpacked >= 0 else -1

    return tuple(rows), block_of


def _block_of_op(calls: list[RawCall]) -> dict[int, int]:
    return {i: b for b, call in enumerate(calls) for i in range(call.first_op, call.last_op + 1)}


def _storage(raw: RawStorage, held: int, end: int) -> Storage:
    """One storage; `held` is the last position where autograd holds it, -1 if it never did."""
    death = end if raw.death is None or raw.lives > 0 else raw.death
    birth, release = raw.birth, death if raw.release is None else raw.release
    if raw.role in ("weight", "state"):
        birth, release, death = -1, end, end
    done = -1 if raw.done is None or held < 0 else min(raw.done, end)
    death = min(max(birth, death, held), end)
    release = min(max(release, birth - 1), death) if held >= 0 else death
    kind = _kind(raw, held >= 0)
    return Storage(raw.name, raw.num_bytes, kind, birth, release, death, raw.dtype, done)


def _kind(raw: RawStorage, is_saved: bool) -> Kind:
    if raw.role:
        return Kind(raw.role)
    if raw.birth < 0:
        return Kind.INPUT
    return Kind.ACTIVATION if is_saved else Kind.TEMPORARY


def _op(
    raw: RawOp, storages: tuple[Storage, ...], machine: Machine, block: int, capture: str
) -> Op:
    traffic = sum(storages[s].num_bytes for s in (*raw.reads, *raw.writes))
    time_s = op_time(machine, raw.flops, traffic, raw.dtype) if capture == "fake" else raw.time_s
    return Op(
        raw.name,
        raw.module,
        raw.phase,
        block,
        time_s,
        tuple(raw.reads),
        tuple(raw.writes),
        raw.workspace_bytes,
        raw.flops,
        traffic,
        raw.random,
    )


def _blocks(
    recorder: Recorder, calls: list[RawCall], storages: tuple[Storage, ...]
) -> tuple[Block, ...]:
    groups: dict[object, int] = {}
    blocks = []
    for call in calls:
        ops = recorder.ops[call.first_op : call.last_op + 1]
        outside = dict.fromkeys(
            s
            for op in ops
            for s in op.reads
            if storages[s].birth < call.first_op and storages[s].kind != Kind.WEIGHT
        )
        form = _form(recorder, call, ops, storages)
        blocks.append(
            Block(
                module=call.path,
                call=call.call,
                group=groups.setdefault(form, len(groups)),
                first=call.first_op,
                last=call.last_op,
                inputs=tuple(outside),
                barred=_barred(call, ops, recorder, storages),
            )
        )
    return tuple(blocks)


def _form(
    recorder: Recorder, call: RawCall, ops: list[RawOp], storages: tuple[Storage, ...]
) -> object:
    """Equal for blocks that do the same to tensors of the same sizes, and save the same of them.

    And are asked for the same gradients.
    """
    numbers: dict[int, int] = {}

    def local(s: int) -> tuple[int, int]:
        return numbers.setdefault(s, len(numbers)), storages[s].num_bytes

    does = tuple((o.name, *map(local, o.reads), "to", *map(local, o.writes)) for o in ops)
    saves = recorder.saved[call.first_saved : call.last_saved + 1]
    return does, tuple(local(row.storage) for row in saves), call.wants


def _barred(
    call: RawCall, ops: list[RawOp], recorder: Recorder, storages: tuple[Storage, ...]
) -> str:
    """Why a second run of these ops would not be the same, or would change something."""
    norms = [m for m in call.module.modules() if isinstance(m, _BatchNorm)]
    statistics = {recorder.sid(b, -1) for m in norms for b in m.buffers(recurse=False)}
    counts = {recorder.sid(b, -1) for m in norms if (b := m.num_batches_tracked) is not None}
    updated = {s for op in ops for s in op.writes} & statistics - counts
    given = set(call.inputs)
    inner = (c for c in recorder.calls if call.first_op <= c.first_op and c.last_op <= call.last_op)
    if any(c.strays for c in inner if c.path.startswith(call.path)):
        return "its forward sets buffers anew or draws from Python's or numpy's generator"
    if call.wrapped:
        return "it is called in a transform of torch.func"
    if any(isinstance(m, torch.jit.ScriptModule) for m in call.module.modules()):
        return "a part of it is scripted"
    touched = given.union(*(op.reads for op in ops))
    for op in ops:
        if op.phase == Phase.BACKWARD:
            return "its forward runs a backward of its own"
        if op.sealed:
            return f"{op.name} draws from a generator of its own"
        for s in op.writes:
            if storages[s].birth < call.first_op and s not in statistics:
                return f"{op.name} changes {storages[s].name or 'its input'} in place"
        if updated & set(op.reads).difference(op.writes):
            return f"{op.name} reads running statistics that its forward also updates"
        for s in op.reads:
            foreign = storages[s].birth < call.first_op and storages[s].kind != Kind.WEIGHT
            if foreign and s not in given:
                return f"{op.name} reads {storages[s].name or 'a tensor'}, which is no argument"
    for op in recorder.ops[call.last_op + 1 :]:
        changed = touched.intersection(op.writes) if op.phase == Phase.FORWARD else ()
        if any(storages[s].birth < call.first_op for s in changed):
            return f"{op.name} changes its input, or a buffer it reads, in place afterwards"
    return ""


def op_forms(recorder: Recorder) -> dict[int, OpForm]:
    """Name and new storages of each op of the forward."""
    births = [s.birth for s in recorder.storages]
    return {
        i: OpForm(op.name, tuple(s if s >= 0 and births[s] == i else -1 for s in op.results))
        for i, op in enumerate(recorder.ops)
        if op.phase == Phase.FORWARD
    }


def same_calls(recorder: Recorder, like: Step) -> list[RawCall]:
    """Calls of the modules that are blocks in another trace of the model, however often called."""
    wanted = {b.module for b in like.blocks}
    ran = (c for c in recorder.calls if c.grad and c.last_op >= c.first_op)
    return [c for c in ran if c.path in wanted]


def set_releases(recorder: Recorder, like: Step | None) -> None:
    """Where storages that autograd kept, or a plan sent away, would be free without either.

    That is where the step's own tensors on them were gone. Where copies of them were done is told
    by the fake trace, if there is one. What came into a block may have been held for its replay.
    """
    saved = {row.storage for row in recorder.saved}
    for sid in saved:
        raw = recorder.storages[sid]
        if raw.birth >= 0:
            raw.release = None if raw.handles else raw.let_go
    touched = {s: i for i, op in enumerate(recorder.ops) for s in (*op.reads, *op.writes)}
    for sid in {s for call in recorder.calls for s in call.inputs} - saved:
        raw = recorder.storages[sid]
        if raw.birth >= 0 and not raw.handles and raw.let_go is not None:
            raw.death, raw.lives = max(raw.let_go, touched.get(sid, -1)), 0
    for mine, theirs in zip(recorder.saved, like.saved if like is not None else (), strict=False):
        assert like is not None
        row, storage = recorder.storages[mine.storage], like.storages[theirs.storage]
        if row.num_bytes != storage.num_bytes:
            break
        if tuple(mine.unpacked) == theirs.unpacked and row.done is None and storage.done >= 0:
            row.done = storage.done
