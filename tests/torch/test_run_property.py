"""Random networks under random plans: the same gradients, and the peak that was predicted."""

import gc
import random
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from legroom.core.errors import BudgetError
from legroom.memory.planner import make_plan
from legroom.memory.profile import Capture, capture_real
from legroom.memory.recorder import Recorder
from legroom.memory.simulate import Simulator
from legroom.memory.timers import CpuTimer, memory_reports, reports_peak
from legroom.memory.trace import Kind
from tests.torch.random_nets import random_net
from tests.torch.support import CPU, MACHINE, PLANS, ROOM, Rig, anyhow, assert_same, swap

NUM_NETS = 12
PEAK_ERROR = 0.01
ONCE_WRONG = (19, 21, 36, 37)
"""Networks whose gradients meet, or whose copies in begin where a kept tensor is asked for."""


def record(rig: Rig) -> Capture:
    """Run one step as it is, recorded, and make a trace of it as a job does."""
    timer = CpuTimer()
    rig.start.restore()
    recorder = Recorder(rig.model, CPU, timer)
    with timer.running(), rig.runner.following(recorder), recorder.watch_modules(), recorder:
        loss = rig.loss()
        loss.backward()
        del loss
    for name, param in rig.model.named_parameters():
        if param.grad is not None:
            recorder.name_storage(param.grad, f"{name}.grad", "gradient")
    return capture_real(recorder, timer, rig.model, MACHINE, like=rig.step)


def real_rig(model: nn.Module, batch: torch.Tensor) -> Rig:
    """A rig whose trace comes from a recorded step."""
    rig = Rig(model, batch)
    rig.capture = record(rig)
    rig.step = rig.capture.step
    return rig


def measured_peak(rig: Rig) -> int:
    """Most bytes that torch's own allocator handed out, and what was there before."""
    rig.start.restore()
    gc.collect()
    reports: list[tuple[int, int]] = []
    with memory_reports(reports), rig.runner.following():
        loss = rig.loss()
        loss.backward()
        del loss
    static = sum(s.num_bytes for s in rig.step.storages if s.birth < 0)
    return reports_peak(reports) + static


@pytest.mark.parametrize("seed", range(NUM_NETS))
def test_random_plans_on_random_networks(seed: int) -> None:
    """Variants, moves to both tiers and bits at random: every gradient bit-identical."""
    model, batch = random_net(seed)
    for k in range(2):
        rig = Rig(model, batch)
        rig.check(lambda step, k=k: anyhow(step, 100 * seed + k))


@pytest.mark.parametrize("seed", range(NUM_NETS))
def test_random_budgets_with_auto(seed: int) -> None:
    """The policy auto keeps the budget it is given, and the gradients."""
    model, batch = random_net(seed)
    rig = Rig(model, batch)
    most = Simulator(rig.step, MACHINE).shape([]).peak
    static = sum(s.num_bytes for s in rig.step.storages if s.birth < 0)
    draw = random.Random(seed)
    for _ in range(3):
        limit = static + int((most - static) * draw.uniform(0.2, 1.0))
        try:
            plan = make_plan(rig.step, MACHINE, {**ROOM, "device": limit})
        except BudgetError as error:
            assert error.smallest_bytes is not None and error.smallest_bytes > limit
            continue
        assert plan.predicted.device_bytes <= limit
        rig.check(lambda step, plan=plan: list(plan.actions))


@pytest.mark.parametrize("plan", ["keep", *PLANS, "random"])
@pytest.mark.parametrize("seed", [*range(NUM_NETS), *ONCE_WRONG])
def test_the_predicted_peak_is_the_measured_one(seed: int, plan: str) -> None:
    """Within one in a hundred, under every kind of plan."""
    model, batch = random_net(seed, size=8)
    rig = real_rig(model, batch)
    build = PLANS.get(plan, lambda step: anyhow(step, seed) if plan == "random" else [])
    actions = build(rig.step)
    predicted = Simulator(rig.step, MACHINE).shape(actions).peak
    rig.install(actions)
    found = [measured_peak(rig) for _ in range(2)]
    assert not rig.runner.deviation
    rig.close()
    for peak in found:
        error = predicted / peak - 1
        assert abs(error) < PEAK_ERROR, f"predicted {predicted}, measured {found}"


class Twice(torch.autograd.Function):
    """Saves two tensors of its own at one position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        one, two = x.exp(), x.sin()
        ctx.save_for_backward(one, two)
        return one * two

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        one, two = ctx.saved_tensors
        return grad * one * two


class Twins(nn.Module):
    """A stack of those."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Twice.apply(layer(x))  # type: ignore[no-untyped-call]
        return x


def test_copies_waited_for_where_their_tensors_are_saved() -> None:
    """Each save of a position is free there, not only the first."""
    rig = real_rig(Twins(), torch.randn(64, 64))
    replace = msgspec.structs.replace
    actions = [replace(m, out_wait=rig.step.packed(m.storage)) for m in swap(rig.step)]
    predicted = Simulator(rig.step, MACHINE).shape(actions).peak
    rig.install(actions)
    found = [measured_peak(rig) for _ in range(2)]
    rig.close()
    assert found == pytest.approx([predicted] * 2, rel=PEAK_ERROR)


def test_two_hundred_steps_of_random_plans() -> None:
    """One model, a new plan every other step, tiny windows: equal gradients each time."""
    model, batch = random_net(3)
    rig = Rig(model, batch)
    plain = rig.plain()
    for i in range(200):
        if i % 2 == 0:
            rig.install(anyhow(rig.step, i, share=random.Random(i).random()))
        assert_same(rig.planned(), plain)
    rig.close()


def test_parts_of_a_recorded_trace_are_named() -> None:
    """A recorded step knows its weights, gradients and activations."""
    rig = real_rig(*random_net(1))
    kinds = {s.kind for s in rig.step.storages}
    assert {Kind.WEIGHT, Kind.GRADIENT, Kind.ACTIVATION, Kind.INPUT} <= kinds
    rig.close()
