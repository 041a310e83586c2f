"""Optimizer states on the host: which, in what waves, and what that frees and takes, by hand."""

import msgspec
import pytest

from legroom.core.errors import BudgetError, RecordError
from legroom.machine.spec import Link, Machine, Tier
from legroom.memory import parking
from legroom.memory.actions import Park
from legroom.memory.handmade import chain, natural_peak
from legroom.memory.parking import make_park, pack, param_states, park_s
from legroom.memory.plan import Plan
from legroom.memory.planner import make_plan
from legroom.memory.simulate import Simulator
from legroom.memory.timeline import predicted_timeline
from legroom.memory.trace import Kind, Op, Phase, Step, Storage

KIB = 1 << 10
STATES = {"a": 40, "b": 30, "c": 20, "d": 10}
"""KiB for each parameter."""


@pytest.fixture(autouse=True)
def waves_of_20(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "WAVE_BYTES", 20 * KIB)
    monkeypatch.setattr(parking, "WAVES", 1)


def machine(cap: float | None = None) -> Machine:
    """10 KiB a second each way."""
    names = ("device", "host")
    links = (
        Link(source="device", target="host", bytes_per_s=10 * KIB, root="bus"),
        Link(source="host", target="device", bytes_per_s=10 * KIB, root="bus"),
    )
    return Machine(
        name="by hand",
        device="cpu",
        origin="made for tests",
        tiers=tuple(Tier(name=n, num_bytes=10**6) for n in names),
        links=links,
        duplex={"bus": cap} if cap else {},
        matrix_flops={"float32": 1.0},
        vector_flops=1.0,
        memory_bytes_per_s=8.0,
    )


def step(activation: int = 50) -> Step:
    """Forward, backward and update, a second each; 100 KiB of states and an activation."""
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
    states = [
        Storage(f"{name}.{part}", size * KIB // 2, Kind.STATE, -1, 3, 3)
        for name, size in STATES.items()
        for part in ("exp_avg", "exp_avg_sq")
    ]
    count = Storage("a.step", 4, Kind.STATE, -1, 3, 3)
    kept = Storage("x", activation * KIB, Kind.TEMPORARY, 0, 1, 1)
    return Step(
        model="by hand",
        machine="by hand",
        capture="fake",
        ops=tuple(Op("op", "", phase, -1, 1.0, (), ()) for phase in phases),
        storages=(*states, count, kept),
        saved=(),
    ).check()


def test_states_are_known_by_their_parameters() -> None:
    """Small ones, such as counts, do not take part."""
    assert param_states(step()) == {name: size * KIB for name, size in STATES.items()}


@pytest.mark.parametrize(
    ("size", "params"),
    [
        (40, ("a",)),
        (45, ("a", "d")),  # none fills 5 but the smallest
        (50, ("a", "d")),
        (60, ("a", "c")),
        (15, ("d", "c")),
        (1, ("d",)),
        (100, ("a", "b", "c", "d")),
        (500, ("a", "b", "c", "d")),
    ],
)
def test_as_few_as_will_do_are_picked(size: int, params: tuple[str, ...]) -> None:
    """The largest that are not too much, and then the smallest that fills what is left."""
    park = make_park(step(), size * KIB)
    assert park.params == params
    assert park.num_bytes == sum(STATES[name] for name in params) * KIB


def test_waves_hold_whole_parameters() -> None:
    """One that is larger than a wave is one by itself."""
    assert pack([40, 30, 20, 10, 5, 5, 1], 20) == [[40], [30], [20], [10, 5, 5], [1]]
    assert pack([], 20) == []


def test_three_waves_are_on_the_device_while_it_updates() -> None:
    """States 100, of which 100 leave in waves 40 30 20 10; x 50 in forward and backward."""
    park = make_park(step(), 100 * KIB)
    assert park.window_bytes == 90 * KIB
    shape = Simulator(step(), machine()).shape([park])
    assert list(shape.during[:3] // KIB) == [50, 50, 90]
    shape = Simulator(step(), machine()).shape([make_park(step(), 10 * KIB)])
    assert list(shape.during[:3] // KIB) == [140, 140, 100]


def test_copies_both_ways_run_side_by_side() -> None:
    """60 KiB at 10 a second each way take 6 s, or 8 where both ways share 15; a wave more."""
    park = Park(params=(), num_bytes=60 * KIB, wave_bytes=0, window_bytes=30 * KIB)
    assert park_s(machine(), park) == pytest.approx(7.0)
    assert park_s(machine(15 * KIB), park) == pytest.approx(9.0)
    outcome = Simulator(step(), machine()).run([park])
    assert outcome.step_s == pytest.approx(10.0)
    assert outcome.stall_s == pytest.approx(7.0)
    assert outcome.peak_bytes["host"] == 60 * KIB
    assert outcome.moved_bytes == {"device->host": 60 * KIB, "host->device": 60 * KIB}
    assert [row.freed_bytes for row in outcome.costs] == [60 * KIB]


def plan(limit: int, **given: int) -> Plan:
    budget = {"device": limit * KIB, "host": given.pop("host", 10**6)}
    return make_plan(step(**given), machine(), budget, "auto")


def test_states_leave_only_if_they_must() -> None:
    """With room for all there is nothing to do; 4 bytes are the count's."""
    assert plan(151).park is None
    park = plan(141).park
    assert park is not None and park.params == ("d",)


def test_states_leave_where_that_is_faster() -> None:
    """A tensor goes out and comes back before and after; states do both at once, in the update."""
    blocks = chain(5, 40 * KIB)
    bare = tuple(msgspec.structs.replace(b, variants=()) for b in blocks.blocks)
    ours = tuple(
        msgspec.structs.replace(s, release=len(blocks.ops), death=len(blocks.ops))
        for s in step().storages
        if s.kind is Kind.STATE
    )
    both = msgspec.structs.replace(blocks, blocks=bare, storages=(*blocks.storages, *ours)).check()
    budget = {"device": natural_peak(both) - 70 * KIB, "host": 10**6}
    links = tuple(msgspec.structs.replace(x, bytes_per_s=KIB) for x in machine().links)
    slow = msgspec.structs.replace(machine(), links=links)
    made = make_plan(both, slow, budget, "auto")
    assert made.park is not None
    moved = make_plan(both, slow, budget, "swap_all")
    assert made.predicted.step_s < moved.predicted.step_s


def test_an_error_names_a_budget_that_works() -> None:
    """With all states gone, 90 KiB of them are there for the update."""
    with pytest.raises(BudgetError) as caught:
        plan(60)
    assert caught.value.smallest_bytes == 90 * KIB + 4
    assert plan(91).park is not None


def test_without_room_on_the_host_states_stay() -> None:
    """Its budget is one as well."""
    with pytest.raises(BudgetError):
        plan(120, host=10 * KIB)


def test_parts_of_the_peak_and_lines_over_time_count_what_is_there() -> None:
    """In forward 100 KiB of states less those parked; in the update what passes through."""
    made = plan(91)
    assert made.predicted.peak_parts["state"] == 90 * KIB + 4
    line = predicted_timeline(Simulator(step(), machine()), made.actions)
    assert max(line.bytes_by_kind["state"]) == 90 * KIB + 4
    assert min(line.bytes_by_kind["state"][:2]) == 4


def test_a_plan_for_other_parameters_is_refused() -> None:
    """Names must be those of the step; and states are parked once."""
    made = plan(141)
    assert made.park is not None
    other = msgspec.structs.replace(made.park, params=("z",))
    with pytest.raises(RecordError, match="states of z"):
        msgspec.structs.replace(made, actions=(other,)).check_against(step())
    with pytest.raises(RecordError, match="twice"):
        msgspec.structs.replace(made, actions=(made.park, made.park)).check()


def test_plans_that_park_are_files_too(tmp_path: object) -> None:
    """They are saved and read again."""
    made = plan(141)
    path = f"{tmp_path}/plan.json"
    made.save(path)
    assert Plan.load(path) == made


@pytest.mark.parametrize("host", [30, 50, 70])
def test_as_much_is_parked_as_the_host_has_room_for(host: int) -> None:
    """A faster number that breaks its budget is none."""
    made = plan(141, host=host * KIB)
    assert made.park is not None and made.park.num_bytes <= host * KIB


def test_a_step_without_an_update_leaves_room_for_one() -> None:
    """Steps of one shape are one kind, whether or not the optimizer runs at their end."""
    bare = msgspec.structs.replace(step(), ops=step().ops[:2], storages=tuple(
        msgspec.structs.replace(s, release=min(s.release, 2), death=min(s.death, 2))
        for s in step().storages
    ))  # fmt: skip
    shape = Simulator(bare, machine()).shape([make_park(bare, 100 * KIB)])
    assert list(shape.during // KIB) == [50, 50, 90]
