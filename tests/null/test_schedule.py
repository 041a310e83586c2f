"""Positions of moves: shifted until a budget is kept, and no further than need be."""

import random

import msgspec
import pytest

from legroom.memory.actions import Action, Move, Recompute
from legroom.memory.gaps import movable
from legroom.memory.plan import find_variant
from legroom.memory.planner import Problem
from legroom.memory.schedule import Want, schedule, tighten
from legroom.memory.simulate import Simulator
from tests.null.test_policies import machine, random_chain


def drawn(seed: int) -> tuple[Simulator, list[Move], list[Action]]:
    """A random chain with some blocks run again and some tensors moved."""
    draw, step = random.Random(seed), random_chain(seed)
    simulator = Simulator(step, machine(draw.choice([2.0, 20.0, 200.0])))
    able = [b for b, block in enumerate(step.blocks) if block.variants and not block.barred]
    again = [
        Recompute(block=b, variant=draw.choice(step.blocks[b].variants).name)
        for b in able
        if draw.random() < 0.4
    ]
    gone = {s for a in again for s in find_variant(step, a).drops}
    problem = Problem(simulator, {"device": 1, "host": 10**9})
    wants = [Want(s, "host") for s in movable(problem) if s not in gone and draw.random() < 0.7]
    return simulator, schedule(simulator, wants, again), list(again)


@pytest.mark.parametrize("seed", range(40))
def test_heights_follow_moves_that_are_shifted(seed: int) -> None:
    """One by one, to any positions in order, they are those of a fresh look."""
    simulator, moves, others = drawn(seed)
    heights, draw, ticks = simulator.heights([*others, *moves]), random.Random(seed), []
    for i, move in enumerate(moves):
        ticks = [t for t in simulator.step.ticks if move.out_start <= t <= move.in_wait]
        out_wait, in_start = sorted(draw.choices(ticks, k=2))
        moves[i] = msgspec.structs.replace(move, out_wait=out_wait, in_start=in_start)
        heights.shift(move, moves[i])
        fresh, now = simulator.shape([*others, *moves]), heights.shape
        assert (now.during == fresh.during).all() and now.replays == fresh.replays


@pytest.mark.parametrize("seed", range(40))
def test_tightening_keeps_a_limit_wherever_that_can_be(seed: int) -> None:
    """Nothing is lower than with all copies waited for at once and fetched on demand."""
    simulator, moves, others = drawn(seed)
    least = simulator.shape([*others, *tighten(simulator, moves, others, 0)]).peak
    natural = simulator.shape([*others, *moves]).peak
    for limit in range(least - 2, natural + 3):
        tight = tighten(simulator, moves, others, limit)
        peak = simulator.shape([*others, *tight]).peak
        assert peak <= limit or (limit < least and peak == least)
        assert tight == moves or limit < natural
