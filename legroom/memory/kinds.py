"""The kinds of step a job has met: visits, trace, plan, and what was measured of each."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from legroom.core.outcome import Outcome
from legroom.core.units import format_seconds
from legroom.memory.actions import Action
from legroom.memory.arena import NOWHERE, Placement
from legroom.memory.builds import SAME, Pace
from legroom.memory.host import BUSY
from legroom.memory.plan import Plan
from legroom.memory.profile import Capture
from legroom.memory.script import Script
from legroom.memory.trace import ROOT

WINDOW = 25
"""Measured steps that count for a report."""
FEWEST, MOST = 2, 11
"""Measured steps before a plan is judged, not counting its first; as many as MOST if they differ.
"""
NOISE = 0.04
"""Steps whose middle half lies closer together, as a share of their median, are alike."""
TIDYING = 1.15
"""Steps that press the allocator may fail one day: only if others take so many times as long."""
MOST_ROOM = 4
"""How often more room is left to the allocator: pressed after that, it is not for want of room."""
PRESSES = 2
"""Steps in which the allocator ran into its cap: one may be the first, which makes room."""


@dataclass
class Measurement:
    """One step as measured from outside the runtime."""

    seconds: float
    peaks: dict[str, int]
    """Bytes by name: "device", and "reserved" where the allocator tells; empty if not taken."""
    stall_s: float
    replay_s: float
    moved_bytes: dict[str, int]
    host_s: float = 0.0
    forward_s: float = 0.0


class Outfit(NamedTuple):
    """What runs in place of the model's own code while a step lasts."""

    shares: Mapping[str, float] = MappingProxyType({})
    """Modules that run compiled, and what their builds may keep."""
    chunks: int = 0
    """How many the loss of a language model is computed in; 0: as the model has it."""

    @property
    def changes(self) -> bool:
        """Whether there is any."""
        return bool(self.shares or self.chunks)

    def __str__(self) -> str:
        counts = Counter(self.shares.values())
        mix = ", ".join(f"{n} keep {share:.0%}" for share, n in sorted(counts.items()))
        chunks = f"loss in {self.chunks} chunk{'s' * (self.chunks > 1)}" if self.chunks else ""
        what = "the model" if ROOT in self.shares else f"{len(self.shares)} blocks"
        blocks = f"{what} compiled ({mix})" if mix else ""
        return ", ".join(x for x in (blocks, chunks) if x)


class Made(NamedTuple):
    """A step, and what it runs in."""

    capture: Capture
    outfit: Outfit = Outfit()
    seconds: float = 0.0
    """How long it took to compile and try what it could run in."""
    missing_bytes: int = 0
    """By how much the best plan for it is over the budget."""
    step_s: float = 0.0
    """How long it takes under that plan."""


class Force(NamedTuple):
    """A plan in force, with all that goes with it."""

    capture: Capture
    plan: Plan
    script: Script
    placement: Placement
    outfit: Outfit
    made: tuple[Pace, float, float]
    bold: bool


class Best(NamedTuple):
    """A plan, and how it did."""

    score: float
    """Step time measured under it, and more where the allocator was pressed."""
    force: Force
    pressed: bool


@dataclass
class Kind:
    """One signature of step."""

    signature: str
    visits: int = 0
    capture: Capture | None = None
    plan: Plan | None = None
    script: Script | None = None
    placement: Placement = NOWHERE
    """How the plan's tensors lie, where the device's allocator can be helped with that."""
    plain: Capture | None = None
    """The step as recorded, where its blocks are compiled since."""
    base: Outfit = Outfit()
    """What it was recorded in."""
    outfit: Outfit = Outfit()
    compile_s: float = 0.0
    """How long it took to compile and try them."""
    made: tuple[Pace, float, float] = (SAME, 0.0, 0.0)
    """The pace that was counted on when builds were chosen, and the times of ops and host then."""
    recorded: bool = False
    """Whether the trace comes from a real step."""
    state_bytes: int = 0
    """What the optimizer held after the step that was recorded."""
    given_up: int = 0
    """Steps that were recorded, and had no backward."""
    reference: tuple[float, float, float] | None = None
    """Time of a warm step before the recording, and how long the host was at it, and at forward."""
    replans: int = 0
    still: bool = False
    """No more plans are made."""
    bold: bool = False
    """Its plan leaves the host little time to spare."""
    dared: bool = False
    """Such a plan was tried."""
    best: "Best | None" = None
    """The best plan so far."""
    lessons: list[tuple[tuple[Action, ...], float]] = field(default_factory=list)
    """What plans so far were to do, and how long their steps took."""
    verdicts: list[tuple[float, float]] = field(default_factory=list)
    """Of each plan that was judged, the step time predicted before it ran, and the measured one."""
    strayed: float = 0.0
    """Steps that left the script, less what those that did not make up for."""
    records: int = 0
    """How often it was recorded anew for that."""
    restless: bool = False
    """No plan suits it: it runs under the online rule."""
    measurements: list[Measurement] = field(default_factory=list)
    judged: int = 0
    """How many of them the plan in force was judged by."""
    presses: int = 0
    """Steps under the plan in force in which the allocator ran into its cap."""
    given_room: int = 0
    """How often more was left to the allocator for it."""
    cramped: bool = False
    """There is no plan that leaves the allocator more room."""
    pending: Callable[[], Measurement] | None = None
    """The last step, which the device may still be at: filed with the next, so none waits."""

    def refer(self, times: tuple[float, float, float], pressed: bool) -> None:
        """Note what a step took before the recording: the fastest counts, but not the first.

        Nor one in which the host was held up by the allocator.
        """
        if self.visits == 2:
            self.reference = None
        if not pressed and (self.reference is None or times < self.reference):
            self.reference = times

    def file(self, fresh: Callable[[], Measurement] | None = None) -> None:
        """Put the pending measurement, if any, with the others; `fresh` is pending from now on.

        Unless plans are still made: then each step waits for the one before it anyway.
        """
        pending, self.pending = self.pending, fresh if self.still else None
        ended = (pending, None if self.still else fresh)
        self.measurements += [measure() for measure in ended if measure is not None]

    def judge(self, last: bool) -> bool:
        """Note the plan in force if it is the fastest so far; the `last` gives way to that one.

        Whether an earlier plan is in force again.
        """
        assert self.capture is not None and self.plan is not None and self.script is not None
        self.judged = len(self.measurements)
        self.verdicts.append((self.plan.predicted.step_s, self.step_s))
        score = self.step_s * (TIDYING if self.pressed else 1.0)
        if self.best is None or score < self.best.score:
            self.best = Best(score, self.force, self.pressed)
        elif last and self.plan is not self.best.force.plan:
            self.put_back(self.best.force)
            self.cramped |= self.best.pressed
            self.start_anew()
            return True
        return False

    @property
    def force(self) -> Force:
        """What is in force now."""
        assert self.capture is not None and self.plan is not None and self.script is not None
        now = (self.capture, self.plan, self.script, self.placement, self.outfit, self.made)
        return Force(*now, self.bold)

    def put_back(self, force: Force) -> None:
        """Have what was in force before."""
        if force.outfit != self.outfit:  # those are of steps with other ops
            self.lessons.clear()
        self.capture, self.plan, self.script = force.capture, force.plan, force.script
        self.placement, self.outfit = force.placement, force.outfit
        self.made, self.bold = force.made, force.bold

    def wear(self, made: Made, pace: Pace = SAME) -> None:
        """Run in other builds, which were chosen for this pace."""
        self.capture, self.outfit, step = made.capture, made.outfit, made.capture.step
        self.made = (pace, step.compute_s, step.host_s)
        self.compile_s = max(self.compile_s, made.seconds)
        self.lessons.clear()

    @property
    def pace(self) -> Pace:
        """By how much ops and host are slower than when builds were tried, as learned so far."""
        assert self.capture is not None
        (ops, host), compute_s, host_s = self.made
        step = self.capture.step
        return Pace(
            ops * step.compute_s / compute_s if compute_s else ops,
            host * step.host_s / host_s if host_s else host,
        )

    def take_up_recording(self) -> None:
        """The trace comes from a real step from now on."""
        self.recorded, self.best = True, None
        self.bold = self.dared = False
        self.lessons.clear()
        self.start_anew()

    def start_anew(self) -> None:
        """Another plan is in force: what was measured does not count any more."""
        self.measurements.clear()
        self.pending, self.judged, self.presses = None, 0, 0

    @property
    def compiled(self) -> str:
        """Which builds run, in words; empty where all is eager."""
        took = format_seconds(self.compile_s)
        return f"{self.outfit}, tried in {took}; " if self.outfit.changes else ""

    @property
    def has_busy_host(self) -> bool:
        """Whether the host is a matter to its plans."""
        step = self.capture.step if self.capture is not None else None
        return step is not None and step.host_s > BUSY * step.compute_s

    @property
    def learning(self) -> bool:
        """Whether plans are made from what its steps take: it came again, and is not settled."""
        return self.visits > 0 and not self.still

    @property
    def pressed(self) -> bool:
        """Whether the plan in force leaves the allocator too little room, and should not."""
        given = self.cramped or self.placement.missing_bytes
        return self.presses >= PRESSES and not given

    @property
    def wants_room(self) -> bool:
        """Whether more room for the allocator may help."""
        return self.pressed and self.given_room < MOST_ROOM

    @property
    def ripe(self) -> bool:
        """Whether there are steps enough to judge the plan in force by."""
        if self.pressed and self.measurements:  # the next step may not find room at all
            return True
        fresh = sorted(m.seconds for m in self.measurements[max(self.judged, 1) :])
        if not FEWEST <= len(fresh) < MOST:
            return len(fresh) >= MOST
        quarter = len(fresh) // 4
        return fresh[-1 - quarter] - fresh[quarter] <= NOISE * median(fresh)

    @property
    def host_s(self) -> float:
        """Median time the host was at a step."""
        return median(m.host_s for m in self.settled)

    @property
    def forward_s(self) -> float:
        """Median time the host was at the forward of a step."""
        return median(m.forward_s for m in self.settled)

    @property
    def stall_s(self) -> float:
        """Median time that the device waited for copies."""
        return median(m.stall_s for m in self.settled)

    @property
    def settled(self) -> list[Measurement]:
        """The last steps; not the first under a plan, which also sets it up."""
        return self.measurements[1:][-WINDOW:] or self.measurements

    @property
    def static_bytes(self) -> int:
        """What is on the device before the step begins."""
        assert self.capture is not None
        return sum(s.num_bytes for s in self.capture.step.storages if s.birth < 0)

    @property
    def saved_bytes(self) -> int:
        """What autograd saves in a step; 0 where that is not known."""
        step = self.capture.step if self.capture is not None else None
        return sum(step.storages[s].num_bytes for s in step.saves) if step is not None else 0

    @property
    def unseen_bytes(self) -> int:
        """The largest tensor of blocks that run compiled: when it comes and goes is not known."""
        if self.plain is None:
            return 0
        step, shares = self.plain.step, self.outfit.shares
        inside = {b for b, block in enumerate(step.blocks) if block.name in shares}
        sizes = [
            s.num_bytes
            for s in step.storages
            if s.birth >= 0 and (ROOT in shares or step.ops[s.birth].block in inside)
        ]
        return max(sizes, default=0)

    @property
    def step_s(self) -> float:
        """Median step time under the plan in force."""
        return median(m.seconds for m in self.settled)

    def measured(self) -> Outcome | None:
        """What was measured under the plan in force; None before its first step."""
        if not self.measurements or self.plan is None:
            return None
        rows = self.settled
        peaks = {"device": 0}
        for row in rows:
            peaks |= {name: max(size, peaks.get(name, 0)) for name, size in row.peaks.items()}
        return Outcome(
            source="measured",
            policy=self.plan.policy,
            peak_bytes=peaks,
            step_s=self.step_s,
            stall_s=self.stall_s,
            recompute_s=median(m.replay_s for m in rows),
            moved_bytes=rows[-1].moved_bytes,
        )


def rescaled(capture: Capture, factor: float, host_s: float | None = None) -> Capture:
    """The same trace with every op slower or faster by a factor, and the host's time if given.

    Blocks keep their variants: none is better or worse than before, next to the others.
    """
    step, replace = capture.step, msgspec.structs.replace
    ops = tuple(replace(op, time_s=op.time_s * factor) for op in step.ops)
    blocks = []
    for block in step.blocks:
        ways = (replace(way, replay_s=way.replay_s * factor) for way in block.variants)
        blocks.append(replace(block, variants=tuple(ways)))
    host_s = step.host_s if host_s is None else host_s
    return Capture(replace(step, ops=ops, blocks=tuple(blocks), host_s=host_s), capture.forms)
