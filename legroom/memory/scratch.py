"""What kernels may take for themselves, as far as shapes tell: more than fake tensors show."""

import msgspec

from legroom.memory.trace import Op, Phase, Step

CONVOLUTION, RECURRENT, UNSEEN = "conv", "_rnn", "cudnn_rnn"
"""What the names of ops have in them whose kernels take scratch, and of those that keep some."""
GATES = 6
"""What recurrent layers keep for their backward, gates and cell states, in sizes of the output."""


def with_scratch(step: Step) -> Step:
    """The step as it may be at the most: with what kernels may take as workspace of their ops.

    A convolution copies what it reads and makes to the layout of its kernel; the backward of a
    recurrent layer makes gates. What such layers keep is counted at every op. The same step where
    no op is of those kinds.
    """
    kept = sum(_kept(step, op) for op in step.ops)
    extra = [kept + _taken(step, op) for op in step.ops]
    if not any(extra):
        return step
    replace = msgspec.structs.replace
    ops = (
        replace(op, workspace_bytes=op.workspace_bytes + n)
        for op, n in zip(step.ops, extra, strict=True)
    )
    return replace(step, ops=tuple(ops))


def _kept(step: Step, op: Op) -> int:
    keeps = UNSEEN in op.name and op.phase is Phase.FORWARD
    return GATES * _sizes(step, op.writes) if keeps else 0


def _taken(step: Step, op: Op) -> int:
    if RECURRENT in op.name:
        return GATES * _sizes(step, op.writes) if "backward" in op.name else 0
    convolves = CONVOLUTION in op.name
    return _sizes(step, op.reads) + _sizes(step, op.writes) if convolves else 0


def _sizes(step: Step, storages: tuple[int, ...]) -> int:
    return sum(step.storages[s].num_bytes for s in set(storages))
