"""ZeRO-Offload and ZeRO-Infinity: states leave, blocks run again, inputs go by bandwidth."""

import msgspec
import pytest

from legroom.machine.spec import Link, Machine, Tier
from legroom.memory.actions import Park, Recompute
from legroom.memory.handmade import chain
from legroom.memory.planner import Problem, make_plan
from legroom.memory.policies.zero_infinity import busy_s, efficiency, zero_infinity
from legroom.memory.policies.zero_offload import all_blocks, zero_offload
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Kind, Step, Storage
from tests.null.test_policies import machine

KIB = 1 << 10


def with_states(step: Step) -> Step:
    """10 KiB of states for the weight of each block."""
    end = len(step.ops)
    names = [s.name for s in step.storages if s.kind is Kind.WEIGHT]
    states = (Storage(f"{n}.exp_avg", 10 * KIB, Kind.STATE, -1, end, end) for n in names)
    return msgspec.structs.replace(step, storages=(*step.storages, *states)).check()


def with_disk(rate: float) -> Machine:
    """Another tier, by links of its own."""
    bare = machine()
    links = (
        Link(source="device", target="disk", bytes_per_s=rate),
        Link(source="disk", target="device", bytes_per_s=rate),
    )
    tiers = (*bare.tiers, Tier(name="disk", num_bytes=10**6))
    return msgspec.structs.replace(bare, tiers=tiers, links=(*bare.links, *links))


def test_offload_is_the_same_split_whatever_the_budget() -> None:
    """All states of the four weights, and all four blocks: even where everything would fit."""
    step = with_states(chain(4, 10, output_bytes=3, weight_bytes=5))
    for device in (200 * KIB, 42 * KIB):
        plan = make_plan(step, machine(1e9), {"device": device, "host": 10**6}, "zero_offload")
        assert plan.park is not None and plan.park.num_bytes == 40 * KIB
        assert sorted(plan.park.params) == ["w0", "w1", "w2", "w3"]
        assert [a.block for a in plan.recomputes] == [0, 1, 2, 3] and not plan.moves


@pytest.mark.parametrize("policy", [zero_offload, zero_infinity])
def test_without_a_host_states_stay(policy: object) -> None:
    step = with_states(chain(4, 10, output_bytes=3, weight_bytes=5))
    choice = policy(Problem(Simulator(step, machine()), {"device": 10**6, "host": 0}))  # type: ignore[operator]
    assert not any(isinstance(a, Park) for a in choice.actions)
    assert sum(isinstance(a, Recompute) for a in choice.actions) == 4


def test_efficiency_is_the_share_of_time_that_is_not_copies() -> None:
    """12 bytes there and back at 4 a second take 6 s; beside 6 s of work that is a half."""
    problem = Problem(Simulator(chain(2, 10), machine(4.0)), {"device": 10**6, "host": 10**6})
    assert efficiency(problem, "host", 12, 6.0) == pytest.approx(0.5)
    assert efficiency(problem, "host", 12, 18.0) == pytest.approx(0.75)


def test_a_block_is_busy_in_forward_replay_and_backward() -> None:
    """Two ops of a second, one of them again, and twice as long back: 2 + 1 + 4 s."""
    problem = Problem(Simulator(chain(3, 10), machine()), {"device": 10**6, "host": 10**6})
    assert busy_s(problem, all_blocks(problem)) == {0: 7.0, 1: 7.0, 2: 7.0}


@pytest.mark.parametrize(("host_rate", "disk_rate", "host", "tiers"), [
    (20.0, 20.0, 1000, ["host"] * 3),  # 2 * 14 / 20 = 1.4 s beside 7 s
    (20.0, 20.0, 30, ["host", "host", "disk"]),
    (20.0, 3.9, 30, ["host", "host"]),  # 2 * 14 / 3.9 s are more than 7
    (3.9, 20.0, 1000, ["disk"] * 3),
    (3.9, 3.9, 1000, []),
])  # fmt: skip
def test_inputs_go_to_the_nearest_tier_that_is_fast_enough(
    host_rate: float, disk_rate: float, host: int, tiers: list[str]
) -> None:
    """Of four blocks, the first one's input is there before the step, and stays."""
    step, both = chain(4, 10, output_bytes=14), with_disk(disk_rate)
    links = (msgspec.structs.replace(x, bytes_per_s=host_rate) for x in both.links[:2])
    both = msgspec.structs.replace(both, links=(*links, *both.links[2:]))
    budget = {"device": 10**6, "host": host, "disk": 1000}
    choice = zero_infinity(Problem(Simulator(step, both), budget))
    moves = [a for a in choice.actions if not isinstance(a, Recompute | Park)]
    assert sorted(m.tier for m in moves) == sorted(tiers)
    names = {step.storages[m.storage].name for m in moves}
    assert names <= {"x1", "x2", "x3"} and len(names) == len(tiers)
