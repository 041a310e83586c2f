"""Where blocks lie: whether an allocator finds room for a plan's tensors, and how to help it.

The peak of a plan counts bytes; an allocator also loses some to gaps too small for what comes
next. This plays the device's own rule: the smallest gap that fits, lowest address first,
neighbours merged when freed. Several stretches instead of one often lose less: small tensors fill
the smaller ones and leave the largest whole for large tensors. Where none of some ways to split the
room will do, the best of them is changed bit by bit for as long as it lacks less. Blocks that are
there before the step lie elsewhere and leave no gaps.
"""

import itertools
import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from legroom.memory.actions import Action, Compress, Move, Recompute, compressed_bytes
from legroom.memory.parking import ALIVE, is_state_of, parks, update_position
from legroom.memory.plan import away_span, held_inputs
from legroom.memory.play import Replay
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step
from legroom.memory.variants import replayed

ROUND_BYTES = 512
SMALL_BYTES = 1 << 20
"""Smaller blocks share segments of their own, which are few."""

NUM_SPLITS = 24
"""Ways to split the room that are tried."""
NUM_DRAWS = 200
"""Ways drawn by lot, where some tensors are large."""
EFFORT = 500_000
"""What may come and go while the best of them is changed."""
MAX_STRETCHES = 16
WALL = 2 << 20
"""Device bytes kept between two stretches, so that they are not merged."""

Stay = tuple[float, float, int]
"""First position, position where it is gone, bytes; a replay lies between two positions."""
Event = tuple[bool, int, int]
"""Whether it begins, its number, bytes."""


class Placement(NamedTuple):
    """How a plan's tensors lie in the room for them."""

    stretches: tuple[int, ...]
    """Sizes of the stretches to keep apart, the largest last."""
    missing_bytes: int
    """By how much the room is too small."""
    whose: str = ""
    """Signature of the step that it is for."""


NOWHERE = Placement((), 0)
"""No placement."""
WHOLE = Placement((ROUND_BYTES,), 0)
"""All the room there is, in one stretch."""


def place(simulator: Simulator, actions: Sequence[Action], limit: int) -> Placement:
    """The best of some splits of what a limit leaves beside the tensors that are always there."""
    room = limit - sum(s.num_bytes for s in simulator.step.storages if s.birth < 0)
    room += sum(park.num_bytes for park in parks(actions))
    return arrange(ordered(list(stays(simulator, actions))), room, WALL)


def arrange(events: Sequence[Event], room: int, wall: int = 0, effort: int = EFFORT) -> Placement:
    """The best of some splits of a room for what comes and goes in it, with walls around parts."""
    large = [event for event in events if event[2] > SMALL_BYTES]
    room = (room - _most(e for e in events if e[2] <= SMALL_BYTES)) // ROUND_BYTES * ROUND_BYTES
    room -= 2 * wall
    over = _most(large) - room
    if over > 0:
        return Placement((room,), over)
    best = Placement((room,), 1 << 62)
    for stretches in _splits(room, large, wall):
        missing = _missing(large, stretches, best.missing_bytes)
        if missing < best.missing_bytes:
            best = Placement(stretches, missing)
        if not missing:
            return best
    return _improved(large, best.stretches, wall, effort // len(large))


def _improved(
    large: Sequence[Event], stretches: tuple[int, ...], wall: int, num_moves: int
) -> Placement:
    """Stretches changed at random, as long as no change makes them lack more."""
    draw, sizes = random.Random(0), sorted({_rounded(size) for is_start, _, size in large})
    found = _played(large, stretches)
    for _ in range(num_moves):
        if not found.grown:
            break
        moved = _moved(stretches, found, sizes, wall, draw)
        again = _played(large, moved, found.grown + 1) if moved else found
        if moved and again.grown <= found.grown:
            stretches, found = moved, again
    return Placement(stretches, found.grown)


def _moved(
    stretches: Sequence[int], found: "Arena", sizes: Sequence[int], wall: int, draw: random.Random
) -> tuple[int, ...]:
    """The same room in other stretches: one of four ways by lot; none where that cannot be."""
    parts, way = list(stretches), draw.randrange(4)
    one, two = draw.randrange(len(parts)), draw.randrange(len(parts))
    some = draw.choice(sizes) if draw.random() < 0.5 else int(parts[one] * draw.random() ** 2)
    some = some // ROUND_BYTES * ROUND_BYTES
    if way == 0:  # as large as they would have had to be, and another one smaller
        parts = list(found.stretches)
        parts[one] -= found.grown
    elif way == 1:  # cut in two
        parts[one] -= some + wall
        parts.append(some)
    elif one == two:
        return ()
    elif way == 2:  # joined
        parts[one] += parts[two] + wall
        del parts[two]
    else:  # moved from one to the other
        parts[one] -= some
        parts[two] += some
    fine = min(parts) > 0 and len(parts) <= MAX_STRETCHES + 1
    return tuple(sorted(parts)) if fine else ()


def suits(events: Sequence[Event], stretches: Sequence[int]) -> bool:
    """Whether all that comes and goes finds room in these stretches."""
    return not _missing([event for event in events if event[2] > SMALL_BYTES], stretches, 1)


def _splits(room: int, large: Sequence[Event], wall: int) -> Iterator[tuple[int, ...]]:
    """Ways to divide a room in which these are to lie, with walls between the parts."""
    for i in range(NUM_SPLITS):
        parts = _split(room, room - room * i // NUM_SPLITS)
        last = parts[-1] - wall * (len(parts) - 1)
        if last > 0:
            yield tuple(sorted((*parts[:-1], last)))
    # Places just for the largest, and the rest for the others: those find it first, being smaller.
    tensor = max((size for _, _, size in large), default=0)
    place = _rounded(tensor)
    if place < room // 20:
        return
    count = _most((is_start, n, 1) for is_start, n, size in large if size == tensor)
    rest, draw = room - count * place, random.Random(0)
    for i in range(NUM_DRAWS if rest > 0 else 0):
        cuts = [draw.random() for _ in range(i % MAX_STRETCHES)]
        free = rest - wall * (count + len(cuts))
        edges = [int(free * cut) // ROUND_BYTES * ROUND_BYTES for cut in (0, *sorted(cuts))]
        gaps = [b - a for a, b in itertools.pairwise((*edges, free))]
        if free > 0:
            yield tuple(sorted((*[place] * count, *gaps)))


def _split(room: int, largest: int) -> tuple[int, ...]:
    """One stretch of about this size, and the rest in smaller ones."""
    rest = room - largest
    count = min(-(-rest // max(largest - largest // 50, 1)), MAX_STRETCHES)
    part = rest // max(count, 1) // ROUND_BYTES * ROUND_BYTES
    return tuple(sorted((*[part] * count, room - count * part)))


def _most(events: Iterable[Event]) -> int:
    level = most = 0
    for is_start, _, size in events:
        level += size if is_start else -size
        most = max(most, level)
    return most


def _missing(events: Sequence[Event], stretches: Sequence[int], enough: int = 1 << 62) -> int:
    """By how much the room is too small, or `enough` where it is by that much or more."""
    return min(_played(events, stretches, enough).grown, enough)


def _played(events: Sequence[Event], stretches: Sequence[int], enough: int = 1 << 62) -> "Arena":
    """Stretches after all that comes and goes, or as soon as they have grown by so much."""
    arena = Arena(stretches)
    live: dict[int, tuple[int, int]] = {}
    for is_start, number, size in events:
        if is_start:
            live[number] = arena.take(size)
            if arena.grown >= enough:
                break
        else:
            arena.give(*live.pop(number))
    return arena


def _rounded(num_bytes: int, unit: int = ROUND_BYTES) -> int:
    return -(-num_bytes // unit) * unit


def stays(simulator: Simulator, actions: Sequence[Action], since: int = 0) -> Iterator[Stay]:
    """When which bytes are on the device: each storage in its stretches, scratch, replays.

    Those that were there before the step are among them with `since` -1.
    """
    step, storages = simulator.step, simulator.step.storages
    held = held_inputs(step, [a for a in actions if isinstance(a, Recompute)])
    away = dict[int, tuple[float, float]]()
    for a in actions:
        if isinstance(a, Move):
            gone, _ = away_span(step, a)
            early = 0.5 if a.in_start >= step.turn else 0.75  # before a replay, or frees, at it
            away[a.storage] = gone, max(a.out_wait - 0.5, a.in_start - early)
    for r in simulator.replays(actions):
        back, others = _replayed(step, r)
        for s in r.variant.drops:
            gone = max(storages[s].release + 1, held.get(s, (0, 0))[1])
            away[s] = (gone, back.get(s, r.position))
        yield from others
    for a in actions:
        if isinstance(a, Compress):
            storage, use = storages[a.storage], step.first_use(a.storage)
            away[a.storage] = (storage.release + 1, use)
            small = compressed_bytes(a.codec, storage.num_bytes, storage.dtype)
            yield step.packed(a.storage), storage.death + 1, small
    moved = {a.storage for a in actions if isinstance(a, Move)}
    parked = {name for park in parks(actions) for name in park.params}
    for i, storage in enumerate(storages):
        if storage.birth >= since and not is_state_of(storage, parked):
            end = max(storage.death + 1, held.get(i, (0, 0))[1])
            left, came = away.get(i, (end, end))
            # What was fetched as an input of a block that runs again may be held for longer.
            longer = i in moved and end > storage.death + 1
            yield storage.birth, left, storage.num_bytes
            yield came, end if longer else storage.last + 1, storage.num_bytes
    for i, size in enumerate(simulator.scratch_under(actions).tolist()):
        yield i, i + 1, size
    for park in parks(actions):
        for _ in range(ALIVE):
            yield update_position(step), len(step.ops) + 1, park.window_bytes // ALIVE


def _replayed(step: Step, replay: Replay) -> tuple[dict[int, float], list[Stay]]:
    """When each storage of a block that runs again is back, and what comes and goes meanwhile."""
    variant, first = replay.variant, step.blocks[replay.block].first
    span = variant.last - first + 2

    def at(op: int) -> float:
        return replay.position - 0.5 + 0.5 * (op - first + 1) / (span + 1)

    back, others, drops = dict[int, float](), list[Stay](), set(variant.drops)
    for s, birth, end in replayed(step, variant.name, variant.replays, first, variant.last):
        back[s] = at(birth)
        if s not in drops:
            others.append((back[s], at(end + 1) + 0.5, step.storages[s].num_bytes))
    for i in variant.replays:
        others.append((at(i), at(i + 1) + 0.5, step.ops[i].workspace_bytes))
    return back, others


def ordered(spans: Sequence[Stay]) -> list[Event]:
    """(whether it begins, number, bytes) in order; what goes at a position is gone before it."""
    events = []
    for number, (start, end, size) in enumerate(spans):
        if size > 0 and end > start:
            events.append((start, True, number, size))
            events.append((end - 0.5, False, number, size))
    return [e[1:] for e in sorted(events)]


APART = 1 << 50
"""Addresses from one stretch to the next: none grows into another."""


class Arena:
    """Stretches of addresses; hands out the smallest gap that fits.

    Where none does, the stretch with most room at its end grows by what is lacking.
    """

    def __init__(self, stretches: Sequence[int], unit: int = ROUND_BYTES) -> None:
        self._unit = unit
        self._gaps: list[tuple[int, int]] = []
        """(size, address), sorted."""
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._tops = [i * APART + size for i, size in enumerate(stretches)]
        """Where each ends."""
        for i, size in enumerate(stretches):
            self._remember(size, i * APART)
        self.grown = 0
        """By how much all of them together."""

    @property
    def stretches(self) -> tuple[int, ...]:
        """Their sizes by now."""
        return tuple(top - i * APART for i, top in enumerate(self._tops))

    def take(self, size: int) -> tuple[int, int]:
        """A block of this size: (address, size)."""
        size = _rounded(size, self._unit)
        i = bisect_left(self._gaps, (size, 0))
        if i < len(self._gaps):
            gap, address = self._gaps[i]
            self._forget(gap, address)
            if gap > size:
                self._remember(gap - size, address + size)
            return address, size
        spare, which = max((self._ends.get(top, 0), i) for i, top in enumerate(self._tops))
        address = self._tops[which] - spare
        if spare:
            self._forget(spare, address)
        self._tops[which] = address + size
        self.grown += size - spare
        return address, size

    def give(self, address: int, size: int) -> None:
        """Free a block, and merge it with the gaps beside it."""
        end = address + size
        if end in self._starts:
            gap = self._starts[end]
            self._forget(gap, end)
            end += gap
        if address in self._ends:
            gap = self._ends[address]
            self._forget(gap, address - gap)
            address -= gap
        self._remember(end - address, address)

    def trim(self) -> None:
        """Let each stretch end where its last block does."""
        for i, top in enumerate(self._tops):
            spare = self._ends.get(top, 0)
            if spare:
                self._forget(spare, top - spare)
                self._tops[i] -= spare

    def _remember(self, size: int, address: int) -> None:
        insort(self._gaps, (size, address))
        self._starts[address] = self._ends[address + size] = size

    def _forget(self, size: int, address: int) -> None:
        del self._gaps[bisect_left(self._gaps, (size, address))]
        del self._starts[address], self._ends[address + size]
