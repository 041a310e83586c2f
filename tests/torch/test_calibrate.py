"""What measured steps teach: each cause is told from the others, and the fastest plan stays."""

import msgspec
import pytest

from legroom.machine.spec import find_machine
from legroom.memory.actions import Recompute
from legroom.memory.builds import Pace
from legroom.memory.calibrate import MAX_CONTENTION, as_predicted, foresee, learn, to_scale
from legroom.memory.kinds import PRESSES, Kind, Made, Measurement, Outfit, rescaled
from legroom.memory.play import Play
from legroom.memory.script import Script
from legroom.memory.simulate import Simulator
from legroom.memory.variants import with_variants
from tests.torch.nets import Mlp, rows, stack
from tests.torch.support import Rig, by_hand, full, selective, swap

MACHINE = find_machine("h200")


def kind_of(build: object, host_s: float = 0.0) -> Kind:
    """A kind of step under a plan, with a host that is busy for so long."""
    rig = Rig(stack(Mlp), rows())
    kind = Kind("test", capture=rig.capture._replace(step=scaled(rig.step, host_s)))
    step = kind.capture.step
    kind.plan = by_hand(step, build(step))  # type: ignore[operator]
    kind.script = Script(step, kind.plan, kind.capture.forms)
    rig.close()
    return kind


def scaled(step: object, host_s: float) -> object:
    """The step with ops of a millisecond each."""
    ops = tuple(msgspec.structs.replace(op, time_s=1e-3) for op in step.ops)  # type: ignore[attr-defined]
    return with_variants(msgspec.structs.replace(step, ops=ops, host_s=host_s))  # type: ignore[type-var]


def scaled_ops(step: object, factor: float) -> object:
    """The step with slower ops."""
    ops = tuple(msgspec.structs.replace(op, time_s=factor * op.time_s) for op in step.ops)  # type: ignore[attr-defined]
    return msgspec.structs.replace(step, ops=ops)  # type: ignore[type-var]


def measure(kind: Kind, *seconds: float, host_s: float = 0.0, forward_s: float = 0.0) -> None:
    """File steps of these times."""
    kind.measurements += [Measurement(s, {}, 0.0, 0.0, {}, host_s, forward_s) for s in seconds]


def total_s(kind: Kind) -> float:
    """Time of all ops of a kind's trace."""
    return kind.capture.step.compute_s  # type: ignore[union-attr]


@pytest.mark.parametrize("share", [0.9, 0.7])
def test_links_are_as_slow_as_the_device_waits_for_them(share: float) -> None:
    """Though the step takes as long as was thought: then the ops are faster."""
    kind = kind_of(swap)
    step, actions = kind.capture.step, kind.plan.actions  # type: ignore[union-attr]
    most = sum(step.storages[move.storage].num_bytes for move in kind.plan.moves)
    links = tuple(
        msgspec.structs.replace(link, bytes_per_s=most / (0.4 * step.compute_s), latency_s=0.0)
        for link in MACHINE.links
    )
    thought = msgspec.structs.replace(MACHINE, links=links, duplex={})
    real = Simulator(step, thought.with_links(share)).run(actions)
    predicted = msgspec.structs.replace(Simulator(step, thought).run(actions), stall_s=0.0)
    kind.plan = msgspec.structs.replace(kind.plan, predicted=predicted)
    measure(kind, 9.0, *[predicted.step_s] * 3)
    assert as_predicted(kind)
    for row in kind.measurements:
        row.stall_s = real.stall_s
    assert real.stall_s > 0.02 * real.step_s and not as_predicted(kind)
    machine, before = learn(kind, thought), step.compute_s
    assert machine.links[0].bytes_per_s == pytest.approx(share * links[0].bytes_per_s, rel=0.06)
    assert total_s(kind) < before


def test_slow_ops_are_taken_for_slow_ops() -> None:
    """Nothing moved, and the host had time: the ops take longer than thought."""
    kind = kind_of(full, host_s=1e-3)
    before, predicted = total_s(kind), kind.plan.predicted.step_s
    measure(kind, 9.0, *[1.2 * predicted] * 3, host_s=0.1 * predicted)
    assert not as_predicted(kind)
    machine = learn(kind, MACHINE)
    assert machine.contention == MACHINE.contention
    assert total_s(kind) == pytest.approx(1.2 * before, rel=0.01)


def test_a_slow_host_is_taken_for_a_slow_host() -> None:
    """The host was busy all the time: it is slower, and the ops are as they were."""
    kind = kind_of(full, host_s=1e-3)
    before, predicted = total_s(kind), kind.plan.predicted.step_s
    measure(kind, *[1.5 * predicted] * 3, host_s=1.45 * predicted)
    learn(kind, MACHINE)
    assert total_s(kind) == before
    assert kind.capture.step.host_s == pytest.approx(1e-3 + 0.5 * predicted)


def test_a_host_thought_too_slow_is_thought_faster() -> None:
    """The plan was made for a busy host, and came out faster: that was not the ops' doing."""
    kind = kind_of(full, host_s=1.0)
    kind.plan = by_hand(kind.capture.step, full(kind.capture.step))
    before, predicted = total_s(kind), kind.plan.predicted.step_s
    assert predicted > 1.0
    measure(kind, *[0.6 * predicted] * 3, host_s=0.59 * predicted)
    learn(kind, MACHINE)
    assert total_s(kind) == before
    assert kind.capture.step.host_s == pytest.approx(1.0 - 0.4 * predicted, rel=0.01)


def test_a_host_that_had_time_to_spare_tells_how_long_it_takes() -> None:
    """What it was busy for is taken as it is; the ops keep their times."""
    kind = kind_of(full, host_s=1e-3)
    before, predicted = total_s(kind), kind.plan.predicted.step_s
    measure(kind, *[predicted] * 3, host_s=0.3 * predicted)
    learn(kind, MACHINE)
    assert total_s(kind) == pytest.approx(before)
    added_s = Simulator(kind.capture.step, MACHINE).host_added_s(kind.plan.actions)
    assert kind.capture.step.host_s + added_s == pytest.approx(0.3 * predicted)


def test_a_host_that_waited_for_the_device_was_not_busy() -> None:
    """A full queue kept it at the step for long; its forward tells how fast it is."""
    kind = kind_of(full, host_s=1e-3)
    before, predicted = total_s(kind), kind.plan.predicted.step_s
    simulator = Simulator(kind.capture.step, MACHINE)
    work = Play(simulator, kind.plan.actions).host_work()
    early_s = sum(seconds for at, seconds in work if at < simulator.host.turn)
    forward_s = early_s + 5e-3
    measure(kind, *[1.2 * predicted] * 3, host_s=1.19 * predicted, forward_s=forward_s)
    learn(kind, MACHINE)
    share = simulator.host.forward_share
    assert 0.1 < share < 0.5
    assert kind.capture.step.host_s == pytest.approx(5e-3 / share)
    assert total_s(kind) == pytest.approx(1.2 * before, rel=0.01)
    kind.reference = (2 * predicted, 1.9 * predicted, forward_s)
    assert to_scale(kind, kind.capture, MACHINE).step.host_s == pytest.approx(5e-3 / share, rel=0.2)


def test_copies_are_blamed_no_more_than_is_plausible() -> None:
    """Up to a share of the time the links were busy; the rest goes to the ops."""
    kind = kind_of(swap)
    slow = msgspec.structs.replace(
        MACHINE,
        links=tuple(
            msgspec.structs.replace(x, bytes_per_s=x.bytes_per_s / 1e5) for x in MACHINE.links
        ),
    )
    before, predicted = total_s(kind), Simulator(kind.capture.step, slow).time(kind.plan.actions)
    measure(kind, *[3 * predicted] * 3)
    machine = learn(kind, slow)
    assert machine.contention == pytest.approx(MAX_CONTENTION["cuda"])
    assert total_s(kind) > before


def test_on_a_cpu_copies_take_cores_from_the_ops() -> None:
    """There the whole of a slower step can be theirs: else plans with moves would never be left."""
    kind = kind_of(swap)
    links = (msgspec.structs.replace(x, bytes_per_s=x.bytes_per_s / 1e5) for x in MACHINE.links)
    slow = msgspec.structs.replace(MACHINE, device="cpu", links=tuple(links))
    before, predicted = total_s(kind), Simulator(kind.capture.step, slow).time(kind.plan.actions)
    measure(kind, *[1.5 * predicted] * 3)
    machine = learn(kind, slow)
    assert machine.contention > 0.2
    assert total_s(kind) == pytest.approx(before, rel=0.01)


def test_plans_that_moved_more_or_less_tell_copies_from_ops() -> None:
    """A plan without moves that is slow too: it was the ops after all."""
    kind = kind_of(swap)
    links = (msgspec.structs.replace(x, bytes_per_s=x.bytes_per_s / 1e5) for x in MACHINE.links)
    slow = msgspec.structs.replace(MACHINE, links=tuple(links))
    before, step = total_s(kind), kind.capture.step
    true = Simulator(with_variants(scaled_ops(step, 1.1)), slow)
    measure(kind, *[true.time(kind.plan.actions)] * 3)
    machine = learn(kind, slow)
    assert machine.contention > 0, "with one plan it may be either"
    kind.plan = by_hand(step, full(step))
    kind.start_anew()
    measure(kind, *[true.time(kind.plan.actions)] * 3)
    machine = learn(kind, machine)
    assert machine.contention == pytest.approx(0, abs=0.001)
    assert total_s(kind) == pytest.approx(1.1 * before, rel=0.01)


def test_the_fastest_plan_is_put_back() -> None:
    """A plan that came out slower than the one before it does not stay."""
    kind = kind_of(full)
    first = kind.plan
    measure(kind, 9.0, 1.0, 1.0, 1.0)
    kind.judge(last=False)
    assert kind.plan is first
    kind.plan = second = msgspec.structs.replace(first, why="another")
    kind.measurements.clear()
    measure(kind, 9.0, 2.0, 2.0, 2.0)
    kind.judge(last=False)
    assert kind.plan is second, "it can still teach something"
    assert kind.judge(last=True)
    assert kind.plan is first and not kind.measurements


def test_a_plan_put_back_brings_its_builds_and_their_pace() -> None:
    """All that was in force with it, not the plan alone."""
    kind = kind_of(full, host_s=1e-3)
    kind.made = (Pace(2.0, 1.0), total_s(kind), kind.capture.step.host_s)
    force, pace = kind.force, kind.pace
    measure(kind, 9.0, 1.0, 1.0, 1.0)
    kind.judge(last=False)
    other = rescaled(kind.capture, 3.0)
    kind.wear(Made(other, Outfit({"0": 1.0})), Pace(5.0, 1.0))
    kind.plan = msgspec.structs.replace(kind.plan, why="another")
    kind.start_anew()
    measure(kind, 9.0, 2.0, 2.0, 2.0)
    assert kind.judge(last=True)
    assert kind.force == force and kind.pace == pace


def test_a_plan_put_back_is_predicted_by_what_was_learned_since() -> None:
    """Its first prediction is known to be wrong: that is why another plan was tried."""
    kind = kind_of(full, host_s=1e-3)
    actions, wrong_s = kind.plan.actions, kind.plan.predicted.step_s
    measure(kind, 9.0, *[1.5 * wrong_s] * 3, host_s=0.1 * wrong_s)
    kind.judge(last=False)
    machine = learn(kind, MACHINE)
    kind.plan = msgspec.structs.replace(kind.plan, why="another")
    kind.start_anew()
    measure(kind, 9.0, *[2.0 * wrong_s] * 3, host_s=0.1 * wrong_s)
    learned = kind.capture
    assert kind.judge(last=True)
    assert kind.plan.predicted.step_s == wrong_s
    foresee(kind, learned, machine)
    assert kind.plan.actions == actions and kind.script.plan is kind.plan
    assert kind.plan.predicted.step_s == pytest.approx(1.5 * wrong_s, rel=0.01)


def test_a_step_held_up_by_the_host_says_nothing_of_the_ops() -> None:
    """Times of a recording are brought to those of a warm step, if the device was what it took."""
    kind = kind_of(lambda step: [])
    before = total_s(kind)
    kind.reference = (2 * before, 0.1 * before, 0.0)
    scaled_up = to_scale(kind, kind.capture, MACHINE)
    assert scaled_up.step.compute_s == pytest.approx(2 * before, rel=0.01)
    assert scaled_up.step.host_s == pytest.approx(0.1 * before)
    kind.reference = (2 * before, 1.95 * before, 0.0)
    held_up = to_scale(kind, kind.capture, MACHINE)
    assert held_up.step.compute_s == pytest.approx(before)
    assert held_up.step.host_s == pytest.approx(1.95 * before)


@pytest.mark.parametrize("share", [1.15, 1.25])
def test_a_host_that_is_late_in_part_is_not_the_ops_doing(share: float) -> None:
    """Ops twice as fast or slow would explain it as well, and are far less likely."""
    kind = kind_of(lambda step: [])
    before = total_s(kind)
    kind.reference = (1.45 * before, share * before, 0.0)
    late = to_scale(kind, kind.capture, MACHINE)
    assert Simulator(late.step, MACHINE).time([]) == pytest.approx(1.45 * before, rel=0.02)
    assert late.step.compute_s < 1.2 * before
    kind.capture = late
    kind.plan = by_hand(late.step, [])
    measure(kind, *[1.1 * before] * 3, host_s=0.9 * before)
    learn(kind, MACHINE)
    assert 0.9 * before < total_s(kind) < 1.1 * before


def test_the_fastest_warm_step_is_what_others_are_measured_by() -> None:
    """Not the first, which finds everything cold; nor one that waited for the allocator."""
    kind = Kind("test")
    for visit, (seconds, pressed) in enumerate([(1.0, False), (3.0, False), (2.0, False)], 1):
        kind.visits = visit
        kind.refer((seconds, 0.5, 0.2), pressed)
    assert kind.reference == (2.0, 0.5, 0.2)
    kind.refer((1.5, 9.0, 9.0), pressed=True)
    assert kind.reference == (2.0, 0.5, 0.2)
    kind.visits = 2
    kind.refer((9.0, 0.5, 0.2), pressed=True)
    assert kind.reference is None, "there was only the first"


def test_replays_are_not_the_steps_own_host_time() -> None:
    """What a warm step's replays took of the host is left out."""
    kind = kind_of(lambda step: [Recompute(block=0, variant="full")])
    (variant,) = kind.script.variants.values()
    kind.reference = (0.2, 10 * variant.host_s, 0.0)
    assert to_scale(kind, kind.capture, MACHINE).step.host_s == pytest.approx(
        9 * variant.host_s, rel=0.01
    )


@pytest.mark.parametrize("factor", [0.05, 0.5, 3.0, 20.0])
def test_recordings_are_brought_to_scale_however_far_off(factor: float) -> None:
    """A step may wait for its data, and a recorder may slow short ops down many times."""
    kind = kind_of(full)
    warm_s = factor * kind.plan.predicted.step_s
    kind.reference = (warm_s, 0.0, 0.0)
    step = to_scale(kind, kind.capture, MACHINE).step
    assert Simulator(step, MACHINE).time(kind.plan.actions) == pytest.approx(warm_s, rel=0.02)


def test_ops_and_host_do_not_take_turns_at_being_too_slow() -> None:
    """Where both take about as long as the step, and it was faster than thought."""
    kind = kind_of(selective, host_s=0.06)
    kind.plan = by_hand(kind.capture.step, kind.plan.actions)
    measured = 0.7 * kind.plan.predicted.step_s
    measure(kind, *[measured] * 3, host_s=0.95 * measured)
    machine = learn(kind, MACHINE)
    found_s = Simulator(kind.capture.step, machine).time(kind.plan.actions)
    assert found_s == pytest.approx(measured, rel=0.02)


def test_lessons_of_other_builds_are_forgotten_with_them() -> None:
    """Their plans are for steps with other ops."""
    kind = kind_of(full)
    force = kind.force
    kind.wear(Made(kind.capture, Outfit({"0": 1.0})))
    kind.lessons.append((kind.plan.actions, 1.0))
    kind.put_back(force)
    assert not kind.lessons


def test_a_warm_step_with_moves_tells_of_the_host_alone() -> None:
    """Copies may have held the device up, so its time says nothing of the ops."""
    kind = kind_of(swap)
    before = total_s(kind)
    added_s = Simulator(kind.script.step, MACHINE).host_added_s(kind.plan.actions)
    assert added_s > 0
    kind.reference = (9 * before, added_s + 2e-3 + before, 0.0)
    seen = to_scale(kind, kind.capture, MACHINE).step
    assert seen.host_s == pytest.approx(2e-3 + before) and seen.compute_s == before


@pytest.mark.parametrize("share", [0.5, 0.97])
def test_a_host_of_which_nothing_was_known_is_as_seen(share: float) -> None:
    """A model that fake tensors cannot follow has no warm step under a plan."""
    kind = kind_of(full)
    measured = 2 * kind.plan.predicted.step_s
    measure(kind, *[measured] * 3, host_s=share * measured)
    learn(kind, MACHINE)
    added_s = Simulator(kind.capture.step, MACHINE).host_added_s(kind.plan.actions)
    assert kind.capture.step.host_s == pytest.approx(share * measured - added_s, rel=0.1)


def test_steps_that_differ_are_not_judged_too_soon() -> None:
    """A host that is slow now and then is not taken for one that always is."""
    kind = kind_of(full)
    measure(kind, 9.0, 1.0)
    assert not kind.ripe
    measure(kind, 1.02)
    assert kind.ripe, "the first also sets the plan up, and does not count"
    kind.start_anew()
    measure(kind, *[1.0, 1.5] * 3)
    assert not kind.ripe
    measure(kind, *[1.0, 1.5] * 3)
    assert kind.ripe
    kind.judge(last=False)
    assert not kind.ripe


@pytest.mark.parametrize(("later_s", "stays"), [(1.1, False), (1.4, True)])
def test_a_plan_that_presses_the_allocator_must_be_much_faster(later_s: float, stays: bool) -> None:
    """It may fail one day; but if all else is slow, it is put back and left in peace."""
    kind = kind_of(full)
    first = kind.plan
    measure(kind, 9.0, *[1.0] * 4)
    kind.presses = PRESSES
    kind.judge(last=False)
    kind.start_anew()
    kind.plan = by_hand(kind.capture.step, swap(kind.capture.step))
    measure(kind, 9.0, *[later_s] * 4)
    assert kind.judge(last=True) is stays
    assert (kind.plan is first) is stays and kind.cramped is stays
    kind.presses = PRESSES
    assert kind.pressed is not stays


def test_a_slower_host_takes_longer_for_all_it_does() -> None:
    """Its own ops, the notes and the replays alike; the device is as fast as ever."""
    kind = kind_of(full, host_s=1e-3)
    step, actions = kind.capture.step, kind.plan.actions
    usual, slow = Simulator(step, MACHINE), Simulator(step, MACHINE, host_pace=3.0)
    assert slow.host_added_s(actions) == pytest.approx(3 * usual.host_added_s(actions))
    assert slow.host.step_s == pytest.approx(3 * usual.host.step_s)
    assert slow.run(actions).recompute_s == usual.run(actions).recompute_s
    assert slow.shape(actions).peak == usual.shape(actions).peak


@pytest.mark.parametrize("share, busy", [(0.0, False), (0.2, False), (0.5, True)])
def test_a_host_matters_where_it_is_at_work_for_much_of_a_step(share: float, busy: bool) -> None:
    """Only then can a plan that leaves it less time be any faster."""
    kind = kind_of(full)
    kind.capture = rescaled(kind.capture, 1.0, share * total_s(kind))
    assert kind.has_busy_host == busy


def test_waits_that_no_slow_link_explains_leave_the_links_alone() -> None:
    """Else each plan would take another share of their rate, for the whole job."""
    kind = kind_of(swap)
    assert kind.capture is not None and kind.plan is not None
    fast = MACHINE.with_links(1e6)  # nothing waits for these, be they somewhat slower
    predicted = Simulator(kind.capture.step, fast).run(kind.plan.actions)
    kind.plan = msgspec.structs.replace(kind.plan, predicted=predicted)
    measure(kind, 9.0, *[predicted.step_s] * 3)
    for row in kind.measurements:
        row.stall_s = 0.05 * predicted.step_s
    assert not as_predicted(kind)
    assert learn(kind, fast).links == fast.links
