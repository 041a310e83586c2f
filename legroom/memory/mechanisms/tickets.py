"""Copies under way, and which must wait for which.

[Note: Order] A copy out to a place and a copy in from it run on different lanes, so each copy
first waits for the earlier ones that touch the same bytes: a copy in for copies out (it must
not read too early), a copy out for both (it must not overwrite what is still read). Waits only
ever point to copies asked for earlier, and a thread waits before it takes a staging slot, never
while it holds one: the earliest unfinished copy can always go on.

[Note: Lifetime] The caller's tensor was allocated on the compute stream and must return there
after the copy. A ticket holds it until wait() has put the compute stream behind the copy, or
until the copy is seen to be over; threads reach it through the ticket alone, since a name of
their own would keep the memory taken while the slow hop to disk goes on.
"""

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Event = torch.cuda.Event
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where moved bytes lie: a tier ("host" or "disk") and a range in its slab or file."""

    tier: str
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.num_bytes


class Ticket:
    """One copy under way; opaque to callers."""

    __slots__ = ("place", "tensor", "hops", "landed", "covered")

    def __init__(self, place: Place, tensor: Tensor) -> None:
        self.place = place
        self.tensor: Tensor | None = tensor
        # What wait() waits for: each future gives the event that ends its part, None on CPU.
        self.hops: list[Future[Event | None]] = []
        # What goes on after wait(): from staging to disk.
        self.landed: list[Future[None]] = []
        # A later copy out goes over its place: nobody asks any more whether it failed.
        self.covered = False

    def passed(self) -> bool:
        """Whether all that wait() waits for has happened, on the host and on the device."""
        return all(f.done() and (f.exception() or _is_over(f.result())) for f in self.hops)

    def settled(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.passed() and all(future.done() for future in self.landed)

    def events(self) -> list[Event]:
        """Block until its work for the device is enqueued; the events of what did not fail."""
        results = [None if hop.exception() else hop.result() for hop in self.hops]
        return [event for event in results if event is not None]

    def error(self) -> BaseException | None:
        """Block until the tier below is done with it; the first failure."""
        parts: list[Future[Any]] = [*self.hops, *self.landed]
        failures = [part.exception() for part in parts]
        return next((failure for failure in failures if failure is not None), None)

    def piece(self, start: int, num_bytes: int) -> Tensor:
        """Part of the caller's tensor."""
        assert self.tensor is not None, "a copy outlived its tensor"
        return self.tensor.narrow(0, start, num_bytes)


def _is_over(event: Event | None) -> bool:
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]


Row = tuple[int, int, Ticket]
"""First byte, end byte, copy: plain, for hundreds of them are looked through at every copy."""


def _beside(rows: Iterable[Row], place: Place) -> list[Ticket]:
    first, end = place.offset, place.end
    return [ticket for since, until, ticket in rows if since < end and first < until]


class Ledger:
    """Copies of one tier that may still run, in the order they were asked for."""

    def __init__(self) -> None:
        self._out: deque[Row] = deque()
        self._in: deque[Row] = deque()
        # Places whose last copy out failed: reading them must fail too.
        self._broken: list[Row] = []

    def enter_out(self, ticket: Ticket) -> list[Ticket]:
        """Note a copy out; gives what it must wait for. It covers what lay there."""
        self.sweep()
        place = ticket.place
        earlier = _beside(self._out, place)
        for covered in (*earlier, *_beside(self._broken, place)):
            covered.covered = True
        self._broken = [row for row in self._broken if not row[2].covered]
        self._out.append((place.offset, place.end, ticket))
        return earlier + _beside(self._in, place)

    def enter_in(self, ticket: Ticket) -> list[Ticket]:
        """Note a copy in; gives what it must wait for. Who covers a copy has waited for it."""
        self.sweep()
        place = ticket.place
        self._in.append((place.offset, place.end, ticket))
        earlier = _beside(self._broken, place) + _beside(self._out, place)
        return [ticket for ticket in earlier if not ticket.covered]

    def live(self) -> list[Ticket]:
        """All copies not known to be over."""
        return [ticket for _, _, ticket in (*self._out, *self._in)]

    def sweep(self) -> None:
        """Let go of the copies that are over, oldest first, and of what they held."""
        while self._out and self._out[0][2].settled():
            row = self._out.popleft()
            row[2].tensor = None
            if not row[2].covered and row[2].error() is not None:
                self._broken.append(row)
        while self._in and self._in[0][2].settled():
            self._in.popleft()[2].tensor = None


def settle(tickets: Sequence[Ticket]) -> None:
    """Block this thread until the tier below is done with some copies, failed or not."""
    for ticket in tickets:
        ticket.error()


def demand(tickets: Sequence[Ticket]) -> None:
    """Like settle, and raise what failed: the bytes to be read are not there."""
    for ticket in tickets:
        error = ticket.error()
        if error is not None:
            raise error


def clean(task: Callable[..., T], *args: object) -> T:
    """Run a task; the frames of a failure are emptied, for they hold tensors (see Lifetime)."""
    try:
        return task(*args)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
