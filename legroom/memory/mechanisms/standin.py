"""A stand-in for an optimizer, through which its own step finds its parameters updated already.

torch calls hooks before a step, then the code of the step, then hooks after it. A hook of ours has
that code run with a stand-in, which does the update as soon as it is asked for parameters, and then
has none. So all hooks, whoever registered them and when, see the optimizer as it always is.
"""

from collections.abc import Callable
from typing import Any

import torch


class StandIn:
    """An optimizer to the code of its own step."""

    def __init__(self, optimizer: torch.optim.Optimizer, updated: Callable[[], bool]) -> None:
        self.__dict__.update(_optimizer=optimizer, _updated=updated, _groups=None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Asked for the first time: none after an update in waves, else the optimizer's own."""
        if self._groups is None:
            done = self._updated()
            self.__dict__["_groups"] = [] if done else self._optimizer.param_groups
        return self._groups  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_optimizer"], name, value)
