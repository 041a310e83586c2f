"""Drop and replay: run a block's forward again to bring back what it saved.

A frame remembers one call of a block: its arguments, random state and autocast. The replay runs
the same forward under hooks that catch the tensors autograd saves, by their number; it stops as
soon as all that was dropped is back. A selective replay skips ops: those whose results were kept
hand them out, those nobody needs give memory without values.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from legroom.core.errors import StepError
from legroom.memory.mechanisms.entry import Entry, Handle, Kept
from legroom.memory.recorder import is_silent, op_name
from legroom.memory.saved import ViewOf


class StopReplay(Exception):
    """All that was dropped is back."""


class Diverged(Exception):
    """A selective replay met another op than the trace has there."""


@dataclass(frozen=True)
class OpForm:
    """What an op looked like when traced: its name, and the form of each result."""

    name: str
    results: tuple[Any, ...]
    """A ViewOf for each tensor, plain values as they were."""
    storages: tuple[int, ...]
    """The storage of each result, -1 for none."""
    single: bool
    bookkeeping: bool
    """It only changes buffers, which a replay leaves alone."""


@dataclass
class Frame:
    """One call of a block that will be run again."""

    block: int
    name: str
    module: nn.Module
    args: Any
    """(args, kwargs) with tensors replaced by what `hold` made of them."""
    rng: "RandomState | None"
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    dropped: "list[weakref.ref[Entry]]"
    """What it dropped; weak, for each entry holds its frame (see [Note: ownership])."""
    wants: frozenset[int]
    """Kept storages that a selective replay hands out."""
    sources: dict[int, Kept | Handle]
    """Those of them at hand; held until the replay, even if backward is done with them."""


@dataclass(frozen=True)
class RandomState:
    """States of the default generators of CPU and device."""

    cpu: Tensor
    device: Tensor | None

    @classmethod
    def take(cls, device: torch.device) -> "RandomState":
        """The states now."""
        on_gpu = device.type == "cuda"
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None)

    def put(self, device: torch.device) -> None:
        """Set the generators back to these states."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


def autocast_state() -> tuple[tuple[tuple[str, bool, torch.dtype], ...], bool]:
    """Autocast of each device type now, and whether casts of weights are cached."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    rows = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
    return rows, torch.is_autocast_cache_enabled()


@contextlib.contextmanager
def as_it_was(frame: Frame, device: torch.device) -> Iterator[None]:
    """Random state, autocast and running statistics as in the first run; put back after."""
    with contextlib.ExitStack() as stack:
        if frame.rng is not None:
            now = RandomState.take(device)
            stack.callback(now.put, device)
            frame.rng.put(device)
        for kind, enabled, dtype in frame.autocast:
            cast = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=frame.cache)
            stack.enter_context(cast)
        stack.enter_context(statistics_frozen(frame.module))
        yield


@contextlib.contextmanager
def statistics_frozen(module: nn.Module) -> Iterator[None]:
    """Keep the module's buffers from changing: a replay must not count a batch twice."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    theirs = {id(b) for m in norms for b in m.buffers(recurse=False)}
    others = [(b, b.detach().clone()) for b in module.buffers() if id(b) not in theirs]
    for norm in norms:
        # In training mode the layer then uses batch statistics, as before, and stores none.
        norm.track_running_stats = not norm.training
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
        with torch.no_grad():
            for buffer, copy in others:
                if not torch.equal(buffer, copy) if buffer.device.type == "cpu" else True:
                    buffer.copy_(copy)


def replay(
    frame: Frame,
    device: torch.device,
    open_args: Callable[[Any], Any],
    catch: Callable[[Tensor], None],
    mode: "SelectiveMode | None",
) -> None:
    """Run the block's forward again; `catch` gets each saved tensor and may raise StopReplay."""
    args, kwargs = tree_map(open_args, frame.args)

    def pack(tensor: Tensor) -> None:
        catch(tensor)

    def unpack(_: object) -> Tensor:
        raise StepError(f"backward through the replay of {frame.name} itself is not supported")

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)  # type: ignore[arg-type]
    with as_it_was(frame, device), torch.enable_grad(), hooks, mode or contextlib.nullcontext():
        with contextlib.suppress(StopReplay):
            frame.module.forward(*args, **kwargs)


class SelectiveMode(TorchDispatchMode):
    """Run only some ops of a block; the others give kept results, or room without values."""

    def __init__(
        self,
        forms: list[OpForm],
        runs: set[int],
        kept: Callable[[int], Tensor | None],
    ) -> None:
        super().__init__()
        self.forms, self.runs, self.kept = forms, runs, kept
        self.next = 0
        self._off = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Let ops of the runtime itself pass by."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._off or is_silent(func):
            return func(*args, **kwargs)
        index, form = self._find(op_name(func))
        if index in self.runs:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return _written(func, args, kwargs)
        return self._stand_in(form, args)

    def _find(self, name: str) -> tuple[int, OpForm]:
        """The traced op this one is; bookkeeping that is left out now is passed over."""
        while self.next < len(self.forms):
            index, self.next = self.next, self.next + 1
            if self.forms[index].name == name:
                return index, self.forms[index]
            if not self.forms[index].bookkeeping:
                raise Diverged(f"{name} where {self.forms[index].name} was traced")
        raise Diverged(f"{name} after the last traced op")

    def _stand_in(self, form: OpForm, args: Any) -> Any:
        device = next((a.device for a in args if isinstance(a, Tensor)), None)
        results = [
            self._result(v, s, device) for v, s in zip(form.results, form.storages, strict=True)
        ]
        return results[0] if form.single else tuple(results)

    def _result(self, view: Any, storage: int, device: Any) -> Any:
        if not isinstance(view, ViewOf):
            return view
        flat = self.kept(storage)
        if flat is not None:
            return view.on(flat)
        return torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=device)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an in-place op returns, without doing it."""
    changed = [
        args[i] if i < len(args) else kwargs.get(a.name)
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    if len(func._schema.returns) == 0:
        return None
    return changed[0] if len(func._schema.returns) == 1 else tuple(changed)
