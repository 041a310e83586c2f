"""The simulator on hand-made chains: peaks and times as sums that can be checked by hand.

The chain of two blocks has ops f0.0 f0.1 f1.0 f1.1 loss loss' b1.1 b1.0 b0.1 b0.0 at positions
0..9. A forward op takes 1 s, a backward op 2 s, the loss none: position 3 is at 3 s, positions 4
to 6 at 4 s, 7 at 6 s, 8 at 8 s, and the step ends at 12 s. Bytes alive during each op are

    x0 3, s0 10, x1 3, s1 10, x2 3, gradients alike:  13 16 26 29 29 32 39 29 26 13
"""

from typing import Any

import msgspec
import pytest

from legroom.machine.spec import Link, Machine, Tier
from legroom.memory.actions import Action, Compress, Move, Recompute
from legroom.memory.handmade import chain, natural_peak
from legroom.memory.play import tier_peaks
from legroom.memory.simulate import Simulator

STEP = chain(2, 10, output_bytes=3)
S0, S1 = 1, 3
"""The saved storages inside the two blocks: free after ops 1 and 3, needed by ops 8 and 6."""
UNPLANNED_S = 12.0


def machine(
    rate: float = 10.0, latency_s: float = 0.0, cap: float | None = None, disk: float = 5.0
) -> Machine:
    """A machine whose host link carries so many bytes a second each way; disk is behind host."""
    tiers = tuple(Tier(name=n, num_bytes=1000) for n in ("device", "host", "disk"))
    speeds = {
        ("device", "host"): rate,
        ("host", "device"): rate,
        ("host", "disk"): disk,
        ("disk", "host"): disk,
    }
    links = tuple(
        Link(
            source=a,
            target=b,
            bytes_per_s=v,
            latency_s=latency_s,
            root="bus" if "device" in (a, b) else "",
        )
        for (a, b), v in speeds.items()
    )
    return Machine(
        name="by hand",
        device="cpu",
        origin="made for tests",
        tiers=tiers,
        links=links,
        duplex={"bus": cap} if cap else {},
        matrix_flops={"float32": 1.0},
        vector_flops=1.0,
        memory_bytes_per_s=8.0,
    )


def move(storage: int, *positions: int, tier: str = "host") -> Move:
    out_start, out_wait, in_start, in_wait = positions
    return Move(
        storage=storage,
        tier=tier,
        out_start=out_start,
        out_wait=out_wait,
        in_start=in_start,
        in_wait=in_wait,
    )


def again(block: int) -> Recompute:
    return Recompute(block=block, variant="full")


def peak(*actions: Action) -> int:
    return Simulator(STEP, machine()).shape(actions).peak


def time_of(*actions: Action, **given: Any) -> float:
    return Simulator(STEP, machine(**given)).time(actions)


# -- peaks ---------------------------------------------------------------------------------------


def test_nothing_planned() -> None:
    """The peak is in b1.1: two saved, two ends of blocks, two gradients."""
    shape = Simulator(STEP, machine()).shape([])
    assert list(shape.during[:10]) == [13, 16, 26, 29, 29, 32, 39, 29, 26, 13]
    assert shape.peak == natural_peak(STEP) == 39
    assert time_of() == UNPLANNED_S


def test_recompute_of_the_last_block_frees_nothing_at_the_peak() -> None:
    """Its backward is the peak itself: what it dropped is back there."""
    shape = Simulator(STEP, machine()).shape([again(1)])
    assert list(shape.during[:10]) == [13, 16, 26, 29, 19, 22, 39, 29, 26, 13]
    ((replay, while_running),) = shape.replays
    x0, x1, s0, grad_x2, s1 = 3, 3, 10, 3, 10
    assert (replay.position, while_running) == (6, x0 + x1 + s0 + grad_x2 + s1)
    assert time_of(again(1)) == UNPLANNED_S + 1


def test_recompute_of_the_first_block() -> None:
    """s0 is gone from its release after op 1 until its replay before op 8."""
    shape = Simulator(STEP, machine()).shape([again(0)])
    assert list(shape.during[:10]) == [13, 16, 16, 19, 19, 22, 29, 19, 26, 13]
    assert peak(again(0)) == peak(again(0), again(1)) == 29
    assert time_of(again(0), again(1)) == UNPLANNED_S + 2


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ((1, 3, 7, 8), 29),  # out in time, back after the peak
        ((1, 1, 8, 8), 29),  # the source is let go by forward after op 1, not sooner
        ((1, 6, 7, 8), 32),  # waited for late: still there in loss'
        ((1, 7, 7, 8), 39),  # too late to help
        ((1, 3, 6, 8), 39),  # back too early
    ],
)
def test_peaks_of_a_move(positions: tuple[int, ...], expected: int) -> None:
    """Bytes count until the wait for the copy out, and again from the start of the copy in."""
    assert peak(move(S0, *positions)) == expected


def test_a_fetch_in_forward_lies_beside_what_the_op_before_it_holds() -> None:
    """The save that tells of it is made while that op runs; in backward nothing runs then."""
    step = chain(4, 1000, output_bytes=10)
    simulator = Simulator(step, machine())
    first = next(s for s in step.saves if step.storages[s].num_bytes == 1000)
    bare = simulator.shape([]).during
    for back, until in ((5, 4), (step.turn + 1, step.turn + 1)):
        move = Move(storage=first, tier="host", out_start=2, out_wait=3, in_start=back, in_wait=16)
        less = bare - simulator.shape([move]).during
        assert [p for p, size in enumerate(less.tolist()) if size == 1000] == list(range(3, until))


def test_a_fetch_of_what_the_step_still_holds_is_there_twice() -> None:
    """The copy is another one."""
    step = chain(4, 1000, output_bytes=10)
    first = next(s for s in step.saves if step.storages[s].num_bytes == 1000)
    storages = list(step.storages)
    storages[first] = msgspec.structs.replace(storages[first], release=7)
    held = msgspec.structs.replace(step, storages=tuple(storages))
    simulator = Simulator(held, machine())
    move = Move(storage=first, tier="host", out_start=2, out_wait=3, in_start=5, in_wait=16)
    more = simulator.shape([move]).during - simulator.shape([]).during
    assert [p for p, size in enumerate(more.tolist()) if size == 1000] == [4, 5, 6, 7]


def test_a_move_beside_a_recompute() -> None:
    """s0 away, s1 dropped and back at the peak: x0 + x1 + x2' + s1 + s1' = 29 in b1.1."""
    assert peak(move(S0, 1, 3, 7, 8), again(1)) == 3 + 3 + 3 + 10 + 10


def test_lower_tiers_hold_their_copies_until_the_storage_dies() -> None:
    both = [move(S0, 1, 3, 7, 8), move(S1, 3, 4, 5, 6)]
    assert tier_peaks(STEP, both) == {"host": 20}
    apart = [move(S0, 1, 3, 7, 8), move(S1, 3, 4, 5, 6, tier="disk")]
    assert tier_peaks(STEP, apart) == {"host": 10, "disk": 10}
    assert Simulator(STEP, machine()).run(both).peak_bytes["host"] == 20


def test_compression_keeps_the_small_copy_to_the_end() -> None:
    """16 bytes of float32 are 8 in bf16: there from the save on, beside the whole before and after.

    With s 16 and x 4 the unplanned levels are 20 24 40 44 44 48 60 44 40 20.
    """
    step = chain(2, 16, output_bytes=4)
    small = Compress(storage=S0, codec="bf16")
    shape = Simulator(step, machine()).shape([small])
    assert list(shape.during[:10]) == [20, 32, 32, 36, 36, 40, 52, 36, 48, 20]
    assert Simulator(step, machine()).shape([Compress(storage=S0, codec="fp8")]).peak == 48


@pytest.mark.parametrize(
    "actions",
    [
        [],
        [Compress(storage=S0, codec="bf16")],
        [Compress(storage=S0, codec="fp8"), Recompute(block=1, variant="full")],
        [Recompute(block=0, variant="full")],
    ],
)
def test_the_parts_of_a_peak_add_up_to_it(actions: list[Action]) -> None:
    """Whatever is packed, dropped or moved."""
    step = chain(2, 16, output_bytes=4)
    outcome = Simulator(step, machine()).run(actions)
    during = Simulator(step, machine()).shape(actions).during
    assert sum(outcome.peak_parts.values()) == during.max()


# -- times ---------------------------------------------------------------------------------------


def test_a_move_that_fits_between_costs_nothing() -> None:
    """Out from 1 s to 2 s, waited for at 3 s; in from 6 s to 7 s, needed at 8 s."""
    outcome = Simulator(STEP, machine()).run([move(S0, 1, 3, 7, 8)])
    assert (outcome.step_s, outcome.stall_s) == (UNPLANNED_S, 0.0)
    assert outcome.moved_bytes == {"device->host": 10, "host->device": 10}


def test_stalls_of_a_slow_link() -> None:
    """At 2 B/s: out 1..6 s, 3 s of stall at 3 s; in 9..14 s, 3 s of stall at 11 s."""
    outcome = Simulator(STEP, machine(rate=2.0)).run([move(S0, 1, 3, 7, 8)])
    assert (outcome.step_s, outcome.stall_s) == (UNPLANNED_S + 6, 6.0)
    assert [c.stall_s for c in outcome.costs] == [6.0]


def test_a_later_wait_stalls_less() -> None:
    """Waited for at 4 s and not at 3 s: one second less of stall."""
    assert time_of(move(S0, 1, 6, 7, 8), rate=2.0) == UNPLANNED_S + 5


def test_an_earlier_fetch_stalls_less() -> None:
    """In from 7 s (op 6 after the stall of 3 s) to 12 s, needed at 11 s."""
    assert time_of(move(S0, 1, 3, 6, 8), rate=2.0) == UNPLANNED_S + 3 + 1


def test_a_fetch_on_demand_stalls_for_the_whole_copy() -> None:
    assert time_of(move(S0, 1, 3, 8, 8)) == UNPLANNED_S + 1


def test_latency_counts_each_way() -> None:
    """3 s of latency: out 1..5 s, 2 s of stall at 3 s; in 8..12 s, 2 s of stall at 10 s."""
    assert time_of(move(S0, 1, 3, 7, 8), latency_s=3.0) == UNPLANNED_S + 4


def test_copies_of_one_way_queue() -> None:
    """Both out at 3 s and 4 s at 5 B/s: the second begins when the first is through, at 6 s."""
    one, two = move(S0, 3, 6, 8, 8), move(S1, 4, 6, 6, 6)
    alone = time_of(two, rate=5.0)
    assert alone == UNPLANNED_S + 2 + 2
    # At position 6 (4 s): out of S1 ends at 3 + 2 + 2 = 7 s, in 7..9 s; on demand 2 s for S0.
    assert time_of(one, two, rate=5.0) == UNPLANNED_S + 3 + 2 + 2


def test_both_ways_at_once_share_the_bus() -> None:
    """S0 comes in and S1 goes out from 4 s on: 1 s each alone, 2 s each under a cap of 10 B/s."""
    both = [move(S0, 1, 3, 5, 8), move(S1, 5, 6, 6, 6)]
    assert time_of(*both) == UNPLANNED_S + 1 + 1
    assert time_of(*both, cap=10.0) == UNPLANNED_S + 2 + 1


def test_two_hops_to_disk() -> None:
    """The device waits for the hop to host on the way out, and for the slower one on the way in."""
    deep = move(S0, 1, 3, 7, 8, tier="disk")
    outcome = Simulator(STEP, machine()).run([deep])
    assert outcome.step_s == UNPLANNED_S
    assert set(outcome.moved_bytes) == {
        "device->host", "host->disk", "disk->host", "host->device"
    }  # fmt: skip
    # In from 6 s: disk at 2.5 B/s takes until 10 s, needed at 8 s.
    assert time_of(deep, disk=2.5) == UNPLANNED_S + 2


def test_bytes_are_not_read_before_they_are_written() -> None:
    """At 1 B/s the disk has them all at 11 s at the soonest, and takes 10 s to give them."""
    assert time_of(move(S0, 1, 3, 7, 8, tier="disk"), disk=1.0) >= 11 + 10 + 4


def test_compression_takes_two_passes() -> None:
    """(16 + 8) bytes at 8 B/s, when saved and when asked for."""
    step = chain(2, 16, output_bytes=4)
    small = Compress(storage=S0, codec="bf16")
    assert Simulator(step, machine()).time([small]) == UNPLANNED_S + 2 * 3


def test_a_replay_gives_the_link_time() -> None:
    """The copy in runs on while a block runs again: 1 s less of stall."""
    late = move(S0, 1, 3, 6, 8)
    assert time_of(late, rate=2.0) == UNPLANNED_S + 4
    # The replay before op 6 comes after the fetch began there: needed at 12 s, there at 12 s.
    assert time_of(late, again(1), rate=2.0) == UNPLANNED_S + 3 + 1


def test_what_nobody_asks_for_does_not_come_back() -> None:
    """A block that is dropped for good costs no time, and its bytes are gone once, not twice."""
    rows = tuple(msgspec.structs.replace(r, unpacked=()) if r.block == 1 else r for r in STEP.saved)
    step = msgspec.structs.replace(STEP, saved=rows)
    simulator, drop = Simulator(step, machine()), [Recompute(block=1, variant="full")]
    bare = [13, 16, 26, 29, 19, 22, 29, 29, 26, 13]  # s1 goes after op 3, and not again
    assert simulator.shape(drop).during.tolist()[:10] == bare
    assert simulator.shape(drop).replays == ()
    assert simulator.time(drop) == UNPLANNED_S
