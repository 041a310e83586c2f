"""What the meters do to an allocator."""

from collections.abc import Iterator

import pytest
import torch

from legroom.memory import device
from legroom.memory.device import MOST_TIMES, CudaMeter


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaMeter]:
    """A meter for CUDA where there is none: memory comes from the CPU, and is noted."""
    monkeypatch.setattr(device, "timing_event", lambda: None)
    monkeypatch.setattr(device, "MARGIN", 0)
    monkeypatch.setattr(device, "WALL", 1 << 10)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": 0})
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *_: None)
    meter = CudaMeter(torch.device("cpu"))
    meter._grows, meter._limit = True, 1 << 20
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
        meter.make_room(stretches)
    return count


def test_a_layout_that_was_left_is_made_again(
    meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going back to an earlier plan needs its layout back: others have taken its place."""
    one, two = (1 << 10, 1 << 16), (1 << 12, 1 << 17)
    assert made(meter, one, monkeypatch) == 4, "two stretches and two walls"
    assert made(meter, one, monkeypatch) == 0, "it is there"
    assert made(meter, (), monkeypatch) == 0, "a plan that asks for none leaves it be"
    assert made(meter, two, monkeypatch) and made(meter, one, monkeypatch)
    meter.uncap()
    assert made(meter, one, monkeypatch), "its walls were taken away"


def test_plans_that_take_turns_leave_the_layout_be(
    meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making it anew at every step would cost more than it saves."""
    turns = [(1 << 10, 1 << 16), (1 << 12, 1 << 17)] * 20
    counts = [made(meter, stretches, monkeypatch) for stretches in turns]
    assert sum(count > 0 for count in counts) == 2 * MOST_TIMES
