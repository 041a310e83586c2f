"""The head of a causal language model, put off until its loss is asked for.

A model of transformers computes logits and hands them to its loss. Here the head returns logits
that are not made yet: the loss takes hidden states and weight from them and works in chunks. Who
looks at such logits in any other way gets them made in full, as if nothing had been changed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from legroom.core.errors import InputError
from legroom.nn.loss import chunked_cross_entropy


class Unmade:
    """Logits that are made when somebody looks at them."""

    def __init__(self, head: nn.Linear, hidden: Tensor, wide: bool = False) -> None:
        self._head, self._hidden, self._wide = head, hidden, wide
        self._made: Tensor | None = None
        self._version = head.weight._version

    def make(self) -> Tensor:
        """All of them, once; raises RuntimeError if the weight was updated since."""
        if self._made is None:
            if self._head.weight._version != self._version:
                raise RuntimeError(
                    "these logits were not made before the head's weight was changed: look at "
                    "output.logits before optimizer.step(), or call remove() on the chunked head"
                )
            with torch.enable_grad():
                made = nn.Linear.forward(self._head, self._hidden)
            self._made = made.float() if self._wide else made
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

    def float(self) -> "Unmade":
        """The same in float32, which the loss is computed in anyway."""
        return Unmade(self._head, self._hidden, wide=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.make(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made, named = tree_map(_made, (args, kwargs or {}))
        return func(*made, **named)

    def __repr__(self) -> str:
        return repr(self.make())


def _made(leaf: Any) -> Any:
    return leaf.make() if isinstance(leaf, Unmade) else leaf


def _as_tensor(name: str) -> Any:
    def call(self: Unmade, *args: Any) -> Any:
        return getattr(self.make(), name)(*[_made(a) for a in args])

    return call


for _name in (
    "__getitem__", "__len__", "__iter__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
    "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__", "__mod__", "__pow__", "__neg__",
    "__abs__", "__matmul__", "__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__", "__hash__",
    "__float__", "__bool__", "__setitem__",
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

    def _put_off(self, hidden: Tensor) -> Any:
        """Only where a backward can follow: an evaluation gets its logits."""
        if not torch.is_grad_enabled():
            return nn.Linear.forward(self.head, hidden)
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
        following = shift_labels
        if following is None:
            following = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if not isinstance(logits, Unmade) or not logits.fits(following, vocab_size):
            terms = {"ignore_index": ignore_index, "shift_labels": shift_labels, **others}
            return self._plain(_made(logits), labels, vocab_size, num_items_in_batch, **terms)
        return logits.loss(
            following, self.chunks, ignore_index=ignore_index, num_items=num_items_in_batch
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
        from transformers import PreTrainedModel
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError as error:
        raise InputError("chunk_head needs transformers: pip install transformers") from error

    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"{type(model).__name__} is not a model of transformers; if it wraps one, give that one"
        )
    whole: Any = model
    head = whole.get_output_embeddings()
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        raise InputError(f"the head of {type(model).__name__} is {type(head).__name__}, not Linear")
    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        raise InputError(f"the loss of {type(model).__name__} is not that of a causal model")
    if chunks < 1:
        raise InputError(f"chunks is {chunks}; at least 1 is needed")
    return Head(model, head, chunks)
