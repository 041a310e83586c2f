"""Policies that choose among ways to run blocks: their own laws, with exact numbers."""

import itertools
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

import legroom.memory.policies  # noqa: F401  (fills the registry)
from legroom.memory.actions import Action, Move, Recompute
from legroom.memory.handmade import chain, natural_peak
from legroom.memory.planner import POLICIES, Problem, make_plan
from legroom.memory.policies.footprint import Footprint
from legroom.memory.policies.poet import Paging, units
from legroom.memory.policies.torch_budget import Knapsack, ways
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Block, Step, Variant
from tests.null.test_policies import budget, machine, random_chain


def with_parts(step: Step, draw: random.Random) -> Step:
    """The same with up to three variants for each block: prefixes of what the whole one drops."""
    return replace(step, blocks=tuple(_parted(step, block, draw) for block in step.blocks)).check()


def _parted(step: Step, block: Block, draw: random.Random) -> Block:
    (full,) = block.variants
    parts = []
    for n in sorted(draw.sample(range(1, len(full.drops)), min(2, len(full.drops) - 1))):
        size = sum(step.storages[s].num_bytes for s in full.drops[:n])
        part = Variant(
            name=f"drop {n}",
            drops=full.drops[:n],
            replays=full.replays[:n],
            last=full.replays[n - 1],
            dropped_bytes=size,
            replay_s=sum(step.ops[i].time_s for i in full.replays[:n]) * draw.choice([0.3, 1.0]),
            replay_peak_bytes=size + draw.choice([0, 3]),
        )
        parts.append(part)
    return replace(block, variants=(*parts, full))


def tangled(seed: int) -> Step:
    """A chain whose blocks are given what others drop, and what dies before they run again."""
    draw = random.Random(seed)
    step = with_parts(random_chain(seed, most=5), draw)
    storages, blocks = list(step.storages), list(step.blocks)
    for b, block in enumerate(blocks):
        earlier = [s for s in range(1, block.first + 1) if s in step.saves]
        extra = draw.sample(earlier, min(len(earlier), draw.randint(0, 3)))
        blocks[b] = replace(block, inputs=tuple(dict.fromkeys((*block.inputs, *extra))))
    for i, storage in enumerate(storages[:-1]):
        if i not in step.saves and storage.birth >= 0 and storage.kind == "temporary":
            inputs = [b for b, block in enumerate(blocks) if block.first > 0]
            if inputs and draw.random() < 0.5:  # lives in forward alone, but for who holds it
                b = draw.choice(inputs)
                first = blocks[b].first
                storages[i] = replace(storage, birth=first - 1, release=first, death=first)
                blocks[b] = replace(blocks[b], inputs=(*blocks[b].inputs, i))
                later = draw.randrange(b, len(blocks))
                blocks[later] = replace(blocks[later], inputs=(*blocks[later].inputs, i))
    scratch = [draw.choice([0, 0, 5, -2]) for _ in step.ops]
    ops = tuple(
        replace(op, workspace_bytes=n, reads=(), writes=())
        for op, n in zip(step.ops, scratch, strict=True)
    )
    return replace(step, ops=ops, storages=tuple(storages), blocks=tuple(blocks))


def choices(step: Step) -> Iterator[dict[int, int]]:
    """All ways to run its blocks: variants by block."""
    rows = [range(-1, len(block.variants)) for block in step.blocks]
    for combination in itertools.product(*rows):
        yield {b: v for b, v in enumerate(combination) if v >= 0}


def actions_of(step: Step, chosen: dict[int, int]) -> list[Action]:
    return [Recompute(block=b, variant=step.blocks[b].variants[v].name) for b, v in chosen.items()]


@pytest.mark.parametrize("seed", range(40))
def test_heights_are_those_of_the_simulator(seed: int) -> None:
    """At every position and in every replay, whatever neighbours hold and drop."""
    step, simulator = tangled(seed), Simulator(tangled(seed), machine())
    pairs = [(b, v) for b, block in enumerate(step.blocks) for v in range(len(block.variants))]
    columns = {pair: i for i, pair in enumerate(pairs)}
    footprint = Footprint(simulator, columns, len(columns))
    every = list(choices(step))
    for chosen in random.Random(seed).sample(every, min(60, len(every))):
        x = np.zeros(len(columns))
        x[[columns[pair] for pair in chosen.items()]] = 1.0
        x = footprint.complete(x)
        heights, shape = footprint.heights(x), simulator.shape(actions_of(step, chosen))
        assert heights[: len(shape.during)].tolist() == shape.during.tolist()
        assert {peak for _, peak in shape.replays} <= set(heights[len(shape.during) :].tolist())
        assert heights.max() == shape.peak
        for at in range(0, len(footprint), 3):
            terms = footprint.terms(at)
            assert heights[at] == footprint.base[at] + sum(x[c] * n for c, n in terms.items())


def best_of_all(problem: Problem) -> float | None:
    """The shortest step over all ways to run all blocks that fit."""
    every = (actions_of(problem.step, chosen) for chosen in choices(problem.step))
    times = [problem.simulator.time(actions) for actions in every if problem.fits(actions)]
    return min(times, default=None)


@pytest.mark.parametrize("seed", range(40))
def test_checkmate_is_the_best_of_all(seed: int) -> None:
    """Against every combination of variants, on plain chains and on tangled ones."""
    draw = random.Random(seed)
    plain = with_parts(random_chain(seed, most=6), draw)
    for step in (plain, tangled(seed)):
        simulator = Simulator(step, machine())
        for share in (draw.uniform(0.2, 0.6), draw.uniform(0.5, 1.0)):
            problem = Problem(simulator, budget(step, share))
            best, choice = best_of_all(problem), POLICIES["checkmate"](problem)
            assert problem.fits(choice.actions) == (best is not None)
            if best is not None:
                assert simulator.time(choice.actions) == best


FACTOR = 1.1
"""A step planned by the relaxation takes at most so many times the best one, on these chains."""


@pytest.mark.parametrize("seed", range(40))
def test_the_relaxation_comes_near(seed: int) -> None:
    draw = random.Random(seed)
    for step in (with_parts(random_chain(seed, most=6), draw), tangled(seed)):
        problem = Problem(Simulator(step, machine()), budget(step, draw.uniform(0.2, 1.0)))
        best, choice = best_of_all(problem), POLICIES["checkmate_lp"](problem)
        if problem.fits(choice.actions):
            assert best is not None
            assert problem.simulator.time(choice.actions) <= FACTOR * best


@pytest.mark.parametrize("seed", range(20))
def test_the_knapsack_is_exact_for_every_share(seed: int) -> None:
    """So few bytes are counted one by one: the least time of all choices that keep no more."""
    step = with_parts(random_chain(seed, most=5), random.Random(seed))
    knapsack, rows = Knapsack(step), list(ways(step).values())
    assert knapsack.quantum == 1
    every = [
        (sum(way.kept_bytes for way in taken), sum(way.replay_s for way in taken))
        for taken in itertools.product(*rows)
    ]
    for most in range(0, knapsack.most + 1, 7):
        best = min(seconds for kept, seconds in every if kept <= most)
        assert knapsack.replay_s[most] == pytest.approx(best)
        replays = Simulator(step, machine()).replays(knapsack.actions(most))
        assert sum(replay.variant.replay_s for replay in replays) == pytest.approx(best)


def test_the_knapsack_counts_bytes_in_ten_thousand_parts() -> None:
    """Rounded up for each block, so that no share is passed."""
    knapsack = Knapsack(chain(3, 1_000_003))
    assert (knapsack.quantum, knapsack.most) == (301, 3 * 3323)
    assert len(knapsack.actions(2 * 3323)) == 1 and len(knapsack.actions(2 * 3323 - 1)) == 2


def test_torch_budget_keeps_the_largest_share_that_fits() -> None:
    """Blocks that save 10, 20 and 30 bytes, each as dear as the others: a peak of 90 bytes.

    To keep 50 is to leave out the first, for a peak of 80; to keep 40 the second, for 70. To keep
    30, or 20, is worth most without the third, which is back at the peak; 10, as well without it,
    fits in no more than 40 does, so what comes next is to keep nothing.
    """
    simulator = Simulator(chain(3, [10, 20, 30], time_s=1.0), machine())

    def again(limit: int) -> list[int]:
        actions = POLICIES["torch_budget"](Problem(simulator, {"device": limit})).actions
        return [a.block for a in actions if isinstance(a, Recompute)]

    found = {limit: again(limit) for limit in (90, 89, 80, 79, 70, 69, 60)}
    every = [0, 1, 2]
    assert found == {90: [], 89: [0], 80: [0], 79: [1], 70: [1], 69: every, 60: every}


@pytest.mark.parametrize(
    "times, first", [((1.0, 1.0, 1.0), 0), ((2.0, 1.0, 1.0), 0), ((3.0, 1.0, 1.0), 1)]
)
def test_dtr_evicts_what_is_cheap_for_how_stale_it_is(times: list[float], first: int) -> None:
    """Full as backward begins: block 0 has been idle for 4 s, block 1 for 2 s, block 2 is in use.

    So block 0 has an h of t / 40, block 1 of 1 / 20; the first of those alike goes.
    """
    step = chain(3, 10, time_s=times)
    choice = POLICIES["dtr"](Problem(Simulator(step, machine()), {"device": 30}))
    assert choice.actions == [Recompute(block=first, variant="full")]


@pytest.mark.parametrize("seed", range(20))
def test_dtr_fits_wherever_running_all_again_does(seed: int) -> None:
    step = with_parts(random_chain(seed), random.Random(seed))
    problem = Problem(Simulator(step, machine()), budget(step, 0.1))
    least = problem.simulator.shape(POLICIES["recompute_all"](problem).actions).peak
    for limit in range(least, natural_peak(step), 5):
        problem = Problem(problem.simulator, {"device": limit})
        assert problem.fits(POLICIES["dtr"](problem).actions)


def convolved(step: Step, place: int) -> Step:
    """The same where the ops at one place of each block convolve."""
    ops = [
        replace(op, name="aten.convolution") if op.name.startswith("f") and i % 2 == place else op
        for i, op in enumerate(step.ops)
    ]
    return replace(step, ops=tuple(ops))


def superneurons(step: Step, limit: int) -> tuple[list[Recompute], list[Move]]:
    problem = Problem(Simulator(step, machine(1e6)), {"device": limit, "host": 1000})
    actions = POLICIES["superneurons"](problem).actions
    assert problem.keeps(actions)
    again = [a for a in actions if isinstance(a, Recompute)]
    return again, [a for a in actions if isinstance(a, Move)]


def test_superneurons_moves_what_was_used_least_recently_and_only_when_full() -> None:
    """Blocks whose last op convolves: results x1, x2, x3 are checkpoints, all else runs again.

    A peak of 90 bytes falls to 70 without what is dropped. One checkpoint after the other goes for
    less, the oldest first; none is fetched before backward of the next one begins.
    """
    step = convolved(chain(4, 10, output_bytes=10), 1)
    for limit, names in [(99, []), (60, ["x1"]), (50, ["x1", "x2"])]:
        again, moves = superneurons(step, limit)
        assert [a.block for a in again] == [0, 1, 2, 3]
        assert [step.storages[m.storage].name for m in moves] == names


def test_superneurons_never_convolves_again() -> None:
    """Blocks whose first op convolves run it in all they could do again: they move instead."""
    again, moves = superneurons(convolved(chain(4, 10, output_bytes=10), 0), 80)
    assert not again and moves


@pytest.mark.parametrize("seed", range(20))
def test_poet_is_the_best_of_all_by_its_own_prices(seed: int) -> None:
    """Over all ways to keep, run again and page each block; its heights are the simulator's."""
    draw = random.Random(seed)
    step = with_parts(random_chain(seed, most=5), draw)
    limits = budget(step, draw.uniform(0.3, 0.9), host=draw.choice([40, 1000]))
    problem = Problem(Simulator(step, machine(draw.choice([5.0, 200.0]))), limits)
    program = (paging := Paging(problem)).program
    best, footprint = float("inf"), program.footprint
    for taken in itertools.product(*([-1, *group] for group in program.groups)):
        x = np.zeros(footprint.count)
        x[[column for column in taken if column >= 0]] = 1.0
        x = footprint.complete(x)
        actions = paging.actions(x)
        shape = problem.simulator.shape(actions)
        assert footprint.heights(x)[: len(shape.during)].tolist() == shape.during.tolist()
        assert footprint.heights(x).max() == shape.peak
        if problem.keeps(actions):
            best = min(best, float(program.cost[:-1] @ x))
    found = program.cheapest(problem.limit, until=time.monotonic() + 5)
    assert (found is None) == (best == float("inf"))
    if found is not None:
        assert program.cost[:-1] @ found == pytest.approx(best)


def test_poet_chooses_for_neighbours_together_where_there_are_many() -> None:
    """Of 130 blocks alike three at a time; of 60 each for itself."""
    for count, sizes in [(60, {1}), (130, {3, 1})]:
        step = chain(count, 10, output_bytes=1)
        grouped = units(Problem(Simulator(step, machine()), {"device": 100}))
        assert {len(unit) for unit in grouped} == sizes and sum(map(len, grouped)) == count
        assert len(grouped) <= 60


def test_searches_are_given_their_time() -> None:
    """And answer with what they have when it is over."""
    draw = random.Random(0)
    sizes = [draw.randint(5, 100) for _ in range(60)]
    step = with_parts(chain(60, sizes, num_saved=3, output_bytes=10), draw)
    for policy in ("checkmate", "poet"):
        started = time.monotonic()
        plan = make_plan(step, machine(), budget(step, 0.5, host=500), policy, time_limit_s=0.05)
        assert time.monotonic() - started < 3 and plan.actions
        assert plan.why.endswith("the best found in time")
