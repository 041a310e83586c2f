"""Slabs give back what they take; layouts and free lists never give a byte twice."""

import multiprocessing
import random
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legroom.core.errors import InputError, TierError
from legroom.memory.mechanisms import pool
from legroom.memory.mechanisms.pool import FreeList, Slab, check_layout, layout

K = 512


def highest_sum(intervals):
    positions = {start for _, start, _ in intervals}
    return max((sum(n for n, s, e in intervals if s <= p < e) for p in positions), default=0)


@pytest.mark.parametrize(
    ("intervals", "offsets", "total"),
    [
        ([], [], 0),
        ([(1, 0, 1)], [0], 1),
        # One after the other: all in the same place.
        ([(4 * K, 0, 2), (2 * K, 2, 4), (3 * K, 4, 6)], [0, 0, 0], 4 * K),
        # Nested, as activations are: a stack.
        ([(4 * K, 0, 6), (2 * K, 1, 5), (K, 2, 4)], [0, 4 * K, 6 * K], 7 * K),
        # From position 5 on there are gaps of 6 and of 4: two go into the smaller.
        (
            [(8 * K, 0, 9), (6 * K, 0, 5), (5 * K, 0, 9), (4 * K, 0, 5), (3 * K, 0, 9)]
            + [(2 * K, 6, 8)],
            [0, 8 * K, 14 * K, 19 * K, 23 * K, 19 * K],
            26 * K,
        ),
        # Places begin at multiples of 512, and only the last keeps its odd end.
        ([(513, 0, 2), (100, 0, 2)], [0, 1024], 1124),
    ],
)
def test_hand_made_layouts(intervals, offsets, total):
    assert layout(intervals) == (offsets, total)
    check_layout(intervals, offsets, total)


lifetimes = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 30), st.integers(1, 10)).map(
        lambda t: (t[0], t[1], t[1] + t[2])
    ),
    max_size=40,
)


@given(lifetimes, st.sampled_from([512, 4096]))
def test_layouts_never_overlap_and_hold_the_peak(intervals, align):
    offsets, total = layout(intervals, align=align)
    check_layout(intervals, offsets, total, align=align)
    assert highest_sum(intervals) <= total


def test_layout_is_the_same_every_time_and_fast():
    draw = random.Random(7)
    starts = [draw.randrange(1000) for _ in range(2000)]
    intervals = [(draw.randrange(1, 1 << 24), s, s + draw.randrange(1, 300)) for s in starts]
    layout(intervals[:10])
    start = time.perf_counter()
    offsets, total = layout(intervals)
    # Half a second is asked for; the rest is for a busy test machine.
    assert time.perf_counter() - start < 2.0
    assert (offsets, total) == layout(intervals)
    assert total <= 1.25 * highest_sum(intervals)
    check_layout(intervals, offsets, total)


def test_check_layout_names_the_rows_at_fault():
    with pytest.raises(AssertionError, match="lifetimes 0 and 1 share bytes"):
        check_layout([(K, 0, 2), (K, 1, 3)], [0, 0], K)
    with pytest.raises(AssertionError, match="lifetime 0 is outside"):
        check_layout([(K, 0, 2)], [K], K)
    with pytest.raises(AssertionError, match="lifetime 0 is not aligned"):
        check_layout([(K, 0, 2)], [1], 2 * K)


def test_a_lifetime_must_end_after_it_starts():
    with pytest.raises(InputError, match="lifetime 1"):
        layout([(1, 0, 1), (1, 3, 3)])


def test_free_list_takes_the_first_hole_and_joins_neighbours():
    room = FreeList(10 * K)
    a, b, c = room.take(3 * K), room.take(2 * K - 1), room.take(5 * K)
    assert (a, b, c) == (0, 3 * K, 5 * K)
    assert room.take(1) is None
    room.give(a)
    room.give(c)
    assert room.take(6 * K) is None
    assert room.take(4 * K) == 5 * K
    room.give(b)
    assert room.take(5 * K) == 0
    assert room.free_bytes == K


def test_free_list_gives_back_only_what_was_taken():
    room = FreeList(K)
    assert room.take(0) == 0
    room.give(0)
    with pytest.raises(AssertionError):
        room.give(0)
    assert FreeList(K - 1).take(1) is None


@given(st.lists(st.integers(-20, 3000), max_size=80))
def test_free_list_never_gives_a_byte_twice(wishes):
    """A wish above zero takes so many bytes; one below gives back the n-th of those held."""
    room, held = FreeList(20 * K), {}
    for wish in wishes:
        if wish > 0:
            offset = room.take(wish)
            if offset is not None:
                held[offset] = wish
        elif held:
            offset = sorted(held)[wish % len(held)]
            room.give(offset)
            del held[offset]
        ranges = sorted((o, o + n) for o, n in held.items())
        assert all(e <= s for (_, e), (s, _) in zip(ranges, ranges[1:], strict=False))
        assert all(end <= 20 * K for _, end in ranges)
    for offset in held:
        room.give(offset)
    assert room.free_bytes == 20 * K and room.take(20 * K) == 0


def test_slab_is_whole_pages_and_views_share_it():
    slab = Slab(5000, pin=False)
    assert slab.num_bytes == 8192
    slab.view(4000, 200).fill_(7)
    assert slab.view(0, 8192).sum().item() == 1400
    assert slab.view(0, 1).data_ptr() % 4096 == 0
    with pytest.raises(AssertionError, match="outside"):
        slab.view(8000, 200)
    slab.close()


def test_slab_closes_twice_and_a_view_outlives_it():
    slab = Slab(4096, pin=False)
    view = slab.view(0, 4096)
    slab.close()
    slab.close()
    assert view.fill_(3).sum().item() == 3 * 4096
    with pytest.raises(AssertionError, match="closed"):
        slab.view(0, 1)


def test_slab_short_of_host_memory_says_by_how_much(monkeypatch):
    memory = SimpleNamespace(available=1 << 20)
    monkeypatch.setattr(pool.psutil, "virtual_memory", lambda: memory)
    with pytest.raises(TierError, match="host memory is short by 2.00 MiB"):
        Slab(3 << 20, pin=False)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_leaves_the_slab_alone():
    """A child has neither the pages nor a way to take them from its parent."""
    slab = Slab(1 << 20, pin=False)
    slab.view(0, 100).fill_(5)
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert slab.view(0, 100).sum().item() == 500
    slab.close()


class FakeCudart:
    """Registers until `limit` pieces are there, then refuses."""

    def __init__(self, limit):
        self.limit = limit
        self.pieces = {}

    def cudaHostRegister(self, address, num_bytes, flags):
        if len(self.pieces) == self.limit:
            return 2
        self.pieces[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        del self.pieces[address]
        return 0


@pytest.fixture
def cudart(monkeypatch):
    fake = FakeCudart(limit=3)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(pool, "PIECE_BYTES", 8192)
    return fake


def test_pinning_goes_piece_by_piece_and_tells(cudart):
    told = []
    slab = Slab(5 * 4096, pin=True, progress=lambda done, of: told.append((done, of)))
    assert told == [(8192, 20480), (16384, 20480), (20480, 20480)]
    assert list(cudart.pieces.values()) == [8192, 8192, 4096]
    assert slab.cuts(4096, 12288) == [(4096, 4096), (8192, 8192)]
    slab.close()
    assert cudart.pieces == {}


def test_pinning_refused_or_interrupted_gives_everything_back(cudart):
    with pytest.raises(TierError, match="error 2 after 24.0 KiB of 32.0 KiB"):
        Slab(8 * 4096, pin=True)
    assert cudart.pieces == {}

    def interrupt(done, of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Slab(4 * 4096, pin=True, progress=interrupt)
    assert cudart.pieces == {}


def test_a_forgotten_slab_unregisters(cudart):
    Slab(4096, pin=True)
    assert cudart.pieces == {}
