"""Pools: hand-made lives with exact addresses, and laws that hold for any."""

import itertools
import random
import time
from collections.abc import Sequence

import pytest

from legroom.core.errors import RecordError
from legroom.machine.spec import find_machine
from legroom.memory.actions import Action, Move, Recompute
from legroom.memory.arena import stays
from legroom.memory.gaps import assign, find_gaps
from legroom.memory.handmade import chain
from legroom.memory.parking import make_park
from legroom.memory.plan import held_inputs
from legroom.memory.planner import Problem, make_plan
from legroom.memory.pool.lives import Life, live_peak, lives_of, moments, rounded
from legroom.memory.pool.place import ALLOCATORS, Figures, Pool, figures
from legroom.memory.shipped import load_shipped
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Kind, Op, Phase, Step, Storage
from legroom.views.policies import pools_table
from legroom.views.table import to_text
from tests.null.test_policies import budget, machine, random_chain

LIMITS = {"device": 10**6, "host": 10**6}
WORST = 1.5
"""Smartpool's pool over the smallest there is: the most in 9000 draws of up to six blocks."""


def lives(*rows: tuple[int, ...]) -> list[Life]:
    """(begins, ends, bytes), and 1 at the end for those that last."""
    return [Life(*row[:3], lasts=len(row) > 3) for row in rows]


def place(allocator: str, *rows: tuple[int, ...]) -> Pool:
    return ALLOCATORS[allocator](lives(*rows)).check(lives(*rows))


def draw_lives(seed: int, most: int = 60, sizes: int = 40) -> list[Life]:
    draw, found = random.Random(seed), list[Life]()
    for _ in range(draw.randint(1, most)):
        begins, ends = sorted(draw.sample(range(100), 2))
        found.append(Life(begins, ends, draw.randint(1, sizes), draw.random() < 0.3))
    return found


# -- allocators -----------------------------------------------------------------------------------


def test_smartpool_takes_the_largest_first_into_the_smallest_hole() -> None:
    """10 and 6 make the pool; later ones find the hole of 4, not that of 10, and share it."""
    rows = ((0, 4, 10), (2, 9, 6), (4, 9, 7), (5, 8, 3), (4, 6, 3), (9, 10, 1))
    # 10 lies at 0; 7 after it, at 0 too; 6 beside both, at 10. Between 7 and 10 there is a hole
    # of 3: the earlier 3 has it, the other goes on top.
    assert place("smartpool", *rows) == Pool((0, 10, 0, 16, 7, 0), 19)
    assert live_peak(lives(*rows)) == 19


def test_smartpool_takes_the_smallest_of_two_holes() -> None:
    """8, 6, 5, 4 in a column; when 8 and 5 are gone, 3 lies in the place of 5."""
    rows = ((0, 2, 8), (0, 9, 6), (0, 3, 5), (0, 9, 4), (5, 9, 3))
    # 6 and 4 overlap all: they lie at the bottom, which leaves no hole; without that:
    assert place("smartpool", *rows, (10, 11, 1)).addresses == (0, 8, 14, 19, 14, 0)


def test_smartpool_lays_what_lives_all_along_at_the_bottom() -> None:
    """However small: largest first it would lie on top of what comes and goes."""
    rows = ((0, 9, 2), (1, 3, 10), (4, 6, 8))
    assert place("smartpool", *rows) == Pool((0, 2, 2), 12)


def test_best_fit_is_online() -> None:
    """What comes goes to the smallest gap, though another choice would leave room later."""
    rows = ((0, 3, 4), (1, 9, 1), (2, 4, 2), (2, 9, 1), (5, 7, 2), (6, 8, 4), (7, 9, 1))
    # 4, 1, 2, 1 in a row; the gaps are 4 at 0 and 2 at 5. 2 goes to 5, 4 to 0, and 1 to 5 again.
    assert place("best_fit", *rows) == Pool((0, 4, 5, 7, 5, 0, 5), 8)


def test_best_fit_merges_neighbours_and_gives_up_the_end() -> None:
    """3 and 4 make 7; the free end is none of the gaps, and what grows there starts where it is."""
    rows = ((0, 4, 3), (1, 5, 4), (2, 9, 1), (6, 8, 7))
    assert place("best_fit", *rows) == Pool((0, 3, 7, 0), 8)
    rows = ((0, 9, 3), (1, 3, 4), (2, 4, 5), (5, 6, 6))
    assert place("best_fit", *rows) == Pool((0, 3, 7, 3), 12)


def test_buddy_halves_and_joins() -> None:
    """Of 16: 5 takes 8; 3 takes 4 of the upper half, 4 the rest; freed, they are 8 and 16 again."""
    rows = ((0, 5, 5), (1, 4, 3), (2, 3, 4), (3, 6, 4), (7, 9, 9))
    assert place("buddy", *rows) == Pool((0, 8, 12, 12, 0), 16)
    rows = ((0, 5, 5), (1, 4, 3), (2, 5, 5))  # chunks of 8: the third of them for the last
    assert place("buddy", *rows) == Pool((0, 8, 16), 24)
    assert place("buddy", (0, 1, 1), (0, 1, 1)) == Pool((0, 1), 2)


def test_buddy_joins_with_the_other_half_only() -> None:
    """2 at 2 and 2 at 4 are free and side by side, yet no place for 4."""
    rows = ((0, 9, 8), (0, 9, 2), (0, 2, 2), (0, 2, 2), (0, 9, 2), (3, 4, 4))
    assert place("buddy", *rows) == Pool((0, 8, 10, 12, 14, 16), 20)


def test_size_classes_join_where_that_saves() -> None:
    """9 and 10 never live at once: one object of 10. 1 lives beside both and has its own."""
    rows = ((0, 2, 9), (3, 5, 10), (1, 4, 1))
    assert place("size_class", *rows) == Pool((1, 1, 0), 11)
    # Side by side they are two objects of 10 or one of each: the classes stay apart.
    assert place("size_class", (0, 4, 9), (3, 5, 10)) == Pool((0, 9), 19)


def test_size_class_objects_are_not_split() -> None:
    """Two of 4 do not share an object of 10, and one of 10 takes none of two of 4 side by side."""
    rows = ((0, 2, 10), (3, 5, 4), (3, 5, 4), (4, 6, 4))
    # Apart 10 + 3 * 4 = 22; as one class three objects of 10.
    assert place("size_class", *rows) == Pool((12, 0, 4, 8), 22)


def test_two_ended_parts_what_stays_from_what_goes() -> None:
    """Temporaries leave no gaps below: what lasts is a row from 0, they hang from the top."""
    rows = ((0, 9, 4, 1), (1, 3, 3), (2, 9, 4, 1), (3, 5, 5), (4, 9, 4, 1))
    # Most at once: 4 + 4 + 4 below and 5 above.
    assert place("two_ended", *rows) == Pool((0, 14, 4, 12, 8), 17)
    mixed = place("best_fit", *rows)
    assert mixed.addresses == (0, 4, 7, 11, 16) and mixed.num_bytes == 20


@pytest.mark.parametrize("name", list(ALLOCATORS))
def test_no_blocks_need_no_pool(name: str) -> None:
    assert ALLOCATORS[name]([]) == Pool((), 0)


# -- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ALLOCATORS))
def test_any_lives_are_placed_by_the_law(name: str) -> None:
    """No overlap, all inside, at least the live peak, the same again; no gaps where all fit."""
    for seed in range(150):
        some = draw_lives(seed)
        pool = ALLOCATORS[name](some).check(some)
        assert pool == ALLOCATORS[name](some)
        assert pool.num_bytes >= live_peak(some)
        total = sum(life.num_bytes for life in some)
        assert pool.num_bytes <= (2 * total if name == "buddy" else total)
        tops = [a + x.num_bytes for a, x in zip(pool.addresses, some, strict=True)]
        assert max(tops) <= pool.num_bytes


def slow_smartpool(some: Sequence[Life]) -> Pool:
    """The same rule in plain loops."""
    addresses = [0] * len(some)
    placed = [
        i for i, a in enumerate(some) if all(a.begins < b.ends and b.begins < a.ends for b in some)
    ]
    for k, i in enumerate(placed):
        addresses[i] = sum(some[j].num_bytes for j in placed[:k])
    rest = [i for i in range(len(some)) if i not in placed]
    for i in sorted(rest, key=lambda i: (-some[i].num_bytes, some[i].begins)):
        size, low, holes = some[i].num_bytes, 0, []
        rows = [(addresses[j], some[j]) for j in placed]
        for at, other in sorted(rows):
            if other.begins < some[i].ends and some[i].begins < other.ends:
                if at - low >= size:
                    holes.append((at - low, low))
                low = max(low, at + other.num_bytes)
        addresses[i] = min(holes)[1] if holes else low
        placed.append(i)
    return Pool(
        tuple(addresses), max(a + x.num_bytes for a, x in zip(addresses, some, strict=True))
    )


def test_smartpool_is_its_rule() -> None:
    for seed in range(150):
        some = draw_lives(seed, sizes=12)
        assert ALLOCATORS["smartpool"](some) == slow_smartpool(some)


def smallest_pool(some: Sequence[Life]) -> int:
    """The best of all orders, each block as low as it can: some order gives the optimum."""
    best = 1 << 60
    for order in itertools.permutations(range(len(some))):
        rows: list[tuple[int, int, Life]] = []
        for i in order:
            low = 0
            for at, end, other in sorted(rows):
                if other.begins < some[i].ends and some[i].begins < other.ends:
                    if at - low >= some[i].num_bytes:
                        break
                    low = max(low, end)
            rows.append((low, low + some[i].num_bytes, some[i]))
        best = min(best, max(end for _, end, _ in rows))
    return best


def test_smartpool_is_near_the_best_there_is() -> None:
    """Up to six blocks, against all orders; most are as good as can be."""
    worst, exact = 1.0, 0
    for seed in range(200):
        draw, some = random.Random(seed), list[Life]()
        for _ in range(draw.randint(4, 6)):
            begins, ends = sorted(draw.sample(range(12), 2))
            some.append(Life(begins, ends, draw.randint(1, 12)))
        best, found = smallest_pool(some), ALLOCATORS["smartpool"](some).num_bytes
        assert live_peak(some) <= best <= found
        worst, exact = max(worst, found / best), exact + (found == best)
    assert worst <= WORST and exact >= 180, (worst, exact)


def test_the_law_sees_what_is_wrong() -> None:
    """Overlap in part, one inside another, below or above the pool; not what is gone by then."""
    some = lives((0, 3, 4), (2, 5, 4), (3, 6, 4))
    assert Pool((0, 4, 0), 8).check(some)
    for addresses, size in [((0, 3, 0), 8), ((0, 0, 4), 8), ((0, 4, 5), 9), ((4, 0, 3), 8)]:
        with pytest.raises(RecordError, match="still lives"):
            Pool(addresses, size).check(some)
    for addresses, size in [((0, 4, -1), 8), ((0, 4, 0), 7)]:
        with pytest.raises(RecordError, match="outside"):
            Pool(addresses, size).check(some)
    inside = lives((0, 9, 10), (1, 2, 3), (3, 4, 1))
    with pytest.raises(RecordError, match="block 2 lies in block 0"):
        Pool((0, 10, 9), 13).check(inside)


# -- lives ----------------------------------------------------------------------------------------


def step_of(*rows: tuple[int, int, int, Kind], scratch: int = 0) -> Step:
    """Four ops: two forward, one backward, one update, and storages (birth, death, bytes, kind)."""
    phases = (Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
    ops = tuple(
        Op("op", "", x, -1, 1.0, (), (), scratch if i == 1 else 0) for i, x in enumerate(phases)
    )
    storages = tuple(Storage(f"t{i}", n, k, b, d, d) for i, (b, d, n, k) in enumerate(rows))
    return Step(model="m", machine="by hand", capture="fake", ops=ops, storages=storages, saved=())


def test_lives_of_a_step_by_hand() -> None:
    """Weights first; what dies goes before what comes next; who lasts is there at the turn."""
    step = step_of(
        (-1, 4, 8, Kind.WEIGHT),
        (0, 2, 5, Kind.ACTIVATION),
        (1, 1, 3, Kind.TEMPORARY),
        (2, 3, 2, Kind.GRADIENT),
        (2, 2, 0, Kind.TEMPORARY),
        scratch=7,
    )
    found = lives_of(Simulator(step, machine()), [])
    assert [(x.num_bytes, x.lasts) for x in found] == [
        *((8, True), (5, True), (3, False), (7, False), (2, True))
    ]
    order = [(is_start, found[i].num_bytes) for is_start, i in moments(found)]
    ends = [(True, 8), (True, 5), (True, 3), (True, 7), (False, 3), (False, 7)]
    assert order == [*ends, (True, 2), (False, 5), (False, 2), (False, 8)]
    assert live_peak(found) == 23 and rounded(found, 4)[1].num_bytes == 8


def test_a_moved_storage_is_two_blocks() -> None:
    """Each where there is room for it; and one that runs again is made anew."""
    step = chain(3, [7, 5, 3], output_bytes=1)
    problem = Problem(Simulator(step, machine()), LIMITS)
    moves = assign(problem, [g for g in find_gaps(problem) if g.num_bytes == 7])
    actions = [*moves, Recompute(block=1, variant="full")]
    assert [type(a) for a in actions] == [Move, Recompute]
    simulator = Simulator(step, machine())
    found = lives_of(simulator, actions)
    for size, kept in ((7, 2), (5, 2), (3, 1)):  # and its gradient
        assert sum(x.num_bytes == size for x in found) == kept + 1
    assert live_peak(found) == simulator.shape(actions).peak


def draw_actions(step: Step, seed: int) -> list[Action]:
    """Some blocks run again, some of the rest moved."""
    draw = random.Random(seed)
    blocks = [b for b in range(len(step.blocks)) if draw.random() < 0.4]
    actions: list[Action] = [Recompute(block=b, variant="full") for b in blocks]
    dropped = {s for b in blocks for s in step.blocks[b].variants[0].drops}
    problem = Problem(Simulator(step, machine()), LIMITS)
    gaps = [g for g in find_gaps(problem) if g.storage not in dropped and draw.random() < 0.5]
    return [*actions, *assign(problem, gaps)]


def test_the_most_that_lives_is_the_shape_of_the_simulator() -> None:
    """To the byte, with moves and blocks that run again together."""
    kinds = set()
    for seed in range(300):
        step = random_chain(seed)
        actions, simulator = draw_actions(step, seed), Simulator(step, machine())
        assert live_peak(lives_of(simulator, actions)) == simulator.shape(actions).peak
        kinds.add(tuple(sorted({type(a).__name__ for a in actions})))
    assert ("Move", "Recompute") in kinds and len(kinds) == 4


@pytest.mark.parametrize("policy", ["every_nth", "swap_all", "auto", "capuchin"])
def test_the_most_that_lives_under_plans(policy: str) -> None:
    for seed in range(12):
        step = random_chain(seed)
        limits = budget(step, 1.0, host=10**6)
        plan = make_plan(step, machine(), limits, policy)
        found = live_peak(lives_of(Simulator(step, machine()), plan.actions))
        assert found == plan.predicted.device_bytes


# -- recorded steps -------------------------------------------------------------------------------


def test_parked_states_are_windows() -> None:
    """Optimizer states on the host are no lives of their own; what they pass through is."""
    step, h200 = load_shipped("seq2seq-128"), find_machine("h200")
    simulator, actions = Simulator(step, h200), [make_park(step, 10**12)]
    before, after = (lives_of(simulator, x) for x in ([], actions))
    gone = sum(x.num_bytes for x in before) - sum(x.num_bytes for x in after)
    assert gone > 0 and after[0].num_bytes > 0
    peak = simulator.shape(actions).peak
    assert 0 <= peak - live_peak(after) < 3  # a window is cut in three


def test_a_moved_input_is_held_for_what_runs_again() -> None:
    """Until autograd has let go of all that the block dropped, though its own uses are over."""
    step, h200 = load_shipped("seq2seq-128"), find_machine("h200")
    simulator, again = Simulator(step, h200), Recompute(block=5, variant="full")
    held = held_inputs(step, [again])
    problem = Problem(simulator, {"device": 1 << 50, "host": 1 << 50})
    gap = next(
        gap
        for gap in find_gaps(problem)
        if gap.storage in held and held[gap.storage][1] > step.storages[gap.storage].death + 1
    )
    actions = [again, *assign(problem, [gap])]
    fetched = [x for x in stays(simulator, actions) if x[1] == held[gap.storage][1]]
    assert (actions[1].in_start, held[gap.storage][1], gap.num_bytes) in [
        (start + 0.5, end, size) for start, end, size in fetched
    ]
    assert live_peak(lives_of(simulator, actions)) == simulator.shape(actions).peak


@pytest.mark.parametrize("name", ["seq2seq-128", "unet-512-8", "vgg16-128", "dlrm-16384"])
def test_the_most_that_lives_on_recorded_steps(name: str) -> None:
    """To the byte: any variants of blocks, and moves of the rest."""
    step, draw = load_shipped(name), random.Random(name)
    problem = Problem(Simulator(step, find_machine("h200")), {"device": 1 << 50, "host": 1 << 50})
    gaps, some = find_gaps(problem), [b for b, block in enumerate(step.blocks) if block.variants]
    for _ in range(8):
        found = {b: draw.choice(step.blocks[b].variants) for b in some if draw.random() < 0.5}
        dropped = {s for variant in found.values() for s in variant.drops}
        moved = [g for g in gaps if g.storage not in dropped and draw.random() < 0.4]
        actions = [Recompute(block=b, variant=v.name) for b, v in found.items()]
        given = [*actions, *assign(problem, moved)]
        shape = problem.simulator.shape(given)
        assert live_peak(lives_of(problem.simulator, given)) == shape.peak


def test_the_largest_recorded_step_takes_less_than_a_second() -> None:
    step, h200 = load_shipped("resnet200-256"), find_machine("h200")
    simulator = Simulator(step, h200)
    natural = simulator.shape([]).peak
    limits = {"device": int(natural * 0.6), "host": 1 << 40}
    actions = make_plan(step, h200, limits, "swap_all").actions
    whole = rounded(lives_of(simulator, actions))
    for name in ALLOCATORS:
        start = time.process_time()
        ALLOCATORS[name](whole)
        assert time.process_time() - start < 1.0, name
    found = figures(simulator, actions)
    assert found.live_bytes == simulator.shape(actions).peak
    assert set(found.pool_bytes) == set(ALLOCATORS)
    assert all(found.overhead(name) >= 0 for name in ALLOCATORS)


def test_the_table_of_pools() -> None:
    """In one unit for all; a row for each policy, with what pools are larger."""
    mib = 1 << 20
    rows = {"auto": (200 * mib, {"buddy": 250 * mib, "best_fit": 203 * mib}), "none": (0, {})}
    rows["none"] = (0, dict.fromkeys(rows["auto"][1], 0))
    text = to_text(pools_table(rows))
    assert "in MiB" in text
    heads, _, auto, none = text.strip().split("\n")[-4:]
    assert heads.split() == ["policy", "live", "buddy", "best_fit"]
    assert auto.split() == ["auto", "200.00", "250.00", "25%", "203.00", "1.5%"]
    assert none.split() == ["none", "0.00", "0.00", "0.0%", "0.00", "0.0%"]


def test_the_figure_is_the_pool_over_what_lives() -> None:
    assert Figures(200, {"buddy": 250}).overhead("buddy") == 0.25
    assert Figures(0, {"buddy": 0}).overhead("buddy") == 0
