"""What the meters do to an allocator."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from legroom.memory import device, layout
from legroom.memory.arena import WHOLE, Event, Placement, _missing
from legroom.memory.device import GRAIN, CudaMeter
from legroom.memory.history import events_of
from legroom.memory.layout import LASTING, MOST_TIMES
from legroom.memory.relief import PRESSED

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaMeter]:
    """A meter for CUDA where there is none: memory comes from the CPU, and is noted."""
    monkeypatch.setattr(device, "timing_event", lambda: None)
    monkeypatch.setattr(device, "MOST_MARGIN", 0)
    monkeypatch.setattr(layout, "WALL", 1 << 10)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    level = {"current": 0, "peak": 0, "freed": 0}
    reserved = {"all": level, "small_pool": level}
    stats = {"num_alloc_retries": 0, "reserved_bytes": reserved}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *_: None)
    meter = CudaMeter(torch.device("cpu"))
    meter._grows, meter._limit, meter._capped = True, 1 << 20, True
    yield meter


def made(meter: CudaMeter, stretches: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many blocks are taken when room is asked for."""
    count, empty = 0, torch.empty

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        nonlocal count
        count += 1
        return empty(*args, **kwargs)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", counted)
        meter.make_room(Placement(stretches, 0))
    return count


def test_a_layout_that_was_left_is_made_again(
    meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going back to an earlier plan needs its layout back: others have taken its place."""
    one, two = (1 << 10, 1 << 16), (1 << 12, 1 << 17)
    assert made(meter, one, monkeypatch) == 6, "all, two stretches and three walls"
    assert made(meter, one, monkeypatch) == 0, "it is there"
    assert made(meter, (), monkeypatch) == 0, "a plan that asks for none leaves it be"
    assert made(meter, two, monkeypatch) and made(meter, one, monkeypatch)
    meter.uncap()
    assert not made(meter, one, monkeypatch), "without a cap there is room"
    meter._capped = True
    assert made(meter, one, monkeypatch), "its walls were taken away"


def test_plans_that_take_turns_leave_the_layout_be(
    meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making it anew at every step would cost more than it saves."""
    turns = [(1 << 10, 1 << 16), (1 << 12, 1 << 17)] * 20
    counts = [made(meter, stretches, monkeypatch) for stretches in turns]
    assert sum(count > 0 for count in counts) == 2 * MOST_TIMES


def test_a_layout_that_served_for_long_is_made_again_however_often(
    meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation between two epochs may press the allocator, which then gives all back."""
    stretches = (1 << 10, 1 << 16)
    for _ in range(3 * MOST_TIMES):
        assert made(meter, stretches, monkeypatch)
        assert not any(made(meter, stretches, monkeypatch) for _ in range(LASTING))
        meter.layout.give_up()


def test_a_step_that_pressed_the_allocator_has_lost_its_layout(
    meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All free memory was given back in it: the next one needs it mapped again, a few times."""
    level = {"current": 0, "peak": 0, "freed": 0}
    stats = {
        "num_alloc_retries": 0,
        "allocated_bytes": {"all": level},
        "reserved_bytes": {"all": level, "small_pool": level},
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: dict(stats))
    stretches = (1 << 10, 1 << 16)
    for times in range(2 * MOST_TIMES):
        assert bool(made(meter, stretches, monkeypatch)) == (times < MOST_TIMES)
        assert not meter.last().pressed
        stats["num_alloc_retries"] += 1
        assert meter.last().pressed and not meter.layout.stretches


def test_a_room_is_made_anew_by_what_a_step_asked_for(
    meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that finds room in it; the second room is the last."""
    monkeypatch.setattr(layout, "recorded", lambda _, into: history(into))
    room = 60 << 20
    meter._limit = room + 2 * layout.WALL
    part = room // 10
    # Two large ones with a small one between, over and over: in one stretch it splits the gap.
    asked = []
    for i in range(0, 40, 4):
        sizes = (4 * part, part, 4 * part)
        asked += [(True, i + k, size) for k, size in enumerate(sizes)]
        asked += [(False, i, sizes[0]), (False, i + 2, sizes[2]), (True, i + 3, 8 * part)]
        asked += [(False, i + 3, 8 * part), (False, i + 1, part)]

    @contextlib.contextmanager
    def history(into: list[Event]) -> Iterator[None]:
        yield
        into.extend(asked)

    monkeypatch.setattr(meter, "_begin", None)
    for name in ("reset_peak_memory_stats",):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    monkeypatch.setattr(device, "timing_event", lambda: SimpleNamespace(record=lambda: None))
    first = Placement((room,), 0)
    assert _missing(asked, first.stretches) > 0
    assert meter.make_room(first) == first
    with meter.step():
        pass
    second = meter.make_room(first)
    assert second != first and not second.missing_bytes and _missing(asked, second.stretches) == 0
    with meter.step():
        pass
    assert meter.make_room(second) == second


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_the_host_is_timed_at_forward_where_there_is_one(
    calls: int, meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several, the end of the first says little; and no hook stays."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(device, "timing_event", lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(meter, "_count_retries", lambda: 0)
    model = nn.Linear(2, 2)
    with meter.step(model):
        for _ in range(calls):
            model(torch.ones(1, 2))
    all_s, forward_s = meter._host_s
    assert (0 < forward_s < all_s) if calls == 1 else forward_s == 0
    assert not model._forward_hooks


def test_a_step_that_breaks_teaches_nothing(
    meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it asked for is not all."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(device, "timing_event", lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(layout, "recorded", lambda _, into: contextlib.nullcontext(into.append(0)))
    first = meter.make_room(Placement((1 << 10, 1 << 16), 0))
    with pytest.raises(ValueError), meter.step():
        raise ValueError
    assert not meter.layout._asked and meter.make_room(first) == first


def test_blocks_are_followed_from_taking_to_giving() -> None:
    """Of one stream; what was there before, and what others do, is left out."""
    rows = [
        ("free_completed", 7, 1, 0),
        ("alloc", 1, 10, 0),
        ("segment_alloc", 1, 99, 0),
        ("alloc", 2, 20, 5),
        ("free_requested", 1, 10, 0),
        ("free_completed", 1, 10, 0),
        ("alloc", 1, 30, 0),
        ("free_completed", 2, 20, 5),
    ]
    entries = [dict(zip(("action", "addr", "size", "stream"), row, strict=True)) for row in rows]
    assert list(events_of(entries, 0)) == [(True, 0, 10), (False, 0, 10), (True, 1, 30)]


def test_rooms_are_made_after_each_uncapping(
    meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often: each `verify` lifts the cap once."""
    for _ in range(3 * MOST_TIMES):
        assert made(meter, (1 << 10, 1 << 16), monkeypatch)
        meter.uncap()
        meter._capped = True


def test_a_step_of_another_kind_teaches_this_one_nothing(
    meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come between a room and the first step in it."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(device, "timing_event", lambda: SimpleNamespace(record=lambda: None))
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        layout, "recorded", lambda *_: contextlib.nullcontext(seen.append(meter.layout.stretches))
    )
    one, other = Placement((1 << 10, 1 << 16), 0), Placement((), 0)
    for placement in (one, other, other, one):
        meter.make_room(placement)
        if placement is other:
            with meter.step():
                pass
    assert not seen
    with meter.step():
        pass
    assert seen == [one.stretches]


@pytest.mark.parametrize("budget", [256 * MIB, 471 * MIB, GIB, 4 * GIB, 8 * GIB, 80 * GIB])
@pytest.mark.parametrize("count", [1, 5])
def test_the_room_that_plans_reckon_with_can_be_had(
    budget: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is planned with lies within the cap, with margin and walls; else steps run into it."""
    monkeypatch.setattr(device, "timing_event", lambda: None)
    meter, static = CudaMeter(torch.device("cpu")), budget // 3
    meter._grows, meter._limit, meter._capped = True, budget - GRAIN, True
    monkeypatch.setattr(meter.layout, "_count_freed", int)
    monkeypatch.setattr(meter.layout, "_count_small", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: static)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: static)
    taken: list[int] = []

    def take(size: int, **_: object) -> range:
        taken.append(size)
        return range(size)

    monkeypatch.setattr(torch, "empty", take)
    room = meter.usable({"device": budget})["device"] - static - (count + 1) * layout.WALL
    part = room // (2 * count)
    stretches = (*[part] * (count - 1), room - part * (count - 1))
    assert meter.make_room(Placement(stretches, 0)).missing_bytes == 0
    whole, *parts = taken
    assert whole == sum(parts) and whole + static < meter._limit
    assert max(parts) >= stretches[-1]


def test_segments_that_weights_do_not_fill_are_reckoned_with(
    meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a plan is made; it can be laid out in all but that, and the gaps at the cap."""
    budget = 16 * GIB
    before, room = meter.overhead(budget), meter.room(budget)
    assert before == int(budget * meter.SLACK) and room > budget - before
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * GIB + 400 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5 * GIB)
    assert room - meter.room(budget) == 400 * MIB - GRAIN
    assert meter.overhead(budget) == 400 * MIB + GRAIN > before
    meter._grows = False
    assert meter.room(budget) == 0


def test_all_the_room_is_mapped_before_steps_are_timed(meter: CudaMeter) -> None:
    """In one stretch; what a step asks for in it is not looked at."""
    assert meter.make_room(WHOLE) == WHOLE
    assert meter.layout._mapped > 0.99 * meter._limit and not meter.layout._watches


def test_a_room_that_cannot_be_had_is_told(meter: CudaMeter) -> None:
    """More may be held than the plan knows of; by how much it is too small."""
    meter._limit = (1 << 16) + (1 << 10)
    found = meter.make_room(Placement((1 << 10, 1 << 16), 0))
    assert found.missing_bytes == 3 * layout.WALL


@pytest.mark.parametrize("budget", [471 * MIB, 4 * GIB, 80 * GIB])
def test_giving_way_leaves_more_of_any_budget(budget: int, meter: CudaMeter) -> None:
    """Also of one that is small beside what the allocator takes by itself."""
    before = meter.overhead(budget)
    assert meter.give_way(PRESSED)
    assert meter.overhead(budget) >= before + max(GRAIN, int(PRESSED * budget))


def test_what_was_left_for_nothing_is_taken_back(
    meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless some of it was needed once: then plans would press the allocator in turns."""
    monkeypatch.setattr(meter.layout, "spare_bytes", lambda: meter._limit // 10)
    assert not meter.take_back(), "nothing was left"
    meter.leave(int(0.15 * GIB) + meter.overhead(GIB), GIB)
    assert meter.slack == pytest.approx(0.15)
    assert meter.take_back() and meter.slack == pytest.approx(0.05, abs=1e-5)
    assert meter.take_back() and meter.slack == 0 and not meter.take_back()
    assert meter.give_way(PRESSED) and not meter.take_back() and meter.slack == PRESSED
