"""Optimizer states on the host, few or many, where a step does not fit or is slow without that."""

import time
from collections.abc import Callable, Sequence

from legroom.core.units import format_bytes
from legroom.memory.parking import (
    TIER,
    make_park,
    param_states,
    park_s,
    parks,
    update_position,
    without_states,
)
from legroom.memory.planner import Choice, Problem
from legroom.memory.simulate import Simulator

DEADLINE_S, FULL_S = 4.0, 3.0
"""After so long no more numbers are tried, once one fits; and no plan is made with more care."""
MORE = (0.0, 0.25, 0.5, 1.0)
"""Of the states that need not go, those that do: the rest of the step then has more room. Once
more of them are slower, yet more are not tried."""
STEEP = 3.0
"""The last byte made room for costs so many times as much as one on average, or less."""


def worth_parking(problem: Problem, choice: Choice) -> bool:
    """Whether bytes that a choice makes room for may cost more than to park as many of states."""
    simulator, total = problem.simulator, sum(param_states(problem.step).values())
    missing = simulator.shape([]).peak - problem.limit
    if TIER not in problem.tiers() or not total or missing <= 0:
        return False
    lost_s = simulator.time(choice.actions) - simulator.time([])
    all_s = park_s(simulator.machine, make_park(problem.step, total))
    return STEEP * lost_s / missing > all_s / total


def must_park(problem: Problem) -> bool:
    """Whether what the update itself needs is more than there is."""
    shape, step = problem.simulator.shape([]), problem.step
    at = min(update_position(step), len(step.ops) - 1)
    return bool(param_states(step)) and int(shape.during[at]) > problem.limit


def parked(
    problem: Problem, bare: Choice, choose: Callable[[Problem], Choice], started: float
) -> Choice:
    """The fastest of some numbers of states on the host; the smallest if none makes room enough.

    `bare` is the best choice that leaves them where they are; `choose` plans the rest.
    """
    total = sum(param_states(problem.step).values())
    need = max(problem.simulator.shape(bare.actions).peak - problem.limit, 0)
    if TIER not in problem.tiers() or not total:
        return bare
    most = min(total, problem.budget[TIER])
    sizes = [need + int(more * (most - need)) for more in MORE if need <= most]
    quick, found = problem._replace(quick=True), [bare]
    for size in [size for size in sizes if size] or [total]:
        found.append(_with(quick, size, choose))
        late = time.monotonic() - started > DEADLINE_S
        slower = better(problem, found[1:]) is not found[-1]
        if problem.keeps(found[-1].actions) and (late or slower):
            break
    best, late = better(problem, found), time.monotonic() - started > FULL_S
    if problem.quick or late or not parks(best.actions) or not problem.keeps(best.actions):
        return best
    return better(problem, [best, _with(problem, parks(best.actions)[0].num_bytes, choose)])


def better(problem: Problem, choices: Sequence[Choice]) -> Choice:
    """The fastest that keeps all budgets; if none does, the smallest: what is over is told."""
    keeping = [choice for choice in choices if problem.keeps(choice.actions)]
    if keeping:
        return min(keeping, key=lambda choice: problem.simulator.time(choice.actions))
    return min(choices, key=lambda choice: problem.simulator.shape(choice.actions).peak)


def _with(problem: Problem, size: int, choose: Callable[[Problem], Choice]) -> Choice:
    """A plan with so many bytes of states on the host, or a few more."""
    park, simulator = make_park(problem.step, size), problem.simulator
    step = without_states(problem.step, park)
    rest = Simulator(step, simulator.machine, simulator.host.pace)
    host = problem.budget[TIER] - park.num_bytes
    choice = choose(problem._replace(simulator=rest, budget={**problem.budget, TIER: host}))
    away = f"optimizer states of {format_bytes(park.num_bytes)} on the host"
    return Choice([park, *choice.actions], f"{away}; {choice.why}")
