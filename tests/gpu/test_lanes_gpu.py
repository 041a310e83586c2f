"""On CUDA: the same bytes come back, no copy races with compute, and compute does not wait."""

import gc
import random
import threading
import time

import pytest
import torch

from legroom.core.errors import InputError, TierError
from legroom.memory.mechanisms import pool
from legroom.memory.mechanisms.disk import DiskFile
from legroom.memory.mechanisms.lanes import Place, make_lanes
from legroom.memory.mechanisms.pool import Slab

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 1 << 20
SIZES = [1, 4095, 4096, 4097, 3 * MIB + 7, 20 * MIB + 1]


class GatedDisk(DiskFile):
    """Writes and reads wait until their gate is open; writes fail if told to."""

    def __init__(self, directory, num_bytes):
        super().__init__(directory, num_bytes)
        self.gate = threading.Event()
        self.gate.set()
        self.read_gate = threading.Event()
        self.read_gate.set()
        self.failing = False

    def write(self, offset, view):
        assert self.gate.wait(20)
        if self.failing:
            raise TierError("the drive is gone")
        super().write(offset, view)

    def read(self, offset, view):
        assert self.read_gate.wait(20)
        super().read(offset, view)


@pytest.fixture
def disk(tmp_path):
    file = GatedDisk(tmp_path, 64 * MIB)
    yield file
    file.close()


@pytest.fixture
def lanes(disk):
    slab = Slab(72 * MIB, pin=True)
    lanes = make_lanes(
        torch.device("cuda"), slab=slab, disk=disk, staging_bytes=8 * MIB, slot_bytes=MIB
    )
    yield lanes
    disk.gate.set()
    disk.read_gate.set()
    lanes.close()
    slab.close()


def random_bytes(num_bytes):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")


def empty_bytes(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def fetch(lanes, place):
    target = empty_bytes(place.num_bytes)
    lanes.wait(lanes.copy_in(place, target))
    return target


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_round_trip(lanes, tier, num_bytes):
    source, place = random_bytes(num_bytes), Place(tier, 8192, num_bytes)
    expected = source.clone()
    lanes.wait(lanes.copy_out(source, place))
    source.zero_()
    assert torch.equal(fetch(lanes, place), expected)


def test_a_copy_may_cross_the_pieces_of_a_registration(monkeypatch):
    monkeypatch.setattr(pool, "PIECE_BYTES", MIB)
    slab = Slab(8 * MIB, pin=True)
    lanes = make_lanes(torch.device("cuda"), slab=slab, disk=None)
    source, place = random_bytes(5 * MIB + 3), Place("host", 512, 5 * MIB + 3)
    lanes.wait(lanes.copy_out(source, place))
    assert torch.equal(fetch(lanes, place), source)
    lanes.close()
    slab.close()


def test_a_refused_registration_does_not_blame_the_next_kernel():
    slab = Slab(MIB, pin=True)
    with pytest.raises(TierError, match="error 712"):
        slab._register([], None)
    assert torch.ones(8, device="cuda").add(1).sum().item() == 16
    slab.close()


def work(seconds=0.0005):
    torch.cuda._sleep(int(seconds * 1.5e9))


def overlap(one, two):
    return one.tier == two.tier and one.offset < two.end and two.offset < one.end


def whole_pages(place):
    return Place(place.tier, place.offset, pool.round_up(place.num_bytes))


def hold(lane):
    """Keep a lane busy, so that what is enqueued on it now happens late."""
    with torch.cuda.stream(lane):
        work(0.05)


def test_a_copy_in_waits_for_a_late_copy_out(lanes):
    source, place = random_bytes(MIB), Place("host", 0, MIB)
    hold(lanes._out)
    lanes.copy_out(source, place)
    assert torch.equal(fetch(lanes, place), source)


def test_a_copy_out_waits_for_a_late_copy_in(lanes):
    old, new = random_bytes(MIB), random_bytes(2 * MIB)
    place, target = Place("host", MIB, MIB), empty_bytes(MIB)
    lanes.wait(lanes.copy_out(old, place))
    hold(lanes._in)
    ticket = lanes.copy_in(place, target)
    lanes.wait(lanes.copy_out(new, Place("host", MIB // 2, 2 * MIB)))
    lanes.wait(ticket)
    assert torch.equal(target, old)


def test_a_write_waits_for_a_late_read(lanes, disk):
    old, new = random_bytes(MIB), random_bytes(MIB)
    place, target = Place("disk", 0, MIB), empty_bytes(MIB)
    lanes.copy_out(old, place)
    disk.read_gate.clear()
    ticket = lanes.copy_in(place, target)
    lanes.copy_out(new, place)
    time.sleep(0.1)
    disk.read_gate.set()
    lanes.wait(ticket)
    assert torch.equal(target, old)
    assert torch.equal(fetch(lanes, place), new)


def test_a_slot_is_not_filled_again_before_the_device_has_read_it(lanes):
    source, place = random_bytes(20 * MIB), Place("disk", 0, 20 * MIB)
    lanes.copy_out(source, place)
    lanes.drain()
    hold(lanes._in)
    assert torch.equal(fetch(lanes, place), source)


@pytest.mark.parametrize("tiers", [["host"], ["disk"], ["host", "disk"]])
@pytest.mark.parametrize("seed", range(2))
def test_no_copy_races_with_compute(lanes, tiers, seed):
    """500 copies over shared slots; sources are overwritten and memory reused after wait()."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, pending = {}, []
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(500):
        readable = sorted(model, key=str)
        if readable and draw.random() < 0.5:
            place = draw.choice(readable)
            target = empty_bytes(place.num_bytes)
            pending.append((lanes.copy_in(place, target), target, model[place]))
        else:
            size = draw.choice([1, 4097, draw.randrange(1, 4 * MIB)])
            place = Place(draw.choice(tiers), draw.randrange(0, 56 * 256) * 4096, size)
            source = random_bytes(size)
            for old in [p for p in model if overlap(p, whole_pages(place))]:
                del model[old]
            model[place] = source.clone()
            pending.append((lanes.copy_out(source, place), source, None))
            del source
        if draw.random() < 0.3:
            work()
        while len(pending) > draw.randrange(1, 8):
            wrong += settle(lanes, *pending.pop(draw.randrange(len(pending))))
    while pending:
        wrong += settle(lanes, *pending.pop())
    assert wrong.item() == 0


def settle(lanes, ticket, tensor, expected):
    """Wait, compare what came in, and overwrite at once."""
    lanes.wait(ticket)
    wrong = 0 if expected is None else (tensor != expected).sum()
    tensor.fill_(255)
    return wrong


def test_the_source_of_a_disk_copy_is_free_before_the_write(lanes, disk):
    """wait() ends the hop to staging: device memory returns while the drive stands still."""
    gc.collect()
    disk.gate.clear()
    before = torch.cuda.memory_allocated()
    source, place = random_bytes(3 * MIB), Place("disk", 0, 3 * MIB)
    expected = source.cpu()
    ticket = lanes.copy_out(source, place)
    del source
    assert torch.cuda.memory_allocated() == before + 3 * MIB
    lanes.wait(ticket)
    assert torch.cuda.memory_allocated() == before
    empty_bytes(3 * MIB).fill_(9)
    disk.gate.set()
    assert torch.equal(fetch(lanes, place).cpu(), expected)


def test_a_failed_write_is_raised_by_the_copy_in(lanes, disk):
    disk.failing = True
    place = Place("disk", 0, 3 * MIB)
    lanes.wait(lanes.copy_out(random_bytes(3 * MIB), place))
    with pytest.raises(TierError, match="the drive is gone"):
        fetch(lanes, place)
    disk.failing = False
    source = random_bytes(3 * MIB)
    lanes.copy_out(source, place)
    assert torch.equal(fetch(lanes, place), source)


def test_drain_gives_back_what_nobody_waited_for(lanes):
    gc.collect()
    before = torch.cuda.memory_allocated()
    lanes.copy_out(random_bytes(MIB), Place("host", 0, MIB))
    lanes.copy_out(random_bytes(MIB), Place("disk", 0, MIB))
    lanes.copy_in(Place("host", 0, MIB), empty_bytes(MIB))
    lanes.copy_in(Place("disk", 0, MIB), empty_bytes(MIB))
    lanes.drain()
    assert torch.cuda.memory_allocated() == before


def test_places_keep_out_of_the_staging_slots(lanes):
    with pytest.raises(AssertionError, match="outside"):
        lanes.copy_out(random_bytes(MIB), Place("host", 64 * MIB - 4096, MIB))


def test_disk_without_staging_is_refused(disk):
    with pytest.raises(InputError, match="staging_bytes"):
        make_lanes(torch.device("cuda"), slab=None, disk=disk)


def test_copies_run_beside_compute_and_stalls_are_seen():
    """Neither the host nor the compute stream waits before wait(); wait() then counts."""
    size = 256 * MIB
    slab = Slab(size, pin=True)
    lanes = make_lanes(torch.device("cuda"), slab=slab, disk=None)
    lanes.timing = True
    source, place = random_bytes(size), Place("host", 0, size)
    alone = elapsed_s(lambda: work(0.1))
    lanes.wait(lanes.copy_out(source, place))
    assert lanes.take_stall()() > 0.2 * size / 55e9

    def both():
        start = time.perf_counter()
        work(0.05)
        ticket = lanes.copy_out(source, place)
        work(0.05)
        lanes.wait(ticket)
        assert time.perf_counter() - start < 0.5 * alone

    assert elapsed_s(both) < 1.3 * alone
    assert lanes.take_stall()() < 0.001
    lanes.close()
    slab.close()


def elapsed_s(task):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    task()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
