"""What measured steps teach: where the time went that the simulator did not foresee."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from scipy.optimize import lsq_linear

from legroom.core.errors import RecordError
from legroom.machine.spec import Machine
from legroom.memory.actions import Action
from legroom.memory.host import LEAST_OWN
from legroom.memory.kinds import Kind, rescaled
from legroom.memory.parking import parks
from legroom.memory.profile import Capture
from legroom.memory.script import Script
from legroom.memory.simulate import Simulator

TOLERANCE = 0.04
"""A step time off by no more than this is as predicted."""
STALLED = 0.02
"""Unless the device waited for copies by this share of it that was not foreseen."""
LINKS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
"""Shares of their rate at which links may turn out to be."""
HALF = 0.5
"""Share of a wait that the slowest of those have to tell, to be blamed for it."""
MAX_CONTENTION = {"cuda": 0.15, "cpu": 2.0}
"""Most that a busy link can slow the compute beside it, as a share of the time it is busy.

On a CPU the copies take cores from the ops themselves."""
ROUNDS = 6
"""Of fitting: with a host that is late in part it takes more than a rule of three."""
LEAST_S = 1e-3
"""No host enqueues a step in less."""
NUDGE = 0.02
SURE = 0.005
"""How far off the median of some steps may be, as a share."""
SURE_OF_OPS, SURE_OF_HOST, SURE_OF_LINKS = 0.1, 0.3, {"cuda": 0.1, "cpu": 2.0}
"""How far off what is thought of the ops may be, of the host, and of what a busy link takes."""
TINY, MOST = 1e-9, 6.0
"""Nothing, nearly; and the most by which ops or host may be off, as a logarithm."""
Slopes = np.ndarray[tuple[int], np.dtype[np.float64]]
"""How times change with the three."""
Lessons = Sequence[tuple[Sequence[Action], float]]
"""What plans were to do, and how long their steps took."""
HOST_BOUND = 0.9
"""A host busy for this share of a step holds the device up."""


def to_scale(kind: Kind, capture: Capture, machine: Machine) -> Capture:
    """Times as they are without the recorder: those of the warm step under the same plan."""
    if kind.reference is None or kind.script is None:
        return capture
    then, plan = Simulator(kind.script.step, machine), kind.script.plan
    seconds, *seen = kind.reference
    busy_s = then.host_seen_s(plan.actions, *seen)
    own_s = max(busy_s - then.host_added_s(plan.actions), LEAST_OWN * busy_s)
    capture = rescaled(capture, 1.0, own_s)
    if plan.moves or busy_s > HOST_BOUND * seconds:  # that says nothing of the ops
        return capture
    try:
        return _fit(capture, machine, [([*plan.recomputes, *parks(plan.actions)], seconds)])[0]
    except RecordError:  # the recording gave the blocks other variants
        return capture


def as_predicted(kind: Kind) -> bool:
    """Whether the plan in force takes the time it was thought to take, and waits no more."""
    assert kind.plan is not None
    off_s = abs(kind.step_s - kind.plan.predicted.step_s)
    return off_s <= TOLERANCE * kind.step_s and not _stalled(kind)


def _stalled(kind: Kind) -> bool:
    assert kind.plan is not None
    return kind.stall_s - kind.plan.predicted.stall_s > STALLED * kind.step_s


def learn(kind: Kind, machine: Machine) -> Machine:
    """Bring the kind's trace in line with what was measured; the machine, in line as well.

    Links that the device waited for are as slow as that. How long a host was busy is known unless
    it waited for the device; one that had no time to spare was slower than thought. Else it was the
    ops, the host or copies beside them: what all plans so far took together tells which.
    """
    assert kind.plan is not None and kind.capture is not None
    step, actions = kind.capture.step, kind.plan.actions
    thought_s, machine = Simulator(step, machine).time(actions), _with_stalls(kind, machine)
    simulator = Simulator(step, machine)
    predicted_s = kind.plan.predicted.step_s + simulator.time(actions) - thought_s
    busy_s = simulator.host_seen_s(actions, kind.host_s, kind.forward_s)
    was_bound = busy_s > HOST_BOUND * kind.step_s
    if kind.host_s and not (was_bound and step.host_s):
        host_s = busy_s - simulator.host_added_s(actions)
        kind.capture = rescaled(kind.capture, 1.0, max(host_s, LEAST_S))
        predicted_s -= simulator.time(actions)
        simulator = Simulator(kind.capture.step, machine)
        predicted_s += simulator.time(actions)
    off_s = kind.step_s - predicted_s
    if kind.host_s and was_bound and off_s > 0:
        kind.capture = rescaled(kind.capture, 1.0, kind.capture.step.host_s + off_s)
        return machine
    kind.lessons.append((actions, kind.step_s))
    kind.capture, machine = _fit(kind.capture, machine, kind.lessons)
    return machine


def _with_stalls(kind: Kind, machine: Machine) -> Machine:
    """The machine with links as slow as the device's waits for them say; as it is without any.

    And as it is where slower links do not tell the half of it: then it was something else.
    """
    assert kind.plan is not None and kind.capture is not None
    for share in LINKS if _stalled(kind) else ():
        slower = machine.with_links(share)
        outcome = Simulator(kind.capture.step, slower).run(kind.plan.actions)
        told = outcome.stall_s / kind.stall_s
        if told >= 1 or (share == LINKS[-1] and told >= HALF):
            return slower
    return machine


def _fit(capture: Capture, machine: Machine, lessons: Lessons) -> tuple[Capture, Machine]:
    """Ops, host, and what a busy link takes from the ops, as plans and their times say.

    The least squares of what those are off by, next to what is thought already: none of the three
    is blamed where the simulator says that it does not matter. A host is at most as busy as it was
    seen to be, which is what it comes in with; but what no one is to blame for is that it was late.
    """
    sure = np.array([SURE_OF_OPS, SURE_OF_HOST, SURE_OF_LINKS[machine.device]])
    most = max(MAX_CONTENTION[machine.device], machine.contention)
    first, found = capture, np.array([0.0, 0.0, machine.contention])  # the first two as logarithms
    thought = found.copy()
    above: list[tuple[Slopes, float]] = []
    for _ in range(ROUNDS):
        now, host_s = Simulator(capture.step, machine), capture.step.host_s
        slower = Simulator(rescaled(capture, 1 + NUDGE).step, machine)
        later = Simulator(rescaled(capture, 1.0, host_s * (1 + NUDGE)).step, machine)
        rows = list(above)
        for actions, measured_s in lessons:
            predicted_s = max(now.time(actions), TINY)
            more = [(x.time(actions) - predicted_s) / NUDGE for x in (slower, later)]
            slopes = np.array([*more, now.busy_s(actions)]) / predicted_s / SURE
            off = math.log(max(measured_s, TINY) / predicted_s) / SURE
            rows.append((slopes, off + float(slopes @ found)))
            if off < 0:  # else ops and host would take turns at being what is too slow
                above.append(rows[-1])
        found = lsq_linear(
            np.array([*(slopes for slopes, _ in rows), *np.diag(1 / sure)]),
            np.array([*(off for _, off in rows), *(thought / sure)]),
            bounds=((-MOST, -MOST, -TINY), (MOST, TINY, most + TINY)),
            method="bvls",
        ).x
        ops, host = np.exp(found[:2]).tolist()
        capture = rescaled(first, ops, first.step.host_s * host)
        machine = msgspec.structs.replace(machine, contention=max(float(found[2]), 0.0))
    actions, measured_s = lessons[-1]
    left_s = measured_s - Simulator(capture.step, machine).time(actions)
    if capture.step.host_s and left_s > TOLERANCE * measured_s:
        capture = rescaled(capture, 1.0, capture.step.host_s + left_s)
    return capture, machine


def foresee(kind: Kind, learned: Capture | None, machine: Machine) -> None:
    """A plan from before is in force again: predict it by what was learned since."""
    assert kind.plan is not None and learned is not None
    try:
        predicted = Simulator(learned.step, machine).run(kind.plan.actions, kind.plan.policy)
    except RecordError:  # its blocks had other variants then
        return
    kind.capture, kind.plan = learned, msgspec.structs.replace(kind.plan, predicted=predicted)
    kind.script = Script(learned.step, kind.plan, learned.forms)
