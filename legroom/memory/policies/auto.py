"""Choose block variants and moves together, near-exactly, then polish against the simulator.

The step is cut into slots of time. A mixed-integer program (HiGHS) chooses one variant per block
and what to move; a link carries so many bytes per slot, what it has not yet carried out or has
fetched early still counts on the device, and waiting is allowed at its price. Every memory
constraint is the trace's own level at one position less what the choices take away there.
Whatever the program's model leaves out (order within a slot, the links' shared root), the
simulator knows: its verdict on each answer comes back as a new constraint, and the last word is
a greedy pass that takes back every action the budget does not need.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np

from legroom.memory.actions import CODECS, Action, Compress, Move, Recompute
from legroom.memory.gaps import movable
from legroom.memory.plan import find_variant
from legroom.memory.planner import POLICIES, Choice, Policy, Problem
from legroom.memory.play import tier_peaks
from legroom.memory.policies.autoswap import SCORES, by_score
from legroom.memory.policies.capuchin import capuchin
from legroom.memory.policies.every_nth import every_nth
from legroom.memory.policies.park import better, must_park, parked, worth_parking
from legroom.memory.policies.program import Answer, Program
from legroom.memory.policies.recompute_all import recompute_all
from legroom.memory.policies.repair import one_more, repair
from legroom.memory.policies.shrink import shrunk, smallest
from legroom.memory.policies.swap_all import swap_all
from legroom.memory.schedule import Want, peak_position, schedule, tighten
from legroom.memory.trace import Variant

ROUNDS, ENOUGH = 4, 2
"""Answers asked of the program for one share of the link before giving it up; and if one does."""
LINK_SHARES = (0.95, 0.9, 1.0, 0.7, 0.85, 0.5, 0.8, 0.6, 0.35, 0.2)
"""How much of the links' rate the program may count on; the simulator judges which was right."""
HASTE = 3
"""How many of them are enough in haste."""
FEW = 64
"""Variants of all blocks that are so few are solved whole at once."""
LEAST_SHARE = 20_000
"""Tensors smaller than this part of the budget are not worth a move."""
DEADLINE_S, EXCHANGE_S = 1.5, 0.5
OTHERS: tuple[Policy, ...] = (
    every_nth,
    swap_all,
    capuchin,
    *(partial(by_score, score) for score in SCORES),
)
"""Those whose answers may be the best ones to polish."""
SOON = 3
"""The first of them, whatever the time; the others only while there is some."""
Timed = tuple[float, list[Action]]
"""A plan and how long its step takes."""
HOST_FULL = 0.9
"""A host used to this share of its budget may have been too small for what was best."""


@POLICIES.register("auto")
def auto(problem: Problem) -> Choice:
    """The fastest mix of variants and moves that keeps the budget; states leave if that is faster.

    Or if nothing else makes the step fit.
    """
    started = time.monotonic()
    choice = _with_all_states(problem._replace(quick=problem.quick or must_park(problem)))
    if problem.keeps(choice.actions) and (problem.quick or not worth_parking(problem, choice)):
        return choice
    return parked(problem, choice, _with_all_states, started)


def _with_all_states(problem: Problem) -> Choice:
    """What is behind the host is no faster than the host: it is for what that has no room for."""
    near = _near(problem)
    choice = _mix(near)
    if near is problem:
        return choice
    used = tier_peaks(problem.step, choice.actions).get("host", 0)
    if near.keeps(choice.actions) and used < HOST_FULL * problem.budget["host"]:
        return choice
    return better(problem, [choice, _mix(problem)])


def _near(problem: Problem) -> Problem:
    """The same without the disk, where that is reached by way of the host."""
    way = problem.simulator.routes.get("disk")
    if way is None or len(way[0]) == 1 or problem.tiers() != ["host", "disk"]:
        return problem
    budget = {tier: size for tier, size in problem.budget.items() if tier != "disk"}
    return problem._replace(budget=budget)


def _mix(problem: Problem) -> Choice:
    if problem.fits([]):
        return Choice([], "everything fits as it is")
    started = time.monotonic()
    least = problem.limit // LEAST_SHARE
    worth = [s for s in movable(problem) if problem.step.storages[s].num_bytes >= least]
    program, late = Program(problem, worth), started + DEADLINE_S
    found = _searched(problem, program, late)
    if problem.tiers() and not problem.quick:
        still = problem._replace(budget={"device": problem.limit})  # that spares the host much
        found += _searched(still, Program(still, []), late)
    for i, plain in enumerate(OTHERS[:SOON] if problem.quick else OTHERS):
        if i >= SOON and time.monotonic() > late + EXCHANGE_S:
            break
        actions = plain(problem).actions
        if problem.keeps(actions):
            found.append((problem.simulator.time(actions), actions))
    small = smallest(problem)
    if not found and small and problem.fits(small):
        found.append((problem.simulator.time(small), small))
    if not found:
        return _least(problem, program)
    actions = polish(problem, exchanged(problem, min(found, key=lambda x: x[0])[1]))
    if not problem.quick:
        actions = shrunk(problem, actions, polish)
    return Choice(actions, _describe(actions))


def _searched(problem: Problem, program: Program, late: float) -> list[Timed]:
    """Plans for one share of the links after the other; for the best, with more care again."""
    few, found = len(program.variants) <= FEW, list[tuple[float, float, list[Action]]]()
    count = (HASTE if problem.quick else len(LINK_SHARES)) if problem.tiers() else 1
    for share in LINK_SHARES[:count]:
        actions = _search(problem, program, share, whole=few)
        if actions is not None:
            found.append((problem.simulator.time(actions), share, actions))
        if found and time.monotonic() > late:
            break
    if found and not few and not problem.quick:
        _, share, _ = min(found, key=lambda x: x[0])
        actions = _search(problem, program, share, whole=True)
        found += [(problem.simulator.time(actions), share, actions)] if actions is not None else []
    return [(seconds, actions) for seconds, _, actions in found]


def _search(problem: Problem, program: Program, share: float, whole: bool) -> list[Action] | None:
    """Ask, replay, and add what the replay found as a constraint, until an answer fits.

    The fastest of what was found: an answer that is a little over may be mended for less.
    """
    found: list[list[Action]] = []
    program.forget_cuts()
    for turn in range(ROUNDS):
        answer = program.solve(share, whole)
        if answer is None:
            break
        actions = realise(problem, answer)
        shape = problem.simulator.shape(actions)
        if shape.peak <= problem.limit:
            found.append(actions)
            break
        mended = (repair(problem, actions), one_more(problem, actions))
        found += [one for one in mended if one is not None]
        if found and turn + 1 >= ENOUGH:
            break
        program.cut(peak_position(shape.during, shape.replays), shape.peak - problem.limit)
    return min(found, key=problem.simulator.time, default=None)


def realise(problem: Problem, answer: Answer, limit: int | None = None) -> list[Action]:
    """Whole actions with positions, from the program's answer."""
    recomputes = [Recompute(block=b, variant=v) for b, v in answer.variants.items()]
    shares: dict[int, dict[str, float]] = {}
    for (storage, tier), share in answer.moves.items():
        shares.setdefault(storage, {})[tier] = share
    wants, debt, room = [], 0.0, dict(problem.budget)
    for storage, by_tier in shares.items():
        size, tier = problem.step.storages[storage].num_bytes, max(by_tier, key=by_tier.__getitem__)
        debt += sum(by_tier.values()) * size
        if debt >= 0.5 * size and room[tier] >= size:
            debt -= size
            room[tier] -= size
            wants.append(Want(storage, tier))
    moves = schedule(problem.simulator, wants, recomputes)
    limit = problem.limit if limit is None else limit
    moves = tighten(problem.simulator, moves, recomputes, limit)
    return [*recomputes, *moves]


def polish(problem: Problem, actions: list[Action]) -> list[Action]:
    """Take back each action, or soften it, where the step gets faster and still fits."""
    simulator = problem.simulator
    best_s = simulator.time(actions)
    for action in _by_cost(problem, actions):
        for trial in _softer(problem, actions, action):
            if not problem.fits(trial):
                continue
            seconds = simulator.time(trial)
            if seconds < best_s - 1e-7 or (seconds <= best_s and len(trial) < len(actions)):
                actions, best_s = trial, seconds
                break
    return actions


def exchanged(problem: Problem, actions: list[Action]) -> list[Action]:
    """Blocks run again instead of having their tensors moved, or the other way round, if faster.

    For answers that the program did not give: those of plain rules, which move all or nothing.
    """
    best_s, until = problem.simulator.time(actions), time.monotonic() + EXCHANGE_S
    for b, block in enumerate(problem.step.blocks):
        if problem.quick or time.monotonic() > until:
            break
        trials = (
            _recomputed(problem, actions, b, variant)
            for variant in sorted(block.variants, key=lambda v: -v.dropped_bytes)
        )
        for trial in chain([_moved(problem, actions, b)], trials):
            if trial is None or not problem.keeps(trial):
                continue
            seconds = problem.simulator.time(trial)
            if seconds < best_s - 1e-7:
                actions, best_s = trial, seconds
                break
    return actions


def _recomputed(
    problem: Problem, actions: list[Action], block: int, variant: Variant
) -> list[Action] | None:
    """The same with a block run again and the moves that are left planned anew, if any go."""
    moves = [a for a in actions if isinstance(a, Move)]
    left = [Want(m.storage, m.tier) for m in moves if m.storage not in variant.drops]
    if len(left) == len(moves):
        return None
    again = [a for a in actions if isinstance(a, Recompute) and a.block != block]
    again.append(Recompute(block=block, variant=variant.name))
    return _planned(problem, actions, left, again)


def _moved(problem: Problem, actions: list[Action], block: int) -> list[Action] | None:
    """The same with what a block dropped moved instead, to the nearest tier."""
    again = [a for a in actions if isinstance(a, Recompute)]
    mine = next((a for a in again if a.block == block), None)
    if mine is None or not problem.tiers():
        return None
    drops, tier = find_variant(problem.step, mine).drops, problem.tiers()[0]
    able = [s for s in movable(problem) if s in drops]
    wants = [Want(a.storage, a.tier) for a in actions if isinstance(a, Move)]
    others = [a for a in again if a is not mine]
    return _planned(problem, actions, [*wants, *(Want(s, tier) for s in able)], others)


def _planned(
    problem: Problem, actions: list[Action], wants: list[Want], again: list[Recompute]
) -> list[Action]:
    others = [a for a in actions if not isinstance(a, Move | Recompute)]
    planned = schedule(problem.simulator, wants, again)
    return [*others, *again, *tighten(problem.simulator, planned, again, problem.limit)]


def _by_cost(problem: Problem, actions: Sequence[Action]) -> list[Action]:
    blocks = problem.step.blocks

    def cost(action: Action) -> float:
        if isinstance(action, Recompute):
            named = {v.name: v for v in blocks[action.block].variants}
            return -named[action.variant].replay_s
        return 0.0

    return sorted(actions, key=cost)


def _softer(problem: Problem, actions: list[Action], action: Action) -> list[list[Action]]:
    """The same list without an action, or with a cheaper variant in its place."""
    rest = [a for a in actions if a is not action]
    trials = [rest]
    if isinstance(action, Recompute):
        variants = problem.step.blocks[action.block].variants
        mine = next(v for v in variants if v.name == action.variant)
        cheaper = [v for v in variants if v.replay_s < mine.replay_s]
        trials += [
            [*rest, Recompute(block=action.block, variant=v.name)]
            for v in sorted(cheaper, key=lambda v: v.replay_s)
        ]
    return trials


def _least(problem: Problem, program: Program) -> Choice:
    """The smallest peak that can be had, polished if that keeps the budget.

    It does not look at the budget, so that the budget an error names is one that works.
    """
    candidates = [realise(problem, answer, 0) for answer in program.smallest()]
    bare = problem._replace(budget={**problem.budget, "device": 0})
    candidates += [list(plain(bare).actions) for plain in (swap_all, recompute_all)]
    candidates.append(smallest(problem))
    peaks = [problem.simulator.shape(c).peak for c in candidates]
    best = candidates[int(np.argmin(peaks))]
    if min(peaks) > problem.limit:
        return Choice(best, "the smallest peak found; " + _describe(best))
    best = polish(problem, exchanged(problem, best))
    return Choice(best, _describe(best))


def _describe(actions: Sequence[Action]) -> str:
    recomputed = sum(isinstance(a, Recompute) for a in actions)
    moved = sum(isinstance(a, Move) for a in actions)
    packed = [a for a in actions if isinstance(a, Compress)]
    parts = [f"{recomputed} blocks recomputed in part or whole"] if recomputed else []
    parts += [f"{moved} tensors moved"] if moved else []
    if packed:
        lossy = any(not CODECS[a.codec].exact for a in packed)
        parts.append(f"{len(packed)} compressed ({'lossy' if lossy else 'exact'})")
    return ", ".join(parts) or "everything is kept"
