"""A stand-in for an optimizer, through which its own step finds its parameters updated already.

torch calls hooks before a step, then the code of the step, then hooks after it. A hook of ours has
that code run with a stand-in, which does the update as soon as that code asks for parameters, and
then has none for it. All others, whoever registered a hook and when, see the optimizer as it is.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[..., Any]


def step_code(optimizer: torch.optim.Optimizer | None) -> Step | None:
    """The code of an optimizer's step beneath all that was put around it; None if not torch's."""
    step: Any = getattr(type(optimizer), "step", None)
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    found = hasattr(step, "__code__") and step.__module__.startswith("torch.optim.")
    return step if found and step.__name__ == "step" else None


def run_step(step: Step, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
    """Run that code by itself, as torch does."""
    with torch.set_grad_enabled(bool(optimizer.defaults.get("differentiable"))):
        step(optimizer, **kwargs)


class StandIn:
    """An optimizer to the code of its own step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, step: Step, updated: Callable[[], bool]
    ) -> None:
        parts = {"_optimizer": optimizer, "_code": step.__code__, "_updated": updated}
        self.__dict__.update(parts, _groups=None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """To the step: none after an update in waves, else the optimizer's own."""
        if sys._getframe(1).f_code is not self._code:
            return self._optimizer.param_groups  # type: ignore[no-any-return]
        if self._groups is None:
            done = self._updated()
            self.__dict__["_groups"] = [] if done else self._optimizer.param_groups
        return self._groups  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_optimizer"], name, value)
