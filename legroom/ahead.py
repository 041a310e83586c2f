"""Ahead of a run: what a job would take on a machine that need not be there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from legroom.core.errors import BudgetError, InputError, StepError, UnknownName
from legroom.core.outcome import Outcome
from legroom.core.units import format_bytes, parse_bytes
from legroom.machine.spec import Machine, find_machine
from legroom.memory.mechanisms.slim import Slimmer, slim_modules
from legroom.memory.plan import Plan
from legroom.memory.planner import make_plan
from legroom.memory.profile import STATE_RULES, Capture, LossFn, capture_fake, stand_in_loss
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step

if TYPE_CHECKING:
    from legroom.memory.kinds import Made
    from legroom.memory.workshop import Forecaster

Slim = tuple[str, ...]
"""Modules whose gradients are to be slim."""
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
    check_compile(compile)
    found = find_machine(machine)
    preview = Preview(model, batch, found, optimizer, loss_fn, blocks)
    if budget is not None:
        limits = machine_budget(budget, found)
        return preview.plan(limits, policy, compiled=compile is not None).predicted
    step = preview.plain.step
    if compile is not None:
        step = preview.made({"device": ENOUGH}, policy).capture.step
    return Simulator(step, found).run([], "keep_all")


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
    preview = Preview(model, batch, found, optimizer, loss_fn, blocks)
    if compile is None:
        return preview.plain.step
    limits = {"device": ENOUGH} if budget is None else machine_budget(budget, found)
    return preview.made(limits, policy).capture.step


class Preview:
    """A step captured with fake tensors: as it is, with slim gradients, in builds as forecast."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        machine: Machine,
        optimizer: str = "adamw",
        loss_fn: LossFn | None = None,
        blocks: Sequence[str] | None = None,
    ) -> None:
        if optimizer not in STATE_RULES:
            raise UnknownName("optimizer", optimizer, STATE_RULES)
        self.model, self.batch, self.machine = model, batch, machine
        self.optimizer, self.loss_fn, self.blocks = optimizer, loss_fn or call_with, blocks
        self._slimmer = Slimmer(model)
        self.plain = self._capture(visitor=self._slimmer)
        self.slim = slim_modules(self._slimmer.found, self.plain.step)
        """Modules whose gradients could be slimmer, for the sake of room."""
        self._captures: dict[Slim, Capture] = {(): self.plain}
        self._forecasters: dict[Slim, Forecaster] = {}

    def plan(
        self, budget: Mapping[str, int], policy: str, *, compiled: bool = False, quick: bool = False
    ) -> Plan:
        """A plan for a budget; raises BudgetError if there is none."""
        try:
            return self._plan(budget, policy, compiled, quick)
        except BudgetError:
            if not self.slim:
                raise
        return self._plan(budget, policy, compiled, quick, self.slim)

    def made(self, budget: Mapping[str, int], policy: str, slim: Slim = ()) -> "Made":
        """The step in the builds that are best for a budget, as forecast."""
        return self._forecaster(slim).made(budget, policy)

    def _plan(
        self, budget: Mapping[str, int], policy: str, compiled: bool, quick: bool, slim: Slim = ()
    ) -> Plan:
        if not compiled:
            return make_plan(self._captured(slim).step, self.machine, budget, policy, quick=quick)
        made = self.made(budget, policy, slim)
        plan = make_plan(made.capture.step, self.machine, budget, policy, quick=quick)
        how = f"{made.outfit}; " if made.outfit.changes else ""
        return msgspec.structs.replace(plan, why=how + plan.why)

    def _forecaster(self, slim: Slim) -> "Forecaster":
        from legroom.memory.workshop import Forecaster

        if slim not in self._forecasters:
            made = Forecaster(self.model, self._captured(slim), self.machine)
            with self._slimmer.slimming(slim):
                self._capture(visitor=made)
            self._forecasters[slim] = made
        return self._forecasters[slim]

    def _captured(self, slim: Slim) -> Capture:
        if slim not in self._captures:
            with self._slimmer.slimming(slim):
                self._captures[slim] = self._capture()
        return self._captures[slim]

    def _capture(self, **more: Any) -> Capture:
        given = (self.model, self.batch, self.loss_fn, self.machine)
        try:
            return capture_fake(*given, optimizer=self.optimizer, blocks=self.blocks, **more)
        except CANNOT_FOLLOW as error:
            first = (str(error).splitlines() or [""])[0]
            raise StepError(
                f"cannot follow {type(self.model).__name__} without running it "
                f"({type(error).__name__}: {first}): a model that looks at its numbers to choose "
                "its way can be fitted, but not estimated"
            ) from error


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
