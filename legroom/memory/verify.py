"""Did it hold: loss and gradients of a planned step against the unplanned one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import inf, isfinite
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from legroom.core.errors import StepError
from legroom.memory.kinds import Kind
from legroom.memory.mechanisms.recompute import RandomState

Closure = Callable[[], Tensor]
Around = Callable[[], AbstractContextManager[Any]]
DOUBTS = 4
"""Unplanned steps more, where a plan seems not to hold: a kernel may seldom repeat itself."""
LOSS = "the loss"
ZERO = 1e-3
"""Gradients smaller than this share of the largest are measured by that: those that would be zero
but for rounding, as of a bias before a norm, differ by their whole size and excuse nothing."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How far the planned step's loss and gradients are from the unplanned step's."""

    identical: bool
    """Every bit of the loss and of all gradients is the same."""
    repeatable: bool
    """Unplanned steps agree bit for bit; if not, some kernel is not deterministic."""
    worst: str = ""
    """The parameter with the largest relative error; empty if identical."""
    worst_error: float = 0.0
    """Largest |difference| of any gradient over its largest |value|, or over `ZERO` of the largest
    of all."""
    noise_error: float = 0.0
    """The same between unplanned steps."""
    num_gradients: int = 0
    exact_plan: bool = True
    """Whether the plan promises identical gradients."""

    @property
    def holds(self) -> bool:
        """The promise was kept: identical, or no further off than the step is from itself."""
        if self.identical or not self.exact_plan:
            return True
        return not self.repeatable and self.worst_error <= 2 * self.noise_error

    def __str__(self) -> str:
        if self.identical:
            return f"loss and {self.num_gradients} gradients are bit-identical"
        text = f"largest relative error {self.worst_error:.2e} in {self.worst}"
        if not self.repeatable:
            text += f" (unplanned steps differ by {self.noise_error:.2e} themselves)"
        return text


def verify_step(
    model: nn.Module,
    device: torch.device,
    closure: Closure,
    planned: Around,
    *,
    exact_plan: bool = True,
) -> Verdict:
    """Run one step three times from the same state: unplanned twice, then planned.

    Where the plan alone seems to be at fault, the unplanned step runs again a few times: kernels
    that add in any order may well give the same twice. `closure` computes the loss. Parameters,
    buffers, gradients and random state are left as found.
    """
    start = Snapshot(model, device)
    repeatable, noise = True, 0.0
    try:
        first = _run(model, closure, nullcontext, start)
        for turn in range(1 + DOUBTS):
            again = _run(model, closure, nullcontext, start)
            repeatable = repeatable and _identical(first, again)
            noise = max(noise, _distance(first, again)[0])
            if not turn:
                mine = _run(model, closure, planned, start)
                identical, (error, worst) = _identical(first, mine), _distance(first, mine)
            if identical or error <= 2 * noise or not exact_plan:
                break
    finally:
        start.restore()
    return Verdict(
        identical=identical,
        repeatable=repeatable,
        worst=worst if error else "",
        worst_error=error,
        noise_error=noise,
        num_gradients=len(first) - 1,
        exact_plan=exact_plan,
    )


class Snapshot:
    """Buffers, gradients and random state, to be put back."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.rng = RandomState.take(device)
        self.buffers = [b.detach().clone() for b in model.buffers()]
        self.grads = [p.grad for p in model.parameters()]

    def restore(self) -> None:
        """Put everything back as it was."""
        self.rng.put(self.device)
        with torch.no_grad():
            for buffer, copy in zip(self.model.buffers(), self.buffers, strict=True):
                buffer.copy_(copy)
        for param, grad in zip(self.model.parameters(), self.grads, strict=True):
            param.grad = grad


def _run(
    model: nn.Module,
    closure: Closure,
    around: Around,
    start: Snapshot,
) -> dict[str, Tensor]:
    start.restore()
    for param in model.parameters():
        param.grad = None
    with around():
        loss = closure()
        loss.backward()  # type: ignore[no-untyped-call]
    found = {LOSS: loss.detach().cpu()}
    for name, param in model.named_parameters():
        if param.grad is not None:
            found[name] = param.grad.detach().cpu()
    return found


def _identical(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(a, two[name]) or _same_bits(a, two[name]) for name, a in one.items()
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal where torch.equal is not: NaN in the same places."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(
        torch.nan_to_num(a), torch.nan_to_num(b)
    ) and torch.equal(a.isnan(), b.isnan())  # fmt: skip


def _distance(one: dict[str, Tensor], two: dict[str, Tensor]) -> tuple[float, str]:
    if one.keys() != two.keys():
        lost = sorted(one.keys() ^ two.keys())
        return inf, f"{lost[0]} (gradient on one side only)"
    tops = {key: float(a.abs().max()) for key, a in one.items() if a.numel()}
    finite = (top for key, top in tops.items() if key != LOSS and isfinite(top))
    least = max(ZERO * max(finite, default=0.0), 1e-30)
    worst, name = 0.0, ""
    for key, a in one.items():
        top = max(tops.get(key, 0.0), least)
        if torch.equal(a, two[key]) or _same_bits(a, two[key]):
            continue
        error = float((a.double() - two[key].double()).abs().max()) / top
        error = error if isfinite(error) else inf
        if error > worst:
            worst, name = error, key
    return worst, name


def settle(
    model: nn.Module,
    device: torch.device,
    closure: Closure,
    step: Around,
    current: Callable[[], Kind | None],
) -> None:
    """Run the step until its plan comes from a recording; states are left as found."""
    keep = Snapshot(model, device)
    try:
        while (kind := current()) is None or not kind.recorded:
            keep.restore()
            for param in model.parameters():
                param.grad = None
            with step():
                closure().backward()  # type: ignore[no-untyped-call]
            if current() is None:
                raise StepError("the closure ran no forward of the fitted model")
    finally:
        keep.restore()
