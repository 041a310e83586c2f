"""Copies between the device and the tiers below it, in order, beside the compute.

The only file where CUDA and CPU differ: streams and events there, threads and futures here.
What must wait for what, and who holds which tensor, is told in tickets.py.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from legroom.core.errors import InputError
from legroom.memory.mechanisms.disk import DiskFile
from legroom.memory.mechanisms.pool import PAGE_BYTES, Slab, round_up
from legroom.memory.mechanisms.tickets import (
    Event,
    Ledger,
    Place,
    Ticket,
    clean,
    demand,
    settle,
)

__all__ = ["SLOT_BYTES", "CpuLanes", "CudaLanes", "Lanes", "Place", "Ticket", "make_lanes"]

SLOT_BYTES = 8 << 20
"""One staging slot: large enough for a drive's full speed, small enough to pipeline."""
MAX_THREADS = 8
"""Transfers to the drive at a time, each way."""
IDLE_S = 20e-6
"""Two timing events with nothing to wait for between them are up to this far apart."""
MAX_PAIRS = 4096
"""Pairs of timing events kept before they are added up."""

Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Lanes(ABC):
    """One way out of the device and one way in; each keeps its order."""

    timing = False
    """Whether wait() measures stalls."""

    def __init__(self, slab: Slab | None, disk: DiskFile | None, host_bytes: int) -> None:
        self._slab = slab
        self._disk = disk
        self._host_bytes = host_bytes
        self._ledgers = {"host": Ledger(), "disk": Ledger()}
        # Forward and backward ask from different threads.
        self._lock = threading.Lock()
        self._stall_s = 0.0
        # Timing events around waits of the device, not read before somebody asks.
        self._pairs: list[tuple[Event, Event]] = []
        self._closed = False

    def copy_out(self, source: Tensor, place: Place) -> Ticket:
        """Begin to copy `source` to `place`, after the work enqueued so far."""
        self._check(source, place)
        ticket = Ticket(place, source)
        with self._lock:
            self._copy_out(ticket, self._ledgers[place.tier].enter_out(ticket))
        return ticket

    def copy_in(self, place: Place, target: Tensor) -> Ticket:
        """Begin to copy `place` to `target`, after the work enqueued so far."""
        self._check(target, place)
        ticket = Ticket(place, target)
        with self._lock:
            self._copy_in(ticket, self._ledgers[place.tier].enter_in(ticket))
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Put the work enqueued from here on behind the copy; raises what the copy raised.

        A copy out is behind once its source may be overwritten: bytes for the disk may still be
        in staging, and if the write then fails, the copy in from that place raises it.
        """
        self._wait(ticket)
        ticket.tensor = None
        for hop in ticket.hops:
            hop.result()

    def done(self, ticket: Ticket) -> bool:
        """Whether wait() would hold up neither the host nor the device."""
        return ticket.passed()

    def take_stall(self) -> Callable[[], float]:
        """Count stalls from zero, and give what tells those until now.

        That is the seconds the device stood still in wait() while `timing` was on; asking waits
        for the device.
        """
        with self._lock:
            pairs, counted_s = self._pairs, self._stall_s
            self._pairs, self._stall_s = [], 0.0
        return lambda: counted_s + sum(map(_stood_s, pairs))

    def drain(self) -> None:
        """Block until every copy is over, failed or not, and let go of what they held."""
        with self._lock:
            for ledger in self._ledgers.values():
                for ticket in ledger.live():
                    settle([ticket])
                    for event in ticket.events():
                        event.synchronize()
                ledger.sweep()

    def close(self) -> None:
        """Finish the copies and end the threads; slab and disk stay with who made them."""
        if not self._closed:
            self._closed = True
            self.drain()
            self._close()

    def _check(self, tensor: Tensor, place: Place) -> None:
        assert not self._closed, "the lanes are closed"
        assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
        assert tensor.numel() == place.num_bytes, f"{tensor.numel()} bytes for {place}"
        assert place.tier in self._ledgers, f"no such tier: {place}"
        room = self._disk.num_bytes if self._disk else 0
        room = self._host_bytes if place.tier == "host" else room
        assert 0 <= place.offset <= room - place.num_bytes, f"{place} is outside of {room} bytes"

    @abstractmethod
    def _copy_out(self, ticket: Ticket, before: Sequence[Ticket]) -> None: ...

    @abstractmethod
    def _copy_in(self, ticket: Ticket, before: Sequence[Ticket]) -> None: ...

    @abstractmethod
    def _wait(self, ticket: Ticket) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


def _stood_s(pair: tuple[Event, Event]) -> float:
    begin, end = pair
    end.synchronize()
    elapsed_s = float(begin.elapsed_time(end)) / 1e3
    return elapsed_s if elapsed_s > IDLE_S else 0.0


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.numpy().data


class CpuLanes(Lanes):
    """A thread each way, straight between the tensor and the tier."""

    def __init__(self, slab: Slab | None, disk: DiskFile | None) -> None:
        super().__init__(slab, disk, slab.num_bytes if slab else 0)
        self._out = ThreadPoolExecutor(1, thread_name_prefix="legroom-out")
        self._in = ThreadPoolExecutor(1, thread_name_prefix="legroom-in")

    def _copy_out(self, ticket: Ticket, before: Sequence[Ticket]) -> None:
        ticket.hops = [self._out.submit(clean, self._write, ticket, before)]

    def _copy_in(self, ticket: Ticket, before: Sequence[Ticket]) -> None:
        ticket.hops = [self._in.submit(clean, self._read, ticket, before)]

    def _wait(self, ticket: Ticket) -> None:
        start = time.perf_counter()
        settle([ticket])
        if self.timing:
            with self._lock:
                self._stall_s += time.perf_counter() - start

    def _write(self, ticket: Ticket, before: Sequence[Ticket]) -> None:
        settle(before)
        place, source = ticket.place, ticket.piece(0, ticket.place.num_bytes)
        if place.tier == "disk":
            assert self._disk is not None
            self._disk.write(place.offset, _bytes_of(source))
        else:
            # By numpy, on this thread alone: torch would start threads beside those of compute.
            np.copyto(self._host(place), source.numpy())

    def _read(self, ticket: Ticket, before: Sequence[Ticket]) -> None:
        demand(before)
        place, target = ticket.place, ticket.piece(0, ticket.place.num_bytes)
        if place.tier == "disk":
            assert self._disk is not None
            self._disk.read(place.offset, _bytes_of(target))
        else:
            np.copyto(target.numpy(), self._host(place))

    def _host(self, place: Place) -> Bytes:
        assert self._slab is not None
        return self._slab.view(place.offset, place.num_bytes).numpy()

    def _close(self) -> None:
        self._out.shutdown()
        self._in.shutdown()


@dataclass
class _Slot:
    offset: int
    busy: Event | None = None
    """Ends the device's use of the slot."""


class _Ring:
    """The staging slots of one direction, and as many threads; a taker waits for its turn."""

    def __init__(self, offsets: Sequence[int], name: str) -> None:
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        for offset in offsets:
            self._free.put(_Slot(offset))
        self.threads = ThreadPoolExecutor(min(len(offsets), MAX_THREADS), thread_name_prefix=name)

    @contextmanager
    def slot(self) -> Iterator[_Slot]:
        """A slot that nothing reads or writes; the next taker waits for its `busy`."""
        slot = self._free.get()
        try:
            if slot.busy is not None:
                slot.busy.synchronize()
                slot.busy = None
            yield slot
        finally:
            self._free.put(slot)


def _event(*, timing: bool = False) -> Event:
    # Blocking: a thread that waits for the device leaves its core to the others.
    return Event(enable_timing=timing, blocking=True)  # type: ignore[no-untyped-call]


class CudaLanes(Lanes):
    """A stream each way; to and from disk also threads, through staging at the slab's end."""

    def __init__(
        self,
        device: torch.device,
        slab: Slab | None,
        disk: DiskFile | None,
        staging_bytes: int,
        slot_bytes: int,
    ) -> None:
        super().__init__(slab, disk, slab.num_bytes - staging_bytes if slab else 0)
        # By number: torch reads a device by other names many times slower, at every copy.
        self._index = device.index
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slot_bytes = slot_bytes
        num_slots = staging_bytes // slot_bytes if disk else 0
        slots = [self._host_bytes + slot * slot_bytes for slot in range(num_slots)]
        # Halves, so that copies out in plenty cannot keep a copy in, which is urgent, waiting.
        half = num_slots // 2
        self._ring_out = _Ring(slots[half:], "legroom-out") if disk else None
        self._ring_in = _Ring(slots[:half], "legroom-in") if disk else None

    def _copy_out(self, ticket: Ticket, before: Sequence[Ticket]) -> None:
        ready = torch.cuda.current_stream(self._index).record_event()
        if ticket.place.tier == "host":
            ticket.hops = [self._through_slab(self._out, ticket, ready, before)]
            return
        assert self._ring_out is not None
        for start in range(0, ticket.place.num_bytes, self._slot_bytes):
            hop: Future[Event | None] = Future()
            ticket.hops.append(hop)
            threads, write = self._ring_out.threads, self._write_piece
            ticket.landed.append(threads.submit(clean, write, ticket, start, ready, before, hop))

    def _copy_in(self, ticket: Ticket, before: Sequence[Ticket]) -> None:
        ready = torch.cuda.current_stream(self._index).record_event()
        if ticket.place.tier == "host":
            ticket.hops = [self._through_slab(self._in, ticket, ready, before)]
            return
        assert self._ring_in is not None
        for start in range(0, ticket.place.num_bytes, self._slot_bytes):
            threads, read = self._ring_in.threads, self._read_piece
            ticket.hops.append(threads.submit(clean, read, ticket, start, ready, before))

    def _wait(self, ticket: Ticket) -> None:
        stream = torch.cuda.current_stream(self._index)
        begin = stream.record_event(_event(timing=True)) if self.timing else None
        # All of them before a failure is raised: the tensor is free for other use after this.
        for event in ticket.events():
            stream.wait_event(event)
        if begin is not None:
            with self._lock:
                self._pairs.append((begin, stream.record_event(_event(timing=True))))
                if len(self._pairs) > MAX_PAIRS:
                    early, self._pairs = self._pairs[:-MAX_PAIRS], self._pairs[-MAX_PAIRS:]
                    self._stall_s += sum(map(_stood_s, early))

    def _through_slab(
        self, lane: torch.cuda.Stream, ticket: Ticket, ready: Event, before: Sequence[Ticket]
    ) -> Future[Event | None]:
        """Enqueue a copy to or from its own place in the slab: no thread, no waiting host."""
        for event in (event for earlier in before for event in earlier.events()):
            lane.wait_event(event)
        place = ticket.place
        done: Future[Event | None] = Future()
        done.set_result(self._enqueue(lane, ready, place.offset, ticket.piece(0, place.num_bytes)))
        return done

    def _enqueue(self, lane: torch.cuda.Stream, ready: Event, offset: int, tensor: Tensor) -> Event:
        """Enqueue a copy between a tensor and the slab; the lane says which way."""
        assert self._slab is not None
        with torch.cuda.stream(lane):
            lane.wait_event(ready)
            for start, num_bytes in self._slab.cuts(offset, tensor.numel()):
                host = self._slab.view(start, num_bytes)
                device = tensor.narrow(0, start - offset, num_bytes)
                target, source = (host, device) if lane is self._out else (device, host)
                target.copy_(source, non_blocking=True)
            event = _event()
            lane.record_event(event)
            return event

    def _write_piece(
        self,
        ticket: Ticket,
        start: int,
        ready: Event,
        before: Sequence[Ticket],
        hop: Future[Event | None],
    ) -> None:
        """Device to slot, slot to file; the source is free after the first."""
        assert self._ring_out is not None and self._disk is not None and self._slab is not None
        size = min(self._slot_bytes, ticket.place.num_bytes - start)
        try:
            settle(before)
            with self._ring_out.slot() as slot:
                event = self._enqueue(self._out, ready, slot.offset, ticket.piece(start, size))
                hop.set_result(event)
                event.synchronize()
                staged = self._slab.view(slot.offset, size)
                self._disk.write(ticket.place.offset + start, _bytes_of(staged))
        except BaseException as error:
            if not hop.done():
                hop.set_exception(error)
            raise

    def _read_piece(
        self, ticket: Ticket, start: int, ready: Event, before: Sequence[Ticket]
    ) -> Event:
        """File to slot, slot to device; gives the event that ends the second."""
        assert self._ring_in is not None and self._disk is not None and self._slab is not None
        size = min(self._slot_bytes, ticket.place.num_bytes - start)
        demand(before)
        with self._ring_in.slot() as slot:
            staged = self._slab.view(slot.offset, size)
            self._disk.read(ticket.place.offset + start, _bytes_of(staged))
            slot.busy = self._enqueue(self._in, ready, slot.offset, ticket.piece(start, size))
            return slot.busy

    def _close(self) -> None:
        for ring in (self._ring_out, self._ring_in):
            if ring is not None:
                ring.threads.shutdown()


def make_lanes(
    device: torch.device,
    *,
    slab: Slab | None,
    disk: DiskFile | None,
    staging_bytes: int = 0,
    slot_bytes: int = SLOT_BYTES,
) -> Lanes:
    """Lanes for a device, to a slab, a disk file or both.

    On CUDA the disk is reached through the last `staging_bytes` of the slab, at least two pages;
    on CPU nothing is staged and the whole slab is for places. Raises InputError otherwise.
    """
    if device.type == "cpu":
        return CpuLanes(slab, disk)
    if device.type != "cuda":
        raise InputError(f"cannot move tensors of a {device.type!r} device, only cuda and cpu")
    # Plain "cuda" is the current device of now, not of whichever thread asks later.
    device = torch.empty(0, device=device).device
    staging_bytes = round_up(staging_bytes) if disk else 0
    if disk and (slab is None or not 2 * PAGE_BYTES <= staging_bytes <= slab.num_bytes):
        raise InputError("a disk tier on CUDA needs staging_bytes of at least 8192 in a slab")
    slot_bytes = min(slot_bytes, staging_bytes // 2) // PAGE_BYTES * PAGE_BYTES
    return CudaLanes(device, slab, disk, staging_bytes, slot_bytes)
