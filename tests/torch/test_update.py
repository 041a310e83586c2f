"""What optimizers will keep and take, foreseen on fake tensors, against what they really do."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

import legroom
from legroom.memory import update
from legroom.memory.parking import make_park, param_states, without_states
from legroom.memory.profile import capture_fake, stand_in_loss
from legroom.memory.timers import memory_reports, reports_peak
from legroom.memory.trace import Kind
from legroom.memory.update import STEPS, Update, foresee_update, states_there
from tests.torch.support import MACHINE

CPU = torch.device("cpu")


class Own(torch.optim.Optimizer):
    """A user's: no states, a count of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count, self.seen = 0, [0]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.count += 1
        self.seen.append(self.count)
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


class Named(torch.optim.SGD):
    """A subclass that is no more than a setting."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)


class Stepping(Named):
    """One that does more in its step."""

    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure)


class Picky(Named):
    """One that has a part of the step its own way."""

    def _init_group(self, *args: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return super()._init_group(*args)  # type: ignore[misc]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first], "momentum": 0.0}, {"params": others}]


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw loop": lambda m: torch.optim.AdamW(m.parameters(), foreach=False),
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd in groups": lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "a subclass": lambda m: Named(m.parameters()),
}
OTHERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adafactor of transformers": lambda m: Adafactor(m.parameters()),
    "of a user": lambda m: Own(m.parameters()),
    "a subclass with a step": lambda m: Stepping(m.parameters()),
    "a subclass with parts": lambda m: Picky(m.parameters()),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters()),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(192, 192) for _ in range(4)], nn.Linear(192, 400))


def foreseen(model: nn.Module, optimizer: torch.optim.Optimizer) -> Update:
    update = foresee_update(optimizer, dict(model.named_parameters()), CPU)
    assert update is not None
    return update


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]


@pytest.mark.parametrize("maker", MAKERS)
def test_states_and_scratch_are_as_foreseen(maker: str) -> None:
    """The states to a hundredth; scratch to a tenth of the weights."""
    model = make_model()
    optimizer = MAKERS[maker](model)
    update = foreseen(model, optimizer)
    assert not tensors(optimizer) and getattr(optimizer, "count", 0) == 0
    assert getattr(optimizer, "seen", [0]) == [0]
    weights, scratch = sum(p.nbytes for p in model.parameters()), 0
    for _ in range(STEPS):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        reports: list[tuple[int, int]] = []
        with memory_reports(reports):
            optimizer.step()
        left = max(sum(size for _, size in reports), 0)
        scratch = max(scratch, reports_peak(reports) - left)
    kept = sum(x.nbytes for x in tensors(optimizer))
    assert sum(update.states.values()) == pytest.approx(kept, abs=0.01 * weights)
    assert update.single_bytes + update.joint_bytes == pytest.approx(scratch, abs=0.1 * weights)


def test_what_is_not_in_the_optimizer_has_no_states() -> None:
    """Nor has what is frozen."""
    model = make_model()
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[1].parameters()], fused=True)
    states = foreseen(model, optimizer).states
    assert {name for name, size in states.items() if size} == {"0.weight", "0.bias"}


def draws() -> list[float]:
    return [torch.rand(()).item(), random.random(), np.random.rand()]


def test_random_numbers_are_as_if_nothing_had_been_foreseen() -> None:
    """Neither by the optimizer nor by a model in an estimate is any used up."""
    model = make_model()
    found = []
    for looks in (False, True):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        if looks:
            foreseen(model, torch.optim.RAdam(model.parameters()))
            legroom.estimate(
                Drawing(), torch.randn(4, 4, generator=torch.Generator()), machine="l4"
            )
        found.append(draws())
    assert found[0] == found[1]


class Drawing(nn.Module):
    """A layer that draws from all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * torch.rand(4) * random.random() * np.random.rand()


@pytest.mark.parametrize("maker", OTHERS)
def test_code_of_others_is_not_run(maker: str) -> None:
    """Their steps may do anything: count, write, draw, step another optimizer."""
    model = make_model()
    optimizer = OTHERS[maker](model)
    assert foresee_update(optimizer, dict(model.named_parameters()), CPU) is None
    assert getattr(optimizer, "count", 0) == 0


def test_states_of_others_are_known_once_they_are_there() -> None:
    """After a checkpoint was loaded, or where the optimizer ran before."""
    model = make_model()
    optimizer = Stepping(model.parameters())
    named = dict(model.named_parameters())
    assert states_there(optimizer, named, CPU) is None
    for p in named.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    update = states_there(optimizer, named, CPU)
    assert update is not None
    assert update.states == {name: p.nbytes for name, p in named.items()}


def test_groups_that_differ_in_rates_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group for each parameter is common, and there may be hundreds."""
    tried, plain = [], update._try

    def count(*args: Any, **kwargs: Any) -> Any:
        tried.append(args)
        return plain(*args, **kwargs)

    monkeypatch.setattr(update, "_try", count)
    model = make_model()
    rows = [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(model.parameters())]
    apart = foreseen(model, torch.optim.AdamW(rows))
    forms = len({p.shape for p in model.parameters() if p.dim() > 1})
    assert len(tried) <= forms + 1
    assert apart == foreseen(model, torch.optim.AdamW(model.parameters()))


def test_parked_updates_take_scratch_for_a_wave_only() -> None:
    """Lists of all parameters take as much as all; where most are parked, no list has all."""
    model = make_model()
    update = foreseen(model, torch.optim.AdamW(model.parameters(), foreach=True))
    batch = ((torch.randn(8, 192),), {})
    step = capture_fake(model, batch, stand_in_loss, MACHINE, device=CPU, optimizer=update).step
    assert step.ops[-1].workspace_bytes == update.joint_bytes > 0
    total = sum(param_states(step).values())
    park = make_park(step, total)
    rest = without_states(step, park)
    assert rest.ops[-1].workspace_bytes - park.window_bytes < 0.5 * update.joint_bytes
    loop = foreseen(model, torch.optim.AdamW(model.parameters(), foreach=False))
    step = capture_fake(model, batch, stand_in_loss, MACHINE, device=CPU, optimizer=loop).step
    rest = without_states(step, make_park(step, total))
    scratch = [s.num_bytes for s in rest.storages if s.name == "optimizer"]
    assert scratch == [loop.single_bytes] and step.storages[-1].kind is Kind.STATE


@pytest.mark.parametrize("maker", ["sgd", "adafactor"])
def test_jobs_are_not_refused_for_states_that_will_not_be_there(maker: str) -> None:
    """Three times the weights are enough for weights, gradients and little else."""
    model = make_model()
    optimizer = MAKERS[maker](model)
    budget = 3 * sum(p.nbytes for p in model.parameters())
    with legroom.fit(model, optimizer, budget=budget, machine=MACHINE) as job:
        for _ in range(5):
            with job.step():
                model(torch.randn(8, 192)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
