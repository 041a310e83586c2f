"""Where nothing else makes a step fit: optimizer states on the host, few or many."""

import time
from collections.abc import Callable

from legroom.core.units import format_bytes
from legroom.memory.parking import TIER, make_park, param_states, parks, without_states
from legroom.memory.planner import Choice, Problem
from legroom.memory.play import tier_peaks
from legroom.memory.simulate import Simulator

DEADLINE_S = 4.0
"""After so long no more numbers are tried, once one fits."""
MORE = (0.5, 1.0, 0.25, 0.0)
"""Of the states that need not go, those that do: the rest of the step then has more room."""


def parked(problem: Problem, bare: Choice, choose: Callable[[Problem], Choice]) -> Choice:
    """The fastest of some numbers of states on the host; the smallest if none makes room enough.

    `bare` is the smallest choice that leaves them where they are; `choose` plans the rest.
    """
    shape, total = problem.simulator.shape, sum(param_states(problem.step).values())
    need = shape(bare.actions).peak - problem.limit
    if TIER not in problem.tiers() or not total:
        return bare
    most = min(total, problem.budget[TIER])
    sizes = [need + int(more * (most - need)) for more in MORE if need <= most]
    quick, until = problem._replace(quick=True), time.monotonic() + DEADLINE_S
    found, fitting = [], []
    for size in sizes or [total]:
        found.append(_with(quick, size, choose))
        fitting += found[-1:] if _keeps_all(problem, found[-1]) else []
        if fitting and time.monotonic() > until:
            break
    if not fitting:  # of the device; what is over on the host is told
        return min((bare, *found), key=lambda choice: shape(choice.actions).peak)
    best = min(fitting, key=lambda choice: problem.simulator.time(choice.actions))
    if problem.quick:
        return best
    full = _with(problem, parks(best.actions)[0].num_bytes, choose)
    return full if _keeps_all(problem, full) else best


def _keeps_all(problem: Problem, choice: Choice) -> bool:
    used = tier_peaks(problem.step, choice.actions).get(TIER, 0)
    return problem.fits(choice.actions) and used <= problem.budget[TIER]


def _with(problem: Problem, size: int, choose: Callable[[Problem], Choice]) -> Choice:
    """A plan with so many bytes of states on the host, or a few more."""
    park, simulator = make_park(problem.step, size), problem.simulator
    step = without_states(problem.step, park)
    rest = Simulator(step, simulator.machine, simulator.host.pace)
    host = problem.budget[TIER] - park.num_bytes
    choice = choose(problem._replace(simulator=rest, budget={**problem.budget, TIER: host}))
    away = f"optimizer states of {format_bytes(park.num_bytes)} on the host"
    return Choice([park, *choice.actions], f"{away}; {choice.why}")
