"""Bring a plan that is slightly over its budget under it: recompute or move a little more."""

from legroom.memory.actions import Action, Move, Recompute
from legroom.memory.gaps import movable
from legroom.memory.plan import replay_position
from legroom.memory.planner import Problem
from legroom.memory.schedule import Want, peak_position, schedule, tighten
from legroom.memory.trace import Variant

MAX_STEPS = 48
MOVES_TRIED = 8
"""Of each tier."""


def repair(problem: Problem, actions: list[Action]) -> list[Action] | None:
    """The plan with stronger variants where the peak is too high; None if that does not do.

    Each time the upgrade with the least time per byte at the fullest position is taken.
    """
    for _ in range(MAX_STEPS):
        shape = problem.simulator.shape(actions)
        if shape.peak <= problem.limit:
            return actions
        upgrade = _best_upgrade(problem, actions, peak_position(shape.during, shape.replays))
        if upgrade is None:
            return None
        actions = _with(problem, actions, *upgrade)
    return None


def one_more(problem: Problem, actions: list[Action]) -> list[Action] | None:
    """The fastest plan that fits with one more tensor moved; None if none of those tried does."""
    simulator, storages = problem.simulator, problem.step.storages
    shape = simulator.shape(actions)
    at, over = peak_position(shape.during, shape.replays), shape.peak - problem.limit
    moves = [a for a in actions if isinstance(a, Move)]
    others = [a for a in actions if not isinstance(a, Move)]
    again = [a for a in others if isinstance(a, Recompute)]
    acted = {m.storage for m in moves} | {
        s for r in simulator.replays(again) for s in r.variant.drops
    }
    spots = [
        s
        for s in movable(problem)
        if s not in acted
        and storages[s].num_bytes >= over
        and storages[s].release < at < problem.step.first_use(s)
    ]
    spots.sort(key=lambda s: (storages[s].num_bytes, -problem.step.first_use(s)))
    tries = [(s, tier) for tier in problem.tiers() for s in spots[:MOVES_TRIED]]
    found: list[list[Action]] = []
    for s, tier in tries:
        wants = [Want(s, tier), *(Want(m.storage, m.tier) for m in moves)]
        planned = schedule(simulator, wants, again)
        trial = [*others, *tighten(simulator, planned, others, problem.limit)]
        found += [trial] if problem.keeps(trial) else []
    return min(found, key=simulator.time, default=None)


def _best_upgrade(problem: Problem, actions: list[Action], at: int) -> tuple[int, Variant] | None:
    chosen = {a.block: a.variant for a in actions if isinstance(a, Recompute)}
    best: tuple[float, int, Variant] | None = None
    for b, block in enumerate(problem.step.blocks):
        named = {v.name: v for v in block.variants}
        now = named.get(chosen.get(b, ""))
        for variant in block.variants:
            gain = _gone(problem, variant, at) - (_gone(problem, now, at) if now else 0)
            if gain <= 0:
                continue
            price = (variant.replay_s - (now.replay_s if now else 0.0)) / gain
            if best is None or price < best[0]:
                best = (price, b, variant)
    return best[1:] if best is not None else None


def _gone(problem: Problem, variant: Variant, at: int) -> int:
    """Bytes a variant takes away at a position."""
    if at >= replay_position(problem.step, variant):
        return 0
    storages = problem.step.storages
    return sum(storages[s].num_bytes for s in variant.drops if storages[s].release < at)


def _with(problem: Problem, actions: list[Action], block: int, variant: Variant) -> list[Action]:
    """The plan with a block's variant replaced, and no moves of what is dropped now."""
    rest = [a for a in actions if not (isinstance(a, Recompute) and a.block == block)]
    moves = [a for a in rest if isinstance(a, Move) and a.storage not in variant.drops]
    others = [a for a in rest if not isinstance(a, Move)]
    others.append(Recompute(block=block, variant=variant.name))
    early = _need_again(problem, moves, block, variant)
    return [*others, *tighten(problem.simulator, early, others, problem.limit)]


def _need_again(problem: Problem, moves: list[Move], block: int, variant: Variant) -> list[Move]:
    """Moves of the block's own tensors dropped: its replay may need them sooner than planned."""
    rows = {row.storage for row in problem.step.saved_in(block)}
    inputs = set(problem.step.blocks[block].inputs)
    position = replay_position(problem.step, variant)
    return [m for m in moves if m.storage not in rows | inputs or m.in_wait <= position]
