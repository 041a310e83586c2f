"""Traces with compiled blocks: hand-made numbers, and the best mix against all mixes."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.machine.spec import find_machine
from legroom.memory.builds import GIVEN, OWN, Build, Save
from legroom.memory.handmade import chain
from legroom.memory.mix import Knapsack, mixes, with_builds
from legroom.memory.rebuild import rebuilt
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step

MACHINE = find_machine("h200")
MIB = 1 << 20
SMALL = Build("small", 1.0, 2.5, 7, 9, (20,), ("float32",), (Save(GIVEN, 0, 10), Save(OWN, 0, 20)))
LARGE = Build("large", 1.0, 2.0, 5, 3, (60,), ("float32",), (Save(GIVEN, 0, 10), Save(OWN, 0, 60)))


def own(mib: int) -> Save:
    """A save of so many MiB of the block's own."""
    return Save(OWN, 0, mib * MIB)


def levels(step: Step) -> list[int]:
    """Device bytes during each op, and at the end."""
    return [int(n) for n in Simulator(step, MACHINE).shape([]).during]


def row(num_blocks: int = 3) -> Step:
    """Blocks that save two storages of 100 bytes and their input of 10, with a weight of 5."""
    return chain(num_blocks, 100, num_saved=2, output_bytes=10, weight_bytes=5)


def test_a_compiled_block_is_one_op_each_way() -> None:
    """All that was inside is gone; what the build saves lives from one to the other."""
    step = rebuilt(row(), dict.fromkeys(range(3), LARGE)).step
    assert [op.block for op in step.ops] == [0, 1, 2, -1, -1, 2, 1, 0, -1]
    assert step.compute_s == pytest.approx(9.0)
    # weights 15, inputs 10 each, what is saved, and what each op holds on the side
    here = [15 + 20 + 60 + 5, 15 + 30 + 120 + 5, 15 + 40 + 180 + 5, 15 + 40 + 180]
    assert levels(step)[:4] == here
    # backward of the last: its gradient comes in and goes out, its weight's gradient is new
    assert levels(step)[5] == 15 + 30 + 180 + 10 + 10 + 5 + 3


def test_blocks_that_stay_eager_keep_their_ops() -> None:
    """Only the chosen one is replaced; the others' ops and saves are as they were."""
    before = row()
    made = rebuilt(before, {1: SMALL})
    kept = [op for op in before.ops if op.block != 1]
    assert len(made.step.ops) == len(kept) + 2
    assert [made.step.ops[at].name for at in made.ops.values()] == [op.name for op in kept]
    assert made.step.blocks[1].build == "small" and made.step.blocks[0].build == ""
    assert len(made.step.saved_in(0)) == len(before.saved_in(0))
    assert [r.storage for r in made.step.saved_in(1)][1] == len(made.step.storages) - 1


def test_what_a_build_does_not_save_may_go() -> None:
    """The block's input is not kept for backward by a build that has no use for it."""
    bare = LARGE._replace(saves=LARGE.saves[1:])
    step = rebuilt(row(), dict.fromkeys(range(3), bare)).step
    second = step.storages[step.blocks[1].inputs[0]]
    assert second.death == 1, "x1 is read by block 1, op 1, and by nothing else"


def test_variants_are_made_for_what_is_left_eager() -> None:
    """A compiled block has none: its builds say what runs again."""
    step = with_builds(row(), {1: SMALL}).step
    assert step.blocks[0].variants and not step.blocks[1].variants


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 200), st.integers(1, 50), st.integers(0, 30)),
        min_size=2, max_size=3,
    ),
    room=st.integers(0, 500),
)  # fmt: skip
def test_the_knapsack_finds_the_best_of_all_mixes(
    sizes: list[tuple[int, int, int]], room: int
) -> None:
    """Against every choice, each judged by its own trace."""
    builds = [
        Build(f"b{i}", 1.0, float(t), m * MIB, m * MIB, (n * MIB,), ("float32",), (own(n),))
        for i, (n, t, m) in enumerate(sizes)
    ]
    step = chain(3, 100 * MIB, num_saved=2, output_bytes=10 * MIB, weight_bytes=5 * MIB)
    options = dict.fromkeys(range(3), builds)
    least = dict.fromkeys(range(3), min(builds, key=lambda b: b.saved_bytes))
    knapsack = Knapsack(with_builds(step, least).step, MACHINE, options, least)
    limit = max(levels(with_builds(step, least).step)) + (room - 50) * MIB
    found = knapsack.solve(limit)
    times = {}
    for picks in itertools.product(builds, repeat=3):
        made = rebuilt(step, dict(enumerate(picks))).step
        if max(levels(made)) <= limit:
            times[picks] = made.compute_s
    assert (found is None) == (not times)
    if found is not None:
        made = rebuilt(step, found).step
        assert max(levels(made)) <= limit
        assert made.compute_s <= min(times.values()) * 1.002


def test_more_relief_gives_faster_mixes() -> None:
    """Each guess of what moves will free gives a mix that saves at least as much."""
    limit = max(levels(with_builds(row(), dict.fromkeys(range(3), SMALL)).step)) + 50
    steps = [m.step for m in mixes(row(), MACHINE, limit, dict.fromkeys(range(3), [SMALL, LARGE]))]
    names = [[b.build for b in s.blocks].count("large") for s in steps]
    assert names == sorted(names) and names[0] < names[-1] == 3


def test_the_host_is_busy_with_what_stays_eager_and_with_each_build() -> None:
    """An op in backward weighs twice one in forward."""
    step = msgspec.structs.replace(row(), host_s=1.0)
    busy = rebuilt(step, dict.fromkeys(range(3), LARGE._replace(host_s=0.1))).step.host_s
    # outside are the loss, its backward and the update: 1 + 2 + 1 of 10 + 2 * 10 + 1
    assert busy == pytest.approx(4 / 31 + 0.3)
    assert rebuilt(row(), {0: LARGE._replace(host_s=0.1)}).step.host_s == 0
