"""All policies on random chains: budgets are kept or refused, and plans come out the same again."""

import random

import msgspec
import pytest

import legroom.memory.policies  # noqa: F401  (fills the registry)
from legroom.core.errors import BudgetError
from legroom.memory.actions import Move
from legroom.memory.gaps import eager_prefetch, find_gaps, find_layers, make_move
from legroom.memory.handmade import chain, natural_peak
from legroom.memory.plan import Plan
from legroom.memory.planner import POLICIES, Problem, make_plan
from legroom.memory.policies.capuchin import capuchin
from legroom.memory.policies.g10 import Ledger
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step
from tests.null.test_policies import GAP, budget, machine, random_chain

ALL = sorted(name for name in POLICIES if not name.startswith("test_"))
STILL = (
    *("keep_all", "every_nth", "recompute_all", "torch_budget", "checkmate", "checkmate_lp"),
    *("dtr", "zero_offload"),
)
MOVING = [p for p in ALL if p not in (*STILL, "home", "auto")]
BLIND = ("vdnn_all", "vdnn_conv", "vdnn", "layrub", "tflms_v1", "zero_infinity")
"""Those that do not look at a budget: they move what their rule says."""


def planned(step: Step, limits: dict[str, int], policy: str, rate: float) -> Plan | None:
    try:
        return make_plan(step, machine(rate), limits, policy)
    except BudgetError as error:
        assert error.missing_bytes > 0
        return None


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("seed", range(12))
def test_a_plan_keeps_its_budget_and_comes_out_the_same(policy: str, seed: int) -> None:
    """In every tier; the plan's own check has seen that it fits the step."""
    step, draw = random_chain(seed), random.Random(seed)
    rate = draw.choice([2.0, 20.0, 200.0])
    for host in (0, 40, 10**6):
        limits = budget(step, draw.uniform(0.2, 1.0), host=host)
        plan = planned(step, limits, policy, rate)
        if plan is None:
            continue
        assert all(plan.predicted.peak_bytes.get(t, 0) <= size for t, size in limits.items())
        assert plan.predicted.step_s >= step.compute_s - 1e-9
        again = planned(step, limits, policy, rate)
        assert again is not None and again.actions == plan.actions


@pytest.mark.parametrize("policy", [p for p in MOVING if p not in BLIND])
def test_nothing_is_moved_where_all_fits(policy: str) -> None:
    """But by those that always move what their rule says."""
    step = chain(5, 10, output_bytes=3)
    plan = make_plan(step, machine(), {"device": natural_peak(step) + 1, "host": 1000}, policy)
    assert plan.actions == () or policy in ("swap_all", "dymem", "sentinel")


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rate", [2.0, 20.0, 200.0])
def test_auto_is_never_slower_than_any_of_them(seed: int, rate: float) -> None:
    step, draw = random_chain(seed), random.Random(seed)
    limits = budget(step, draw.uniform(0.25, 1.0), host=draw.choice([30, 10**6]))
    found = {policy: planned(step, limits, policy, rate) for policy in ALL}
    best = min((p.predicted.step_s for p in found.values() if p is not None), default=None)
    auto = found["auto"]
    assert (auto is None) == (best is None)
    if auto is not None and best is not None:
        assert auto.predicted.step_s <= best * (1 + GAP)


def test_vdnn_takes_the_first_form_that_fits() -> None:
    step = chain(5, 10, output_bytes=3)
    easy = make_plan(step, machine(1e6), {"device": natural_peak(step), "host": 1000}, "vdnn")
    assert easy.actions == ()


@pytest.mark.parametrize("host", [0, 15, 40])
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_capuchin_recomputes_what_no_tier_has_room_for(host: int, share: float) -> None:
    """A host that is almost full bars nothing."""
    step = chain(12, 10, output_bytes=3)
    limits = budget(step, share, host=host)
    if planned(step, limits, "recompute_all", 20.0) is not None:
        assert planned(step, limits, "capuchin", 20.0) is not None


def test_capuchin_takes_a_last_part_whole() -> None:
    """131 candidates come three at a time, and two are left at the end: none moves twice."""
    step = chain(66, 10, output_bytes=3)
    bare = tuple(msgspec.structs.replace(block, variants=()) for block in step.blocks)
    step = msgspec.structs.replace(step, blocks=bare)
    limits = budget(step, 0.02, host=10**6)
    actions = capuchin(Problem(Simulator(step, machine(200.0)), limits)).actions
    storages = [action.storage for action in actions if isinstance(action, Move)]
    assert len(storages) == len(set(storages)) == 131


@pytest.mark.parametrize("policy", ALL)
def test_a_budget_of_nothing_is_refused(policy: str) -> None:
    step = chain(3, 10, output_bytes=3)
    assert planned(step, {"device": 0, "host": 1000}, policy, 20.0) is None


@pytest.mark.parametrize("policy", [p for p in (*MOVING, *STILL) if p not in BLIND])
def test_five_hundred_tensors_are_planned_soon(policy: str) -> None:
    """With a host that holds a few of them: no policy tries one after the other for ever."""
    step = chain(120, 100, num_saved=3, output_bytes=10)
    limits = budget(step, 0.5, host=2000)
    plan = planned(step, limits, policy, 200.0)
    if plan is not None:
        assert plan.predicted.device_bytes <= limits["device"]
        assert plan.predicted.peak_bytes.get("host", 0) <= limits["host"]


# -- what they share -----------------------------------------------------------------------------


def test_gaps_run_from_the_last_use_in_forward_to_the_first_in_backward() -> None:
    """Storage s0 of the chain of two blocks is let go after op 1 and needed by op 8."""
    step = chain(2, 10, output_bytes=3)
    problem = Problem(Simulator(step, machine()), {"device": 100, "host": 100})
    gaps = {step.storages[gap.storage].name: gap for gap in find_gaps(problem)}
    assert (gaps["s0.0"].start, gaps["s0.0"].end) == (2, 8)
    assert (gaps["s0.0"].start_s, gaps["s0.0"].end_s) == (2.0, 8.0)
    assert (gaps["s1.0"].start, gaps["s1.0"].end) == (4, 6)


def test_layers_own_what_their_first_op_reads_and_come_back_in_turn() -> None:
    """An op's inputs are saved at its own position; two layers here, by the name of their ops."""
    step = chain(2, 10, output_bytes=3)
    ops = list(step.ops)
    for i in (0, 2):
        ops[i] = msgspec.structs.replace(ops[i], name="aten.convolution")
    first, second = find_layers(msgspec.structs.replace(step, ops=tuple(ops)))
    assert (first.first, first.last, second.first) == (0, 1, 2) and second.convolves
    names = [[step.storages[s].name for s in layer.storages] for layer in (first, second)]
    assert "x1" in names[1] and "s0.0" in names[0] and "x0" in names[0]
    assert second.back <= first.back


def test_a_move_is_brought_into_order() -> None:
    step = chain(2, 10, output_bytes=3)
    problem = Problem(Simulator(step, machine()), {"device": 100, "host": 100})
    gap = next(gap for gap in find_gaps(problem) if step.storages[gap.storage].name == "s0.0")
    move = make_move(step, gap, "host", out_wait=99, in_start=-5)
    assert move.out_start <= move.out_wait <= move.in_start <= move.in_wait == gap.end


def test_early_fetches_take_the_room_there_is() -> None:
    """A fetch on demand comes as early as a limit allows, and not before the copy out is done."""
    step = chain(6, 10, output_bytes=3)
    simulator = Simulator(step, machine())
    problem = Problem(simulator, {"device": 1000, "host": 1000})
    gap = find_gaps(problem)[0]
    late = [make_move(step, gap, "host", gap.start, gap.end)]
    peak = simulator.shape(late).peak
    (free,) = eager_prefetch(simulator, late, 10**6)
    assert free.in_start == free.out_wait
    (tight,) = eager_prefetch(simulator, late, peak)
    assert free.in_start < tight.in_start < gap.end
    assert simulator.shape([tight]).peak <= peak


def test_a_ledger_hands_out_what_a_link_can_carry() -> None:
    """Ops of 1 s on a link of 20 bytes a second: 30 bytes take two of them, and then the next."""
    step = chain(6, 10, output_bytes=3, time_s=1.0)
    ledger = Ledger(Simulator(step, machine(20.0)))
    gap = find_gaps(Problem(Simulator(step, machine()), {"device": 1000, "host": 1000}))[0]
    assert ledger.finish_out("host", 30, 2) == 3
    assert ledger.latest_in("host", 30, 10) is not None
    ledger.commit(gap._replace(num_bytes=30, start=2, end=20), "host", 15)
    assert ledger.finish_out("host", 10, 2) == 3 and ledger.finish_out("host", 11, 2) == 4
    assert ledger.finish_out("host", 10**9, 2) is None


def test_moves_have_all_four_positions() -> None:
    """Of all who move: out after the save, in before the use, in order."""
    step = chain(6, 10, num_saved=2, output_bytes=3)
    for policy in MOVING:
        plan = planned(step, budget(step, 0.7, host=10**6), policy, 200.0)
        for move in plan.moves if plan is not None else ():
            assert isinstance(move, Move)
            assert step.packed(move.storage) <= move.out_start <= move.out_wait
            assert move.out_wait <= move.in_start <= move.in_wait <= step.first_use(move.storage)
