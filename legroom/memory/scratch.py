"""What kernels may take for themselves, as far as shapes tell: more than fake tensors show."""

from collections.abc import Iterator

from legroom.memory.trace import Phase, Step

CONVOLUTION, RECURRENT, UNSEEN = "conv", "_rnn", "cudnn_rnn"
"""What the names of ops have in them whose kernels take scratch, and of those that keep some."""
GATES = 6
"""What recurrent layers keep for their backward, gates and cell states, in sizes of the output."""


def scratch_bytes(step: Step) -> int:
    """At the most, and on top of the peak by shapes: kept by recurrent layers, taken by one op.

    A convolution copies what it reads and makes to the layout of its kernel.
    """
    return sum(_kept(step)) + max(_taken(step), default=0)


def _kept(step: Step) -> Iterator[int]:
    for op in step.ops:
        if UNSEEN in op.name and op.phase is Phase.FORWARD:
            yield GATES * _sizes(step, op.writes)


def _taken(step: Step) -> Iterator[int]:
    for op in step.ops:
        if CONVOLUTION in op.name or RECURRENT in op.name:
            yield _sizes(step, op.reads) + _sizes(step, op.writes)


def _sizes(step: Step, storages: tuple[int, ...]) -> int:
    return sum(step.storages[s].num_bytes for s in set(storages))
