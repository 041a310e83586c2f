"""What a head and its labels must be like to go together."""

import torch
from torch import Tensor

from legroom.core.errors import InputError


def check_tensors(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
    """Raise for tensors that do not go together, by name."""
    if not hidden.is_floating_point():
        raise TypeError(f"hidden is {hidden.dtype}; it must be of a floating dtype")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels are {labels.dtype}; they must be integers, one class per row")
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1]:
        raise InputError(f"{shapes}: they must be [..., dim] and [vocabulary, dim]")
    if labels.shape != hidden.shape[:-1]:
        raise InputError(f"labels {tuple(labels.shape)} do not match the rows of {shapes}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"bias {tuple(bias.shape)} does not match {shapes}: one per word")
    for name, other in (("weight", weight), ("labels", labels), ("bias", bias)):
        if other is not None and other.device != hidden.device:
            raise InputError(f"hidden is on {hidden.device} and {name} on {other.device}")
