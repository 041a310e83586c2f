"""Where blocks lie: the allocator's rule on hand-made steps, with exact numbers."""

import random

import pytest

from legroom.machine.spec import find_machine
from legroom.memory import arena
from legroom.memory.actions import Move, Recompute
from legroom.memory.arena import APART, ROUND_BYTES, Arena, arrange, place, stays
from legroom.memory.handmade import chain
from legroom.memory.plan import find_variant, replay_position
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Kind, Op, Phase, Step, Storage

MIB = 1 << 20
MACHINE = find_machine("h200")


@pytest.fixture(autouse=True)
def without_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round numbers."""
    monkeypatch.setattr(arena, "WALL", 0)


def step_of(*lives: tuple[int, int, int]) -> Step:
    """A step whose tensors are born and die as given: (birth, death, MiB)."""
    ops = max(death for _, death, _ in lives) + 1
    return Step(
        model="handmade",
        machine=MACHINE.name,
        capture="fake",
        saved=(),
        ops=tuple(Op("op", "", Phase.FORWARD, -1, 1e-3, (), ()) for _ in range(ops)),
        storages=tuple(
            Storage(f"t{i}", n * MIB, Kind.TEMPORARY if b >= 0 else Kind.WEIGHT, b, d, d)
            for i, (b, d, n) in enumerate(lives)
        ),
    )


def missing(step: Step, limit_mib: int) -> float:
    """How many MiB short a limit is."""
    return place(Simulator(step, MACHINE), [], limit_mib * MIB).missing_bytes / MIB


def test_gaps_cost_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two freed neighbours of a kept tensor give no place for one of their sum."""
    step = step_of((0, 0, 40), (1, 5, 10), (0, 1, 30), (3, 4, 60))
    # 40 and 30 lie below the 10 that stays; merged they hold 60.
    assert missing(step, 80) == 0
    step = step_of((0, 1, 40), (1, 5, 10), (2, 2, 30), (3, 4, 60))
    # The 10 lies above the 40, and the 60 fits on neither side of it in a room of 70.
    assert Simulator(step, MACHINE).shape([]).peak == 70 * MIB
    assert missing(step, 110) == 0
    events = arena.ordered(list(stays(Simulator(step, MACHINE), [])))
    assert arena._missing(events, (70 * MIB,)) == 40 * MIB  # 20 of 60 find room behind the 10
    with monkeypatch.context() as patch:
        patch.setattr(arena, "NUM_DRAWS", 0)
        assert arrange(events, 70 * MIB, effort=0).missing_bytes > 0
        assert arrange(events, 70 * MIB).missing_bytes == 0
    # A place just for the 60 keeps the 10 out of its way.
    assert place(Simulator(step, MACHINE), [], 70 * MIB).stretches == (10 * MIB, 60 * MIB)


def test_stretches_keep_large_tensors_whole() -> None:
    """Small ones that stay fill a stretch of their own: the same room then holds the large one."""
    small = [(i, 40, 2) for i in range(0, 20, 2)]
    passing = [(i + 1, i + 2, 30) for i in range(0, 20, 2)]
    step = step_of(*small, *passing, (21, 22, 60))
    placed = place(Simulator(step, MACHINE), [], 90 * MIB)
    assert placed.missing_bytes == 0
    assert len(placed.stretches) > 1 and sum(placed.stretches) == 90 * MIB
    assert max(placed.stretches) == placed.stretches[-1]


def test_what_is_always_there_takes_its_part() -> None:
    """Weights are outside of the stretches, and too little room says by how much."""
    step = step_of((-1, 3, 50), (0, 2, 30))
    placed = place(Simulator(step, MACHINE), [], 100 * MIB)
    assert placed.stretches == (50 * MIB,) and placed.missing_bytes == 0
    assert missing(step, 70) == 10


def test_a_fetch_takes_its_room_before_a_replay_at_the_same_place() -> None:
    """What asks for the replay first has the copies begin that are due by then."""
    step = chain(3, saved_bytes=[7 * MIB, 5 * MIB, 3 * MIB], output_bytes=MIB)
    again = Recompute(block=1, variant="full")
    at = replay_position(step, find_variant(step, again))
    moved = next(s for s in step.saves if step.storages[s].num_bytes == 7 * MIB)
    out = step.packed(moved)
    move = Move(
        storage=moved, tier="host", out_start=out, out_wait=out + 1, in_start=at, in_wait=at + 1
    )
    found = list(stays(Simulator(step, MACHINE), [again, move]))
    back = min(start for start, _, size in found if size == 7 * MIB and start > out)
    replayed = min(start for start, _, size in found if size == 5 * MIB and start > out + 2)
    assert at - 1 < back < replayed < at


def test_an_arena_gives_out_no_byte_twice() -> None:
    """Live blocks never overlap nor leave a stretch, and all comes together again when freed."""
    rng = random.Random(5)
    stretches = (3000 * ROUND_BYTES, 1000 * ROUND_BYTES, 5000 * ROUND_BYTES)
    arena, live = Arena(stretches), []
    for _ in range(3000):
        if live and rng.random() < 0.5:
            arena.give(*live.pop(rng.randrange(len(live))))
        else:
            live.append(arena.take(rng.randint(1, 400 * ROUND_BYTES)))
        ordered = sorted(live)
        assert all(a + n <= b for (a, n), (b, _) in zip(ordered, ordered[1:], strict=False))
        assert all(a % APART + n <= arena.stretches[a // APART] for a, n in live)
    assert arena.grown == sum(arena.stretches) - sum(stretches) > 0
    for block in live:
        arena.give(*block)
    grown, before = arena.stretches, arena.grown
    whole = [arena.take(n)[0] for n in sorted(grown)]
    assert whole == [grown.index(n) * APART for n in sorted(grown)] and arena.grown == before


def test_stretches_are_changed_until_less_is_lacking() -> None:
    """Often until all finds room; and what does is played again, block by block."""
    better = fits = 0
    for seed in range(8):
        draw, events, live = random.Random(seed), [], []
        for number in range(400):
            while live and sum(size for _, size in live) > 600 * MIB:
                events.append((False, *live.pop(draw.randrange(len(live)))))
            live.append((number, draw.choice([3, 10, 25, 25, 60, 110]) * MIB))
            events.append((True, *live[-1]))
        first, then = (arrange(events, 900 * MIB, 2 * MIB, effort) for effort in (0, 400_000))
        assert first.missing_bytes >= then.missing_bytes
        assert sum(then.stretches) + 2 * MIB * (len(then.stretches) + 1) <= 900 * MIB
        assert arena.suits(events, then.stretches) == (then.missing_bytes == 0)
        better += first.missing_bytes > then.missing_bytes
        fits += first.missing_bytes > 0 == then.missing_bytes
    assert better >= 3 and fits >= 1, (better, fits)


@pytest.mark.parametrize("seed", range(8))
def test_walls_take_their_part_of_the_room(seed: int) -> None:
    """Stretches and the walls between them are never more than the room."""
    draw, wall, room = random.Random(seed), 2 * MIB, 400 * MIB
    events, live, count = [], [], 0
    for _ in range(300):
        if live and (draw.random() < 0.5 or sum(size for _, size in live) > 250 * MIB):
            events.append((False, *live.pop(draw.randrange(len(live)))))
        else:
            live.append((count, draw.randint(1, 60) * MIB))
            events.append((True, *live[-1]))
            count += 1
    stretches, missing_bytes, _ = arrange(events, room, wall)
    assert sum(stretches) + wall * len(stretches) <= room
    assert min(stretches) > 0 and stretches[-1] == max(stretches)
    assert missing_bytes >= 0
