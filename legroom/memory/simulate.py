"""Play a plan on the clock: peak per tier, step time, stalls.

[Note: peak and time part ways] On a device with streams a freed block is reusable in program
order, whatever the clock says: a source is free once the compute stream has been told to wait for
its copy. So peaks follow from positions alone, and are exact; only stalls need the clock.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from legroom.core.outcome import Outcome
from legroom.machine.spec import Machine
from legroom.memory.actions import Action, Compress, Move, Park, Recompute, compressed_bytes
from legroom.memory.host import Host
from legroom.memory.parking import parks, update_position
from legroom.memory.plan import away_span, find_variant, held_inputs, replay_position
from legroom.memory.play import Play, Replay, tier_peaks
from legroom.memory.trace import Kind, Phase, Step, Storage

Levels = npt.NDArray[np.int64]


class Shape(NamedTuple):
    """Device bytes by position: during each op, and at each replay."""

    during: Levels
    replays: tuple[tuple[Replay, int], ...]
    """Each replay with the peak while it runs."""

    @property
    def peak(self) -> int:
        """Most device bytes at any moment."""
        return max(int(self.during.max(initial=0)), *(p for _, p in self.replays), 0)


class Heights:
    """Device bytes under some actions, kept up to date while their moves are shifted."""

    def __init__(
        self, step: Step, levels: Levels, scratch: Levels, above: Sequence[tuple[Replay, int]]
    ) -> None:
        self._step, self._levels, self._scratch, self._above = step, levels, scratch, above

    @property
    def shape(self) -> Shape:
        """As they are now."""
        peaks = tuple((r, int(self._levels[r.position]) + more) for r, more in self._above)
        return Shape(self._levels + self._scratch, peaks)

    def shift(self, before: Move, after: Move) -> None:
        """A move has other positions from now on."""
        storage = self._step.storages[before.storage]
        (left, back), (now_left, now_back) = (away_span(self._step, m) for m in (before, after))
        self._raise(now_left, left, -storage.num_bytes)
        most = storage.last + 1
        self._raise(min(back, most), min(now_back, most), -storage.num_bytes)

    def _raise(self, start: int, end: int, num_bytes: int) -> None:
        if start <= end:
            self._levels[start:end] += num_bytes
        else:
            self._levels[end:start] -= num_bytes


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
        updates = [op.phase is Phase.UPDATE for op in step.ops]
        self._shared = self.scratch * np.array([*updates, False])
        """What updates take for all parameters together."""
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
        return self.heights(actions).shape

    def heights(self, actions: Sequence[Action]) -> Heights:
        """The same, for somebody who shifts moves and looks again."""
        delta, replays, until = self._delta.copy(), self.replays(actions), self._needs(actions)
        self._change(actions, replays, until, lambda storage: delta)
        for park in parks(actions):
            self._add_park(delta, park)
        levels = np.cumsum(delta)[: len(self.scratch)]
        happen = (r for r in replays if r.position < len(self.step.ops))
        above = [(r, self._replay_extra(r, until)) for r in happen]
        return Heights(self.step, levels, self.scratch_under(actions), above)

    def _needs(self, actions: Sequence[Action]) -> dict[int, int]:
        """Inputs of blocks that run again, and until when each is held."""
        held = held_inputs(self.step, [a for a in actions if isinstance(a, Recompute)])
        return {s: span[1] for s, span in held.items()}

    def _change(
        self,
        actions: Sequence[Action],
        replays: Sequence[Replay],
        last_need: dict[int, int],
        of: Callable[[Storage], Levels],
    ) -> None:
        """What these actions change of when bytes come and go: in the levels of each storage."""
        storages = self.step.storages
        for s, until in last_need.items():
            if storages[s].death < until:
                delta = of(storages[s])
                delta[storages[s].death + 1] += storages[s].num_bytes
                delta[until] -= storages[s].num_bytes
        for a in actions:
            if isinstance(a, Move):
                storage, (left, back) = storages[a.storage], away_span(self.step, a)
                delta = of(storage)
                delta[left] -= storage.num_bytes
                self._add_return(delta, storage, back)
            elif isinstance(a, Compress):
                self._add_compress(of(storages[a.storage]), a)
        for replay in replays:
            for s in replay.variant.drops:
                # A later block that runs again may still hold it as its input.
                delta = of(storages[s])
                delta[max(storages[s].release + 1, last_need.get(s, 0))] -= storages[s].num_bytes
                self._add_return(delta, storages[s], replay.position)

    def _add_park(self, delta: Levels, park: Park) -> None:
        delta[0] -= park.num_bytes
        delta[update_position(self.step)] += park.window_bytes
        delta[len(self.step.ops) + 1] -= park.window_bytes

    def scratch_under(self, actions: Sequence[Action]) -> Levels:
        """What ops take for themselves; updates take less where fewer are updated at once."""
        spared = sum(1.0 - park.at_once for park in parks(actions))
        return self.scratch - (spared * self._shared).astype(np.int64) if spared else self.scratch

    @staticmethod
    def _add_return(delta: Levels, storage: Storage, position: int) -> None:
        """Bytes that come back at a position, and go as soon as nobody needs them.

        Those that nobody asked for do not come back.
        """
        delta[min(position, storage.last + 1)] += storage.num_bytes
        delta[storage.last + 1] -= storage.num_bytes
        delta[storage.death + 1] += storage.num_bytes

    def _add_compress(self, delta: Levels, a: Compress) -> None:
        storage, use = self.step.storages[a.storage], self.step.first_use(a.storage)
        small = compressed_bytes(a.codec, storage.num_bytes, storage.dtype)
        delta[storage.release + 1] -= storage.num_bytes
        self._add_return(delta, storage, use)
        delta[self.step.packed(a.storage)] += small
        delta[storage.death + 1] -= small

    def _replay_extra(self, replay: Replay, last_need: dict[int, int]) -> int:
        """A replay's peak above its position: less what comes there, its inputs still held."""
        p, storages = replay.position, self.step.storages
        extra = replay.variant.replay_peak_bytes - replay.variant.dropped_bytes
        for s in self.step.blocks[replay.block].inputs:
            if last_need.get(s) == p and storages[s].death < p:
                extra += storages[s].num_bytes
        return extra - int(self.births[p])

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
            stall_s=sum(play.stalls.values()) + play.parked_s,
            recompute_s=sum(r.variant.replay_s for r in play.replays),
            moved_bytes=play.moved_bytes(),
            costs=tuple(play.costs()),
            peak_at=self._peak_name(shape),
            peak_parts=self._peak_parts(shape, actions),
        )

    def busy_s(self, actions: Sequence[Action]) -> float:
        """Time the links are busy under these actions."""
        play = Play(self, actions)
        play.run()
        return play.busy_s

    def host_added_s(self, actions: Sequence[Action]) -> float:
        """Time that these actions add to what the host is busy for."""
        return sum(seconds for _, seconds in Play(self, actions).host_work())

    def host_seen_s(self, actions: Sequence[Action], all_s: float, forward_s: float) -> float:
        """Time the host was busy under these actions, where it was at the step for that long."""
        return self.host.seen_s(Play(self, actions).host_work(), all_s, forward_s)

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
        """Bytes by kind at the op that needs most."""
        at = int(shape.during.argmax()) if len(shape.during) else 0
        deltas = {kind: np.zeros_like(self._delta) for kind in Kind}
        for s in self.step.storages:
            deltas[s.kind][max(s.birth, 0)] += s.num_bytes
            deltas[s.kind][s.death + 1] -= s.num_bytes
        given = (actions, self.replays(actions), self._needs(actions))
        self._change(*given, lambda storage: deltas[storage.kind])
        for park in parks(actions):
            self._add_park(deltas[Kind.STATE], park)
        parts = {kind.value: int(delta[: at + 1].sum()) for kind, delta in deltas.items()}
        parts["workspace"] = int(self.scratch_under(actions)[at])
        return {name: size for name, size in parts.items() if size > 0}
