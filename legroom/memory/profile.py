"""Capture a step as a trace: with fake tensors on any machine, or from a real recorded step."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves, tree_map

from legroom.machine.spec import Machine
from legroom.memory.blocks import find_blocks
from legroom.memory.mechanisms.recompute import OpForm
from legroom.memory.recorder import RawCall, RawOp, RawStorage, Recorder
from legroom.memory.roofline import op_time
from legroom.memory.saved import ViewOf
from legroom.memory.timers import CpuTimer, CudaTimer
from legroom.memory.trace import Block, Kind, Op, Phase, Saved, Step, Storage
from legroom.memory.variants import with_variants

LossFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class StateRule:
    """What an optimizer keeps per parameter byte, and what its update takes on top."""

    copies: float
    scratch: float
    """Share of all parameter bytes that its update allocates for a moment."""


STATE_RULES = {
    "none": StateRule(0, 0),
    "sgd": StateRule(0, 0),
    "sgd-momentum": StateRule(1, 0),
    "adam": StateRule(2, 0),
    "adamw": StateRule(2, 0),
    "adamw-foreach": StateRule(2, 1),
}


class Capture(NamedTuple):
    """A trace, and the forms of its forward ops that selective replays need."""

    step: Step
    forms: dict[int, OpForm]


def op_forms(recorder: Recorder) -> dict[int, OpForm]:
    """Name and results of each op of the forward."""
    return {
        i: OpForm(
            name=op.name,
            results=tuple(view for view, _ in op.results),
            storages=tuple(s for _, s in op.results),
            single=op.single,
            bookkeeping=bool(op.writes)
            and all(recorder.storages[s].role == "weight" for s in op.writes),
        )
        for i, op in enumerate(recorder.ops)
        if op.phase == Phase.FORWARD
    }


def capture_fake(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    machine: Machine,
    *,
    device: torch.device | None = None,
    optimizer: str = "none",
    blocks: Sequence[str] | None = None,
    signature: str = "",
) -> Capture:
    """Trace forward, backward and update without allocating: times come from a roofline.

    The model and batch may be real, or on the meta device; neither is changed. Raises whatever
    the model raises on fake tensors (data-dependent control flow does).
    """
    device = device or fake_device(machine)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        weights = _fake_weights(model, device)
        inputs = tree_map(lambda x: fake_input(x, device) if isinstance(x, Tensor) else x, batch)
        with mode, _reparametrize_module(model, weights, tie_weights=True):
            recorder = Recorder(model, device, run=run_small_for_real)
            with fake_hooks(recorder), recorder.watch_modules(), recorder:
                loss = loss_fn(model, inputs)
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
            _note_gradients(recorder, weights)
            chosen = find_blocks(recorder, blocks)
            draft = build_step(recorder, chosen, model=type(model).__name__, machine=machine)
        del inputs, weights
    step = with_variants(_with_update(draft, optimizer, machine, signature))
    return Capture(step, op_forms(recorder))


def fake_device(machine: Machine) -> torch.device:
    """Where fake tensors pretend to be: a build without CUDA cannot run fake CUDA backward."""
    cuda = machine.device == "cuda" and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


def _fake_weights(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: _fake_like(t, device) for name, t in tensors}


def _fake_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A fake tensor of the same form; leaves on the CPU what a CUDA model keeps on the CPU."""
    stays = tensor.device.type == "cpu" and tensor.dim() == 0
    fake = torch.empty_strided(
        tensor.size(),
        tensor.stride(),
        dtype=tensor.dtype,
        device="cpu" if stays else device,
    )
    return fake.requires_grad_(tensor.requires_grad)


SMALL_INDEX_BYTES = 1 << 20


def fake_input(tensor: Tensor, device: torch.device) -> Tensor:
    """A batch tensor for the capture: small indices and masks keep their values."""
    if tensor.is_meta or tensor.is_floating_point() or tensor.is_complex():
        return _fake_like(tensor, device)
    if tensor.nbytes > SMALL_INDEX_BYTES:
        return _fake_like(tensor, device)
    with unset_fake_temporarily():
        return tensor.detach().to(device, copy=True)


def run_small_for_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on fake tensors, or for real where it makes small indices from real ones.

    Models look at positions and masks to choose their way (is anything padded?); with real
    values there, the capture takes the way the real step takes.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    random = torch.Tag.nondeterministic_seeded in func.tags
    if random or any(isinstance(x, FakeTensor) for x in tensors):
        return func(*args, **kwargs)
    makes_tensors = any("Tensor" in str(r.type) for r in func._schema.returns)
    if makes_tensors and not func._schema.is_mutable:
        fake = func(*args, **kwargs)
        results = [x for x in tree_leaves(fake) if isinstance(x, Tensor)]
        if not all(_is_small_index(x) for x in results):
            return fake
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _is_small_index(tensor: Tensor) -> bool:
    exact = not tensor.is_floating_point() and not tensor.is_complex() and not tensor.is_meta
    return exact and tensor.numel() * tensor.itemsize <= SMALL_INDEX_BYTES


@dataclass
class _Return:
    """A storage on its way through backward: held until its last saved tensor was asked for."""

    sid: int
    num_bytes: int
    waiting: set[int]
    flat: Tensor | None = None


@contextlib.contextmanager
def fake_hooks(recorder: Recorder) -> Iterator[None]:
    """Let go of every saved tensor, and hand out new bytes when backward asks for it.

    So the trace shows where the bytes would be free, and when they must be back.
    """
    returns: dict[int, _Return] = {}

    def pack(tensor: Tensor) -> Any:
        row = recorder.pack(tensor)
        if row < 0:
            return tensor
        sid = recorder.saved[row].storage
        size = tensor.untyped_storage().nbytes()
        returns.setdefault(sid, _Return(sid, size, set())).waiting.add(row)
        return row, ViewOf.of(tensor)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        row, view = packed
        recorder.unpack(row)
        back = returns[recorder.saved[row].storage]
        recorder.paused = True
        try:
            if back.flat is None:
                back.flat = torch.empty(back.num_bytes, dtype=torch.uint8, device=recorder.device)
                recorder.adopt(back.flat, back.sid)
            back.waiting.discard(row)
            tensor: Tensor = view.on(back.flat)
            if not back.waiting:
                back.flat = None
        finally:
            recorder.paused = False
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _note_gradients(recorder: Recorder, weights: dict[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if tensor.grad is not None:
            recorder.name_storage(tensor.grad, f"{name}.grad", "gradient")


def build_step(
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
    saved, block_of_row = _saved_rows(recorder, calls)
    held = {row.storage for row in saved}
    storages = tuple(_storage(s, i in held, end) for i, s in enumerate(recorder.storages))
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
    ).check()


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

    def block_of(raw: RawOp) -> int:
        backward = raw.phase == Phase.BACKWARD and raw.unpacked >= 0
        return owner[raw.unpacked] if backward else -1

    return tuple(rows), block_of


def _block_of_op(calls: list[RawCall]) -> dict[int, int]:
    return {i: b for b, call in enumerate(calls) for i in range(call.first_op, call.last_op + 1)}


def _storage(raw: RawStorage, is_saved: bool, end: int) -> Storage:
    death = end if raw.death is None or raw.lives > 0 else raw.death
    birth, release = raw.birth, death if raw.release is None else raw.release
    if raw.role in ("weight", "state"):
        birth, release, death = -1, end, end
    death = max(birth, death)
    release = min(max(release, birth - 1), death) if is_saved else death
    return Storage(raw.name, raw.num_bytes, _kind(raw, is_saved), birth, release, death, raw.dtype)


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
        form = tuple((o.name, tuple(storages[s].num_bytes for s in o.writes)) for o in ops)
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


def _barred(
    call: RawCall, ops: list[RawOp], recorder: Recorder, storages: tuple[Storage, ...]
) -> str:
    """Why a second run of these ops would not be the same, or would change something."""
    buffers = {recorder.sid(b, -1) for b in call.module.buffers()}
    for op in ops:
        if op.sealed:
            return f"{op.name} draws from a generator of its own"
        for s in op.writes:
            if storages[s].birth < call.first_op and s not in buffers:
                return f"{op.name} changes {storages[s].name or 'its input'} in place"
    return ""


def _with_update(step: Step, optimizer: str, machine: Machine, signature: str) -> Step:
    """Append the optimizer's states and one op for its update."""
    rule = STATE_RULES[optimizer]
    end = len(step.ops)
    grads = [i for i, s in enumerate(step.storages) if s.kind == Kind.GRADIENT]
    params = sum(step.storages[i].num_bytes for i in grads)
    state = Storage("optimizer", int(params * rule.copies), Kind.STATE, -1, end + 1, end + 1)
    storages = tuple(
        Storage(s.name, s.num_bytes, s.kind, s.birth, _shift(s.release, end), _shift(s.death, end), s.dtype)
        for s in step.storages
    )
    update = Op(
        f"optimizer.{optimizer}", "", Phase.UPDATE, -1,
        op_time(machine, 0, params * (3 + 2 * rule.copies), "float32"),
        tuple(grads), (len(storages),), int(params * rule.scratch),
    )  # fmt: skip
    return Step(
        model=step.model, signature=signature, machine=step.machine, capture=step.capture,
        ops=(*step.ops, update), storages=(*storages, state), saved=step.saved, blocks=step.blocks,
    ).check()  # fmt: skip


def _shift(position: int, end: int) -> int:
    """What lasted to the end of the step lasts through the update as well."""
    return position + 1 if position >= end else position


def capture_real(
    recorder: Recorder,
    timer: CudaTimer | CpuTimer,
    model: nn.Module,
    machine: Machine,
    *,
    like: Step | None = None,
    blocks: Sequence[str] | None = None,
    signature: str = "",
) -> Capture:
    """The trace of a step that was recorded as it ran, times and scratch measured.

    `like` is a fake trace of the same model: it knows where each saved tensor would be free,
    which a run that keeps it cannot show. Its blocks are used again.
    """
    births = [0] * len(recorder.ops)
    for row in recorder.storages:
        if row.birth >= 0:
            births[row.birth] += row.num_bytes
    timer.fill(recorder.ops, births)
    _set_releases(recorder, like)
    calls = _same_calls(recorder, like) if like is not None else find_blocks(recorder, blocks)
    draft = build_step(
        recorder,
        calls,
        model=type(model).__name__,
        machine=machine,
        capture="real",
        signature=signature,
    )
    return Capture(with_variants(draft), op_forms(recorder))


def _same_calls(recorder: Recorder, like: Step) -> list[RawCall]:
    wanted = {(b.module, b.call) for b in like.blocks}
    return [c for c in recorder.calls if (c.path, c.call) in wanted and c.last_op >= c.first_op]


def _set_releases(recorder: Recorder, like: Step | None) -> None:
    """Where kept storages would be free: as the fake trace says, or after the last access."""
    known: dict[int, int] = {}
    if like is not None:
        for mine, theirs in zip(recorder.saved, like.saved, strict=False):
            storage = like.storages[theirs.storage]
            if recorder.storages[mine.storage].num_bytes != storage.num_bytes:
                break
            if mine.packed == theirs.packed and storage.release < like.turn:
                known[mine.storage] = storage.release
    last: dict[int, int] = {}
    for i, op in enumerate(recorder.ops):
        if op.phase == Phase.FORWARD:
            last.update(dict.fromkeys((*op.reads, *op.writes), i))
    for sid in {row.storage for row in recorder.saved}:
        raw = recorder.storages[sid]
        held_to_end = raw.release is None or recorder.ops[raw.release].phase != Phase.FORWARD
        if raw.birth >= 0 and held_to_end:
            raw.release = known.get(sid, last.get(sid, raw.birth))
