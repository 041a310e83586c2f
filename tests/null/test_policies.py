"""Policies on hand-made chains: what they promise, against every other choice where that is few."""

import contextlib
import itertools
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from legroom.core.errors import BudgetError
from legroom.machine.spec import Link, Machine, Tier
from legroom.memory.actions import Action, Compress, Move, Recompute
from legroom.memory.arena import NOWHERE, WHOLE, Placement
from legroom.memory.handmade import chain, natural_peak
from legroom.memory.plan import Plan
from legroom.memory.planner import (
    SAFE,
    Problem,
    _Placed,
    best_placed,
    make_placed_plan,
    make_plan,
    make_safe_plan,
    rough_placement,
)
from legroom.memory.policies.repair import one_more, repair
from legroom.memory.policies.shrink import shrunk
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step

GAP = 0.005
"""auto stops its search this close to the best, as a share of the step."""


def machine(rate: float = 20.0) -> Machine:
    tiers = tuple(Tier(name=n, num_bytes=10**6) for n in ("device", "host"))
    links = (
        Link(source="device", target="host", bytes_per_s=rate),
        Link(source="host", target="device", bytes_per_s=rate),
    )
    return Machine(
        name="by hand",
        device="cpu",
        origin="made for tests",
        tiers=tiers,
        links=links,
        matrix_flops={"float32": 1.0},
        vector_flops=1.0,
        memory_bytes_per_s=8.0,
    )


def random_chain(seed: int, most: int = 7) -> Step:
    draw = random.Random(seed)
    count = draw.randint(1, most)
    return chain(
        count,
        [draw.randint(5, 60) for _ in range(count)],
        num_saved=draw.randint(1, 3),
        output_bytes=draw.randint(0, 12),
        weight_bytes=draw.choice([0, 7]),
        time_s=[draw.uniform(0.5, 3.0) for _ in range(count)],
    )


def budget(step: Step, share: float, **tiers: int) -> dict[str, int]:
    """So much of the way from the static bytes to the natural peak."""
    static = sum(s.num_bytes for s in step.storages if s.birth < 0)
    return {"device": static + int((natural_peak(step) - static) * share), **tiers}


def planned(step: Step, limits: dict[str, int], policy: str, rate: float = 20.0) -> Plan | None:
    try:
        return make_plan(step, machine(rate), limits, policy)
    except BudgetError:
        return None


def best_of_all(step: Step, limit: int) -> float | None:
    """The shortest step over all sets of blocks run again that fit."""
    simulator, times = Simulator(step, machine()), []
    for kept in itertools.product((False, True), repeat=len(step.blocks)):
        actions = [Recompute(block=b, variant="full") for b, k in enumerate(kept) if not k]
        if simulator.shape(actions).peak <= limit:
            times.append(simulator.time(actions))
    return min(times, default=None)


def test_keep_all_does_nothing() -> None:
    step = chain(4, 10, output_bytes=3)
    plan = make_plan(step, machine(), {"device": natural_peak(step)}, "keep_all")
    assert plan.actions == () and plan.predicted.device_bytes == natural_peak(step)


def test_every_nth_runs_the_fewest_blocks_again() -> None:
    """Each bound it tries keeps one block of a run; the first that fits wins."""
    step = chain(6, 10, output_bytes=1)
    plan = make_plan(step, machine(), budget(step, 0.7), "every_nth")
    assert plan.recomputes and len(plan.recomputes) < 6
    assert all(a.variant == "full" for a in plan.recomputes) and not plan.moves


def test_swap_all_moves_all_it_can() -> None:
    """Every saved storage that is free in between, as far as the tier has room."""
    step = chain(4, 10, output_bytes=3)
    plan = make_plan(step, machine(1e6), budget(step, 1.0, host=10**6), "swap_all")
    sizes = [step.storages[m.storage].num_bytes for m in plan.moves]
    assert sum(sizes) == 4 * 10 + 4 * 3
    tight = make_plan(step, machine(1e6), budget(step, 1.0, host=20), "swap_all")
    assert tight.predicted.peak_bytes.get("host", 0) <= 20


def test_auto_leaves_alone_what_fits() -> None:
    step = chain(4, 10)
    plan = make_plan(step, machine(), {"device": natural_peak(step), "host": 1000})
    assert plan.actions == ()


@pytest.mark.parametrize("seed", range(25))
def test_auto_without_moves_equals_the_best_of_all(seed: int) -> None:
    """Against every set of recomputed blocks; auto may be off by its gap, and never over."""
    step, draw = random_chain(seed), random.Random(seed)
    for _ in range(3):
        limits = budget(step, draw.uniform(0.3, 1.0))
        best = best_of_all(step, limits["device"])
        plan = planned(step, limits, "auto")
        assert (plan is None) == (best is None)
        if plan is not None and best is not None:
            assert plan.predicted.device_bytes <= limits["device"]
            assert plan.predicted.step_s <= best * (1 + GAP)


@pytest.mark.parametrize("rate", [2.0, 20.0, 200.0])
@pytest.mark.parametrize("seed", range(15))
def test_auto_is_never_slower_than_the_plain_policies(seed: int, rate: float) -> None:
    """Wherever every_nth or swap_all keeps a budget, auto keeps it in no more time."""
    step, draw = random_chain(seed), random.Random(seed)
    limits = budget(step, draw.uniform(0.3, 1.0), host=draw.choice([30, 10**6]))
    found = {p: planned(step, limits, p, rate) for p in ("every_nth", "swap_all", "auto")}
    for policy in ("every_nth", "swap_all"):
        other = found[policy]
        if other is not None:
            assert found["auto"] is not None, f"{policy} fits and auto does not"
            assert found["auto"].predicted.step_s <= other.predicted.step_s * (1 + GAP)


@pytest.mark.parametrize("policy", ["keep_all", "every_nth", "swap_all", "auto"])
@pytest.mark.parametrize("seed", range(8))
def test_a_refusal_says_by_how_much_and_what_works(seed: int, policy: str) -> None:
    """What is missing is smallest - limit; the smallest budget it names indeed works."""
    step = random_chain(seed)
    limits = budget(step, 0.02, host=10**6)
    with pytest.raises(BudgetError) as refusal:
        make_plan(step, machine(), limits, policy)
    error = refusal.value
    assert error.smallest_bytes is not None
    assert error.missing_bytes == error.smallest_bytes - limits["device"] > 0
    assert str(error.smallest_bytes) in str(error)
    again = make_plan(step, machine(), {**limits, "device": error.smallest_bytes}, policy)
    assert again.predicted.device_bytes <= error.smallest_bytes


@pytest.mark.parametrize("policy", ["every_nth", "swap_all", "auto"])
@pytest.mark.parametrize("seed", range(8))
def test_plans_are_lawful_and_repeatable(seed: int, policy: str) -> None:
    """Same numbers, same plan; positions in order, tiers within their budgets."""
    step = random_chain(seed)
    limits = budget(step, 0.6, host=100)
    one, two = planned(step, limits, policy), planned(step, limits, policy)
    assert (one is None) == (two is None)
    if one is None or two is None:
        return
    assert one.actions == two.actions
    one.check_against(step)
    assert one.predicted.peak_bytes.get("host", 0) <= 100
    assert all(isinstance(a, Move | Recompute) for a in one.actions)


def test_a_block_whose_saved_tensors_are_never_asked_for() -> None:
    """Its output goes nowhere: its replay would never happen, and no policy stumbles over it."""
    from msgspec.structs import replace

    step = chain(3, 10, output_bytes=3)
    rows = tuple(replace(r, unpacked=()) if r.block == 1 else r for r in step.saved)
    step = replace(step, saved=rows)
    limits = budget(step, 0.6, host=1000)
    plans = {name: planned(step, limits, name) for name in ("every_nth", "swap_all", "auto")}
    assert plans["auto"] is not None
    for plan in plans.values():
        assert plan is None or plan.predicted.device_bytes <= limits["device"]


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_auto_shrinks_floats_only_if_it_may(share: float) -> None:
    """Where memory is fast, links slow and blocks dear, fewer bits are the cheapest way."""
    step = chain(6, 4096, output_bytes=64, time_s=[5.0] * 6)
    fast = msgspec.structs.replace(machine(rate=40.0), memory_bytes_per_s=1e6)
    limits = budget(step, share, host=10**6)
    exact = make_plan(step, fast, limits, "auto")
    lossy = make_plan(step, fast, limits, "auto", lossy=True)
    assert not exact.compressions and exact.exact
    assert lossy.compressions and not lossy.exact and "lossy" in lossy.why
    assert lossy.predicted.step_s < exact.predicted.step_s
    assert lossy.predicted.device_bytes <= limits["device"]


def test_auto_packs_masks_without_being_asked() -> None:
    """Exactly, so nobody has to allow it."""
    step = chain(6, 4096, output_bytes=64, time_s=[5.0] * 6)
    masks = tuple(
        msgspec.structs.replace(s, dtype="bool") if s.num_bytes == 4096 else s
        for s in step.storages
    )
    fast = msgspec.structs.replace(machine(rate=40.0), memory_bytes_per_s=1e6)
    step = msgspec.structs.replace(step, storages=masks)
    plan = make_plan(step, fast, budget(step, 0.5), "auto")
    assert plan.compressions and plan.exact


def test_what_a_block_that_runs_again_is_given_does_not_shrink() -> None:
    """It holds that as it is."""
    step = chain(4, 1000, output_bytes=400, num_saved=2)
    problem = Problem(Simulator(step, machine()), budget(step, 0.5), lossy=True)
    again: list[Action] = [Recompute(block=b, variant="full") for b in (1, 2)]
    kept = shrunk(problem, again, lambda _, actions: actions)
    held = {s for b in (1, 2) for s in step.blocks[b].inputs}
    assert held.isdisjoint(a.storage for a in kept if isinstance(a, Compress))


def test_masks_alone_can_keep_a_budget() -> None:
    """With nothing to recompute and nowhere to move to."""
    step = chain(4, 4096, output_bytes=64)
    masks = tuple(
        msgspec.structs.replace(s, dtype="bool") if s.num_bytes == 4096 else s
        for s in step.storages
    )
    bare = tuple(msgspec.structs.replace(b, variants=()) for b in step.blocks)
    step = msgspec.structs.replace(step, storages=masks, blocks=bare)
    plan = make_plan(step, machine(), budget(step, 0.7), "auto")
    assert plan.compressions and not plan.recomputes
    with pytest.raises(BudgetError) as caught:
        make_plan(step, machine(), budget(step, 0.05), "auto")
    least = caught.value.smallest_bytes
    assert make_plan(step, machine(), {"device": least}, "auto").predicted.device_bytes <= least


def test_a_plan_that_finds_no_room_for_all_is_the_one_that_comes_closest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the first, which is the fastest: an allocator without room ends the step."""
    step, asked = chain(12, 4096, output_bytes=64), []

    def place(simulator: Simulator, actions: Sequence[Action], limit: int) -> Placement:
        peak = simulator.shape(actions).peak
        asked.append(peak)
        return Placement((limit,), max(1, peak - int(0.9 * limit)))

    monkeypatch.setattr("legroom.memory.planner.place", place)
    plan, placed = make_placed_plan(step, machine(), budget(step, 0.5), "auto")
    assert len(set(asked)) > 1 and plan.predicted.device_bytes == min(asked)
    assert placed.missing_bytes


def test_a_first_plan_leaves_a_gap_for_a_large_tensor() -> None:
    """Allocators have gaps, and a large tensor fits in none of them."""
    step = chain(40, [2048] + [512] * 39, output_bytes=16)
    limit = int(natural_peak(step) / (SAFE - 0.01))
    plan = make_safe_plan(step, machine(), {"device": limit}, "auto")
    assert plan.policy != "keep_all" and plan.predicted.device_bytes <= SAFE * limit - 2048


def test_a_first_plan_without_room_to_spare_still_leaves_some() -> None:
    """Half of what could be left, rather than none; a plan that must not be tight is refused."""
    step = chain(12, 4096, output_bytes=64)
    with pytest.raises(BudgetError) as caught:
        make_plan(step, machine(), {"device": 1}, "auto")
    least = caught.value.smallest_bytes
    assert least is not None
    limit = int(1.1 * least)
    plan = make_safe_plan(step, machine(), {"device": limit}, "auto")
    assert plan.predicted.device_bytes <= (least + limit) // 2
    with pytest.raises(BudgetError):
        make_safe_plan(step, machine(), {"device": limit}, "auto", tight=False)


def test_auto_leaves_a_disk_behind_the_host_alone() -> None:
    """It is reached over the same link; unless the host has no room for what is best."""
    tiers = tuple(Tier(name=n, num_bytes=10**6) for n in ("device", "host", "disk"))
    pairs = (("device", "host"), ("host", "device"), ("host", "disk"), ("disk", "host"))
    links = tuple(Link(source=a, target=b, bytes_per_s=20.0) for a, b in pairs)
    deep = msgspec.structs.replace(machine(), tiers=tiers, links=links)
    for seed in range(12):
        step = random_chain(seed)
        limits = budget(step, 0.6, host=10**6, disk=10**6)
        try:
            plan = make_plan(step, deep, limits, "auto")
        except BudgetError:
            continue
        assert "disk" not in plan.predicted.peak_bytes
        bare = make_plan(step, deep, {**limits, "host": 1}, "auto")
        assert bare.predicted.peak_bytes.get("host", 0) <= 1


def test_a_disk_behind_the_host_makes_no_plan_slower() -> None:
    """Nor does a host that is nearly full make one that is over its budget."""
    tiers = tuple(Tier(name=n, num_bytes=10**6) for n in ("device", "host", "disk"))
    pairs = (("device", "host"), ("host", "device"), ("host", "disk"), ("disk", "host"))
    links = tuple(
        Link(source=a, target=b, bytes_per_s=2.0 if "disk" in (a, b) else 20.0) for a, b in pairs
    )
    deep, compared = msgspec.structs.replace(machine(), tiers=tiers, links=links), 0
    for seed, host in itertools.product(range(8), (60, 150, 300)):
        step = random_chain(seed)
        limits = budget(step, 0.55, host=host)
        with contextlib.suppress(BudgetError):
            without = make_plan(step, deep, limits, "auto")
            plan = make_plan(step, deep, {**limits, "disk": 10**6}, "auto")
            assert plan.predicted.step_s <= 1.01 * without.predicted.step_s, (seed, host)
            compared += 1
    assert compared > 8


def test_a_plan_that_is_a_little_over_is_mended_by_one_more_move() -> None:
    """Which fits, moves what was moved before, and often costs less than running more again."""
    faster = 0
    for seed in range(24):
        step = random_chain(seed, most=9)
        limits = budget(step, 0.6, host=10**6)
        simulator = Simulator(step, machine())
        roomy = Problem(simulator, {**limits, "device": limits["device"] + 3})
        plan = planned(step, dict(roomy.budget), "auto")
        problem, actions = Problem(simulator, limits), list(plan.actions) if plan else []
        mended = None if plan is None or problem.fits(actions) else one_more(problem, actions)
        if mended is None:
            continue
        assert problem.keeps(mended)
        before, after = moved(actions), moved(mended)
        assert before < after and len(after) == len(before) + 1
        again = repair(problem, actions)
        faster += again is None or simulator.time(mended) < simulator.time(again)
    assert faster > 3


def moved(actions: Sequence[Action]) -> set[int]:
    """Storages that are moved."""
    return {a.storage for a in actions if isinstance(a, Move)}


@pytest.mark.parametrize("quick", [False, True])
def test_blocks_that_are_divided_at_first_get_one_variant_each(
    quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large steps are solved: the plans keep their budgets, and move nothing that is dropped."""
    monkeypatch.setattr("legroom.memory.policies.auto.FEW", 0)
    made = 0
    for seed in (29, 133, *range(12)):
        step = random_chain(seed, most=12)
        for share in (0.3, 0.6):
            with contextlib.suppress(BudgetError):
                limits = budget(step, share, host=10**6)
                make_plan(step, machine(), limits, "auto", quick=quick)
                made += 1
    assert made > 10


@pytest.mark.parametrize("share", [0.6, 0.7, 0.9])
def test_links_are_left_time_to_spare(share: float) -> None:
    """One that is a little slower than it was when probed holds nothing up."""
    step = chain(40, 64, output_bytes=8)
    plan = make_plan(step, machine(), budget(step, share, host=10**6), "auto")
    slower = Simulator(step, machine().with_links(0.9)).run(plan.actions, "auto")
    assert plan.moves and slower.stall_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    "rows, best",
    [
        ([(0, 9.0), (0, 8.0), (5, 1.0)], 1),
        ([(7, 1.0), (5, 1.05), (1, 2.0)], 1),
        ([(7, 1.0), (5, 1.2)], 0),
        ([(7, 1.05), (7, 1.0)], 1),
    ],
)
def test_room_for_all_comes_first_and_time_before_a_little_more_room(
    rows: list[tuple[int, float]], best: int
) -> None:
    """An allocator that has to tidy up does so for one byte as for many."""
    plan: Any = object()
    found = [_Placed(missing, seconds, plan, NOWHERE) for missing, seconds in rows]
    assert best_placed(found) is found[best]


def test_a_plan_at_leisure_is_tried_where_a_quick_one_finds_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may find room for all in a larger share of the budget."""
    step, quick_ones = chain(40, 512, output_bytes=16), []

    def make(*args: Any, quick: bool = False, **kwargs: Any) -> Plan:
        plan = make_plan(*args, quick=quick, **kwargs)
        if quick:
            quick_ones.append(plan)
        return plan

    def place(simulator: Simulator, actions: Sequence[Action], limit: int) -> Placement:
        hurried = quick_ones[-1].actions == tuple(actions) and len(quick_ones) < 4
        return Placement((limit,), int(hurried))

    monkeypatch.setattr("legroom.memory.planner.make_plan", make)
    monkeypatch.setattr("legroom.memory.planner.place", place)
    limits = {"device": make_plan(step, machine(), budget(step, 0.5)).predicted.device_bytes}
    plan, placed = make_placed_plan(step, machine(), limits, "auto")
    assert len(quick_ones) == 4 and placed == Placement((limits["device"],), 0, step.signature)
    assert plan.budget == limits, "at leisure, for all of it"


@pytest.mark.parametrize("gain, lies_in", [(0.005, 1.0), (0.05, 1.1)])
def test_plans_lie_in_more_than_their_budget_only_where_it_pays(
    gain: float, lies_in: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is for what no trace shows: a plan for less is not much slower, as a rule."""
    step = chain(200, 512, output_bytes=16)
    limits, time = budget(step, 0.5), Simulator.time
    limit = limits["device"]

    def place(simulator: Simulator, actions: Sequence[Action], room: int) -> Placement:
        needs = simulator.shape(actions).peak + 0.03 * limit
        return Placement((room,), max(0, int(needs) - room))

    def seconds(simulator: Simulator, actions: Sequence[Action]) -> float:
        full = simulator.shape(actions).peak > 0.97 * limit
        return time(simulator, []) * (1.0 if full else 1.0 + gain)

    monkeypatch.setattr("legroom.memory.planner.place", place)
    monkeypatch.setattr(Simulator, "time", seconds)
    plan, placed = make_placed_plan(step, machine(), limits, "auto", room=int(1.1 * limit))
    assert placed.stretches == (int(lies_in * limit),) and not placed.missing_bytes
    assert (plan.predicted.device_bytes > 0.97 * limit) == (lies_in > 1)
    plan, placed = make_placed_plan(step, machine(), limits, "auto", room=int(0.8 * limit))
    assert placed.stretches == (int(0.8 * limit),) and not placed.missing_bytes
    assert plan.predicted.device_bytes <= 0.8 * limit, "and for less where there is less room"
    _, placed = make_placed_plan(step, machine(), limits, "auto", room=int(0.01 * limit))
    assert placed.stretches == (int(0.01 * limit),) and placed.missing_bytes


def test_a_plan_that_nearly_finds_room_is_made_for_a_little_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not for the next share, which is much less."""
    step, most = chain(200, 512, output_bytes=16), []

    def place(simulator: Simulator, actions: Sequence[Action], limit: int) -> Placement:
        most.append(int(0.995 * limit))
        return Placement((limit,), max(0, simulator.shape(actions).peak - most[-1]))

    monkeypatch.setattr("legroom.memory.planner.place", place)
    limits = {"device": make_plan(step, machine(), budget(step, 0.5)).predicted.device_bytes}
    plan, placed = make_placed_plan(step, machine(), limits, "auto")
    assert not placed.missing_bytes
    assert 0.985 * limits["device"] <= plan.budget["device"] <= most[-1]


def test_a_slow_plan_that_finds_room_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for less may find room as well, and be about as fast as those that find none."""
    step = chain(200, 512, output_bytes=16)
    limits, time, made = budget(step, 0.5), Simulator.time, []
    limit = limits["device"]

    def make(step: Step, machine: Machine, given: dict[str, int], **how: Any) -> Plan:
        made.clear()
        plan = make_plan(step, machine, given, **how)
        made.append(given["device"] / limit)
        return plan

    def place(simulator: Simulator, actions: Sequence[Action], room: int) -> Placement:
        return Placement((room,), int(limit * 0.05) if made[0] > 0.99 else 0)

    def seconds(simulator: Simulator, actions: Sequence[Action]) -> float:
        slow = 2.0 if made and 0.96 < made[0] < 0.99 else 1.0
        return slow * time(simulator, actions)

    monkeypatch.setattr("legroom.memory.planner.make_plan", make)
    monkeypatch.setattr("legroom.memory.planner.place", place)
    monkeypatch.setattr(Simulator, "time", seconds)
    plan, placed = make_placed_plan(step, machine(), limits, "auto")
    assert not placed.missing_bytes and 0.9 < plan.budget["device"] / limit < 0.96


def test_plans_are_made_for_less_until_large_tensors_find_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few that fill most of the room leave gaps that are of no use to the next."""
    step = chain(40, 512, output_bytes=16)

    def place(simulator: Simulator, actions: Sequence[Action], limit: int) -> Placement:
        return Placement((limit,), max(0, simulator.shape(actions).peak - int(0.83 * limit)))

    monkeypatch.setattr("legroom.memory.planner.place", place)
    plan, placed = make_placed_plan(step, machine(), budget(step, 0.6), "auto")
    assert not placed.missing_bytes and plan.actions


def test_first_plans_are_given_all_the_room_where_it_is_tight() -> None:
    """A job with room in plenty takes what it needs, and others may have the rest."""
    step = chain(12, 4096, output_bytes=64)
    plan = make_plan(step, machine(), budget(step, 0.5), "auto")
    peak = plan.predicted.device_bytes
    assert rough_placement(plan, int(peak / 0.8), room=peak) == WHOLE
    assert rough_placement(plan, int(peak / 0.6), room=peak) == NOWHERE
    assert rough_placement(plan, peak, room=0) == NOWHERE
    assert rough_placement(None, peak, room=peak) == NOWHERE
