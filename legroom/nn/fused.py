"""Between the products of a head: losses and slopes of a chunk of logits in one compiled kernel."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor


def fused_slopes(
    logits: Tensor,
    labels: Tensor,
    shares: Tensor,
    label_smoothing: float,
    softcap: float | None,
    ignore_index: int,
) -> Tensor:
    """The loss of each row; the logits become its slopes, times the row's share.

    Compiled once for all numbers of rows.
    """
    for tensor in (logits, labels, shares):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    made: Tensor = _compiled()(logits, labels, shares, label_smoothing, softcap, ignore_index)
    return made


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(_slopes)


def _slopes(
    logits: Tensor,
    labels: Tensor,
    shares: Tensor,
    smooth: float,
    softcap: float | None,
    ignore_index: int,
) -> Tensor:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    values = logits.to(wide)
    if softcap is not None:
        values = softcap * torch.tanh(values / softcap)
    powers = torch.exp(values - values.amax(1, keepdim=True))
    totals = powers.sum(1, keepdim=True)
    kept = labels != ignore_index
    some = torch.where(kept, labels, 0).unsqueeze(1)
    scores = values.gather(1, some).squeeze(1)
    losses = (values.amax(1) + totals.squeeze(1).log()) - (1.0 - smooth) * scores
    if smooth:
        losses = losses - smooth * values.mean(1)
    words = torch.arange(values.shape[1], device=values.device)
    wanted = torch.where(words == some, 1.0 - smooth, 0.0)
    if smooth:
        wanted = wanted + smooth / values.shape[1]
    slopes = (powers / totals - wanted) * shares.unsqueeze(1)
    if softcap is not None:
        slopes = slopes * (1.0 - (values / softcap) ** 2)
    logits.copy_(slopes)
    return torch.where(kept, losses, 0.0)
