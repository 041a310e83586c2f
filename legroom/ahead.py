"""Ahead of a run: what a job would take on a machine that need not be there."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from legroom.core.errors import InputError, StepError, UnknownName
from legroom.core.outcome import Outcome
from legroom.core.units import format_bytes, parse_bytes
from legroom.machine.spec import Machine, find_machine
from legroom.memory.fake import fake_device
from legroom.memory.kinds import Made
from legroom.memory.planner import make_plan
from legroom.memory.profile import STATE_RULES, Capture, LossFn, capture_fake, stand_in_loss
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step

Budget = str | int | Mapping[str, str | int]
CANNOT_FOLLOW = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""What fake tensors raise where numbers are needed."""
ENOUGH = 1 << 60
"""Bytes, where there is no budget."""


def estimate(
    model: nn.Module,
    batch: Any,
    *,
    machine: str | Path | Machine,
    optimizer: str = "adamw",
    loss_fn: LossFn | None = None,
    budget: Budget | None = None,
    policy: str = "auto",
    blocks: Sequence[str] | None = None,
    compile: str | None = None,
) -> Outcome:
    """Peak and step time of a model on a machine, with no such machine present.

    The model may be on the meta device. With a budget, the outcome is that of the plan a policy
    finds; raises BudgetError if none keeps it. With `compile="blocks"`, builds of its blocks and
    a loss in chunks take part; what they will take is guessed from how torch cuts them. Times come
    from the machine's rates, not from runs.
    """
    found = find_machine(machine)
    step = trace(
        model,
        batch,
        machine=found,
        optimizer=optimizer,
        loss_fn=loss_fn,
        blocks=blocks,
        compile=compile,
        budget=budget,
        policy=policy,
    )
    if budget is None:
        return Simulator(step, found).run([], "keep_all")
    return make_plan(step, found, machine_budget(budget, found), policy).predicted


def trace(
    model: nn.Module,
    batch: Any,
    *,
    machine: str | Path | Machine,
    optimizer: str = "adamw",
    loss_fn: LossFn | None = None,
    blocks: Sequence[str] | None = None,
    compile: str | None = None,
    budget: Budget | None = None,
    policy: str = "auto",
) -> Step:
    """Capture a step with fake tensors: nothing is allocated, times come from a roofline.

    With `compile="blocks"` it is the step in the builds that are best for the budget, as forecast.
    """
    check_compile(compile)
    found = find_machine(machine)
    capture = fake_capture(model, batch, found, optimizer, loss_fn, blocks)
    if compile is None:
        return capture().step
    limits = {"device": ENOUGH} if budget is None else machine_budget(budget, found)
    return forecaster(model, capture, found).made(limits, policy).capture.step


def fake_capture(
    model: nn.Module,
    batch: Any,
    machine: Machine,
    optimizer: str = "adamw",
    loss_fn: LossFn | None = None,
    blocks: Sequence[str] | None = None,
) -> Callable[..., Capture]:
    """What captures this step with fake tensors."""
    if optimizer not in STATE_RULES:
        raise UnknownName("optimizer", optimizer, STATE_RULES)

    def capture(**more: Any) -> Capture:
        given = (model, batch, loss_fn or call_with, machine)
        try:
            return capture_fake(*given, optimizer=optimizer, blocks=blocks, **more)
        except CANNOT_FOLLOW as error:
            first = (str(error).splitlines() or [""])[0]
            raise StepError(
                f"cannot follow {type(model).__name__} without running it "
                f"({type(error).__name__}: {first}): a model that looks at its numbers to choose "
                "its way can be fitted, but not estimated"
            ) from error

    return capture


class Forecaster:
    """Forecasts builds for a step on a machine that is not there, and chooses among them."""

    def __init__(self, model: nn.Module, plain: Capture, machine: Machine) -> None:
        from legroom.memory.workshop import Workshop  # which loads a compiler

        self.plain, self.machine = plain, machine
        self.workshop = Workshop(model, fake_device(machine))

    def watching(self) -> AbstractContextManager[None]:
        """Take samples of the blocks while the step is captured with fake tensors."""
        return self.workshop.sampling(self.plain.step)

    def look(self) -> None:
        """Forecast what builds of them will take."""
        self.workshop.expect(self.plain.step, self.machine)

    def made(self, budget: Mapping[str, int], policy: str) -> Made:
        """The step in the builds that are best for a budget."""
        return self.workshop.make(Made(self.plain), self.plain.step, self.machine, budget, policy)


def forecaster(model: nn.Module, capture: Callable[..., Capture], machine: Machine) -> Forecaster:
    """Who knows the builds of a captured step, as forecast."""
    made = Forecaster(model, capture(), machine)
    capture(visitor=made)
    return made


def machine_budget(budget: Budget, machine: Machine) -> dict[str, int]:
    """Bytes per tier for a plan on a machine that need not be present."""
    given = dict(budget) if isinstance(budget, Mapping) else {"device": budget}
    limits = {t.name: t.num_bytes - t.reserve_bytes for t in machine.tiers}
    for tier, value in given.items():
        if tier not in limits:
            raise InputError(f"{machine.name} has no tier {tier!r}; it has {', '.join(limits)}")
        if value != "auto":
            size = parse_bytes(value, or_none=tier != "device")
            if size > limits[tier]:
                raise InputError(
                    f"the {tier} budget of {format_bytes(size)} is larger than {machine.name}'s "
                    f"{format_bytes(limits[tier])}"
                )
            limits[tier] = size
    return limits


def call_with(model: nn.Module, batch: Any) -> torch.Tensor:
    """Call a model the way its batch suggests, and take its loss (or a sum of its outputs)."""
    if isinstance(batch, Mapping):
        return stand_in_loss(model, ((), dict(batch)))
    args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return stand_in_loss(model, (args, {}))


def check_compile(what: str | None) -> None:
    """Raise InputError for what cannot be compiled."""
    if what not in (None, "blocks"):
        raise InputError(f'compile is "blocks" or None, not {what!r}')
