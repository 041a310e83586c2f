"""What a job does where the allocator has less room than its plan reckoned with."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from legroom.core.errors import BudgetError
from legroom.memory.arena import Placement
from legroom.memory.device import CpuMeter
from legroom.memory.kinds import Kind
from legroom.memory.relief import OFF_BY, after_failure, make_room
from legroom.memory.timers import CpuTimer
from tests.torch.nets import Mlp
from tests.torch.support import fitted

BUDGET = 1000


class Small(CpuMeter):
    """Can make rooms of so many bytes; more is missing."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.asked = most, 0

    def overhead(self, budget: int) -> int:
        return int(budget * self.slack)

    def make_room(self, placement: Placement) -> Placement:
        self.asked += 1
        short = sum(placement.stretches) - self.most
        return placement._replace(missing_bytes=max(short, placement.missing_bytes, 0))


def kind_with(stretches: tuple[int, ...]) -> Kind:
    """One with a plan laid out in that room."""
    kind: Any = Kind("a step")
    kind.capture, kind.plan, kind.script = object(), None, object()
    kind.plan = object()
    kind.placement, kind.recorded = Placement(stretches, 0), True
    return kind  # type: ignore[no-any-return]


def planner(meter: Small, least: int) -> Callable[[Kind], None]:
    """Lays plans out in all that is left; none fits in less than `least`."""

    def plan(kind: Kind) -> None:
        left = BUDGET - meter.overhead(BUDGET)
        if left < least:
            raise BudgetError("too small", missing_bytes=1, smallest_bytes=least)
        kind.plan, kind.placement = object(), Placement((left,), 0)  # type: ignore[assignment]

    return plan


def test_a_room_that_is_there_changes_nothing() -> None:
    """No plan is made."""
    meter, kind = Small(1000), kind_with((900,))
    before = kind.force
    make_room(kind, meter, BUDGET, planner(meter, 0))
    assert kind.force == before and meter.slack == 0 and meter.asked == 1


def test_a_room_too_small_is_planned_with() -> None:
    """The plan in force from now on is laid out in what there is."""
    meter, kind = Small(900), kind_with((1000,))
    make_room(kind, meter, BUDGET, planner(meter, 0))
    assert kind.placement == Placement((900,), 0)
    assert meter.slack == pytest.approx(0.1) and meter.asked == 2


def test_where_nothing_fits_in_it_the_plan_stays() -> None:
    """With what is missing noted: the allocator tidies up in mid-step."""
    meter, kind = Small(900), kind_with((1000,))
    plan = kind.plan
    make_room(kind, meter, BUDGET, planner(meter, 950))
    assert kind.plan is plan and meter.slack == 0
    assert kind.placement == Placement((1000,), 100)


def test_after_a_failure_the_allocator_has_more() -> None:
    """Whether or not there was a plan yet; and it says so."""
    meter = Small(1000)
    assert "step 1" in after_failure(None, meter, planner(meter, 0))
    assert meter.slack == OFF_BY


def test_a_recorded_step_without_a_plan_keeps_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device with a cap it has kept the budget: the job says so, and goes on as it was."""
    monkeypatch.setattr("legroom.memory.job.CudaTimer", CpuTimer)

    def refuse(*args: object, **kwargs: object) -> None:
        raise BudgetError("no room", missing_bytes=1 << 20)

    monkeypatch.setattr("legroom.memory.job.make_placed_plan", refuse)
    model, x = nn.Sequential(*[Mlp(p=0.0) for _ in range(4)]), torch.randn(64, 64)
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    with fitted(model, "test_full") as job:
        with pytest.warns(UserWarning, match="needs 1.00 MiB more than its budget has; the plan"):
            for _ in range(6):
                model.zero_grad()
                with job.step():
                    model(x).sum().backward()
                for p, grad in zip(model.parameters(), plain, strict=True):
                    torch.testing.assert_close(p.grad, grad)
        kind = job.current
        assert kind is not None and kind.plan is not None and kind.plan.actions
        assert kind.recorded and kind.still and not job.runner.deviation
        assert kind.plan.why in job.report()


def test_without_a_cap_a_recorded_step_without_a_plan_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each step, since nothing else keeps the budget; gradients are there as ever."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise BudgetError("no room", missing_bytes=1 << 20)

    monkeypatch.setattr("legroom.memory.job.make_placed_plan", refuse)
    model, x = nn.Sequential(*[Mlp(p=0.0) for _ in range(4)]), torch.randn(64, 64)
    with fitted(model, "test_full") as job:
        for i in range(5):
            model.zero_grad()
            with contextlib.nullcontext() if i < 2 else pytest.raises(BudgetError), job.step():
                model(x).sum().backward()
            assert all(p.grad is not None for p in model.parameters())
