"""A callback that keeps the steps of a transformers.Trainer in a memory budget.

    from legroom.integrations.huggingface import LegroomCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[LegroomCallback("16GiB")])
    trainer.train()

[Note: exceptions] A Trainer does not tell its callbacks when training fails. A failed forward is
seen through the model, and its step left at once; after any other failure the next `train`, or
`callback.close()`, cleans up. As a context manager the callback is closed whatever happens:

    with LegroomCallback("16GiB") as callback:
        trainer.add_callback(callback)
        trainer.train()
"""

from typing import Any, Self

import torch
from torch import nn

from legroom.ahead import Budget
from legroom.api import Job
from legroom.integrations.steps import JobSteps, log

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "legroom.integrations.huggingface needs transformers: pip install 'legroom[transformers]'"
    ) from error


class LegroomCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Fits the Trainer's model to a budget; takes what `legroom.fit` takes.

    With gradient accumulation each micro-batch is a step of its own, since each one has its own
    peak; the last one holds the update. Evaluation runs between steps, untouched.
    """

    def __init__(self, budget: Budget = "auto", **options: Any) -> None:
        self._steps = JobSteps({"budget": budget, **options})

    @property
    def job(self) -> Job | None:
        """The job, for its reports; None before training begins."""
        return self._steps.job

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **_: Any,
    ) -> None:
        """Fit the model, which is on its device by now; raises InputError as `legroom.fit` does."""
        assert model is not None, "a Trainer hands its model to its callbacks"
        self._steps.fit(model, optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first micro-batch of an update is about to run."""
        self._steps.open()

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A micro-batch is done, and the next one follows."""
        self._steps.open()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The update is done; evaluation, logging and saving come after this."""
        self._steps.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say how it went, and take all hooks out of the model."""
        self._steps.drop()
        log.info("legroom: %s", self._steps.summary())
        self.close()

    def close(self) -> None:
        """Take all hooks out of the model; what has been measured stays with `job`."""
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
