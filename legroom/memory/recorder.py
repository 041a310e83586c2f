"""Record one step as it runs: ops, storages, saved tensors and module calls.

The recorder sees every op below autograd (a dispatch mode), every module call (global module
hooks) and every tensor autograd saves. It works on fake tensors, where nothing is allocated, and
on real ones, where a timer takes the time of each op.
"""

import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook as _after_forward
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from legroom.memory.ops import (
    count_flops,
    current_node,
    in_backward,
    is_silent,
    is_sum,
    next_node,
    op_name,
    statistics,
)
from legroom.memory.raw import RawCall, RawOp, RawSaved, RawStorage
from legroom.memory.saved import StorageTable, has_storage, is_ours, is_wrapped, weight_storages
from legroom.memory.trace import Phase

LEFTOVER = "left by the step before"


class Timer(Protocol):
    """Takes the time, and the extra bytes, of each op."""

    def start(self) -> None:
        """An op is about to run."""

    def stop(self) -> None:
        """It has run."""

    def cancel(self) -> None:
        """It raised."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Log of one step; see `profile.assemble_step` for what is made of it."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        timer: Timer | None = None,
        run: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.timer = timer
        self.run = run or _call
        self.ops: list[RawOp] = []
        self.storages: list[RawStorage] = []
        self.saved: list[RawSaved] = []
        self.calls: list[RawCall] = []
        self.backward_seen = False
        self.paused = False
        self.running = False
        self.last_unpacked = -1
        self._stack: list[RawCall] = []
        self._held: list[weakref.ref[object]] = []
        self._handles: dict[int, weakref.ref[Tensor]] = {}
        self._counts: dict[int, int] = {}
        self._absent: dict[str, int] = {}
        self._model = model
        self._paths = {id(m): name for name, m in model.named_modules()}
        self._table: StorageTable[tuple[int, bool]] = StorageTable(self._died)
        self.weights = weight_storages([model])
        self._name_weights(model)

    # -- storages ----------------------------------------------------------------------------

    def _name_weights(self, model: nn.Module) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.name_storage(tensor, name, "weight")

    def name_storage(self, tensor: Tensor, name: str, role: str) -> None:
        """Say what a storage is for; it counts as there from before the step if yet unseen."""
        if self._here(tensor):
            sid = self.sid(tensor, birth=-1)
            if not self.storages[sid].role:
                self.storages[sid].role, self.storages[sid].name = role, name

    def name_absent(self, tensor: Tensor, name: str, role: str) -> None:
        """A storage of this size counts as there from before the step, though it is elsewhere."""
        self.storages.append(RawStorage(tensor.nbytes, _dtype(tensor), -1, name, role))
        self._absent[name] = len(self.storages) - 1

    def came(self, tensor: Tensor, name: str) -> None:
        """A storage that was elsewhere is on the device for a while."""
        if name in self._absent:
            self.adopt(tensor, self._absent[name])

    def name_leftovers(self) -> None:
        """Results of the step before that are still held.

        Those that go while the step runs are a part of it: what they leave is free from then on.
        Garbage is not, for it may go at any time; nor is data of the user's own.
        """
        gc.collect()
        for x in gc.get_objects():
            result = type(x) is Tensor and x.grad_fn is not None
            if result and x.device == self.device and has_storage(x):
                known = len(self.storages)
                if self.sid(x, birth=-1) == known:
                    self.storages[known].name = LEFTOVER

    def sid(self, tensor: Tensor, birth: int, maker: str = "") -> int:
        """The number of a tensor's storage, new if it was not known."""
        storage = tensor.untyped_storage()
        known = self._table.get(storage)
        if known is not None:
            return known[0]
        name = ": ".join(x for x in (self.path, maker) if x)
        row = RawStorage(storage.nbytes(), _dtype(tensor), birth, name)
        self.storages.append(row)
        self._table.put(storage, (len(self.storages) - 1, False))
        return len(self.storages) - 1

    def num_live(self) -> int:
        """How many storages it knows are still there."""
        return self._table.live()

    def adopt(self, tensor: Tensor, sid: int) -> None:
        """These bytes are storage `sid`, come back for backward."""
        storage = tensor.untyped_storage()
        if self._table.get(storage) != (sid, True):  # several tensors may lie in it
            self.storages[sid].lives += 1
            self._table.put(storage, (sid, True))

    def _watch_handles(self, out: Any) -> None:
        """Note when the tensors that an op returned are gone, whatever else holds their bytes.

        Views may be passed on as other objects; but those hold their base. What backward makes of
        a saved tensor is no sign that the step held it.
        """
        for tensor in tree_leaves(out) if not in_backward() else ():
            if isinstance(tensor, Tensor) and self._here(tensor):
                known = self._table.get(tensor.untyped_storage())
                link = self._handles.get(id(tensor))
                if known is not None and (link is None or link() is not tensor):
                    sid, _ = known
                    self.storages[sid].handles += 1
                    gone = partial(self._handle_gone, sid)
                    self._handles[id(tensor)] = weakref.ref(tensor, gone)

    def _handle_gone(self, sid: int, _: object) -> None:
        row = self.storages[sid]
        row.handles -= 1
        if not row.handles:
            row.let_go = self._now

    @property
    def _now(self) -> int:
        """The op that is running, or the last that ran."""
        return len(self.ops) if self.running else len(self.ops) - 1

    def _died(self, value: tuple[int, bool]) -> None:
        sid, is_copy = value
        row, last = self.storages[sid], self._now
        if not is_copy:
            row.release = last
        row.lives -= 1
        row.death = last
        if is_copy:
            row.done = last

    def _known(self, tree: Any, birth: int, maker: str = "") -> list[int]:
        ids: dict[int, None] = {}
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and self._here(leaf):
                ids[self.sid(leaf, birth, maker)] = None
        return list(ids)

    def _here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type and has_storage(tensor)

    # -- ops ---------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The module that is running now."""
        return self._stack[-1].path if self._stack else ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if is_silent(func):
            out = self.run(func, args, kwargs)
            self._watch_handles(out)
            return out
        reads = self._known((args, kwargs), birth=-1)
        kept = self._known(statistics(func, args), birth=-1)
        reads = [s for s in reads if s not in kept]
        self.running = True
        if self.timer is not None:
            self.timer.start()
        try:
            out = self.run(func, args, kwargs)
        except BaseException:
            if self.timer is not None:
                self.timer.cancel()
            raise
        finally:
            self.running = False
        if self.timer is not None:
            self.timer.stop()
        self.ops.append(self._describe(func, args, kwargs, out, reads))
        self._watch_handles(out)
        return out

    def _describe(self, func: Any, args: Any, kwargs: Any, out: Any, reads: list[int]) -> RawOp:
        index, packet = len(self.ops), func._overloadpacket
        writes = self._known(out, birth=index, maker=packet.__name__)
        writes = [s for s in writes if s not in reads] + self._mutated(func, args, kwargs)
        leaves = [x for x in tree_leaves((args, kwargs)) if x is not None]
        many = isinstance(out, tuple | list)
        generator = any(isinstance(x, torch.Generator) for x in leaves)
        return RawOp(
            name=op_name(func),
            module=self.path,
            phase=self._phase(),
            reads=reads,
            writes=writes,
            flops=count_flops(packet, args, kwargs, out),
            dtype=next((_dtype(x) for x in tree_leaves(out) if isinstance(x, Tensor)), ""),
            random=torch.Tag.nondeterministic_seeded in func.tags,
            sealed=generator,
            unpacked=self.last_unpacked,
            node=current_node(),
            results=tuple(self._result(x) for x in (out if many else (out,))),
            sums=is_sum(func, args),
        )

    def _result(self, value: Any) -> int:
        here = isinstance(value, Tensor) and self._here(value)
        return self.sid(value, len(self.ops)) if here else -1

    def _mutated(self, func: Any, args: Any, kwargs: Any) -> list[int]:
        """Storages the op changes in place, by its schema."""
        changed: list[Any] = []
        for i, arg in enumerate(func._schema.arguments):
            if arg.alias_info is not None and arg.alias_info.is_write:
                changed.append(args[i] if i < len(args) else kwargs.get(arg.name))
        changed += statistics(func, args)
        return self._known(changed, birth=-1)

    def _phase(self) -> Phase:
        if torch._C._current_graph_task_id() != -1:
            self.backward_seen = True
            return Phase.BACKWARD
        if self.backward_seen and not torch.is_grad_enabled():
            return Phase.UPDATE
        return Phase.FORWARD

    # -- saved tensors -----------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> int:
        """Autograd saves a tensor: note it, and return its row (-1 if it is not ours)."""
        if not is_ours(tensor, self.device, self.weights) or in_backward():
            return -1
        self.saved.append(RawSaved(self.sid(tensor, birth=-1), len(self.ops)))
        return len(self.saved) - 1

    def watch_saved(self, packed: object, row: int) -> None:
        """Note when autograd lets go of what it holds for a saved tensor."""

        def gone(_: object) -> None:
            self.saved[row].gone = self._now

        self._held.append(weakref.ref(packed, gone))

    def unpack(self, row: int) -> None:
        """Backward asks for a saved tensor."""
        self.backward_seen = True
        self.saved[row].unpacked.append(len(self.ops))
        self.last_unpacked = row

    # -- modules -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch_modules(self) -> Iterator[None]:
        """Follow module calls while the step runs."""
        handles = [_after_forward(self._leave_module, always_call=True)]
        for module in self._model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks: part of its caller
                continue
            handles.append(module.register_forward_pre_hook(self.enter_module, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is about to run."""
        path = self._paths.get(id(module))
        if path is None or self.paused:
            return
        grad = torch.is_grad_enabled()
        call = self._counts.get(id(module), 0)
        self._counts[id(module)] = call + grad  # what runs without gradients is no block's call
        raw = RawCall(
            path=path,
            module=module,
            depth=len(self._stack),
            call=call,
            first_op=len(self.ops),
            first_saved=len(self.saved),
            grad=grad,
            inputs=self._known((args, kwargs), birth=-1),
            wrapped=any(is_wrapped(x) for x in tree_leaves((args, kwargs))),
            before=_beyond(module),
            nodes=range(next_node(), next_node()),
            wants=tuple(
                x.requires_grad for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
            ),
        )
        self._stack.append(raw)
        self.calls.append(raw)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack and self._stack[-1].module is module and not self.paused:
            raw = self._stack.pop()
            raw.last_op, raw.last_saved = len(self.ops) - 1, len(self.saved) - 1
            raw.nodes = range(raw.nodes.start, raw.nodes.start if in_backward() else next_node())
            raw.strays = raw.before != _beyond(module)


class Same:
    """Equal to another one that holds the very same object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def _beyond(module: nn.Module) -> object:
    """What a forward may change and a replay would not see as it was."""
    buffers = [Same(b) for b in module._buffers.values()]
    theirs: Any = np.random.get_state(legacy=True)
    return buffers, hash(random.getstate()), theirs[2], int(theirs[1][0])


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
