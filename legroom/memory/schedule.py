"""When to copy: the four positions of each move, by link time first and memory second."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from legroom.memory.actions import Action, Move, Recompute
from legroom.memory.plan import Held, first_need, held_inputs
from legroom.memory.play import Replay
from legroom.memory.simulate import Levels, Simulator
from legroom.memory.trace import Step

EARLY = 1.15
"""Prefetches are given this much more time than the link needs: late costs more than early."""


class Want(NamedTuple):
    """A storage to be moved, and where to."""

    storage: int
    tier: str


def schedule(
    simulator: Simulator, wants: Sequence[Want], recomputes: Sequence[Recompute]
) -> list[Move]:
    """Moves for these storages: out as soon as saved, back just in time, one after another."""
    held = held_inputs(simulator.step, list(recomputes))
    clock = _Clock(simulator, recomputes)
    outs = _outs(simulator, wants, clock, held)
    return _ins(simulator, wants, clock, held, outs)


class _Clock:
    """Times of positions with replays counted in, and the ticks to round to."""

    def __init__(self, simulator: Simulator, recomputes: Sequence[Recompute]) -> None:
        self.ticks = simulator.step.ticks
        extra = np.zeros(len(simulator.until))
        for replay in simulator.replays(recomputes):
            # What a replay needs must be there when it begins, not when it ends.
            extra[replay.position + 1 :] += replay.variant.replay_s
        self.times = simulator.until + extra
        self.tick_times = [float(self.times[p]) for p in self.ticks]

    def tick_after(self, time_s: float) -> int:
        """First tick at or after a moment."""
        return self.ticks[min(bisect_left(self.tick_times, time_s), len(self.ticks) - 1)]

    def tick_before(self, time_s: float) -> int:
        """Last tick at or before a moment."""
        return self.ticks[max(bisect_right(self.tick_times, time_s) - 1, 0)]


def leave_position(simulator: Simulator, storage: int) -> int:
    """Where a storage can start to leave: when saved, or when its block begins."""
    if storage in simulator.step.saves:
        return simulator.step.packed(storage)
    readers = [b.first for b in simulator.step.blocks if storage in b.inputs]
    ticks = simulator.step.ticks
    return ticks[min(bisect_left(ticks, min(readers, default=0)), len(ticks) - 1)]


def _seconds(simulator: Simulator, want: Want, out: bool) -> float:
    route = simulator.routes[want.tier]
    assert route is not None
    hops = route[0][:1] if out else route[1]
    rate = min(h.bytes_per_s for h in hops)
    size = simulator.step.storages[want.storage].num_bytes
    return sum(h.latency_s for h in hops) + size / rate


def _outs(
    simulator: Simulator, wants: Sequence[Want], clock: _Clock, held: Held
) -> dict[int, tuple[int, int]]:
    """Start and wait positions of each copy out, in order of leaving."""
    free_s, found = 0.0, {}
    for want in sorted(wants, key=lambda w: leave_position(simulator, w.storage)):
        start = leave_position(simulator, want.storage)
        need = first_need(simulator.step, want.storage, held)
        free_s = max(free_s, float(clock.times[start])) + _seconds(simulator, want, out=True)
        wait = min(max(clock.tick_after(free_s), start), need)
        found[want.storage] = (start, wait)
    return found


def _ins(
    simulator: Simulator,
    wants: Sequence[Want],
    clock: _Clock,
    held: Held,
    outs: dict[int, tuple[int, int]],
) -> list[Move]:
    """Copy-in positions, planned backwards from the last need."""
    needs = [(first_need(simulator.step, w.storage, held), w) for w in wants]
    until_s, moves = float("inf"), []
    for need, want in sorted(needs, key=lambda x: (-x[0], x[1].storage)):
        out_start, out_wait = outs[want.storage]
        seconds = _seconds(simulator, want, out=False) * EARLY
        until_s = min(until_s, float(clock.times[need])) - seconds
        start = min(max(clock.tick_before(until_s), out_wait), need)
        moves.append(
            Move(
                storage=want.storage,
                tier=want.tier,
                out_start=out_start,
                out_wait=out_wait,
                in_start=start,
                in_wait=need,
            )
        )
    return moves


def tighten(
    simulator: Simulator, moves: list[Move], others: Sequence[Action], limit: int
) -> list[Move]:
    """Shift waits and fetches, at the price of stalls, until the peak fits.

    Where the peak is too high, a copy under way out is waited for sooner, and a copy back in
    begins later: the last needed first. Where nothing fits, all are as tight as can be.
    """
    ticks, moves = simulator.step.ticks, list(moves)
    storages = simulator.step.storages
    heights = simulator.heights([*others, *moves])
    if heights.shape.peak <= limit:
        return moves
    tightest = [_tightest(simulator.step, move) for move in moves]
    if simulator.shape([*others, *tightest]).peak > limit:
        return tightest
    for _ in range(4 * len(moves) + 1):
        shape = heights.shape
        over = shape.peak - limit
        if over <= 0:
            break
        at = peak_position(shape.during, shape.replays)
        spots = _shiftable(simulator, moves, at)
        if not spots:
            break
        for spot in spots:
            before, moves[spot] = moves[spot], _shifted(moves[spot], at, ticks)
            heights.shift(before, moves[spot])
            over -= storages[moves[spot].storage].num_bytes
            if over <= 0:
                break
    return moves


def peak_position(during: Levels, replays: Sequence[tuple[Replay, int]]) -> int:
    """Where the device is fullest."""
    at, most = int(during.argmax()), int(during.max(initial=0))
    for replay, peak in replays:
        if peak > most:
            at, most = replay.position, peak
    return at


def _shiftable(simulator: Simulator, moves: list[Move], at: int) -> list[int]:
    """Moves whose bytes at this position can go, those first that stall least."""
    storages = simulator.step.storages
    early = [i for i, m in enumerate(moves) if m.in_start <= at < m.in_wait]
    late = [
        i
        for i, m in enumerate(moves)
        if m.out_start <= at < m.out_wait and storages[m.storage].release < at
    ]
    early.sort(key=lambda i: (-moves[i].in_wait, -storages[moves[i].storage].num_bytes))
    late.sort(key=lambda i: moves[i].out_start)
    return early + late


def _tightest(step: Step, move: Move) -> Move:
    """Waited for as soon as its source is free, and fetched on demand."""
    free = max(move.out_start, step.storages[move.storage].release + 1)
    sooner = max(step.ticks[max(bisect_right(step.ticks, free) - 1, 0)], move.out_start)
    out_wait = min(sooner, move.out_wait)
    return msgspec.structs.replace(move, out_wait=out_wait, in_start=move.in_wait)


def _shifted(move: Move, at: int, ticks: Sequence[int]) -> Move:
    if move.in_start <= at < move.in_wait:
        later = ticks[min(bisect_right(ticks, at), len(ticks) - 1)]
        return msgspec.structs.replace(move, in_start=min(later, move.in_wait))
    sooner = max(ticks[max(bisect_right(ticks, at) - 1, 0)], move.out_start)
    return msgspec.structs.replace(move, out_wait=min(sooner, move.out_wait))
