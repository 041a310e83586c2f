"""Drop and replay: run a block's forward again to bring back what it saved.

A frame remembers one call of a block: its arguments, random state and autocast. The replay runs
the same forward under hooks that catch the tensors autograd saves, by their number; it stops as
soon as all that was dropped is back. Where only some ops run again, a tape does it (tape.py).
"""

import contextlib
import ctypes
import random
import struct
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from legroom.core.errors import StepError
from legroom.memory.mechanisms.attributes import attributes_of, attributes_set
from legroom.memory.mechanisms.entry import Dropped, Handle, Kept
from legroom.memory.mechanisms.tape import Tape
from legroom.memory.saved import bare, is_weight
from legroom.memory.script import Replay


class StopReplay(Exception):
    """All that was dropped is back."""


class Held:
    """An argument of a block, kept for its replay: by handle if its storage leaves the device."""

    __slots__ = ("grad", "handle", "kept")

    def __init__(self, tensor: Tensor) -> None:
        # A parameter stays itself: whether a saved tensor is one decides what is done with it.
        keep = tensor if is_weight(tensor) else bare(tensor, apart=True)
        self.kept: Kept | None = Kept(keep)
        self.handle: Handle | None = None
        self.grad = tensor.requires_grad


@dataclass(slots=True)
class Frame:
    """One call of a block that will be run again."""

    how: Replay
    module: nn.Module
    args: Any
    """(args, kwargs) with each tensor as a Held."""
    held: list[Held]
    rng: "RandomState | None"
    autocast: "Autocast"
    versions: tuple[int, ...]
    """Versions of the module's parameters in the first run."""
    attributes: list[dict[str, Any]]
    """Of the module and those in it, in the first run; none where a tape needs no module."""
    whole: bool = False
    """The call did not go as traced: nothing may be skipped in its replay."""
    tape: Tape | None = None
    """The ops to run again, if not all."""
    dropped: "list[weakref.ref[Dropped]]" = field(default_factory=list)
    """What it dropped; weak, for each holds its frame (see [Note: ownership])."""
    sources: dict[int, Kept | Handle] = field(default_factory=dict)
    """Kept storages at hand for the replay; held until then, even if backward is done with them."""

    def forget_random(self, device: torch.device) -> None:
        """The call is over: if it drew nothing, there is nothing to rewind."""
        if self.rng is not None and not self.how.draws and self.rng.is_now(device):
            self.rng = None


def open_frame(how: Replay, module: nn.Module, args: Any, device: torch.device) -> Frame:
    """Remember a call that is about to run."""
    held: dict[int, Held] = {}

    def hold(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        known = held.get(id(leaf))  # one tensor given twice is one in the replay: modules ask
        if known is None:
            known = held[id(leaf)] = Held(leaf)
        return known

    rng = RandomState.take(device)
    around = surroundings(module)
    attributes = [attributes_of(m, own) for m, own in around.own]
    kept_args = map_args(hold, args)
    autocast, versions = autocast_state(device), around.versions()
    frame = Frame(how, module, kept_args, [*held.values()], rng, autocast, versions, attributes)
    if how.runs is not None:
        frame.tape = Tape(how.forms, how.runs, [h.kept.tensor for h in frame.held if h.kept])
    return frame


def map_args(change: Callable[[Any], Any], args: Any) -> Any:
    """(args, kwargs) with each leaf changed; most calls have tensors alone, and no keywords."""
    given, named = args
    if not named and all(isinstance(x, Tensor | Held) for x in given):
        return tuple([change(x) for x in given]), named
    return tree_map(change, args)


class NumpyState:
    """The state of numpy's shared generator as raw bytes: asking numpy itself is a slow affair."""

    def __init__(self) -> None:
        self._of: Any = None
        self._address = self._size = 0

    def take(self) -> bytes:
        """The state now; empty if it is no Mersenne twister."""
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._of:
            twister = type(generator) is np.random.MT19937
            self._of, self._size = generator, 625 * 4 if twister else 0  # 624 words and a place
            self._address = int(generator.ctypes.state_address) if twister else 0
        return ctypes.string_at(self._address, self._size) if self._size else b""

    def put(self, state: bytes) -> None:
        """Set it back."""
        if state and self.take():
            ctypes.memmove(self._address, state, self._size)


NUMPY = NumpyState()


_copy = ctypes.pythonapi.memmove
"""In one go: another thread that draws meanwhile waits, unlike with `ctypes.memmove`."""
_copy.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)


class PythonState:
    """The state of Python's shared generator as raw bytes where those can be found, else as told.

    Being told makes numbers of 625 words twice for each block that runs again.
    """

    SIZE = 625 * 4  # a place and 624 words

    def __init__(self) -> None:
        self._address, self._of = 0, cast(Any, random)._inst
        *words, place = random.getstate()[1]
        raw = struct.pack("=i624I", place, *words)
        start = object.__basicsize__
        if type(self._of).__basicsize__ >= start + self.SIZE:
            address = id(self._of) + start
            if ctypes.string_at(address, self.SIZE) == raw:
                self._address = address

    def take(self) -> Any:
        """The state now."""
        if self._address:
            return ctypes.string_at(self._address, self.SIZE), self._of.gauss_next
        return random.getstate()

    def put(self, state: Any) -> None:
        """Set it back."""
        if self._address:
            raw, self._of.gauss_next = state
            _copy(self._address, raw, self.SIZE)
        else:
            random.setstate(state)


PYTHON = PythonState()


@dataclass(frozen=True)
class RandomState:
    """States of the generators everybody shares: torch's of CPU and device, Python's, numpy's."""

    cpu: bytes
    """As plain bytes: a tensor would count as memory of a CPU job."""
    device: Tensor | None
    python: Any
    numpy: bytes

    @classmethod
    def take(cls, device: torch.device) -> "RandomState":
        """The states now."""
        on_gpu = device.type == "cuda"
        cpu = torch.get_rng_state().numpy().tobytes()
        gpu = torch.cuda.get_rng_state(device) if on_gpu else None
        return cls(cpu, gpu, PYTHON.take(), NUMPY.take())

    def is_now(self, device: torch.device) -> bool:
        """Whether the generators are in these states."""
        now = RandomState.take(device)
        same = self.device is None or now.device is None or torch.equal(self.device, now.device)
        mine, theirs = (self.cpu, self.numpy, self.python), (now.cpu, now.numpy, now.python)
        return same and mine == theirs

    def put(self, device: torch.device) -> None:
        """Set the generators back to these states."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.cpu), dtype=torch.uint8))
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
        PYTHON.put(self.python)
        NUMPY.put(self.numpy)


@contextlib.contextmanager
def undrawn(device: torch.device) -> Iterator[None]:
    """Whatever is drawn in here, all generators are as before after it."""
    there = device.type == "cuda" and torch.cuda.is_available()
    real = device if there else torch.device("cpu")
    before = RandomState.take(real)
    try:
        yield
    finally:
        before.put(real)


Autocast = tuple[tuple[str, bool, torch.dtype, bool], ...]


def autocast_state(device: torch.device) -> Autocast:
    """Autocast of CPU and device now, and whether casts of weights are cached."""
    kinds = ("cpu", "cuda") if device.type == "cuda" else ("cpu",)
    cached = torch.is_autocast_cache_enabled()
    return tuple(
        (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k), cached) for k in kinds
    )


@contextlib.contextmanager
def as_it_was(frame: Frame, device: torch.device) -> Iterator[None]:
    """Random state, autocast and running statistics as in the first run; put back after."""
    check_unchanged(frame, surroundings(frame.module).versions() == frame.versions)
    with contextlib.ExitStack() as stack:
        stack.enter_context(rewound(frame, device))
        for then, now_on in zip(frame.autocast, autocast_state(device), strict=True):
            kind, enabled, dtype, cached = then
            if then != now_on or enabled:
                cast = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cached)
                stack.enter_context(cast)
        stack.enter_context(surroundings(frame.module).as_then(frame.attributes))
        yield


def check_unchanged(frame: Frame, same: bool) -> None:
    """Raise StepError unless what a replay reads of its module is the same as in the first run."""
    if not same:
        raise StepError(
            f"a parameter or buffer of {frame.how.name} was changed between forward and backward, "
            "or frozen or thawed, and the plan runs that block again: do that after backward"
        )


@contextlib.contextmanager
def rewound(frame: Frame, device: torch.device) -> Iterator[None]:
    """Random state as in the first run, put back after."""
    if frame.rng is None:
        yield
        return
    now = RandomState.take(device)
    frame.rng.put(device)
    try:
        yield
    finally:
        now.put(device)


class Surroundings:
    """What a module's forward may change besides its results."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self.own = [(m, not type(m).__module__.startswith("torch.nn.")) for m in self.modules]
        """Each module, and whether its forward is the user's own."""
        self.norms = [m for m in self.modules if isinstance(m, _BatchNorm)]
        plain = (m for m in self.modules if not isinstance(m, _BatchNorm))
        buffers = (b for m in plain for b in m.buffers(recurse=False))
        self.held = [*module.parameters(), *buffers]

    def versions(self) -> tuple[int, ...]:
        """How often each parameter and buffer was changed in place; odd if it wants gradients."""
        return tuple([2 * x._version + x.requires_grad for x in self.held])

    @contextlib.contextmanager
    def as_then(self, attributes: list[dict[str, Any]]) -> Iterator[None]:
        """Attributes as in the first run, put back after: a replay must not count twice.

        A norm layer that uses the batch's own statistics is given others to update, so that it
        saves as many tensors as in the first run.
        """
        with attributes_set(self.own, attributes):
            for norm in self.norms:
                if not norm.training:
                    continue
                for name in ("running_mean", "running_var"):
                    buffer = norm._buffers[name]
                    norm._buffers[name] = None if buffer is None else stand_in(buffer)
                norm._buffers["num_batches_tracked"] = None
            yield


_stand_ins: dict[Any, Tensor] = {}


def stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same shape whose values nobody reads."""
    key = (tensor.shape, tensor.dtype, tensor.device)
    if key not in _stand_ins:
        _stand_ins[key] = torch.zeros_like(tensor)
    return _stand_ins[key]


_known: "weakref.WeakKeyDictionary[nn.Module, Surroundings]" = weakref.WeakKeyDictionary()


def forget_surroundings() -> None:
    """Modules may have been changed: look at them anew."""
    _known.clear()


def surroundings(module: nn.Module) -> Surroundings:
    """The surroundings of a module, found once."""
    found = _known.get(module)
    if found is None:
        found = _known[module] = Surroundings(module)
    return found


def replay(
    frame: Frame,
    device: torch.device,
    arguments: Any,
    catch: Callable[[Tensor], None],
) -> None:
    """Run the block's forward again; `catch` gets each saved tensor and may raise StopReplay."""
    args, kwargs = arguments

    def unpack(_: object) -> Tensor:
        raise StepError(f"backward through the replay of {frame.how.name} itself is not supported")

    hooks = torch.autograd.graph.saved_tensors_hooks(catch, unpack)
    stop = contextlib.suppress(StopReplay)
    with stop, as_it_was(frame, device), torch.enable_grad(), hooks:
        frame.module.forward(*args, **kwargs)
