"""Fake tensors that outlive their capture, in caches that the model or its hooks keep.

Left there they would meet real ones in the next step, and a step of fake tensors trains nothing
without a word. Caches by `functools` are emptied, plain lists and dicts are rid of them; what is
held otherwise is told.
"""

import functools
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from legroom.core.errors import StepError

MAX_CLIMB = 3
"""How deep in tuples a cached tensor may lie."""


def let_go(mode: FakeTensorMode) -> None:
    """Take all tensors of a mode out of what holds them; warns where that cannot be done."""
    torch.clear_autocast_cache()
    gc.collect()
    if not _fakes(mode):
        return
    for cache in [x for x in gc.get_objects() if type(x) is functools._lru_cache_wrapper]:
        if _holds(cache, mode):
            cache.cache_clear()
    found = _fakes(mode)
    while found:
        _take_out(found.pop())
    gc.collect()
    owners = sorted({name for x in _fakes(mode) for name in _owners(x)})
    if owners:
        warnings.warn(
            "legroom: fake tensors of its capture are still held as attributes of "
            f"{', '.join(owners)}. Real steps may meet them: keep cached tensors in the model's "
            "own attributes, or fill that cache before",
            stacklevel=3,
        )


@contextmanager
def gradients_kept(loss: Tensor) -> Iterator[None]:
    """A backward with fake tensors gives none to real leaves that the model does not own."""
    nodes, seen = [loss.grad_fn], set()
    leaves: list[Tensor] = []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and type(leaf) is not FakeTensor:
            leaves.append(leaf)
        nodes += [before for before, _ in node.next_functions]
    grads = [leaf.grad for leaf in leaves]
    try:
        yield
    finally:
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad


def check_real(model: nn.Module) -> None:
    """Raise StepError if a step gave fake gradients: it has met tensors of a capture."""
    fake = next((n for n, p in model.named_parameters() if type(p.grad) is FakeTensor), None)
    if fake is not None:
        raise StepError(
            f"the gradient of {fake} is a fake tensor: the model has kept one from legroom's "
            "capture where it cannot be taken out. Keep cached tensors in the model's own "
            "attributes, or call the model once before legroom.fit"
        )


def _fakes(mode: FakeTensorMode) -> list[FakeTensor]:
    return [x for x in gc.get_objects() if type(x) is FakeTensor and x.fake_mode is mode]


def _holds(cache: Any, mode: FakeTensorMode) -> bool:
    """Whether a cache keeps a fake tensor, itself or in tuples."""
    level = gc.get_referents(cache)
    for _ in range(MAX_CLIMB + 2):
        if any(type(x) is FakeTensor and x.fake_mode is mode for x in level):
            return True
        kinds = (tuple, list, dict)
        level = [y for x in level if type(x) in kinds or _is_link(x) for y in gc.get_referents(x)]
    return False


def _is_link(x: Any) -> bool:
    return type(x).__name__ == "_lru_list_elem"


def _take_out(value: Any, depth: int = 0) -> None:
    """Remove a value from the lists and dicts it is in, with the tuples around it."""
    for holder in gc.get_referrers(value):
        if type(holder) is dict and not _is_namespace(holder):
            for key in [k for k, v in holder.items() if v is value]:
                del holder[key]
        elif type(holder) is list:
            holder[:] = [x for x in holder if x is not value]
        elif type(holder) is tuple and depth < MAX_CLIMB:
            _take_out(holder, depth + 1)


def _owners(value: Any) -> list[str]:
    """The types of the objects and the names of the modules that have it as an attribute."""
    tables = [x for x in gc.get_referrers(value) if type(x) is dict]
    found = [x for t in tables for x in gc.get_referrers(t) if getattr(x, "__dict__", None) is t]
    return [getattr(x, "__name__", type(x).__name__) for x in found]


def _is_namespace(table: dict[Any, Any]) -> bool:
    """Whether a dict is the attributes of something: those are expected to be there."""
    return any(getattr(x, "__dict__", None) is table for x in gc.get_referrers(table))
