"""What makes two steps alike: shapes, dtypes, and the mode of the model."""

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten


def signature_of(model: nn.Module, args: Any, kwargs: Any) -> str:
    """A short text, equal for steps that run the same ops on the same shapes."""
    leaves, form = tree_flatten((args, kwargs))
    parts = [_part(x) for x in leaves]
    grads = any(p.grad is not None for p in model.parameters())
    cast = ",".join(k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k))
    flags = ["train" if model.training else "eval", *(["grads"] if grads else []), cast]
    mark = zlib.crc32(str(form).encode()) & 0xFFFF
    return f"{'+'.join(f for f in flags if f)} {' '.join(parts)} #{mark:04x}"


def _part(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return f"{dtype}[{','.join(map(str, leaf.shape))}]"
    return repr(leaf)[:40] if isinstance(leaf, bool | int | float | str | None) else "_"
