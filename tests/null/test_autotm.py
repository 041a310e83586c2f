"""AutoTM's program against every other choice, on chains that are few; and its back-off."""

import itertools
import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from legroom.core.errors import BudgetError
from legroom.memory.gaps import Gap, find_gaps, link_s, make_move
from legroom.memory.handmade import chain, natural_peak
from legroom.memory.planner import Problem, make_plan
from legroom.memory.policies import autotm
from legroom.memory.policies.autotm import ASYNC, STATIC, SYNC, Form, Program, shrink
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step
from tests.null.test_policies import budget, machine, random_chain


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotm, "GAP", 0.0)


def posed(step: Step, limits: dict[str, int], rate: float) -> Problem:
    return Problem(Simulator(step, machine(rate)), limits)


def solved(problem: Problem, gaps: list[Gap], form: Form) -> float | None:
    """What the program says the step takes."""
    program = Program(problem, gaps, form)
    moves = program.solve(np.full(len(program.during), float(problem.limit)), 60.0)
    if moves is not None:
        assert problem.keeps(moves)
    return None if moves is None else program.objective_s


def waiting_best(problem: Problem, gaps: list[Gap]) -> float | None:
    """The shortest step over all sets of tensors away, where each copy is waited for."""
    found = []
    for picked in itertools.product((False, True), repeat=len(gaps)):
        away = [gap for gap, gone in zip(gaps, picked, strict=True) if gone]
        moves = [make_move(problem.step, gap, "host", gap.start, gap.end) for gap in away]
        if problem.keeps(moves):
            copies = [both_s(problem, gap) for gap in away]
            found.append(problem.step.compute_s + sum(copies))
    return min(found, default=None)


def both_s(problem: Problem, gap: Gap) -> float:
    ways = (link_s(problem.simulator, "host", gap.num_bytes, out) for out in (True, False))
    return sum(ways)


@pytest.mark.parametrize("seed", range(20))
def test_no_set_of_tensors_away_is_better_where_copies_are_waited_for(seed: int) -> None:
    """The least of compute and all copies, over the sets that keep all budgets."""
    step, draw = random_chain(seed, most=4), random.Random(seed)
    for _ in range(2):
        limits = budget(step, draw.uniform(0.3, 1.0), host=draw.choice([60, 10**6]))
        problem = posed(step, limits, draw.choice([2.0, 20.0]))
        gaps = find_gaps(problem)[:9]
        best = waiting_best(problem, gaps)
        found = solved(problem, gaps, SYNC) if gaps else step.compute_s
        assert found == (best if best is None or not gaps else pytest.approx(best, rel=1e-6))


def beside_best(problem: Problem, gaps: list[Gap]) -> float | None:
    """The shortest step over all ways to copy, each waited for or beside one op."""
    step, found = problem.step, []
    for ways in itertools.product(*(ways_of(step, gap) for gap in gaps)):
        used = [(gap, way) for gap, way in zip(gaps, ways, strict=True) if way]
        moves = [
            make_move(
                step, gap, "host", gap.start if a is None else a + 1, gap.end if b is None else b
            )
            for gap, (a, b) in used
        ]
        if problem.keeps(moves):
            found.append(lasts(problem, used))
    return min(found, default=None)


Way = tuple[int | None, int | None]
"""The ops beside which a tensor leaves and comes back; None: the step waits."""


def ways_of(step: Step, gap: Gap) -> list[Way | tuple[()]]:
    outs = [None, *range(step.packed(gap.storage), gap.end)]
    ins = [None, *range(gap.start, gap.end)]
    pairs = [(a, b) for a in outs for b in ins if a is None or b is None or a < b]
    return [(), *(p for p in pairs if p[0] is None or p[0] + 1 < gap.end)]


def lasts(problem: Problem, used: Sequence[tuple[Gap, Way]]) -> float:
    beside, waits = [0.0] * len(problem.step.ops), 0.0
    for gap, ops in used:
        for op, out in zip(ops, (True, False), strict=True):
            seconds = link_s(problem.simulator, "host", gap.num_bytes, out)
            waits += seconds if op is None else 0.0
            if op is not None:
                beside[op] += seconds
    times = (op.time_s for op in problem.step.ops)
    return waits + sum(max(a, b) for a, b in zip(times, beside, strict=True))


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
@pytest.mark.parametrize("rate", [4.0, 9.0, 30.0])
def test_no_way_to_copy_beside_single_ops_is_better(rate: float, share: float) -> None:
    step = chain(3, [20, 30, 10], output_bytes=0, time_s=[1.0, 2.0, 1.5])
    problem = posed(step, budget(step, share, host=1000), rate)
    gaps = find_gaps(problem)[:2]
    best = beside_best(problem, gaps)
    found = solved(problem, gaps, ASYNC)
    assert found == (best if best is None else pytest.approx(best, rel=1e-6))


def test_a_copy_beside_an_op_hides_behind_that_op_alone() -> None:
    """20 bytes at 8 a second: 2.5 s, of which an op of forward hides 1 s, one of backward 2 s."""
    step = chain(2, [20, 30], time_s=1.0)
    problem = posed(step, {"device": natural_peak(step) - 20, "host": 100}, 8.0)
    gaps = [gap for gap in find_gaps(problem) if gap.num_bytes == 20]
    assert solved(problem, gaps, SYNC) == pytest.approx(step.compute_s + 5.0)
    assert solved(problem, gaps, ASYNC) == pytest.approx(step.compute_s + 1.5 + 0.5)


def test_back_off_lowers_limits_around_the_peak_alone() -> None:
    """By half of what is over, as a share, and never by more than a tenth."""
    step = chain(12, 10, output_bytes=3)
    problem = posed(step, {"device": 100, "host": 1000}, 20.0)
    at = int(problem.simulator.shape([]).during.argmax())
    for over, factor in ((10, 0.95), (50, 0.90)):
        limits = np.full(len(step.ops) + 1, 100.0)
        shrink(problem, limits, [], over)
        changed = np.flatnonzero(limits != 100.0)
        assert (changed[0], changed[-1], len(changed)) == (at - 10, at + 10, 21)
        assert limits[changed].tolist() == pytest.approx([100.0 * factor] * 21)


def test_a_layout_that_lacks_room_is_answered_by_smaller_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes more away than the bytes alone ask for, until nothing is lacking."""
    step, asked = chain(8, 10, output_bytes=1), list[int]()
    problem = posed(step, budget(step, 0.7, host=1000), 20.0)
    plain = autotm.by_form(SYNC, problem)

    def lacking(problem: Problem, moves: Sequence[object]) -> int:
        asked.append(len(moves))
        return max(0, 8 - problem.limit + problem.simulator.shape(list(moves)).peak)  # type: ignore[arg-type]

    monkeypatch.setattr(autotm, "excess", lacking)
    choice = autotm.by_form(SYNC, problem)
    assert problem.simulator.shape(choice.actions).peak <= problem.limit - 8
    assert len(choice.actions) > len(plain.actions) and 1 < len(asked) <= 6


def test_a_tensor_placed_once_pays_at_each_use() -> None:
    """10 bytes at 5 a second, asked for twice: three copies where it is placed once, else two."""
    step = chain(3, 10, time_s=1.0)
    (row,) = [row for row in step.saved if step.storages[row.storage].name == "s0.0"]
    saved = tuple(
        msgspec.structs.replace(r, unpacked=(*r.unpacked, r.unpacked[0] + 1)) if r is row else r
        for r in step.saved
    )
    problem = posed(msgspec.structs.replace(step, saved=saved), {"device": 1, "host": 100}, 5.0)
    gap = next(g for g in find_gaps(problem) if g.storage == row.storage)
    for form, seconds in ((SYNC, 4.0), (STATIC, 6.0)):
        program = Program(problem, [gap], form)
        assert sum(x.seconds for x in (*program.outs, *program.ins)) == pytest.approx(seconds)


@pytest.mark.parametrize("form", ["autotm", "autotm_sync", "autotm_static"])
def test_a_time_limit_leaves_the_best_so_far(form: str) -> None:
    step = chain(120, 100, num_saved=3, output_bytes=10)
    try:
        plan = make_plan(step, machine(20.0), budget(step, 0.5, host=10**6), form, time_limit_s=0.3)
    except BudgetError:
        pytest.fail("swapping all fits")
    assert plan.planning_s < 3.0
