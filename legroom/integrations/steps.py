"""A job whose steps are opened by one call and closed by another, as callbacks need it."""

import contextlib
import logging
import sys
from typing import Any

import torch
from torch import nn

from legroom.api import Job, fit
from legroom.core.units import format_bytes, format_seconds

log = logging.getLogger("legroom")


class JobSteps:
    """Holds a job and its open step; whatever happens, `close` takes both away."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.job: Job | None = None
        """The job, kept for its reports after it is closed; None before the first `fit`."""
        self._step: contextlib.ExitStack | None = None
        self._guard: Any = None

    def fit(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Job:
        """Make the job; one left over from a run that failed is closed first."""
        self.close()
        self.job = fit(model, _bare(optimizer), **self.options)
        # Trainers do not tell their callbacks that a forward has failed; the model does.
        self._guard = model.register_forward_hook(self._after_forward, always_call=True)
        return self.job

    def open(self) -> None:
        """Begin a step; one that is still open is closed first."""
        self.end()
        if self.job is not None and self._guard is not None:
            stack = contextlib.ExitStack()
            stack.enter_context(self.job.step())
            self._step = stack

    def end(self) -> None:
        """End the step, if one is open; a step with no forward in it is dropped."""
        if self._step is None or self.job is None or self.job.current is None:
            self.drop()
            return
        stack, self._step = self._step, None
        stack.close()

    def drop(self) -> None:
        """Leave an open step as an exception would: it is not counted, and nothing is said."""
        stack, self._step = self._step, None
        if stack is not None:
            reason = RuntimeError("the step was given up")
            stack.__exit__(RuntimeError, reason, None)

    def close(self) -> None:
        """Drop an open step and take all hooks out of the model; may be called again."""
        self.drop()
        if self._guard is not None:
            self._guard.remove()
            self._guard = None
        if self.job is not None:
            self.job.close()

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        if output is None and sys.exc_info()[0] is not None:
            self.drop()

    def summary(self) -> str:
        """The job in one line: what was predicted, and what was measured if anything was."""
        kinds = [kind for kind in self.job.kinds.values() if kind.plan] if self.job else []
        if self.job is None or not kinds:
            return "no step was run"
        found = self.job.comparison(max(kinds, key=lambda kind: kind.visits))
        budget = format_bytes(self.job.budget["device"])
        text = f"budget {budget}; predicted {_in_words(found.predicted)}"
        return text + (f"; measured {_in_words(found.measured)}" if found.measured else "")


def _in_words(outcome: Any) -> str:
    peak = format_bytes(outcome.device_bytes) if outcome.device_bytes else "not taken"
    return f"peak {peak}, step {format_seconds(outcome.step_s)}"


def _bare(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer itself, out of the wrapper a trainer may have put around it."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        if not hasattr(optimizer, "optimizer"):
            return None
        optimizer = optimizer.optimizer
    return optimizer
