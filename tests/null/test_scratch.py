"""What kernels may take for themselves: known by the names of ops and the shapes they touch."""

from legroom.memory.scratch import GATES, scratch_bytes
from legroom.memory.trace import Kind, Op, Phase, Step, Storage


def step(*ops: Op) -> Step:
    """A step over three storages of 1, 10 and 100 bytes."""
    sizes, end = (1, 10, 100), len(ops)
    rows = tuple(Storage(str(n), n, Kind.INPUT, -1, end, end) for n in sizes)
    return Step(model="m", machine="x", capture="fake", ops=ops, storages=rows, saved=())


def op(name: str, phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...]) -> Op:
    return Op(name, "", phase, -1, 0.0, reads, writes)


def test_ops_of_known_need_take_none() -> None:
    assert scratch_bytes(step(op("aten.mm", Phase.FORWARD, (0, 1), (2,)))) == 0


def test_a_convolution_copies_what_it_touches_and_one_runs_at_a_time() -> None:
    """110 = 10 + 100 of the larger, not the 11 of the other besides."""
    first = op("aten.convolution", Phase.FORWARD, (0,), (1,))
    second = op("aten.convolution_backward", Phase.BACKWARD, (1, 2), ())
    assert scratch_bytes(step(first, second)) == 110


def test_recurrent_layers_keep_gates_each_for_its_own() -> None:
    """Two layers' gates, of 10 bytes of output each, and one backward's 11 bytes."""
    layer = op("aten._cudnn_rnn", Phase.FORWARD, (), (1,))
    back = op("aten._cudnn_rnn_backward", Phase.BACKWARD, (1,), (0,))
    assert scratch_bytes(step(layer, layer, back)) == 2 * GATES * 10 + 11
