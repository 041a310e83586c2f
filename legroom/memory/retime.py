"""A step captured with fake tensors, as another machine's rates would have timed it."""

from typing import TypeVar

import msgspec

from legroom.core.errors import InputError
from legroom.machine.spec import Machine
from legroom.memory.roofline import op_time, update_time
from legroom.memory.trace import Op, Phase, Step, Storage
from legroom.memory.variants import with_variants

Row = TypeVar("Row", Op, Storage)


def retimed(step: Step, machine: Machine) -> Step:
    """The step with times by a machine's rates: what a capture for that machine gives.

    One whose times were measured, or forecast for builds, stays as it is.
    """
    forecast = any(block.build for block in step.blocks)
    if step.machine == machine.name or step.capture != "fake" or forecast:
        return step
    ops = tuple(msgspec.structs.replace(op, time_s=_time(step, op, machine)) for op in step.ops)
    return with_variants(msgspec.structs.replace(step, ops=ops, machine=machine.name))


def at_batch(
    small: Step, large: Step, sizes: tuple[int, int], batch: int, machine: Machine
) -> Step:
    """The step at another batch, from those captured at two sizes: all bytes and work are linear.

    Raises InputError where the two did not run the same ops.
    """
    names = [[op.name for op in step.ops] for step in (small, large)]
    if names[0] != names[1] or len(small.storages) != len(large.storages):
        raise InputError(
            f"{small.model} runs other ops at a batch of {sizes[1]} than of {sizes[0]}"
        )
    share = (batch - sizes[0]) / (sizes[1] - sizes[0])

    def blend(a: Row, b: Row, *fields: str) -> Row:
        pairs = {f: (getattr(a, f), getattr(b, f)) for f in fields}
        values = {f: type(x)(round(x + share * (y - x))) for f, (x, y) in pairs.items()}
        return msgspec.structs.replace(a, **values)

    pairs = zip(small.storages, large.storages, strict=True)
    storages = tuple(blend(a, b, "num_bytes") for a, b in pairs)
    work = ("workspace_bytes", "flops", "traffic_bytes")
    ops = [blend(a, b, *work) for a, b in zip(small.ops, large.ops, strict=True)]
    step = msgspec.structs.replace(small, storages=storages)
    timed = (msgspec.structs.replace(op, time_s=_time(step, op, machine)) for op in ops)
    return with_variants(msgspec.structs.replace(step, ops=tuple(timed)))


def _time(step: Step, op: Op, machine: Machine) -> float:
    if op.phase == Phase.UPDATE:
        return update_time(machine, _bytes(step, op.reads), _bytes(step, op.writes))
    dtype = next((step.storages[s].dtype for s in op.writes), "")
    return op_time(machine, op.flops, op.traffic_bytes, dtype)


def _bytes(step: Step, storages: tuple[int, ...]) -> int:
    return sum(step.storages[s].num_bytes for s in storages)
