"""Selective replay: note the ops of a block call as they run, and run some of them again.

While a block runs forward, a tape takes down each op that its variant will need again: the op
itself and its arguments, tensors by the number of their storage in the trace and the view taken of
it. Nothing made inside the block is held. The replay then calls those ops one after the other, on
what was kept and on each other's results; modules, autocast and autograd stay out of it. Since the
arguments are those of this very call, a number that changes from step to step is no trap.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from legroom.memory.mechanisms.entry import Kept
from legroom.memory.ops import STATISTICS, is_silent, op_name
from legroom.memory.recorder import Recorder
from legroom.memory.saved import StorageTable, ViewOf, has_storage


class Diverged(Exception):
    """The block did not run as traced: nothing may be skipped in its replay."""


class OpForm(NamedTuple):
    """What an op looked like when traced: its name, and the storages it made."""

    name: str
    storages: tuple[int, ...]
    """One for each result; -1 where it is no new storage of the device."""


class Made(NamedTuple):
    """An argument by the number of its storage, which the block itself made."""

    storage: int
    view: ViewOf
    grad: bool


class Given(NamedTuple):
    """An argument that looks at the storage of one of the block's own arguments."""

    rank: int
    view: ViewOf
    grad: bool


class Call(NamedTuple):
    """One op to run again, with its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: OpForm


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows one call of a block, and notes the ops at some offsets."""

    def __init__(
        self, forms: Sequence[OpForm], runs: frozenset[int], given: Sequence[Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forms, self.runs = forms, runs
        self.calls: list[Call] = []
        self.lost = False
        """An op came that the trace does not have there."""
        self._next = 0
        self.paused = False
        self._given: StorageTable[int] = StorageTable()
        self._made: StorageTable[int] = StorageTable()
        for i, tensor in enumerate(given):
            if has_storage(tensor):
                self._given.put(tensor.untyped_storage(), i)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a guard around each op that nothing here needs

    def is_storage(self, tensor: Tensor, number: int) -> bool:
        """Whether a tensor lies in what the trace has as this storage."""
        return self._made.get(tensor.untyped_storage()) == number

    def is_unchanged(self) -> bool:
        """Whether weights and whatever else came from outside of the block are as they were."""
        refs = (x for call in self.calls for x in _refs(call))
        return all(x.tensor._version == x.version for x in refs if type(x) is Kept)

    def close(self) -> bool:
        """The call is over: forget its tensors; whether it did not go as traced."""
        self._given.clear()
        self._made.clear()
        return self.lost or self._next != len(self.forms)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or self.lost or is_silent(func):
            return func(*args, **kwargs)
        index, self._next = self._next, self._next + 1
        if index >= len(self.forms) or self.forms[index].name != op_name(func):
            self.lost = True
            return func(*args, **kwargs)
        form = self.forms[index]
        if index in self.runs:  # noted before it runs: it may change its arguments in place
            self._note(func, args, kwargs, form)
        result = func(*args, **kwargs)
        if form.storages:
            self._name(result, form)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, form: OpForm) -> None:
        places = STATISTICS.get(form.name)
        if places is not None and args[places[2]]:  # the update was made: not a second time
            args = (*args[: places[0]], None, None, *args[places[1] + 1 :])
        refs = tuple([self._ref(a) for a in args])
        named = {k: self._ref(v) for k, v in kwargs.items()} if kwargs else kwargs
        call = Call(func, refs, named, form)
        # What the block did not make itself must not be changed a second time.
        self.lost |= any(type(ref) is not Made for ref in _written(call))
        self.calls.append(call)

    def _ref(self, value: Any) -> Any:
        """What stands for an argument; tensors from outside the block are held."""
        if isinstance(value, Tensor):
            if value.is_conj() or value.is_neg():  # a view of the bytes would lose these
                self.lost = True
            if not has_storage(value):
                return Kept(value)
            storage = value.untyped_storage()
            made = self._made.get(storage)
            if made is not None:
                return Made(made, ViewOf.of(value), value.requires_grad)
            given = self._given.get(storage)
            if given is not None:
                return Given(given, ViewOf.of(value), value.requires_grad)
            # Detached, for the graph holds the tape; a parameter has none.
            return Kept(value if isinstance(value, nn.Parameter) else value.detach())
        if type(value) in (list, tuple):
            return type(value)([self._ref(v) for v in value])
        return value

    def _name(self, result: Any, form: OpForm) -> None:
        """Remember which storage of the trace each result is."""
        for tensor, number in _results(result, form):
            self._made.put(tensor.untyped_storage(), number)


@contextlib.contextmanager
def paused(*modes: Tape | Recorder) -> Iterator[None]:
    """Let ops of the runtime itself pass by these modes."""
    before = [mode.paused for mode in modes]
    for mode in modes:
        mode.paused = True
    try:
        yield
    finally:
        for mode, was in zip(modes, before, strict=True):
            mode.paused = was


class Player:
    """Runs the noted ops of one tape.

    `kept` gives a storage of the trace that is still there, `given` an argument of the block.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        kept: Callable[[int], Tensor | None],
        given: Callable[[int], Tensor],
    ) -> None:
        self.calls, self._kept, self._given = calls, kept, given
        self._made: dict[int, Tensor] = {}

    def play(self, wanted: frozenset[int]) -> dict[int, Tensor]:
        """A tensor on each of the wanted storages; raises Diverged if an op lacks what it reads."""
        last = {number: i for i, call in enumerate(self.calls) for number in _numbers(call)}
        spent: dict[int, list[int]] = {}
        for number, i in last.items():
            if number not in wanted:
                spent.setdefault(i, []).append(number)
        with _below_autograd():
            for i, call in enumerate(self.calls):
                self._run(call)
                for number in spent.get(i, ()):
                    self._made.pop(number, None)
            if not wanted <= self._made.keys():
                raise Diverged("not all that was dropped came back")
            return {number: self._made[number].detach() for number in wanted}

    def _run(self, call: Call) -> None:
        if any(ref.storage not in self._made for ref in _written(call)):
            raise Diverged(f"{call.func} would change what was kept")
        args = [self._open(a) for a in call.args]
        named = {k: self._open(v) for k, v in call.kwargs.items()}
        for tensor, number in _results(call.func(*args, **named), call.form):
            self._made[number] = tensor

    def _open(self, ref: Any) -> Any:
        kind = type(ref)
        if kind is Made:
            tensor = self._made.get(ref.storage)
            if tensor is None:
                tensor = self._kept(ref.storage)
            if tensor is None:
                raise Diverged(f"storage {ref.storage} is read and was not brought back")
            return look(tensor, ref.view, ref.grad)
        if kind is Given:
            return look(self._given(ref.rank), ref.view, ref.grad)
        if kind is Kept:
            return ref.open()
        return kind([self._open(r) for r in ref]) if kind in (list, tuple) else ref


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """Where ops of a tape live: autocast is through with them, and autograd stays out.

    Grad mode is on as in the first run, for some kernels are chosen by it.
    """
    # In this order: the first one, when left, also sets back what it found of the second.
    with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        yield


def look(tensor: Tensor, view: ViewOf, grad: bool) -> Tensor:
    """A view of a tensor's storage, wanting a gradient or not."""
    tensor = view.on(tensor)
    return tensor if tensor.requires_grad == grad else tensor.detach().requires_grad_(grad)


def _results(result: Any, form: OpForm) -> Iterator[tuple[Tensor, int]]:
    results = result if isinstance(result, tuple | list) else (result,)
    for tensor, number in zip(results, form.storages, strict=False):
        if number >= 0 and isinstance(tensor, Tensor):
            yield tensor, number


def _numbers(call: Call) -> Iterator[int]:
    """Storages an op reads or makes."""
    yield from (n for n in call.form.storages if n >= 0)
    yield from (one.storage for one in _refs(call) if type(one) is Made)


def _refs(call: Call) -> Iterator[Any]:
    """What stands for each argument, those in lists one by one."""
    for ref in (*call.args, *call.kwargs.values()):
        yield from ref if type(ref) in (list, tuple) else (ref,)


def _written(call: Call) -> Iterator[Any]:
    """The arguments an op changes in place."""
    if not call.func._schema.is_mutable:
        return
    for i, arg in enumerate(call.func._schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            ref = call.args[i] if i < len(call.args) else call.kwargs.get(arg.name)
            many = ref if isinstance(ref, list) else [ref]
            yield from (one for one in many if one is not None)
