"""One run of a plan: the compute stream against the roads, and what each action bought and cost."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from legroom.core.clock import Road, Traffic, Transfer
from legroom.core.outcome import ActionCost
from legroom.memory.actions import CODECS, Action, Compress, Move, compressed_bytes
from legroom.memory.host import Work
from legroom.memory.parking import TIER, park_s, parks
from legroom.memory.trace import Step, Variant

if TYPE_CHECKING:
    from legroom.memory.simulate import Simulator


class Replay(NamedTuple):
    """One block run again: where, which variant, and how long it takes."""

    position: int
    block: int
    variant: Variant


Event = tuple[int, int, int]
"""Something the compute stream does: the position, its rank among those there, and of which action.
"""
OUT_WAIT, IN_START, IN_WAIT, REPLAY, CODE, OUT_START, LATE_WAIT, TURN = range(8)


class Play:
    """One run of the compute stream against the roads."""

    def __init__(self, simulator: "Simulator", actions: Sequence[Action]) -> None:
        self.sim = simulator
        self.moves = [a for a in actions if isinstance(a, Move)]
        self.codes = [a for a in actions if isinstance(a, Compress)]
        self.parks = parks(actions)
        end = len(simulator.step.ops)
        self.replays = [r for r in simulator.replays(actions) if r.position < end]
        machine = simulator.machine
        self.roads = {
            x.name: Road(x.name, x.bytes_per_s, x.latency_s, x.root) for x in machine.links
        }
        self.traffic = Traffic(self.roads, machine.duplex)
        self.now_s: float = 0.0
        self.stalls: dict[int, float] = {}
        self.spans: list[tuple[str, float, float, int]] = []
        """(what, start, end, index) of stalls and replays, for the timeline."""
        self.position_s: list[tuple[int, float]] = []
        self._outs: dict[int, list[Transfer]] = {}
        self._ins: dict[int, list[Transfer]] = {}
        self._landed: dict[int, list[Transfer]] = {}
        """Per storage, the copy out that must be complete before it can come back."""
        self.transfers: list[tuple[str, int, Transfer]] = []

    def run(self) -> float:
        """Play all events; return when the last op ends."""
        until, at, last = self.sim.until_s, 0, len(self.sim.until_s) - 1
        for position, rank, which in sorted([*self._events(), (self.sim.host.turn, TURN, 0)]):
            place = position if position < last else last
            self.now_s += until[place] - until[at]
            at = place
            self._fire(rank, which)
            self.position_s.append((at, self.now_s))
        self.now_s += until[-1] - until[at]
        device_s = self.now_s + self.contended_s + self.parked_s
        if not self.sim.step.host_s:
            return device_s
        return self.sim.host.end_s(self.host_work(), self.position_s, device_s)

    def host_work(self) -> Work:
        """What the actions ask of the host."""
        rows = [(r.position, r.block, r.variant.noting_s, r.variant.again_s) for r in self.replays]
        return self.sim.host.work(self.moves, self.codes, rows)

    @property
    def busy_s(self) -> float:
        """Time the links were busy, all of them together."""
        return sum(road.served_bytes / road.rate for road in self.roads.values())

    @property
    def contended_s(self) -> float:
        """Time the device loses because copies share its memory or its cores."""
        return self.sim.machine.contention * self.busy_s

    @property
    def parked_s(self) -> float:
        """Time the update waits for states that come from the host and go there."""
        return sum(park_s(self.sim.machine, park) for park in self.parks)

    def _events(self) -> list[Event]:
        events = [(r.position, REPLAY, i) for i, r in enumerate(self.replays)]
        for i, m in enumerate(self.moves):
            waits = OUT_WAIT if m.out_wait > m.out_start else LATE_WAIT
            events += (
                (m.out_start, OUT_START, i),
                (m.out_wait, waits, i),
                (m.in_start, IN_START, i),
                (m.in_wait, IN_WAIT, i),
            )
        for i, c in enumerate(self.codes):
            events.append((self.sim.step.packed(c.storage), CODE, i))
            events.append((self.sim.step.first_use(c.storage), CODE, i))
        return events

    def _fire(self, rank: int, i: int) -> None:
        if rank == OUT_START:
            self._outs[i] = self._send(self.moves[i], out=True)
        elif rank == IN_START:
            self._ins[i] = self._send(self.moves[i], out=False)
        elif rank == REPLAY:
            self._spend(self.replays[i].variant.replay_s, "recompute", i)
        elif rank == CODE:
            self._spend(self._code_s(self.codes[i]), "compress", i)
        elif rank != TURN:
            self._wait(i, self._ins[i] if rank == IN_WAIT else self._outs[i])

    def _send(self, move: Move, out: bool) -> list[Transfer]:
        """Queue a move on its roads; what the device has to wait for.

        Hops are pipelined in pieces, so they run side by side. A copy in begins when the copy
        out is complete on every hop.
        """
        route = self.sim.routes.get(move.tier)
        assert route is not None, f"no road to tier {move.tier}"
        size = self.sim.step.storages[move.storage].num_bytes
        self.traffic.advance(self.now_s)
        landed = self._landed.get(move.storage)
        last = None if out or not landed else landed[-1]
        sent = []
        for hop in route[0] if out else route[1]:
            transfer = self.traffic.send(hop.name, size, move.storage, last)
            sent.append(transfer)
            self.transfers.append((hop.name, move.storage, transfer))
        if out:
            self._landed[move.storage] = sent
        # On the way out the source is free after the first hop; on the way in all must be done.
        return sent[:1] if out else sent

    def _wait(self, i: int, transfers: list[Transfer]) -> None:
        done = max([t.done_s if t.done_s >= 0 else self.traffic.finish(t) for t in transfers])
        if done > self.now_s:
            self.spans.append(("stall", self.now_s, done, self.moves[i].storage))
            self.stalls[i] = self.stalls.get(i, 0.0) + done - self.now_s
            self.now_s = done

    def _spend(self, seconds: float, what: str, index: int) -> None:
        self.spans.append((what, self.now_s, self.now_s + seconds, index))
        self.now_s += seconds

    def _code_s(self, code: Compress) -> float:
        storage = self.sim.step.storages[code.storage]
        small = compressed_bytes(code.codec, storage.num_bytes, storage.dtype)
        # Bits are packed by a few passes over the elements, floats by one.
        passes = 4 if CODECS[code.codec].bits == 1 else 1
        rate = self.sim.machine.memory_bytes_per_s
        return passes * (storage.num_bytes + small) / rate + self.sim.machine.launch_s

    def moved_bytes(self) -> dict[str, int]:
        """Bytes over each link."""
        moved = {k: int(v.served_bytes) for k, v in self.roads.items()}
        for park in self.parks:
            for way in self.sim.routes[TIER] or ():
                for hop in way:
                    moved[hop.name] += park.num_bytes
        return {name: size for name, size in moved.items() if size}

    def costs(self) -> list[ActionCost]:
        """What each action bought and cost."""
        step = self.sim.step
        rows = [
            ActionCost(
                label=f"recompute {step.blocks[r.block].name} ({r.variant.name})",
                freed_bytes=r.variant.dropped_bytes,
                recompute_s=r.variant.replay_s,
            )
            for r in self.replays
        ]
        for i, m in enumerate(self.moves):
            storage = step.storages[m.storage]
            rows.append(
                ActionCost(
                    label=f"move {storage.name} to {m.tier}",
                    freed_bytes=storage.num_bytes,
                    moved_bytes=storage.num_bytes,
                    stall_s=self.stalls.get(i, 0.0),
                )
            )
        for park in self.parks:
            rows.append(
                ActionCost(
                    label=f"keep optimizer states on {TIER}",
                    freed_bytes=park.num_bytes,
                    moved_bytes=park.num_bytes,
                    stall_s=self.parked_s,
                )
            )
        for c in self.codes:
            storage = step.storages[c.storage]
            small = compressed_bytes(c.codec, storage.num_bytes, storage.dtype)
            rows.append(
                ActionCost(
                    label=f"compress {storage.name} ({c.codec})",
                    freed_bytes=storage.num_bytes - small,
                    recompute_s=2 * self._code_s(c),
                )
            )
        return rows


def tier_peaks(step: Step, actions: Sequence[Action]) -> dict[str, int]:
    """Most bytes each lower tier holds at once, from the start of copy-out to the first use."""
    marks: dict[str, list[tuple[int, int]]] = {}
    for a in actions:
        if isinstance(a, Move):
            size = step.storages[a.storage].num_bytes
            marks.setdefault(a.tier, []).extend(
                [(a.out_start, size), (step.storages[a.storage].death + 1, -size)]
            )
    peaks = {}
    for tier, rows in marks.items():
        level = most = 0
        for _, change in sorted(rows):
            level += change
            most = max(most, level)
        peaks[tier] = most
    for park in parks(actions):
        peaks[TIER] = peaks.get(TIER, 0) + park.num_bytes
    return peaks
