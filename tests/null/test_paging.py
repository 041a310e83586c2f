"""Evictions under pressure, by hand: who leaves at which op, and where it comes back."""

from typing import NamedTuple

import msgspec

from legroom.memory.actions import Move
from legroom.memory.gaps import find_gaps
from legroom.memory.handmade import chain
from legroom.memory.paging import Stay
from legroom.memory.planner import Choice, Problem
from legroom.memory.policies.dragon import AHEAD, _Clock, dragon, read_ahead
from legroom.memory.policies.ocdnn import ocdnn
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step
from tests.null.test_zero import with_disk


class Seen(NamedTuple):
    """A move by the name of what it moves."""

    out: int
    back: int
    tier: str


def posed(step: Step, device: int, host: int = 10**6, disk: int = 0) -> Problem:
    limits = {"device": device, "host": host, "disk": disk}
    return Problem(Simulator(step, with_disk(1000.0)), limits)


def seen(step: Step, choice: Choice) -> dict[str, Seen]:
    moves = [a for a in choice.actions if isinstance(a, Move)]
    assert all(move.out_start == move.out_wait for move in moves)  # nothing leaves before it must
    return {step.storages[m.storage].name: Seen(m.out_wait, m.in_start, m.tier) for m in moves}


def layered(step: Step) -> Step:
    """Every op of the forward is a layer of its own."""
    ops = (
        msgspec.structs.replace(op, name="aten.mm.default") if op.name.startswith("f") else op
        for op in step.ops
    )
    return msgspec.structs.replace(step, ops=tuple(ops))


def test_what_was_used_longest_ago_leaves_at_the_op_that_needs_the_room() -> None:
    """Tensors of 10, born in ops 0, 2, 4 and 6 of 8; the fourth and its gradient make 50.

    In 30, s0 leaves for s3 at op 6, and s1 and s2 can stay until s3 meets its gradient at op 10,
    where s1 leaves, too. Tensor s1 belongs to the layer of op 3, and backward of the next one, of
    op 4, begins with op 13; s0 to that of op 1, and backward of the next one with op 15.
    """
    step = layered(chain(4, 10, output_bytes=0))
    found = seen(step, ocdnn(posed(step, 30)))
    assert found == {"s0.0": Seen(6, 15, "host"), "s1.0": Seen(10, 13, "host")}


def test_nothing_is_evicted_that_need_not_be() -> None:
    step = layered(chain(4, 10, output_bytes=0))
    for policy in (ocdnn, dragon):
        assert seen(step, policy(posed(step, 50))) == {}


def test_what_was_not_used_lately_goes_first_and_then_by_address() -> None:
    """Memory ran out at op 5: since then, the gaps that began at 6 and 8 were used."""
    step = chain(5, 10, output_bytes=0)
    gaps = [gap for gap in find_gaps(posed(step, 100)) if gap.num_bytes]
    starts = [gap.start for gap in gaps]
    assert starts == [2, 4, 6, 8, 10]
    clock = _Clock()
    assert clock.order(5, gaps[::-1]) == gaps
    late, old = gaps[2]._replace(storage=0), gaps[1]._replace(storage=99)
    assert clock.order(9, [late, old]) == [old, late]


def test_a_use_reads_the_next_ones_ahead() -> None:
    """Six are away: the first is asked for on demand, four come with it, and then the last."""
    step = chain(8, 10, output_bytes=0)
    gaps = [gap for gap in find_gaps(posed(step, 100)) if gap.num_bytes][: AHEAD + 2]
    found = read_ahead([Stay(gap, gap.start, gap.end) for gap in gaps])
    ends = sorted(gap.end for gap in gaps)
    assert [stay.gap.end for stay in found] == ends
    assert [stay.fetch for stay in found] == [*[ends[0]] * (AHEAD + 1), ends[-1]]


def test_the_oldest_of_the_page_cache_are_on_the_drive() -> None:
    """Of four tensors away, nine tenths of the host hold the two that left last."""
    step = chain(6, 10, output_bytes=0)
    found = seen(step, dragon(posed(step, 30, host=23, disk=1000)))
    tiers = {name: move.tier for name, move in found.items()}
    assert tiers == {"s0.0": "disk", "s1.0": "disk", "s2.0": "host", "s3.0": "host"}
    assert {m.tier for m in seen(step, dragon(posed(step, 30, host=40))).values()} == {"host"}
