"""What makes two steps alike: shapes, dtypes, and the mode of the model."""

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten


class Signer:
    """Gives signatures for the steps of one model, whose parts are looked up once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules, self.params = list(model.modules()), list(model.parameters())

    def signature(self, args: Any, kwargs: Any) -> str:
        """A short text, equal for steps that run the same ops on the same shapes."""
        leaves, form = tree_flatten((args, kwargs))
        parts = [_part(x) for x in leaves]
        grads = any(p.grad is not None for p in self.params)
        cast = ",".join(k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k))
        flags = ["train" if self.model.training else "eval", *(["grads"] if grads else []), cast]
        trained = bytes([p.requires_grad for p in self.params])
        modes = bytes([m.training for m in self.modules])
        mark = zlib.crc32(str(form).encode() + trained + modes)
        return f"{'+'.join(f for f in flags if f)} {' '.join(parts)} #{mark:08x}"


def _part(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return f"{dtype}[{','.join(map(str, leaf.shape))}]"
    # Numbers change from step to step (a temperature, a counter) and seldom change the ops.
    return repr(leaf)[:40] if isinstance(leaf, bool | str | None) else "_"
