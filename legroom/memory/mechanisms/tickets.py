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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Event = torch.cuda.Event
TIERS = ("host", "disk")
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where moved bytes lie: a tier ("host" or "disk") and a range in its slab or file."""

    tier: str
    offset: int
    num_bytes: int

    def overlaps(self, other: "Place") -> bool:
        """Whether two places share a byte."""
        return (
            self.tier == other.tier
            and self.offset < other.offset + other.num_bytes
            and other.offset < self.offset + self.num_bytes
        )


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


class Ledger:
    """Copies that may still touch the tiers, in the order they were asked for."""

    def __init__(self) -> None:
        self._out: dict[str, deque[Ticket]] = {tier: deque() for tier in TIERS}
        self._in: dict[str, deque[Ticket]] = {tier: deque() for tier in TIERS}
        # Places whose last copy out failed: reading them must fail too.
        self._broken: list[Ticket] = []

    def add_out(self, ticket: Ticket) -> None:
        """Enter a copy out; it covers what lay there."""
        lane = self._out[ticket.place.tier]
        for earlier in (*self._broken, *lane):
            earlier.covered |= earlier.place.overlaps(ticket.place)
        self._broken = [earlier for earlier in self._broken if not earlier.covered]
        lane.append(ticket)

    def add_in(self, ticket: Ticket) -> None:
        """Enter a copy in."""
        self._in[ticket.place.tier].append(ticket)

    def before_out(self, place: Place) -> list[Ticket]:
        """What a copy out to `place` must wait for."""
        self.sweep()
        live = (*self._out[place.tier], *self._in[place.tier])
        return [ticket for ticket in live if ticket.place.overlaps(place)]

    def before_in(self, place: Place) -> list[Ticket]:
        """What a copy in from `place` must wait for; who covers a copy has waited for it."""
        self.sweep()
        live = (*self._broken, *self._out[place.tier])
        return [t for t in live if not t.covered and t.place.overlaps(place)]

    def live(self) -> list[Ticket]:
        """All copies not known to be over."""
        lanes = (*self._out.values(), *self._in.values())
        return [ticket for lane in lanes for ticket in lane]

    def sweep(self) -> None:
        """Let go of the copies that are over, oldest first, and of what they held."""
        for lane in (*self._out.values(), *self._in.values()):
            while lane and lane[0].settled():
                ticket = lane.popleft()
                ticket.tensor = None
                is_out = lane is self._out[ticket.place.tier]
                if is_out and not ticket.covered and ticket.error() is not None:
                    self._broken.append(ticket)


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
