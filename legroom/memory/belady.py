"""Which tensors are on the device when: evict what is used last, the same in every step.

[Note: steady residency] Rooms are scanned op by op. Where a tensor needs room and there is none,
the one there that is needed last goes (Belady). Tensors that outlive the step are needed again in
the next one. So there are two scans (SwapAdvisor, Huang et al. 2020): the first begins with none of
those on the device and ends with some; the second begins with these, and whenever it has to evict
one that was not used yet, that one is not there from the start. What is there at the end then is
what was there at the beginning.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Tenant(NamedTuple):
    """A tensor that needs room."""

    room: int
    """Where: a size class, or 0 for all."""
    size: int
    """How much of it: 1 in a class of objects, or bytes."""
    spans: tuple[tuple[int, int], ...]
    """First and last op of each stretch in which it has to be there; between them it may go."""
    looped: bool = False
    """Whether it outlives the step; a copy is below when the first one begins."""
    writes: tuple[int, ...] = ()
    """Ops that change it, other than the first of one that does not outlive the step."""


class Eviction(NamedTuple):
    """A tensor goes."""

    tenant: int
    op: int
    """That needs the room."""
    copied: bool
    """Whether there was no valid copy below."""


class Fetch(NamedTuple):
    """A tensor comes back."""

    tenant: int
    op: int
    """That needs it."""
    since: int
    """From this position on, nothing else uses its room."""
    after: tuple[int, ...]
    """Whose copy out has to be done before."""


class Residency(NamedTuple):
    """What goes and comes in a step like all others."""

    first: frozenset[int]
    """Tensors that outlive the step, and are on the device when it begins."""
    evictions: tuple[Eviction, ...]
    fetches: tuple[Fetch, ...]
    lacking: int
    """Most that was needed beyond the rooms, where nothing could go."""


def belady_steady(
    tenants: Sequence[Tenant],
    rooms: Mapping[int, int],
    times_s: Sequence[float],
    idle_s: Sequence[float] | None = None,
) -> Residency:
    """Evictions and fetches of a step in the steady state; see [Note: steady residency].

    `times_s` tells when each position is; a tensor goes only if it has been idle for its share of
    `idle_s`, unless there is no such.
    """
    idle = idle_s or [0.0] * len(tenants)
    warm = _Scan(tenants, rooms, times_s, idle).run()
    if not any(tenant.looped for tenant in tenants):
        return warm.result()
    there = warm.looped_there()
    return _Scan(tenants, rooms, times_s, idle, there, warm.dirty & there).run().result()


class _Free(NamedTuple):
    """Room that nobody has."""

    since: int
    size: int
    left: int
    """Who was there; -1 for one that is gone for good, or nobody."""


@dataclass
class _Room:
    """One class: who is there, and what is free since when."""

    free: list[_Free]
    idle: set[int] = field(default_factory=set)
    lacking: int = 0

    @property
    def free_size(self) -> int:
        return sum(x.size for x in self.free)

    def take(self, size: int, oldest: bool) -> list[_Free]:
        """So much of what is free: what has been for longest, or shortest."""
        taken = []
        self.free.sort(key=lambda x: x.since, reverse=oldest)
        while size and self.free:
            part = self.free.pop()
            used = min(size, part.size)
            taken.append(part._replace(size=used))
            if part.size > used:
                self.free.append(part._replace(size=part.size - used))
            size -= used
        self.lacking += size
        return taken

    def give(self, since: int, size: int, left: int = -1) -> None:
        """Room is free again; what was lacking is paid back first."""
        paid = min(self.lacking, size)
        self.lacking -= paid
        if size > paid:
            self.free.append(_Free(since, size - paid, left))


class _Scan:
    """One pass over the ops."""

    def __init__(
        self,
        tenants: Sequence[Tenant],
        rooms: Mapping[int, int],
        times_s: Sequence[float],
        idle_s: Sequence[float],
        first: Collection[int] = (),
        dirty: Collection[int] = (),
    ) -> None:
        self.tenants, self.times_s, self.idle_s = tenants, times_s, idle_s
        self.end = len(times_s) - 1
        self.rooms = {key: _Room([_Free(0, size, -1)]) for key, size in rooms.items()}
        self.first = set(first)
        self.there: set[int] = set()
        self.untouched = set(first)
        """Of the first, those not used yet."""
        self.since = [0] * len(tenants)
        """When the span of each ended that it is in, or was in last."""
        self.next: list[int] = [t.spans[0][0] for t in tenants]
        self.dirty = set(dirty)
        self.evictions: list[Eviction] = []
        self.fetches: list[Fetch] = []
        self.lacking = 0
        self.begins: dict[int, list[int]] = {}
        self.ends: dict[int, list[tuple[int, int]]] = {}
        self.writes: dict[int, list[int]] = {}
        for i, tenant in enumerate(tenants):
            for n, (begin, end) in enumerate(tenant.spans):
                self.begins.setdefault(begin, []).append(i)
                self.ends.setdefault(end + 1, []).append((i, n))
            for op in tenant.writes:
                self.writes.setdefault(op, []).append(i)

    def run(self) -> "_Scan":
        """All ops, one after another."""
        for i in sorted(self.first):
            room = self.rooms[self.tenants[i].room]
            room.take(self.tenants[i].size, oldest=True)
            room.idle.add(i)
            self.there.add(i)
        for op in sorted({*self.begins, *self.ends, *self.writes}):
            for i, n in self.ends.get(op, ()):
                self._rest(i, n, op)
            begin = self.begins.get(op, ())
            for i in begin:
                self.rooms[self.tenants[i].room].idle.discard(i)
                self.untouched.discard(i)
            for i in begin:
                if i not in self.there:
                    self._admit(i, op)
            self.dirty.update(self.writes.get(op, ()))
        return self

    def _rest(self, i: int, n: int, op: int) -> None:
        """A span of a tensor is over: it is idle, or gone for good."""
        tenant, last = self.tenants[i], n + 1 == len(self.tenants[i].spans)
        self.since[i] = op
        if last and not tenant.looped:
            self.there.discard(i)
            self.rooms[tenant.room].give(op, tenant.size)
            return
        self.next[i] = tenant.spans[0][0] + self.end if last else tenant.spans[n + 1][0]
        self.rooms[tenant.room].idle.add(i)

    def _admit(self, i: int, op: int) -> None:
        """Room for a tensor, whoever has to go for it."""
        tenant, room = self.tenants[i], self.rooms[self.tenants[i].room]
        fetched = tenant.looped or op > tenant.spans[0][0]
        while room.free_size < tenant.size:
            victim = self._victim(room, op)
            if victim is None:
                break
            self._evict(victim, op)
        parts = room.take(tenant.size, fetched)
        self.lacking = max(self.lacking, sum(r.lacking for r in self.rooms.values()))
        self.there.add(i)
        if fetched:
            since = max((x.since for x in parts), default=op)
            left = sorted({x.left for x in parts if x.left >= 0})
            self.fetches.append(Fetch(i, op, since, tuple(left)))
        else:
            self.dirty.add(i)

    def _victim(self, room: _Room, op: int) -> int | None:
        """Of those idle for long enough, or else of all that are idle, who is needed last."""
        now_s, since = self.times_s[op], self.since
        long = [i for i in room.idle if now_s - self.times_s[since[i]] >= self.idle_s[i]]
        return max(long or room.idle, key=lambda i: (self.next[i], -i), default=None)

    def _evict(self, i: int, op: int) -> None:
        """It goes; one that was there from the start and not used yet never was."""
        tenant = self.tenants[i]
        room = self.rooms[tenant.room]
        room.idle.discard(i)
        self.there.discard(i)
        if i in self.untouched:
            self.untouched.discard(i)
            self.first.discard(i)
            room.give(0, tenant.size)
            return
        self.evictions.append(Eviction(i, op, i in self.dirty))
        self.dirty.discard(i)
        room.give(self.since[i], tenant.size, i)

    def looped_there(self) -> set[int]:
        """What outlives the step and is on the device at its end."""
        return {i for i in self.there if self.tenants[i].looped}

    def result(self) -> Residency:
        """The same at the end as at the beginning: what else is there goes, what is not, comes."""
        there = self.looped_there()
        gone = [Eviction(i, self.end, i in self.dirty) for i in sorted(there - self.first)]
        lost = sorted(self.first - there)
        back = [Fetch(i, self.tenants[i].spans[0][0], 0, ()) for i in lost]
        fetches = sorted((*self.fetches, *back), key=lambda x: (x.op, x.tenant))
        evictions = (*self.evictions, *gone)
        return Residency(frozenset(self.first & there), evictions, tuple(fetches), self.lacking)
