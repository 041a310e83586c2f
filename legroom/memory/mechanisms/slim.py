"""Slim gradients: parts of a larger gradient that have to wait are copied out of it.

The gradient of a concatenation is one tensor, and each input gets a part of it as a view. The part
of a skip waits until backward is where the skip began, and all of the tensor waits with it. Copied
out, it takes no more than its own bytes: numbers are the same, and the copy takes little time.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from legroom.memory.trace import Step

CAT = "CatBackward0"
LEAST_BYTES = 1 << 20
"""A smaller part is left where it is."""

Grads = tuple[Tensor | None, ...]


class Slimmer:
    """Finds the modules of a model that are given a concatenation, and slims its gradient."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self.found: tuple[str, ...] = ()
        """The outermost modules that were given one while somebody looked on."""
        self._put: tuple[str, ...] = ()
        self._handles: list[Any] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note who is given a concatenation while a step runs."""
        nodes: dict[Any, str] = {}

        def note(name: str, module: nn.Module, args: Any) -> None:
            for node in _concatenations(args):
                nodes.setdefault(node, name)

        hooks = [
            module.register_forward_pre_hook(partial(note, name))
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.found = tuple(dict.fromkeys(nodes.values()))

    def look(self) -> None:
        """All is known by then."""

    def put(self, names: Sequence[str]) -> None:
        """From now on, slim the gradients of what these modules are given, and no others."""
        if tuple(names) == self._put:
            return
        self._put = tuple(names)
        for handle in self._handles:
            handle.remove()
        modules = (self._modules[name] for name in names)
        self._handles = [module.register_forward_pre_hook(_slim) for module in modules]

    @contextmanager
    def slimming(self, names: Sequence[str]) -> Iterator[None]:
        """For a while."""
        self.put(names)
        try:
            yield
        finally:
            self.put(())


def slim_modules(found: Iterable[str], step: Step) -> tuple[str, ...]:
    """Of the modules that are given a concatenation, those that are not part of a block."""
    blocks = tuple(f"{block.module}." for block in step.blocks)
    return tuple(name for name in found if not name.startswith(blocks))


def _slim(module: nn.Module, args: Any) -> None:
    for node in _concatenations(args) if torch.is_grad_enabled() else ():
        late = _late(node)
        if late:
            node.register_hook(partial(_copy_out, late))


def _concatenations(args: Any) -> Iterator[Any]:
    """The nodes of those arguments that are one."""
    for x in args:
        node = x.grad_fn if isinstance(x, Tensor) else None
        if node is not None and node.name() == CAT:
            yield node


def _late(node: Any) -> frozenset[int]:
    """Which inputs get their gradient later than others: backward runs the latest node first."""
    made = {
        i: int(before._sequence_nr())
        for i, (before, _) in enumerate(node.next_functions)
        if before is not None and "AccumulateGrad" not in before.name()
    }
    latest = max(made.values(), default=0)
    return frozenset(i for i, number in made.items() if number < latest)


def _copy_out(late: frozenset[int], grads: Grads, _: Grads) -> Grads:
    return tuple(
        grad.clone() if grad is not None and i in late and _is_part(grad) else grad
        for i, grad in enumerate(grads)
    )


def _is_part(grad: Tensor) -> bool:
    return LEAST_BYTES <= grad.nbytes < grad.untyped_storage().nbytes()
