"""The head of a causal language model, put off until its loss is asked for.

A model of transformers computes logits and hands them to its loss. Here the head returns logits
that are not made yet: the loss takes hidden states and weight from them and works in chunks. Who
looks at such logits in any other way gets them made in full, as if nothing had been changed.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_map

from legroom.core.errors import InputError
from legroom.nn.loss import chunked_cross_entropy


class Unmade:
    """Logits that are made when somebody looks at them."""

    def __init__(self, head: nn.Linear, hidden: Tensor, wide: bool = False) -> None:
        self._head, self._hidden, self._wide = head, hidden, wide
        self._made: Tensor | None = None
        self._version = head.weight._version
        self._looks: list[bool] | None = None
        self._casts, cast = _autocast_of(hidden)
        self._dtype = torch.float32 if wide else cast or head.weight.dtype

    def make(self) -> Tensor:
        """All of them, once; raises RuntimeError if the weight was updated since."""
        if self._looks is not None:
            self._looks.append(True)
        return self._make()

    def _make(self) -> Tensor:
        if self._made is None:
            if self._head.weight._version != self._version:
                raise RuntimeError(
                    "these logits were not made before the head's weight was changed: look at "
                    "output.logits before optimizer.step(); or do without chunk_head, or without "
                    "compile='blocks' if you gave that to legroom.fit"
                )
            with torch.enable_grad(), self._casts():
                made = nn.Linear.forward(self._head, self._hidden)
            self._made = made.float() if self._wide else made
        return self._made

    @property
    def dtype(self) -> torch.dtype:
        """That it will have."""
        return self._dtype

    @property
    def shape(self) -> torch.Size:
        """As it will be."""
        return torch.Size((*self._hidden.shape[:-1], len(self._head.weight)))

    @property
    def device(self) -> torch.device:
        """Where it will be."""
        return self._hidden.device

    def rows_for(self, labels: Tensor, vocab_size: int) -> Tensor | None:
        """The hidden states, if there is a label for each and a row of the weight for each word."""
        fits = labels.shape == self._hidden.shape[:-1] and vocab_size == len(self._head.weight)
        return self._hidden if fits else None

    def float(self) -> "Unmade":
        """The same in float32, which the loss is computed in anyway."""
        wide = Unmade(self._head, self._hidden, wide=True)
        wide._looks = self._looks
        wide._made = None if self._made is None else self._made.float()
        return wide

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


def _autocast_of(
    hidden: Tensor,
) -> tuple[Callable[[], contextlib.AbstractContextManager[Any]], torch.dtype | None]:
    """Autocast as it is now, for later; and the dtype it casts to, if it does."""
    kind = hidden.device.type
    if not torch.amp.is_autocast_available(kind):
        return contextlib.nullcontext, None
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    casts = enabled and hidden.dtype != torch.float64
    return (lambda: torch.autocast(kind, dtype, enabled=enabled)), dtype if casts else None


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


class Call(NamedTuple):
    """What a loss in chunks is given."""

    hidden: Tensor
    terms: dict[str, Any]
    """The labels among them."""


class Head:
    """The head of a causal model, whose loss can be had in chunks."""

    def __init__(self, model: nn.Module, head: nn.Linear, fused: bool = False) -> None:
        self.model, self.head, self.fused = model, head, fused
        self.chunks = 0
        """How many there are now; 0: the model computes its loss itself."""
        self.as_module = False
        """Whether the loss is a call of the head's module, for who hangs hooks on that."""
        self._plain: Any = model.loss_function
        self._was: dict[str, Any] | None = None
        self._ours: tuple[Any, ...] = ()
        self._note: Callable[[Call], None] | None = None
        self._looks: list[bool] | None = None

    def put(self, chunks: int) -> None:
        """Have the loss in so many chunks from now on; not where the user has a hand in it."""
        if chunks != self.chunks:
            self.remove()
            if chunks and self.free:
                self._patch(self._forward, self._loss)
                self.chunks = chunks

    @property
    def free(self) -> bool:
        """Whether nobody hangs hooks on the head, or has put another forward or loss in place."""
        if self._was is not None:
            return True
        head = self.head
        there = [*head._forward_hooks.values(), *head._forward_pre_hooks.values()]
        there += [*head._backward_hooks.values(), *head._backward_pre_hooks.values()]
        mine = all(getattr(hook, "__module__", "").startswith("legroom.") for hook in there)
        same = getattr(self.model, "loss_function", None) is self._plain
        return mine and same and "forward" not in head.__dict__

    def remove(self) -> None:
        """The model computes its loss as before."""
        if self._was is not None:
            for thing, name in ((self.head, "forward"), (self.model, "_loss_function")):
                if thing.__dict__.get(name) in self._ours:  # else the user has put another there
                    thing.__dict__.pop(name, None)
                    thing.__dict__.update({k: v for k, v in self._was.items() if k == name})
            self._was, self.chunks = None, 0

    def _patch(self, forward: Any, loss: Any) -> None:
        self._was = {k: v for k, v in self.model.__dict__.items() if k == "_loss_function"}
        self._ours = (forward, loss)
        self.head.__dict__["forward"] = forward
        self.model.__dict__["_loss_function"] = loss

    def loss(self, hidden: Tensor, *, chunks: int, labels: Tensor, **terms: Any) -> Tensor:
        """Cross entropy of the labels."""
        weight, bias, labels = self.head.weight, self.head.bias, labels.to(hidden.device)
        fused = self.fused and _get_current_dispatch_mode() is None  # which sees ops one by one
        return chunked_cross_entropy(
            hidden, weight, labels, bias=bias, chunks=chunks, fused=fused, **terms
        )

    def _forward(self, hidden: Tensor, labels: Tensor | None = None, **terms: Any) -> Any:
        """Logits put off where a backward can follow; an evaluation gets them; or the loss."""
        if labels is not None:
            return self.loss(hidden, chunks=self.chunks, labels=labels, **terms)
        if not torch.is_grad_enabled():
            return nn.Linear.forward(self.head, hidden)
        logits = Unmade(self.head, hidden)
        logits._looks = self._looks
        return logits

    def _loss(self, logits: Any, labels: Tensor, vocab_size: int, *args: Any, **others: Any) -> Any:
        call = _call_of(logits, labels, vocab_size, *args, **others)
        if call is None:
            return self._plain(_made(logits), labels, vocab_size, *args, **others)
        if self._note is not None:
            self._note(call)
        return (self.head if self.as_module else self._forward)(call.hidden, **call.terms)

    @contextlib.contextmanager
    def watched(self, note: Callable[[Call], None], looks: list[bool]) -> Iterator[None]:
        """Have the loss as it is, and note what one in chunks is given, or would be.

        `looks` has an item for each time that somebody else looks at the logits, now or later.
        """
        self._note, self._looks = note, looks
        try:
            with contextlib.nullcontext() if self.chunks else self._whole():
                yield
        finally:
            self._note = self._looks = None

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Logits in full, with a watch on them."""

        def forward(hidden: Tensor) -> Any:
            made = nn.Linear.forward(self.head, hidden)
            if not torch.is_grad_enabled():
                return made
            logits = Unmade(self.head, hidden)
            logits._made, logits._looks = made, self._looks
            return logits

        def loss(logits: Any, labels: Tensor, vocab_size: int, *args: Any, **others: Any) -> Any:
            call = _call_of(logits, labels, vocab_size, *args, **others)
            if call is not None and self._note is not None:
                self._note(call)
            logits = logits._make() if isinstance(logits, Unmade) else logits
            return self._plain(logits, labels, vocab_size, *args, **others)

        self._patch(forward, loss)
        try:
            yield
        finally:
            self.remove()


def _call_of(
    logits: Any,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **others: Any,
) -> Call | None:
    """As transformers' loss understands these, which takes no notice of others either."""
    following = shift_labels
    if following is None:
        following = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    hidden = logits.rows_for(following, vocab_size) if isinstance(logits, Unmade) else None
    if hidden is None:
        return None
    terms = {"labels": following, "ignore_index": ignore_index, "num_items": num_items_in_batch}
    return Call(hidden, terms)


def chunk_head(model: nn.Module, chunks: int = 8, fused: bool = False) -> Head:
    """Have a causal language model of transformers compute its loss in chunks.

        legroom.nn.chunk_head(model, chunks=8)
        loss = model(input_ids=ids, labels=ids).loss

    All the logits are then never there at once, unless somebody looks at `output.logits`. The loss
    equals the model's own to the tolerance of `chunked_cross_entropy`, which also says what `fused`
    does. `remove` of what this returns makes the model as it was.

    Raises InputError for a model with another loss, or another head than a linear layer.
    """
    if chunks < 1:
        raise InputError(f"chunks is {chunks}; at least 1 is needed")
    head = find_head(model, fused)
    head.put(chunks)
    return head


def find_head(model: nn.Module, fused: bool = False) -> Head:
    """The head of a causal language model of transformers; raises InputError if it has none."""
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
    return Head(model, head, fused)
