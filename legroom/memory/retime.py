"""A step captured with fake tensors, as another machine's rates would have timed it."""

import msgspec

from legroom.machine.spec import Machine
from legroom.memory.roofline import op_time, update_time
from legroom.memory.trace import Op, Phase, Step
from legroom.memory.variants import with_variants


def retimed(step: Step, machine: Machine) -> Step:
    """The step with times by a machine's rates: what a capture for that machine gives.

    One whose times were measured, or forecast for builds, stays as it is.
    """
    forecast = any(block.build for block in step.blocks)
    if step.machine == machine.name or step.capture != "fake" or forecast:
        return step
    ops = tuple(msgspec.structs.replace(op, time_s=_time(step, op, machine)) for op in step.ops)
    return with_variants(msgspec.structs.replace(step, ops=ops, machine=machine.name))


def _time(step: Step, op: Op, machine: Machine) -> float:
    if op.phase == Phase.UPDATE:
        return update_time(machine, _bytes(step, op.reads), _bytes(step, op.writes))
    dtype = next((step.storages[s].dtype for s in op.writes), "")
    return op_time(machine, op.flops, op.traffic_bytes, dtype)


def _bytes(step: Step, storages: tuple[int, ...]) -> int:
    return sum(step.storages[s].num_bytes for s in storages)
