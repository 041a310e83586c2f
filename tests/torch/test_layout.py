"""Stretches of device memory are apart, however the allocator's gaps lie."""

import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from legroom.memory import layout
from legroom.memory.arena import Placement
from legroom.memory.layout import MOST_TIMES, Layout

WALL, LIMIT, PAGE = 1 << 10, 1 << 20, 1 << 13


class Block:
    """Memory of an allocator; given back with its last name."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size


class Allocator:
    """Gives each block the smallest gap that fits, as CUDA's does, and grows by pages."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.end = self.freed = self.count = 0
        self.small = self.small_peak = 0
        """What it holds for small blocks, apart from the rest, and the most that it held."""

    @property
    def stats(self) -> dict[str, dict[str, dict[str, int]]]:
        """Those of torch that a layout looks at."""
        small = {"current": self.small, "peak": self.small_peak}
        return {"reserved_bytes": {"all": {"freed": self.freed}, "small_pool": small}}

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """(size, address), smallest first."""
        found, last = [], 0
        for address, size in [*sorted(self.live.items()), (self.end, 0)]:
            found += [(address - last, last)] if address > last else []
            last = address + size
        return sorted(found)

    def take(self, size: int, **_: object) -> Block:
        """A block of this size."""
        if not size:
            return Block(0, 0)
        address = next((a for gap, a in self.gaps if gap >= size), None)
        if address is None:
            address = max((a + n for a, n in self.live.items()), default=0)
            self.end = -(-(address + size) // PAGE) * PAGE
        self.live[address] = size
        self.count += 1
        block = Block(address, size)
        weakref.finalize(block, self.live.pop, address)
        return block

    def tidy(self) -> None:
        """Give back what lies free at the end."""
        last = max((a + n for a, n in self.live.items()), default=0)
        end, self.end = self.end + self.small, -(-last // PAGE) * PAGE
        self.freed += end - self.end
        self.small = 0


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    """In place of CUDA's."""
    allocator = Allocator()
    monkeypatch.setattr(layout, "WALL", WALL)
    monkeypatch.setattr(torch, "empty", allocator.take)
    monkeypatch.setattr(torch.cuda, "empty_cache", allocator.tidy)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: allocator.end + allocator.small)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: sum(allocator.live.values()))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: allocator.stats)
    yield allocator


@pytest.mark.parametrize("gaps", [(), (WALL,), (WALL, 3 * WALL, 512, 7 * WALL), (5 * WALL,) * 30])
def test_walls_part_the_stretches(gaps: tuple[int, ...], allocator: Allocator) -> None:
    """Also where weights have left gaps that a wall would fit in."""
    held = [(allocator.take(2 * WALL), allocator.take(gap)) for gap in gaps]
    weights = [weight for weight, _ in held]
    weights.append(allocator.take(2 * WALL))
    del held
    before = dict(allocator.live)
    room = Layout(torch.device("cpu"))
    stretches = (20 * WALL, 40 * WALL, 100 * WALL)
    assert room.take_up(Placement(stretches, 0), LIMIT).missing_bytes == 0
    assert [size for a, size in allocator.live.items() if a not in before] == [WALL] * 4
    large = [size for size, _ in allocator.gaps if size > max([PAGE, *gaps])]
    *first, last = large
    assert first == [*stretches[:-1]] and last >= stretches[-1]
    assert allocator.end <= LIMIT


@pytest.mark.parametrize("first", [20 * WALL, 0])
def test_small_blocks_find_their_room_again(first: int, allocator: Allocator) -> None:
    """They lie apart; what the last step had for them is not mapped for others."""
    allocator.small = allocator.small_peak = 9 * PAGE
    stretches = (first, 100 * WALL) if first else (100 * WALL,)
    room = Layout(torch.device("cpu"))
    assert not room.take_up(Placement(stretches, 0), LIMIT).missing_bytes
    assert LIMIT - 11 * PAGE <= allocator.end <= LIMIT - 9 * PAGE
    short = room.take_up(Placement((LIMIT - 8 * PAGE,), 0), LIMIT).missing_bytes
    assert PAGE <= short < 2 * PAGE, "a plan that took it is told"


@pytest.mark.parametrize("stretches", [(40 * WALL,), (20 * WALL, 40 * WALL)])
def test_where_nothing_is_left_the_plan_is_told(
    stretches: tuple[int, ...], allocator: Allocator
) -> None:
    """Others hold all of it, and more."""
    held, room = allocator.take(LIMIT), Layout(torch.device("cpu"))
    short = room.take_up(Placement(stretches, 0), LIMIT - PAGE).missing_bytes
    assert short == sum(stretches) + PAGE + (len(stretches) + 1) * WALL
    assert max(size for a, size in allocator.live.items() if a != held.address) == WALL


@pytest.mark.parametrize("more, short", [(-0.01, 0.0), (0.005, 0.01), (0.03, 0.04), (0.5, 0.08)])
def test_a_step_that_asks_for_more_than_there_is_tells_how_much(
    more: float, short: float, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the next plan leaves that, and not a little at a time; meanwhile nothing is mapped."""
    limit, room = 64 << 20, Layout(torch.device("cpu"))
    asked = [(True, i, int(limit * (1 + more) / 8)) for i in range(8)]
    monkeypatch.setattr(layout, "recorded", lambda _, into: nullcontext(into.extend(asked)))
    first = room.take_up(Placement((limit // 2, limit // 4), 0), limit)
    with room.watched():
        pass
    room.give_up()
    found = room.take_up(first, limit)
    assert found.missing_bytes == int(room._mapped * short)
    assert bool(allocator.live) == (not short)
    with room.watched():
        pass
    assert room.take_up(found, limit) == found, "it is told once"


@pytest.mark.parametrize("used, spare", [(0.85, 0.12), (0.9, 0.08), (0.97, 0.02), (0.995, 0.0)])
def test_what_a_watched_step_left_is_told_once(
    used: float, spare: float, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans can have it where it was left for what traces do not show."""
    limit, room = 64 << 20, Layout(torch.device("cpu"))
    asked = [(True, i, int(limit * used / 8)) for i in range(8)]
    monkeypatch.setattr(layout, "recorded", lambda _, into: nullcontext(into.extend(asked)))
    first = room.take_up(Placement((limit // 2,), 0), limit)
    assert room.spare_bytes() == 0, "no step has run"
    with room.watched():
        pass
    room.take_up(first, limit)
    assert room.spare_bytes() == int(room._mapped * spare) and room.spare_bytes() == 0


def test_a_layout_lost_between_steps_is_made_again(allocator: Allocator) -> None:
    """Others may empty the cache, or press the allocator, however often."""
    room, placement = Layout(torch.device("cpu")), Placement((20 * WALL, 100 * WALL), 0)
    for _ in range(3 * MOST_TIMES):
        room.take_up(placement, LIMIT)
        taken = allocator.count
        room.take_up(placement, LIMIT)
        assert allocator.count == taken, "it is there"
        allocator.freed += PAGE
        room.take_up(placement, LIMIT)
        assert allocator.count > taken and len(room._walls) == 3


def test_steps_of_other_shapes_do_not_teach_each_other(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be laid out alike, and ask for other things."""
    limit, room, watched = 64 << 20, Layout(torch.device("cpu")), []
    asked = [(True, i, limit) for i in range(2)]
    monkeypatch.setattr(layout, "recorded", lambda _, into: nullcontext(into.extend(asked)))
    one, two = (Placement((limit // 2,), 0, whose) for whose in ("one", "two"))
    for placement in (one, two):
        watched.append(room.take_up(placement, limit))
        with room.watched():
            pass
    assert watched == [one, two]
    assert room.take_up(one, limit).missing_bytes > 0 and room.take_up(two, limit).missing_bytes > 0
    assert room.take_up(one, limit) == one


def test_a_step_that_strayed_teaches_nothing(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked for what others will not."""
    limit, room = 64 << 20, Layout(torch.device("cpu"))
    asked = [(True, i, limit) for i in range(2)]
    monkeypatch.setattr(layout, "recorded", lambda _, into: nullcontext(into.extend(asked)))
    placement = room.take_up(Placement((limit // 2,), 0), limit)
    with room.watched():
        pass
    room.unlearn()
    assert room.take_up(placement, limit) == placement and room.spare_bytes() == 0


def test_giving_a_layout_up_leaves_one_gap(allocator: Allocator) -> None:
    """Walls would part what the allocator maps anew."""
    room = Layout(torch.device("cpu"))
    room.take_up(Placement((20 * WALL, 100 * WALL), 0), LIMIT)
    room.give_up()
    assert not allocator.live and len(allocator.gaps) == 1
