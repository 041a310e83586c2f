"""Saved tensors in fewer bits, in place of actions that cost more.

Masks shrink exactly and always may; floats lose bits, and do so only if that is allowed. What a
program of moves and recomputation found is taken as it is, all that can shrink is shrunk on top,
and `polish` takes back whatever the step is then faster without.
"""

from collections.abc import Callable

from legroom.memory.actions import CODECS, Action, Compress, Park, Recompute
from legroom.memory.gaps import movable
from legroom.memory.plan import held_inputs
from legroom.memory.planner import Problem

MOST = 64
"""Tensors that may shrink, the largest first."""
Ours = dict[int, Compress]
Polish = Callable[[Problem, list[Action]], list[Action]]


def shrunk(problem: Problem, actions: list[Action], polish: Polish) -> list[Action]:
    """The same plan with tensors shrunk in place of what costs more; as it was if none do."""
    ours = {c.storage: c for c in candidates(problem)}
    if not ours:
        return actions
    best, best_s = actions, problem.simulator.time(actions)
    for start in (_on_top(problem, actions, ours), _instead(problem, actions, ours)):
        found = polish(problem, start) if problem.fits(start) else actions
        seconds = problem.simulator.time(found)
        if seconds < best_s:
            best, best_s = found, seconds
    return best


def smallest(problem: Problem) -> list[Action]:
    """All that can shrink, and nothing else."""
    return list(candidates(problem))


def _on_top(problem: Problem, actions: list[Action], ours: Ours) -> list[Action]:
    """All that can shrink beside the actions there are."""
    acted = {s for a in actions for s in _storages(problem, a)}
    acted |= _held(problem, actions)
    return [*actions, *(c for s, c in ours.items() if s not in acted)]


def _instead(problem: Problem, actions: list[Action], ours: Ours) -> list[Action]:
    """One action after the other given up for shrinking its tensors, where that fits."""
    for action in actions:
        rest = [a for a in actions if a is not action]
        held = _held(problem, rest)
        small = [ours[s] for s in _storages(problem, action) if s in ours and s not in held]
        if small and problem.fits([*rest, *small]):
            actions = [*rest, *small]
    return actions


def _storages(problem: Problem, action: Action) -> tuple[int, ...]:
    if isinstance(action, Recompute):
        (replay,) = problem.simulator.replays([action])
        return replay.variant.drops
    return () if isinstance(action, Park) else (action.storage,)


def _held(problem: Problem, actions: list[Action]) -> set[int]:
    """What blocks that run again were given: they hold it as it is."""
    again = [a for a in actions if isinstance(a, Recompute)]
    return set(held_inputs(problem.step, again))


def candidates(problem: Problem) -> list[Compress]:
    """What can shrink, and how: the largest tensors first."""
    step = problem.step
    sized = sorted(movable(problem), key=lambda s: -step.storages[s].num_bytes)
    found = []
    for s in sized:
        codec = codec_for(step.storages[s].dtype, problem.lossy)
        if codec and step.storages[s].birth >= 0:
            found.append(Compress(storage=s, codec=codec))
    return found[:MOST]


def codec_for(dtype: str, lossy: bool) -> str:
    """The codec that takes fewest bits of those allowed; empty if there is none."""
    names = [n for n, c in CODECS.items() if dtype in c.dtypes and (c.exact or lossy)]
    return min(names, key=lambda n: CODECS[n].bits, default="")
