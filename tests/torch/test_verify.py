"""What `verify` says of a step that keeps its promise, of one that does not, and of a noisy one."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from legroom.memory.verify import DOUBTS, Verdict, verify_step

CPU = torch.device("cpu")


class Step:
    """A closure that may be off by `noise[i]` in its i-th run, and by `fault` while planned."""

    def __init__(self, noise: dict[int, float] | None = None, fault: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.x = torch.randn(8, 4)
        self.noise, self.fault = noise or {}, fault
        self.runs, self.inside = 0, False

    def __call__(self) -> Tensor:
        off = self.noise.get(self.runs, 0.0) + (self.fault if self.inside else 0.0)
        self.runs += 1
        return self.model(self.x).square().sum() * (1 + off)

    @contextlib.contextmanager
    def planned(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def verify(self) -> Verdict:
        return verify_step(self.model, CPU, self, self.planned)


def test_a_step_that_keeps_its_promise_runs_three_times() -> None:
    """Draws and running statistics included; and the model is left as it was."""
    step = Step()
    (step.model(step.x).sum()).backward()
    grads = [p.grad for p in step.model.parameters()]
    state = [b.clone() for b in step.model.buffers()]
    draws = torch.get_rng_state()
    verdict = step.verify()
    assert verdict.identical and verdict.repeatable and verdict.holds
    assert verdict.num_gradients == 4
    assert step.runs == 3
    assert all(p.grad is g for p, g in zip(step.model.parameters(), grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(step.model.buffers(), state, strict=True))
    assert torch.equal(torch.get_rng_state(), draws)


def test_a_plan_that_is_off_is_told() -> None:
    """However little; the unplanned step was seen to repeat itself each time."""
    step = Step(fault=1e-6)
    verdict = step.verify()
    assert not verdict.holds and verdict.repeatable
    assert "largest relative error" in str(verdict) and "unplanned" not in str(verdict)
    assert step.runs == 3 + DOUBTS


def test_a_kernel_that_seldom_differs_is_not_the_plans_fault() -> None:
    """Twice alike, then the planned run off by as much as a later unplanned one."""
    step = Step(noise={2: 1e-6, 4: 1e-6})
    verdict = step.verify()
    assert verdict.holds and not verdict.identical and not verdict.repeatable
    assert "unplanned steps differ" in str(verdict)
    assert step.runs == 5


@pytest.mark.parametrize("offset", [0.0, 1e6, float("inf")])
def test_a_large_loss_makes_no_fault_of_a_gradient_small(offset: float) -> None:
    """Gradients are measured by gradients; those of a step that does not repeat itself, too."""

    class Offset(Step):
        def __call__(self) -> Tensor:
            return super().__call__() + offset

    verdict = Offset(noise={1: 1e-6}, fault=1e-3).verify()
    assert not verdict.holds and verdict.worst and verdict.worst_error > 1e-4


def test_noise_excuses_no_larger_fault() -> None:
    """A plan further off than the step is from itself does not hold."""
    verdict = Step(noise={1: 1e-6}, fault=1e-3).verify()
    assert not verdict.holds and not verdict.repeatable
