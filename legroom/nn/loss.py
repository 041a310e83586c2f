"""The head of a language model and its loss, a few rows at a time."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.nn import functional as F

from legroom.core.errors import InputError, UnknownName
from legroom.nn.checks import check_tensors
from legroom.nn.fused import fused_slopes

__all__ = ["chunked_cross_entropy"]

REDUCTIONS = ("mean", "sum", "none")
NUM_VOCAB_PIECES = 8
"""Scratch as long as the vocabulary is made in this many pieces, one after another."""
HALF_LIFT = 2.0**15
"""Slopes are at most one. As float16 they are held this much larger, so that small ones live."""

P = ParamSpec("P")
R = TypeVar("R")
Grads = tuple[Tensor | None, ...]
"""Gradients of the hidden states, the weight and the bias; None where not asked for."""


def _not_compiled(fn: Callable[P, R]) -> Callable[P, R]:
    """Break compiled graphs at a function, and run it as it is written.

    As a part of the graph, the loop over chunks is unrolled, and the compiler keeps several chunks
    at once: on a small model the peak was above that of all the logits.
    """
    why = "compiled, the chunks of logits would not be freed one by one"
    plain: Callable[P, R] = torch.compiler.disable(fn, reason=why)  # type: ignore[no-untyped-call]
    return plain


@_not_compiled
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunks: int = 8,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    num_items: Tensor | int | None = None,
    fused: bool = False,
) -> Tensor:
    """A linear head and its cross entropy, without ever holding all the logits.

    The same as `F.cross_entropy(F.linear(hidden, weight, bias).float().view(-1, vocabulary),
    labels.view(-1), ...)`, in `chunks` pieces of the rows, of which one at a time is in memory.

        loss = chunked_cross_entropy(hidden[:, :-1], model.lm_head.weight, ids[:, 1:])

    `hidden` is [..., dim], `weight` [vocabulary, dim], `labels` [...] integers. `num_items` takes
    the place of the number of labels in a mean. `softcap` bounds the logits as Gemma 2 does, here
    in float32. "none" gives one loss per row, flat, and makes the logits twice. Gradients are made
    in forward and wait for backward: for float16 in float32, so that a loss scale comes in time.
    `fused` compiles what lies between the head's products into one kernel: seconds to begin with.

    Measured against that formula on CPU, up to 2048 rows and 4000 words, as |a - b| / |b|:

                  loss   gradient of hidden   of weight   of bias
        float32   3e-7         3e-6             3e-6        5e-6
        bfloat16  3e-7         5e-3             5e-3        6e-3
        float16   3e-7         6e-4             6e-4        7e-4    (loss scaled by 256)

    Raises InputError, a ValueError, for shapes or terms that do not fit, and TypeError for dtypes.
    """
    check_tensors(hidden, weight, bias, labels)
    terms = _Terms(
        chunks=chunks,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        dtype=_product_dtype(hidden, weight, bias),
        with_grad=torch.is_grad_enabled(),
        fused=fused,
    )
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    loss: Tensor = _apply(rows, weight, bias, flat, _divisor(flat, num_items, terms), terms)
    return loss


@dataclass(frozen=True)
class _Terms:
    """How the loss is made, but for its tensors; `dtype` is that of the head's product."""

    chunks: int
    ignore_index: int
    reduction: str
    label_smoothing: float
    softcap: float | None
    dtype: torch.dtype
    with_grad: bool
    fused: bool

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise UnknownName("reduction", str(self.reduction), REDUCTIONS)
        if self.chunks < 1:
            raise InputError(f"chunks is {self.chunks}; at least 1 is needed")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise InputError(f"label_smoothing is {self.label_smoothing}, not between 0 and 1")
        if self.softcap is not None and not self.softcap > 0.0:
            raise InputError(f"softcap is {self.softcap}; it must be above 0, or None for no cap")


class _Inputs(NamedTuple):
    """Rows of hidden states, the head, and one label per row."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor


class _ChunkedLoss(Function):
    """The loss, its gradients made in forward, where each chunk of logits is at hand.

    Backward only scales them. With reduction "none" it alone knows what each row counts: there
    the inputs are saved, and the chunks are made again.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """The loss of flat inputs, what to divide it by, and the terms."""
        inputs, divisor, terms = _Inputs(*args[:4]), args[4], args[5]
        ctx.terms = terms
        ctx.dtypes = [terms.dtype if t is None else t.dtype for t in inputs[:3]]
        if terms.reduction == "none":
            ctx.save_for_backward(*inputs)
            return _sweep(inputs, terms)
        needs = ctx.needs_input_grad[:3]
        if terms.with_grad and any(needs):
            losses, grads = _with_grads(inputs, divisor.reciprocal(), needs, terms)
            ctx.save_for_backward(*_cast(grads, [_patient(d) for d in ctx.dtypes]))
        else:
            losses = _sweep(inputs, terms)
        return torch.div(losses.sum(), divisor)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        """The gradients, times that of the loss."""
        with torch.no_grad():
            made = _made_again if ctx.terms.reduction == "none" else _scaled
            grads = made(ctx, outer[0])
        if torch.is_grad_enabled():
            grads = tuple(None if g is None else _once(g.requires_grad_()) for g in grads)
        return *grads, None, None, None


class _NoSecond(Function):
    """A gradient that cannot be differentiated, and says so to who tries."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        grad: Tensor = args[0]
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        raise RuntimeError("chunked_cross_entropy has no second derivative; F.cross_entropy has")


_apply: Any = _ChunkedLoss.apply
_once: Any = _NoSecond.apply


def _scaled(ctx: Any, outer: Tensor) -> Grads:
    """The saved gradients times that of the loss: in place where no backward can come again."""
    last = not torch._C._autograd._get_current_graph_task_keep_graph()
    saved = ctx.saved_tensors
    grads = [g if g is None else g.mul_(outer) if last else g * outer for g in saved]
    return _cast(grads, ctx.dtypes)


def _made_again(ctx: Any, outer: Tensor) -> Grads:
    """The gradients where each row has its own incoming one."""
    inputs = _Inputs(*ctx.saved_tensors)
    _, grads = _with_grads(inputs, outer, ctx.needs_input_grad[:3], ctx.terms)
    return _cast(grads, ctx.dtypes)


def _with_grads(
    inputs: _Inputs, share: Tensor, needs: tuple[bool, ...], terms: _Terms
) -> tuple[Tensor, Grads]:
    """The loss of each row, and the gradients of their sum with each row counted by its share.

    Slopes carry a row's share as a part of the largest, which is multiplied in after the products:
    so they never pass one, and a small share (one of very many rows) takes no bits from them.
    """
    kept = inputs.labels != terms.ignore_index
    shares = torch.where(kept, share, 0.0).to(_wide(terms.dtype))
    top = F.pad(shares.abs(), (0, 1)).amax().clamp_min(torch.finfo(shares.dtype).tiny)
    lift = HALF_LIFT if terms.dtype == torch.float16 else 1.0
    sums = _Sums(inputs, needs, top / lift)
    losses = _sweep(inputs, terms, shares.div_(top).mul_(lift), sums)
    return losses, sums.finish()


class _Sums:
    """The gradients asked for, filled chunk by chunk."""

    def __init__(self, inputs: _Inputs, needs: tuple[bool, ...], scale: Tensor) -> None:
        hidden, weight, bias, _ = inputs
        self.scale = scale
        self.hidden = torch.empty_like(hidden, dtype=_patient(hidden.dtype)) if needs[0] else None
        self.weight = _wide_zeros(weight) if needs[1] else None
        self.bias = _wide_zeros(bias) if needs[2] and bias is not None else None

    def add(self, part: slice, slopes: Tensor, rows: Tensor, weight: Tensor) -> None:
        """Take in the slopes of some rows: the gradients of their logits."""
        pieces = [slice(None)] if slopes.is_cuda else _pieces(slopes)
        if self.hidden is not None:
            total = _wide_zeros(rows)
            for piece in pieces:
                _add_product(total, slopes[:, piece], weight[piece])
            self.hidden[part] = total.mul_(self.scale)
            del total
        if self.weight is not None:
            for piece in pieces:
                _add_product(self.weight[piece], slopes[:, piece].t(), rows)
        if self.bias is not None:
            self.bias.add_(slopes.sum(0, dtype=self.bias.dtype))

    def finish(self) -> Grads:
        """All of them, to scale."""
        for total in (self.weight, self.bias):
            if total is not None:
                total.mul_(self.scale)
        return self.hidden, self.weight, self.bias


def _sweep(
    inputs: _Inputs, terms: _Terms, shares: Tensor | None = None, sums: _Sums | None = None
) -> Tensor:
    """The loss of each row, chunk by chunk; with shares, the gradients go to the sums."""
    hidden, labels = inputs.hidden, inputs.labels
    size = max(1, -(-len(hidden) // terms.chunks))
    losses = hidden.new_zeros(len(hidden), dtype=_wide(terms.dtype))
    with _no_autocast(hidden.device):
        weight = inputs.weight.to(terms.dtype)
        bias = None if inputs.bias is None else inputs.bias.to(terms.dtype)
        for begin in range(0, len(hidden), size):
            part = slice(begin, begin + size)
            chunk = _Inputs(hidden[part].to(terms.dtype), weight, bias, labels[part])
            share = None if shares is None else shares[part]
            losses[part], slopes = _one_chunk(chunk, share, terms)
            if sums is not None:
                sums.add(part, slopes, chunk.hidden, weight)
            del slopes
    return losses


def _one_chunk(chunk: _Inputs, shares: Tensor | None, terms: _Terms) -> tuple[Tensor, Tensor]:
    """The loss of each row; with shares also its slope by each logit, in the product's dtype."""
    logits = F.linear(chunk.hidden, chunk.weight, chunk.bias)
    if terms.fused and shares is not None:
        how = (terms.label_smoothing, terms.softcap, terms.ignore_index)
        return fused_slopes(logits, chunk.labels, shares, *how), logits
    values = _wide_logits(logits, terms.softcap)
    losses, totals = _exp_in_place(values, chunk.labels, terms)
    if shares is None:
        return losses, logits
    values.mul_((shares / totals).unsqueeze(1))
    _subtract_targets(values, chunk.labels, shares, terms)
    if terms.softcap is not None:
        _through_cap(values, logits, terms.softcap)
    return losses, values if values.dtype == logits.dtype else logits.copy_(values)


def _wide_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits in a dtype to reckon in, free to overwrite; those to be capped are a copy."""
    values = logits.to(_wide(logits.dtype), copy=softcap is not None)
    return values if softcap is None else values.div_(softcap).tanh_().mul_(softcap)


def _exp_in_place(values: Tensor, labels: Tensor, terms: _Terms) -> tuple[Tensor, Tensor]:
    """The loss of each row; its logits become exponentials, which sum to the second result."""
    smooth = terms.label_smoothing
    values.sub_(values.amax(1, keepdim=True))
    losses = F.nll_loss(values, labels, ignore_index=terms.ignore_index, reduction="none")
    if smooth:
        losses.mul_(1.0 - smooth).sub_(values.mean(1), alpha=smooth)
    totals = values.exp_().sum(1)
    kept = labels != terms.ignore_index
    return torch.where(kept, losses.add_(totals.log()), 0.0), totals


def _subtract_targets(values: Tensor, labels: Tensor, shares: Tensor, terms: _Terms) -> None:
    """Take the wanted probabilities off the predicted ones, both times the row's share."""
    smooth = terms.label_smoothing
    if smooth:
        values.sub_((shares * (smooth / values.shape[1])).unsqueeze(1))
    rows = torch.arange(len(labels), device=labels.device)
    some = torch.where(labels == terms.ignore_index, 0, labels)
    values[rows, some] -= shares * (1.0 - smooth)


def _through_cap(slopes: Tensor, logits: Tensor, softcap: float) -> None:
    """Multiply by the slope of the cap itself, one less its squared tanh; spends the logits."""
    for piece in _pieces(logits):
        tanh = logits[:, piece].to(slopes.dtype).div_(softcap).tanh_()
        slopes[:, piece].mul_(tanh.square_().neg_().add_(1.0))
        del tanh


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product; its sum is not rounded to the dtype of narrower factors."""
    if left.is_cuda and left.dtype != into.dtype:
        if isinstance(left, FakeTensor):  # which cannot follow the other in torch 2.11
            into.add_(torch.mm(left, right, out_dtype=into.dtype))
        else:
            torch.addmm(into, left, right, out_dtype=into.dtype, out=into)
    else:
        into.addmm_(left.to(into.dtype), right.to(into.dtype))


def _pieces(product: Tensor) -> list[slice]:
    """The vocabulary in pieces, or whole where a wide dtype needs no scratch to convert."""
    vocab = product.shape[1]
    num = 1 if product.dtype == _wide(product.dtype) else NUM_VOCAB_PIECES
    size = max(1, -(-vocab // num))
    return [slice(begin, begin + size) for begin in range(0, vocab, size)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to reckon and to sum in."""
    return dtype if dtype == torch.float64 else torch.float32


def _wide_zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=_wide(like.dtype), device=like.device)


def _patient(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a gradient until backward: float16 waits for its scale, lest it underflow."""
    return torch.float32 if dtype == torch.float16 else dtype


def _cast(grads: Iterable[Tensor | None], dtypes: Iterable[torch.dtype]) -> Grads:
    pairs = zip(grads, dtypes, strict=True)
    return tuple(None if grad is None else grad.to(dtype) for grad, dtype in pairs)


def _divisor(labels: Tensor, num_items: Tensor | int | None, terms: _Terms) -> Tensor:
    """What to divide the sum of all rows' losses by."""
    dtype, device = _wide(terms.dtype), labels.device
    if num_items is not None and terms.reduction != "mean":
        raise InputError(f"num_items goes with reduction 'mean', not with {terms.reduction!r}")
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise InputError(f"num_items is one number, not of shape {tuple(num_items.shape)}")
        return num_items.detach().reshape(()).to(device, dtype)
    if num_items is None and terms.reduction == "mean":
        return (labels != terms.ignore_index).sum(dtype=dtype)
    return torch.full((), 1 if num_items is None else num_items, dtype=dtype, device=device)


def _autocast_on(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Dtypes as they are written, even under autocast."""
    on = _autocast_on(device)
    return torch.autocast(device.type, enabled=False) if on else contextlib.nullcontext()


def _product_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype of the head's product, as a linear layer would choose it."""
    if _autocast_on(hidden.device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != hidden.dtype:
            raise TypeError(
                f"hidden is {hidden.dtype} and {name} is {other.dtype};"
                " give both one dtype, or call inside torch.autocast"
            )
    return hidden.dtype
