"""Play a plan on the clock: peak per tier, step time, stalls.

[Note: peak and time part ways] On a device with streams a freed block is reusable in program
order, whatever the clock says: a source is free once the compute stream has been told to wait for
its copy. So peaks follow from positions alone, and are exact; only stalls need the clock.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from legroom.core.clock import Road, Traffic, Transfer
from legroom.core.outcome import ActionCost, Outcome
from legroom.machine.spec import Machine
from legroom.memory.actions import CODECS, Action, Compress, Move, Recompute, compressed_bytes
from legroom.memory.host import Host, Work
from legroom.memory.plan import find_variant, held_inputs, replay_position
from legroom.memory.trace import Step, Storage, Variant

Levels = npt.NDArray[np.int64]


class Replay(NamedTuple):
    """One block run again: where, which variant, and how long it takes."""

    position: int
    block: int
    variant: Variant


class Shape(NamedTuple):
    """Device bytes by position: during each op, and at each replay."""

    during: Levels
    replays: tuple[tuple[Replay, int], ...]
    """Each replay with the peak while it runs."""

    @property
    def peak(self) -> int:
        """Most device bytes at any moment."""
        return max(int(self.during.max(initial=0)), *(p for _, p in self.replays), 0)


class Event(NamedTuple):
    """Something the compute stream does at a position; sorted by position, then rank."""

    position: int
    rank: int
    which: int


OUT_WAIT, IN_START, IN_WAIT, REPLAY, CODE, OUT_START, LATE_WAIT, TURN = range(8)


class Simulator:
    """One step on one machine; each `run` plays one list of actions."""

    def __init__(self, step: Step, machine: Machine, host_pace: float = 1.0) -> None:
        self.step, self.machine = step, machine
        count = len(step.ops)
        self._delta = np.zeros(count + 3, dtype=np.int64)
        self.births = np.zeros(count + 2, dtype=np.int64)
        for s in step.storages:
            self._delta[max(s.birth, 0)] += s.num_bytes
            self._delta[s.death + 1] -= s.num_bytes
            if s.birth >= 0:
                self.births[s.birth] += s.num_bytes
        self.scratch = np.array([*(op.workspace_bytes for op in step.ops), 0], dtype=np.int64)
        self.until = np.concatenate(([0.0], np.cumsum([op.time_s for op in step.ops])))
        self.until_s: list[float] = self.until.tolist()
        self.routes = {t.name: machine.route(t.name) for t in machine.tiers if t.name != "device"}
        self.host = Host(step, host_pace)
        self._replay_cache: dict[tuple[int, str], Replay] = {}

    # -- memory ------------------------------------------------------------------------------

    def replays(self, actions: Sequence[Action]) -> list[Replay]:
        """The replays of a plan, in order of position."""
        found = []
        for a in actions:
            if isinstance(a, Recompute):
                key = (a.block, a.variant)
                if key not in self._replay_cache:
                    variant = find_variant(self.step, a)
                    place = replay_position(self.step, variant)
                    self._replay_cache[key] = Replay(place, a.block, variant)
                found.append(self._replay_cache[key])
        return sorted(found, key=lambda r: (r.position, r.block))

    def shape(self, actions: Sequence[Action]) -> Shape:
        """Device bytes under these actions: exact, and without the clock."""
        storages, delta = self.step.storages, self._delta.copy()
        replays = self.replays(actions)
        held = held_inputs(self.step, [a for a in actions if isinstance(a, Recompute)])
        last_need = {s: span[1] for s, span in held.items()}
        for s, until in last_need.items():
            if storages[s].death < until:
                delta[storages[s].death + 1] += storages[s].num_bytes
                delta[until] -= storages[s].num_bytes
        for a in actions:
            if isinstance(a, Move):
                storage = storages[a.storage]
                delta[max(storage.release + 1, a.out_wait)] -= storage.num_bytes
                self._add_return(delta, storage, a.in_start)
            elif isinstance(a, Compress):
                self._add_compress(delta, a)
        for replay in replays:
            for s in replay.variant.drops:
                # A later block that runs again may still hold it as its input.
                delta[max(storages[s].release + 1, last_need.get(s, 0))] -= storages[s].num_bytes
                self._add_return(delta, storages[s], replay.position)
        levels = np.cumsum(delta)[: len(self.scratch)]
        peaks = tuple((r, self._replay_peak(r, levels, last_need)) for r in replays)
        return Shape(levels + self.scratch, peaks)

    @staticmethod
    def _add_return(delta: Levels, storage: Storage, position: int) -> None:
        """Bytes that come back at a position, and go as soon as nobody needs them."""
        delta[position] += storage.num_bytes
        delta[storage.last + 1] -= storage.num_bytes
        delta[storage.death + 1] += storage.num_bytes

    def _add_compress(self, delta: Levels, a: Compress) -> None:
        storage, use = self.step.storages[a.storage], self.step.first_use(a.storage)
        small = compressed_bytes(a.codec, storage.num_bytes, storage.dtype)
        delta[storage.release + 1] -= storage.num_bytes
        self._add_return(delta, storage, use)
        delta[self.step.packed(a.storage)] += small
        delta[storage.death + 1] -= small

    def _replay_peak(self, replay: Replay, levels: Levels, last_need: dict[int, int]) -> int:
        """Bytes just before the replay's position, its inputs still there, plus its own peak."""
        p, storages = replay.position, self.step.storages
        level = int(levels[p] - self.births[p]) - replay.variant.dropped_bytes
        for s in self.step.blocks[replay.block].inputs:
            if last_need.get(s) == p and storages[s].death < p:
                level += storages[s].num_bytes
        return level + replay.variant.replay_peak_bytes

    # -- time --------------------------------------------------------------------------------

    def run(self, actions: Sequence[Action], policy: str = "") -> Outcome:
        """Predict peaks, step time and stalls of a plan."""
        shape = self.shape(actions)
        play = Play(self, actions)
        total_s = play.run()
        peak_bytes = {"device": shape.peak, **tier_peaks(self.step, actions)}
        return Outcome(
            source="predicted",
            policy=policy,
            peak_bytes=peak_bytes,
            step_s=total_s,
            compute_s=self.step.compute_s,
            stall_s=sum(play.stalls.values()),
            recompute_s=sum(r.variant.replay_s for r in play.replays),
            moved_bytes={k: int(v.served_bytes) for k, v in play.roads.items() if v.served_bytes},
            costs=tuple(play.costs()),
            peak_at=self._peak_name(shape),
            peak_parts=self._peak_parts(shape, actions),
        )

    def busy_s(self, actions: Sequence[Action]) -> float:
        """Time the links are busy under these actions."""
        play = Play(self, actions)
        play.run()
        return play.busy_s

    def host_s(self, actions: Sequence[Action]) -> float:
        """Time the host is busy under these actions; 0 where it is not a matter."""
        return self.host.total_s(Play(self, actions).host_work()) if self.step.host_s else 0.0

    def time(self, actions: Sequence[Action]) -> float:
        """Step time alone."""
        return Play(self, actions).run()

    def _peak_name(self, shape: Shape) -> str:
        at = int(shape.during.argmax()) if len(shape.during) else 0
        for replay, peak in shape.replays:
            if peak > shape.during[at]:
                return f"recomputing {self.step.blocks[replay.block].name}"
        if at >= len(self.step.ops):
            return "the end of the step"
        op = self.step.ops[at]
        return f"{op.name} in {op.module or 'the step'} ({op.phase})"

    def _peak_parts(self, shape: Shape, actions: Sequence[Action]) -> dict[str, int]:
        at = int(shape.during.argmax()) if len(shape.during) else 0
        parts: dict[str, int] = {}
        away = {a.storage: a for a in actions if isinstance(a, Move)}
        gone = {s: r.position for r, _ in shape.replays for s in r.variant.drops}
        for i, s in enumerate(self.step.storages):
            alive = s.birth <= at <= s.death
            if i in away and max(s.release + 1, away[i].out_wait) <= at < away[i].in_start:
                alive = False
            if i in gone and s.release < at < gone[i]:
                alive = False
            if (i in away or i in gone) and at > s.last:
                alive = False
            if alive:
                parts[s.kind.value] = parts.get(s.kind.value, 0) + s.num_bytes
        if self.scratch[at] > 0:
            parts["workspace"] = int(self.scratch[at])
        return parts


class Play:
    """One run of the compute stream against the roads."""

    def __init__(self, simulator: Simulator, actions: Sequence[Action]) -> None:
        self.sim = simulator
        self.moves = [a for a in actions if isinstance(a, Move)]
        self.codes = [a for a in actions if isinstance(a, Compress)]
        self.replays = simulator.replays(actions)
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
        until, at = self.sim.until_s, 0
        for event in sorted([*self._events(), Event(self.sim.host.turn, TURN, 0)]):
            place = min(event.position, len(until) - 1)
            self.now_s += until[place] - until[at]
            at = place
            self._fire(event)
            self.position_s.append((at, self.now_s))
        self.now_s += until[-1] - until[at]
        device_s = self.now_s + self.contended_s
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

    def _events(self) -> list[Event]:
        events = [Event(r.position, REPLAY, i) for i, r in enumerate(self.replays)]
        for i, m in enumerate(self.moves):
            events.append(Event(m.out_start, OUT_START, i))
            events.append(Event(m.out_wait, OUT_WAIT if m.out_wait > m.out_start else LATE_WAIT, i))
            events.append(Event(m.in_start, IN_START, i))
            events.append(Event(m.in_wait, IN_WAIT, i))
        for i, c in enumerate(self.codes):
            events.append(Event(self.sim.step.packed(c.storage), CODE, i))
            events.append(Event(self.sim.step.first_use(c.storage), CODE, i))
        return events

    def _fire(self, event: Event) -> None:
        self.traffic.advance(self.now_s)
        i = event.which
        if event.rank == TURN:
            return
        if event.rank == REPLAY:
            self._spend(self.replays[i].variant.replay_s, "recompute", i)
        elif event.rank == CODE:
            self._spend(self._code_s(self.codes[i]), "compress", i)
        elif event.rank == OUT_START:
            self._outs[i] = self._send(self.moves[i], out=True)
        elif event.rank == IN_START:
            self._ins[i] = self._send(self.moves[i], out=False)
        else:
            self._wait(i, self._ins[i] if event.rank == IN_WAIT else self._outs[i])

    def _send(self, move: Move, out: bool) -> list[Transfer]:
        """Queue a move on its roads; what the device has to wait for.

        Hops are pipelined in pieces, so they run side by side. A copy in begins when the copy
        out is complete on every hop.
        """
        route = self.sim.routes.get(move.tier)
        assert route is not None, f"no road to tier {move.tier}"
        size = self.sim.step.storages[move.storage].num_bytes
        landed = self._landed.get(move.storage, [])
        last = None if out or not landed else landed[-1]
        sent = []
        for hop in route[0] if out else route[1]:
            sent.append(self.traffic.send(hop.name, size, move.storage, last))
            self.transfers.append((hop.name, move.storage, sent[-1]))
        if out:
            self._landed[move.storage] = sent
        # On the way out the source is free after the first hop; on the way in all must be done.
        return sent[:1] if out else sent

    def _wait(self, i: int, transfers: list[Transfer]) -> None:
        done = max(self.traffic.finish(t) for t in transfers)
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
    return peaks
