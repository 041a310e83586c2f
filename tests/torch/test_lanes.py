"""Bytes that go out come back the same, in any order of asking, or the caller hears why not."""

import errno
import gc
import os
import random
import threading
import time
import weakref

import pytest
import torch

from legroom.core.errors import InputError, TierError
from legroom.memory.mechanisms import disk as disk_module
from legroom.memory.mechanisms.disk import DiskFile
from legroom.memory.mechanisms.lanes import Place, make_lanes
from legroom.memory.mechanisms.pool import Slab

SIZES = [1, 4095, 4096, 4097, (3 << 20) + 7, (9 << 20) + 1]
CPU = torch.device("cpu")


@pytest.fixture
def slab():
    slab = Slab(16 << 20, pin=False)
    yield slab
    slab.close()


@pytest.fixture
def disk(tmp_path):
    file = DiskFile(tmp_path, 16 << 20)
    yield file
    file.close()


@pytest.fixture
def lanes(slab, disk):
    lanes = make_lanes(CPU, slab=slab, disk=disk)
    yield lanes
    lanes.close()


def random_bytes(num_bytes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def fetch(lanes, place):
    target = torch.zeros(place.num_bytes, dtype=torch.uint8)
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


@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("direct", [True, False])
def test_disk_takes_memory_at_any_address(tmp_path, shift, direct):
    """What follows the bytes in the caller's memory is not touched."""
    file = DiskFile(tmp_path, 16 << 20)
    file.direct = file.direct and direct
    if not direct:
        file._fd, closed = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT), file._fd
        os.close(closed)
        os.ftruncate(file._fd, file.num_bytes)
    slab = Slab(16 << 20, pin=False)
    for num_bytes in SIZES:
        source = slab.view(shift, num_bytes + 1).copy_(random_bytes(num_bytes + 1, num_bytes))
        expected = source.clone()
        file.write(4096, source[:-1].numpy().data)
        source[:-1] = 0
        file.read(4096, source[:-1].numpy().data)
        assert torch.equal(source, expected)
    file.close()
    slab.close()


def test_disk_goes_on_after_partial_transfers(tmp_path, monkeypatch):
    file, source = DiskFile(tmp_path, 1 << 20), random_bytes((1 << 20) - 100)
    pwrite, preadv = os.pwrite, os.preadv
    short = 5 * 4096 if file.direct else 5000
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: pwrite(fd, view[:short], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:short]], at))
    file.write(0, source.numpy().data)
    target = torch.zeros_like(source)
    file.read(0, target.numpy().data)
    assert torch.equal(target, source)
    file.close()


def ranges_for(draw, tier):
    """Places of all sizes that overlap each other in every way."""
    align = 4096 if tier == "disk" else 512
    size = draw.choice([1, 511, 4097, 70_000, draw.randrange(1, 300_000)])
    return Place(tier, draw.randrange(0, (1 << 20) // align) * align, size)


@pytest.mark.parametrize("seed", range(4))
def test_random_copies_agree_with_doing_them_one_by_one(lanes, seed):
    """300 copies over shared slots, most not waited for, against plain arrays."""
    draw = random.Random(seed)
    model = {}
    checks, waits = [], []
    for op in range(300):
        readable = sorted(model, key=str)
        if readable and draw.random() < 0.5:
            place = draw.choice(readable)
            target = torch.zeros(place.num_bytes, dtype=torch.uint8)
            checks.append((lanes.copy_in(place, target), target, model[place]))
        else:
            place = ranges_for(draw, draw.choice(["host", "disk"]))
            source = random_bytes(place.num_bytes, op)
            # What shares a page on disk is lost with it, since writes own whole pages.
            for old in [p for p in model if overlap(p, whole_pages(place))]:
                del model[old]
            model[place] = source.clone()
            waits.append((lanes.copy_out(source, place), source))
        if waits and draw.random() < 0.5:
            ticket, source = waits.pop(draw.randrange(len(waits)))
            lanes.wait(ticket)
            source.zero_()
    for ticket, target, expected in checks:
        lanes.wait(ticket)
        assert torch.equal(target, expected)


def overlap(one, two):
    return one.tier == two.tier and one.offset < two.end and two.offset < one.end


def whole_pages(place):
    if place.tier == "host":
        return place
    return Place(place.tier, place.offset, -(-place.num_bytes // 4096) * 4096)


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
        assert self.gate.wait(10)
        if self.failing:
            raise TierError("the drive is gone")
        super().write(offset, view)

    def read(self, offset, view):
        assert self.read_gate.wait(10)
        super().read(offset, view)


@pytest.fixture
def gated(tmp_path):
    file = GatedDisk(tmp_path, 1 << 20)
    lanes = make_lanes(CPU, slab=None, disk=file)
    yield file, lanes
    file.gate.set()
    file.read_gate.set()
    lanes.close()
    file.close()


def test_a_copy_in_waits_for_the_copy_out_of_its_place(gated):
    file, lanes = gated
    place, target = Place("disk", 4096, 5000), torch.zeros(5000, dtype=torch.uint8)
    file.gate.clear()
    lanes.copy_out(random_bytes(5000), place)
    ticket = lanes.copy_in(place, target)
    time.sleep(0.05)
    assert not lanes.done(ticket)
    file.gate.set()
    lanes.wait(ticket)
    assert torch.equal(target, random_bytes(5000))


def test_a_copy_out_waits_for_copies_in_from_any_byte_of_its_place(gated):
    file, lanes = gated
    old, target = Place("disk", 4096, 5000), torch.zeros(5000, dtype=torch.uint8)
    lanes.copy_out(random_bytes(5000), old)
    file.read_gate.clear()
    ticket = lanes.copy_in(old, target)
    over = lanes.copy_out(random_bytes(9000, 1), Place("disk", 0, 9000))
    aside = lanes.copy_out(random_bytes(100, 2), Place("disk", 16384, 100))
    time.sleep(0.05)
    assert not lanes.done(over)
    file.read_gate.set()
    for each in (ticket, over, aside):
        lanes.wait(each)
    assert torch.equal(target, random_bytes(5000))


def test_wait_raises_what_the_copy_raised(gated):
    file, lanes = gated
    file.failing = True
    ticket = lanes.copy_out(random_bytes(5000), Place("disk", 0, 5000))
    for _ in range(2):
        with pytest.raises(TierError, match="the drive is gone"):
            lanes.wait(ticket)


def test_reading_a_place_whose_write_failed_fails_until_it_is_written_again(gated):
    file, lanes = gated
    place, other = Place("disk", 0, 5000), Place("disk", 8192, 100)
    file.failing = True
    lanes.copy_out(random_bytes(5000), place)
    lanes.drain()
    file.failing = False
    with pytest.raises(TierError, match="the drive is gone"):
        fetch(lanes, place)
    lanes.copy_out(random_bytes(100), other)
    assert torch.equal(fetch(lanes, other), random_bytes(100))
    lanes.copy_out(random_bytes(5000, 1), place)
    assert torch.equal(fetch(lanes, place), random_bytes(5000, 1))


def test_a_copy_in_asked_before_the_place_is_covered_still_fails(gated):
    file, lanes = gated
    place = Place("disk", 0, 5000)
    file.gate.clear()
    file.failing = True
    lanes.copy_out(random_bytes(5000), place)
    early = lanes.copy_in(place, torch.zeros(5000, dtype=torch.uint8))
    lanes.copy_out(random_bytes(5000, 1), place)
    late = lanes.copy_in(place, torch.zeros(5000, dtype=torch.uint8))
    file.gate.set()
    for ticket in (early, late):
        with pytest.raises(TierError, match="the drive is gone"):
            lanes.wait(ticket)


def test_a_ticket_holds_its_tensor_until_the_wait_and_no_longer(gated):
    file, lanes = gated
    file.gate.clear()
    source = random_bytes(5000)
    alive = weakref.ref(source)
    ticket = lanes.copy_out(source, Place("disk", 0, 5000))
    del source
    assert alive() is not None and not lanes.done(ticket)
    file.gate.set()
    lanes.wait(ticket)
    assert alive() is None and lanes.done(ticket)


@pytest.mark.parametrize("failing", [False, True])
def test_drain_lets_go_of_copies_nobody_waited_for(gated, failing):
    file, lanes = gated
    file.failing = failing
    source = random_bytes(5000)
    alive = weakref.ref(source)
    lanes.copy_out(source, Place("disk", 0, 5000))
    del source
    lanes.drain()
    gc.collect()
    assert alive() is None


def test_stalls_are_counted_only_when_asked_for(gated):
    file, lanes = gated
    place = Place("disk", 0, 100)
    lanes.wait(lanes.copy_out(random_bytes(100), place))
    assert lanes.take_stall()() == 0.0
    lanes.timing = True
    file.gate.clear()
    ticket = lanes.copy_out(random_bytes(100), place)
    threading.Timer(0.05, file.gate.set).start()
    lanes.wait(ticket)
    assert 0.02 < lanes.take_stall()() < 10
    assert lanes.take_stall()() == 0.0


def test_closing_twice_is_closing_once(tmp_path):
    slab, file = Slab(4096, pin=False), DiskFile(tmp_path, 4096)
    lanes = make_lanes(CPU, slab=slab, disk=file)
    lanes.copy_out(random_bytes(100), Place("host", 0, 100))
    for thing in (lanes, lanes, file, file, slab, slab):
        thing.close()
    with pytest.raises(AssertionError, match="closed"):
        lanes.copy_out(random_bytes(100), Place("host", 0, 100))


def test_what_does_not_fit_is_refused(lanes):
    with pytest.raises(AssertionError, match="outside"):
        lanes.copy_out(random_bytes(4097), Place("host", (16 << 20) - 4096, 4097))
    with pytest.raises(AssertionError, match="100 bytes for"):
        lanes.copy_out(random_bytes(100), Place("disk", 0, 4097))
    with pytest.raises(InputError, match="'meta'"):
        make_lanes(torch.device("meta"), slab=None, disk=None)


def test_the_file_leaves_no_name_behind(tmp_path, monkeypatch):
    file = DiskFile(tmp_path, 5000)
    assert file.num_bytes == 8192 and os.listdir(tmp_path) == []
    file.close()
    plain = os.open
    refuse = OSError(errno.EOPNOTSUPP, "no nameless files here")

    def no_nameless(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise refuse
        return plain(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_nameless)
    DiskFile(tmp_path, 5000).close()
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="cannot make a file of 1.00 MiB in .*/file/below"):
        DiskFile(tmp_path / "file" / "below", 1 << 20)


def test_a_full_disk_says_how_much_is_missing(tmp_path, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    usage = type("Usage", (), {"free": 4096})
    monkeypatch.setattr(disk_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(TierError, match=rf"{tmp_path}: No space.* 8192 bytes .*are missing"):
        DiskFile(tmp_path, 12288)


def test_a_failing_drive_is_a_tier_error(tmp_path, monkeypatch):
    def broken(*args):
        raise OSError(errno.EIO, "Input/output error")

    file = DiskFile(tmp_path, 8192)
    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(TierError, match="write at 4096 in .*Input/output error"):
        file.write(4096, memoryview(bytes(10)))
    monkeypatch.setattr(os, "preadv", lambda *args: 0)
    with pytest.raises(TierError, match="read at 0 in .*moved 0 bytes"):
        file.read(0, memoryview(bytearray(10)))
    file.close()
