"""A callback that keeps the steps of a Lightning Trainer in a memory budget.

from legroom.integrations.lightning import LegroomCallback

trainer = lightning.Trainer(callbacks=[LegroomCallback("16GiB")])
trainer.fit(module, loader)
"""

from typing import Any

from torch import nn

from legroom.ahead import Budget
from legroom.api import Job
from legroom.core.errors import InputError, UnknownName
from legroom.integrations.steps import JobSteps, log

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "legroom.integrations.lightning needs lightning: pip install 'legroom[lightning]'"
    ) from error


class LegroomCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Fits the module that `training_step` calls to a budget; takes what `legroom.fit` takes.

    `module` is the path of the module that `training_step` calls ("model" for `self.model(x)`).
    Left out, it is the LightningModule itself if that has a forward (`self(x)`), and else its
    largest child. Each batch is a step; with accumulated gradients the last one has the update.
    """

    def __init__(
        self, budget: Budget = "auto", *, module: str | None = None, **options: Any
    ) -> None:
        self.module = module
        self._steps = JobSteps({"budget": budget, **options})

    @property
    def job(self) -> Job | None:
        """The job, for its reports; None before training begins."""
        return self._steps.job

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit the module, on its device by now; raises InputError as `legroom.fit` does."""
        if len(trainer.optimizers) > 1:
            raise InputError(
                f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers; "
                "a step with one is needed"
            )
        self.module = _path(pl_module) if self.module is None else self.module
        model = _find(pl_module, self.module)
        self._steps.fit(model, trainer.optimizers[0] if trainer.optimizers else None)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A batch is about to run."""
        self._steps.open()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """The batch is done, its update included; validation comes after this.

        Raises InputError when `training_step` did not call the fitted module.
        """
        missed = self.job is not None and not self.job.kinds
        self._steps.end()
        if missed:
            children = ", ".join(repr(name) for name, _ in pl_module.named_children())
            raise InputError(
                f"training_step did not call {self.module or 'the module itself'!r}: name the "
                f"module it calls, such as LegroomCallback(budget, module=...) with {children}"
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say how it went, and take all hooks out of the model."""
        self._steps.drop()
        log.info("legroom: %s", self._steps.summary())
        self._steps.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the step that failed, and take all hooks out of the model."""
        self._steps.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take all hooks out of the model, however the run ended."""
        self._steps.close()


def _path(module: LightningModule) -> str:
    """The module that `training_step` calls, most likely: itself, or its largest child."""
    if type(module).forward is not LightningModule.forward:
        return ""
    sizes = {name: _num_parameters(child) for name, child in module.named_children()}
    return max(sizes, key=lambda name: sizes[name], default="")


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _find(root: LightningModule, path: str) -> nn.Module:
    modules = dict(root.named_modules())
    if path not in modules:
        raise UnknownName(f"module of {type(root).__name__}", path, filter(None, modules))
    found: nn.Module = modules[path]
    return found
