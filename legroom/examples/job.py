"""Job: a model, a maker of batches and a loss, and the registry of built-in ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from legroom.core.registry import Registry

Device = str | torch.device


class MakeBatch(Protocol):
    """Makes a batch on the model's device, the same for the same seed."""

    def __call__(self, seed: int = 0) -> Any:
        """A dict or a tuple of tensors."""


@dataclass(frozen=True)
class Job:
    """A model, a maker of batches and a loss: all that a training step needs."""

    model: nn.Module
    make_batch: MakeBatch
    """Takes a seed, returns a dict or a tuple of tensors on the model's device."""
    loss_fn: Callable[[nn.Module, Any], Tensor]
    """Takes the model and a batch, returns a scalar."""


Builder = Callable[..., Job]
EXAMPLES: Registry[Builder] = Registry("example")
