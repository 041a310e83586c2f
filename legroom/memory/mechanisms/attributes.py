"""What a forward may change of its modules: attributes, buffers, and the containers they hold.

A capture on fake tensors puts all of it back. A replay runs on what the first run found, in copies
of its own, so that whatever it counts or collects is counted and collected once.
"""

import contextlib
from collections.abc import Iterable, Iterator
from math import inf
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

INTERNAL = frozenset(nn.Module().__dict__) - {"training", "_buffers"}
"""Attributes every module has: they hold modules, parameters and hooks."""
HOOKS = [k for k, v in nn.Module().__dict__.items() if isinstance(v, dict) and "hooks" in k]
MAX_ITEMS = 64
"""Containers with more are tables that nobody changes in passing: a replay uses them as is."""
MAX_DEPTH = 4


class Content:
    """A container, and what it held."""

    __slots__ = ("items", "owner")

    def __init__(self, owner: Any, items: Any) -> None:
        self.owner, self.items = owner, items

    def restore(self) -> Any:
        """Give the container what it held, and return it."""
        items = _each(self.items, lambda x: x.restore() if isinstance(x, Content) else x)
        self.owner.clear()
        if isinstance(self.owner, list):
            self.owner.extend(items)
        else:
            self.owner.update(items)
        return self.owner

    def copy(self) -> Any:
        """Another container with what it held."""
        return _each(self.items, lambda x: x.copy() if isinstance(x, Content) else x)


def _each(items: Any, change: Any) -> Any:
    if isinstance(items, dict):
        return {key: change(value) for key, value in items.items()}
    return type(items)(change(value) for value in items)


def content(value: Any, most: float, seen: "set[int] | None" = None, depth: int = 0) -> Any:
    """A value, or its Content if it is a container of at most so many items."""
    seen = set() if seen is None else seen
    if type(value) not in (list, dict, set) or id(value) in seen:
        return value
    if depth == MAX_DEPTH or len(value) > most:
        return value
    seen.add(id(value))
    return Content(value, _each(value, lambda x: content(x, most, seen, depth + 1)))


def attributes_of(module: nn.Module, own: bool) -> dict[str, Any]:
    """The attributes of a module now, for `attributes_set`; those of the user's `own` in depth.

    Tensors are left out: a block that reads one so is not recomputed, and it may be large.
    """
    taken = dict(module.__dict__)
    for key in taken.keys() - INTERNAL if own else ():
        value = taken[key]
        if isinstance(value, Tensor):
            del taken[key]
        elif type(value) in (list, dict, set):
            taken[key] = (
                Content(value, dict(value)) if key == "_buffers" else content(value, MAX_ITEMS)
            )
    return taken


@contextlib.contextmanager
def attributes_set(
    modules: Iterable[tuple[nn.Module, bool]], taken: Iterable[dict[str, Any]]
) -> Iterator[None]:
    """Modules with the attributes they had when those were taken; as they are now after."""
    before = []
    try:
        for (module, own), then in zip(modules, taken, strict=True):
            now = module.__dict__
            if own or len(now) != len(then) or not all(map(is_, now.values(), then.values())):
                before.append((now, dict(now)))
                fresh: dict[str, Any] = {k: v for k, v in now.items() if isinstance(v, Tensor)}
                fresh |= {k: v.copy() if isinstance(v, Content) else v for k, v in then.items()}
                _replace(now, fresh)
            if module._buffers:
                before.append((module._buffers, dict(module._buffers)))
        yield
    finally:
        for target, values in reversed(before):
            _replace(target, values)


@contextlib.contextmanager
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put attributes, buffers, hooks and all that containers hold back after.

    A forward may hang hooks on its modules once, and note in an attribute that it has.
    """
    seen: set[int] = set()
    before = []
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):  # those are no dicts of Python's
            continue
        own = (v for k, v in module.__dict__.items() if k not in INTERNAL and k != "_buffers")
        held = [content(v, inf, seen) for v in own]
        inside = [
            (d, dict(d))
            for d in (module._buffers, *map(module.__dict__.get, HOOKS))
            if d is not None
        ]
        before.append((module, dict(module.__dict__), inside, held))
    try:
        yield
    finally:
        for module, attributes, inside, held in before:
            _replace(module.__dict__, attributes)
            for table, items in inside:
                _replace(table, items)
            for one in held:
                if isinstance(one, Content):
                    one.restore()


def _replace(target: dict[str, Any], values: dict[str, Any]) -> None:
    target.clear()
    target.update(values)
