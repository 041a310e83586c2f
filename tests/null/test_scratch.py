"""What kernels may take for themselves: known by the names of ops and the shapes they touch."""

from legroom.memory.scratch import GATES, with_scratch
from legroom.memory.trace import Kind, Op, Phase, Step, Storage


def taken(*ops: Op) -> list[int]:
    """Workspace of ops over three storages of 1, 10 and 100 bytes."""
    sizes, end = (1, 10, 100), len(ops)
    rows = tuple(Storage(str(n), n, Kind.INPUT, -1, end, end) for n in sizes)
    step = Step(model="m", machine="x", capture="fake", ops=ops, storages=rows, saved=())
    return [op.workspace_bytes for op in with_scratch(step).ops]


def op(name: str, phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...]) -> Op:
    return Op(name, "", phase, -1, 0.0, reads, writes)


def test_ops_of_known_need_take_none() -> None:
    assert taken(op("aten.mm", Phase.FORWARD, (0, 1), (2,))) == [0]


def test_a_convolution_copies_what_it_touches() -> None:
    first = op("aten.convolution", Phase.FORWARD, (0,), (1,))
    second = op("aten.convolution_backward", Phase.BACKWARD, (1, 2, 2), ())
    assert taken(first, second, op("aten.mm", Phase.BACKWARD, (2,), ())) == [11, 110, 0]


def test_recurrent_layers_keep_gates_each_for_its_own() -> None:
    """Two layers' gates, of 10 bytes of output each, are there at every op."""
    layer = op("aten._cudnn_rnn", Phase.FORWARD, (), (1,))
    back = op("aten._cudnn_rnn_backward", Phase.BACKWARD, (1,), (0,))
    kept = 2 * GATES * 10
    assert taken(layer, layer, back) == [kept, kept, kept + GATES]
