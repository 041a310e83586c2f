"""The head of a causal language model, put off until its loss is asked for.

A model of transformers computes logits and hands them to its loss. Here the head returns logits
that are not made yet: the loss takes hidden states and weight from them and works in chunks. Who
looks at such logits in any other way gets them made in full, as if nothing had been changed.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from legroom.core.errors import InputError
from legroom.nn.loss import chunked_cross_entropy


class Unmade:
    """Logits that are made when somebody looks at them."""

    def __init__(self, head: nn.Linear, hidden: Tensor) -> None:
        self._head, self._hidden = head, hidden
        self._made: Tensor | None = None
        self._grad = torch.is_grad_enabled()

    def make(self) -> Tensor:
        """All of them, once."""
        if self._made is None:
            with torch.set_grad_enabled(self._grad):
                self._made = nn.Linear.forward(self._head, self._hidden)
        return self._made

    def fits(self, labels: Tensor, vocab_size: int) -> bool:
        """Whether there is a label for each row, and a row of the weight for each word."""
        return labels.shape == self._hidden.shape[:-1] and vocab_size == len(self._head.weight)

    def loss(self, labels: Tensor, chunks: int, **terms: Any) -> Tensor:
        """Cross entropy of the labels, in chunks."""
        head, hidden = self._head, self._hidden
        labels = labels.to(hidden.device)
        return chunked_cross_entropy(
            hidden, head.weight, labels, bias=head.bias, chunks=chunks, **terms
        )

    def float(self) -> Self:
        """Itself: the loss is computed in float32 in any case."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.make(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = [a.make() if isinstance(a, Unmade) else a for a in args]
        named = {k: v.make() if isinstance(v, Unmade) else v for k, v in (kwargs or {}).items()}
        return func(*made, **named)

    def __repr__(self) -> str:
        return repr(self.make())


def _as_tensor(name: str) -> Any:
    def call(self: Unmade, *args: Any) -> Any:
        return getattr(self.make(), name)(*args)

    return call


for _name in (
    "__getitem__", "__len__", "__iter__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
    "__rmul__", "__truediv__", "__neg__", "__matmul__", "__gt__", "__lt__", "__eq__", "__hash__",
    "__float__", "__bool__",
):  # fmt: skip
    setattr(Unmade, _name, _as_tensor(_name))


class Head:
    """A model whose loss is computed in chunks; `remove` makes it as it was."""

    def __init__(self, model: nn.Module, head: nn.Linear, chunks: int) -> None:
        self.model, self.head, self.chunks = model, head, chunks
        self._plain: Any = model.loss_function
        self._before = {k: v for k, v in model.__dict__.items() if k == "_loss_function"}
        head.__dict__["forward"] = self._put_off
        model.__dict__["_loss_function"] = self._loss

    def _put_off(self, hidden: Tensor) -> Unmade:
        return Unmade(self.head, hidden)

    def _loss(
        self,
        logits: Any,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """As transformers has it, whose loss takes no notice of others either."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        fits = isinstance(logits, Unmade) and logits.fits(shift_labels, vocab_size)
        if not fits:
            made = logits.make() if isinstance(logits, Unmade) else logits
            terms = {"ignore_index": ignore_index, "shift_labels": shift_labels, **others}
            return self._plain(made, labels, vocab_size, num_items_in_batch, **terms)
        return logits.loss(
            shift_labels, self.chunks, ignore_index=ignore_index, num_items=num_items_in_batch
        )

    def remove(self) -> None:
        """The model computes its loss as before."""
        self.head.__dict__.pop("forward", None)
        self.model.__dict__.pop("_loss_function", None)
        self.model.__dict__.update(self._before)


def chunk_head(model: nn.Module, chunks: int = 8) -> Head:
    """Have a causal language model of transformers compute its loss in chunks.

        legroom.nn.chunk_head(model, chunks=8)
        loss = model(input_ids=ids, labels=ids).loss

    All the logits are then never there at once, unless somebody looks at `output.logits`. The loss
    equals the model's own to the tolerance of `chunked_cross_entropy`.

    Raises InputError for a model with another loss, or another head than a linear layer.
    """
    try:
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError as error:
        raise InputError("chunk_head needs transformers: pip install transformers") from error

    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        raise InputError(f"the head of {type(model).__name__} is {type(head).__name__}, not Linear")
    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        raise InputError(f"the loss of {type(model).__name__} is not that of a causal model")
    if chunks < 1:
        raise InputError(f"chunks is {chunks}; at least 1 is needed")
    return Head(model, head, chunks)
