"""Hooks around a block, inside of any the user hangs on it; and those for what it saves."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from legroom.core.errors import StepError


class Live:
    """A hook of a running job: in copies of its module, and in files of them, it does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *given: Any) -> None:
        """Pass on what the hook is given."""
        if self._call is not None:
            self._call(*given)

    def __reduce__(self) -> Any:
        return Live, ()


class InnerHooks:
    """Pairs of hooks, one before and one after a module's forward."""

    def __init__(self) -> None:
        self._watched: list[tuple[nn.Module, Any, Any]] = []
        self._handles: list[tuple[RemovableHandle, RemovableHandle]] = []

    def add(self, module: nn.Module, enter: Any, leave: Any) -> None:
        """Call `enter(module, args, kwargs)` before its forward, `leave()` after, come what may.

        A copy of the module, of whatever depth, takes the hooks along and calls neither.
        """

        def before(mod: nn.Module, args: Any, kwargs: Any) -> None:
            if mod is module:
                enter(mod, args, kwargs)

        def after(mod: nn.Module, args: Any, output: Any) -> None:
            if mod is module:
                leave()

        self._watched.append((module, Live(before), Live(after)))
        self._handles.append(_hang(*self._watched[-1]))

    def keep_innermost(self) -> None:
        """Hang them anew where the user has set others since: the block is its forward alone."""
        for i, (module, enter, leave) in enumerate(self._watched):
            before, after = self._handles[i]
            last = next(reversed(module._forward_pre_hooks))
            first = next(iter(module._forward_hooks))
            if (last, first) != (before.id, after.id):
                before.remove()
                after.remove()
                self._handles[i] = _hang(module, enter, leave)

    def remove(self) -> None:
        """Take all of them out."""
        for before, after in self._handles:
            before.remove()
            after.remove()
        self._handles.clear()
        self._watched.clear()


def _hang(module: nn.Module, before: Any, after: Any) -> tuple[RemovableHandle, RemovableHandle]:
    return (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, prepend=True, always_call=True),
    )


_autograd: Any = torch._C._autograd
_innermost = _autograd._top_saved_tensors_default_hooks


def innermost() -> Any:
    """The hooks for saved tensors that count now; None where there are none."""
    return _innermost(False)


def check_hooks(around: Any) -> None:
    """Raise StepError for a model called inside of hooks that were opened within the step.

    Those may end before the step does; and what they take, no plan sees. `around` are those that
    counted when the step began; another job may have hung its own since.
    """
    now = innermost()
    if now != around and not _is_of_a_job(now):
        raise StepError(
            "the model is called inside of hooks for saved tensors that were opened within the "
            "step, such as those of torch.utils.checkpoint around all of it, or of save_on_cpu: "
            "what they take, no plan can keep in a budget. Leave them out (the plan recomputes or "
            "moves by itself), checkpoint modules inside of the model, or open the hooks before "
            "the step"
        )


class Saver:
    """Somebody whose hooks for saved tensors last until the end of a step."""


def _is_of_a_job(found: Any) -> bool:
    pack = found[0] if found is not None else None
    return isinstance(getattr(getattr(pack, "__wrapped__", pack), "__self__", None), Saver)


def shield(pack: Any, unpack: Any) -> tuple[Any, Any]:
    """Hooks that are not compiled with a block that breaks its graph, as recurrent layers do.

    That costs each call a little, and is for jobs that compile.
    """
    off: Any = torch.compiler.disable
    return off(pack), off(unpack)


def lift(pack: Any, unpack: Any, until: ExitStack) -> None:
    """Take hooks for saved tensors off until a stack is closed, if there are no others.

    Autograd then saves what it saves by itself, without a call into Python for each.
    """
    if torch.compiler.is_compiling() or not _is_innermost(pack):
        return
    until.callback(_put_back, pack, unpack)  # before they go: an interrupt may come in between
    _autograd._pop_saved_tensors_default_hooks()
    if innermost() is not None:  # of the user's, around the step
        _put_back(pack, unpack)


def _is_innermost(pack: Any) -> bool:
    found = innermost()
    return found is not None and found[0] == pack


def _put_back(pack: Any, unpack: Any) -> None:
    if not _is_innermost(pack):
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
