"""Optimizer states on the host between updates.

An update goes through the optimizer's parameters in waves: the states of a wave are copied in, the
optimizer itself updates those parameters, and the states are copied out, while the next wave comes
in. An optimizer that treats each parameter on its own gives the same bits as in one go. Between
updates `optimizer.state` has tensors of the host in the places of these.

[Note: order] Room on the device is taken and given back in the order of the stream that computes:
a wave comes in after that stream has reached its place, and its room is free once that stream has
been told to wait for the copy out. So no copy is waited for by the host.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from legroom.core.units import format_bytes
from legroom.memory.actions import Park
from legroom.memory.mechanisms.pool import PIECE_BYTES, Slab, round_up
from legroom.memory.mechanisms.standin import StandIn, run_step, step_code
from legroom.memory.mechanisms.tape import paused
from legroom.memory.parking import LEAST_BYTES, pack
from legroom.memory.recorder import Recorder

APART = ("LBFGS", "SparseAdam")
"""Optimizers of torch that do not treat each parameter on its own, or not all of it."""
TAKEN_OVER = (
    "legroom: another job keeps the states of this job's optimizer now, so this one cannot park "
    "them and may go over its budget; close it, and fit the model anew"
)
Wave = list[Tensor]
States = list[tuple[Tensor, str, Tensor]]
"""Parameter, name, and the state on the device."""
Quiet = Callable[[], AbstractContextManager[Any]]
Seen = Callable[[Tensor, str], None]


@dataclass
class Batch:
    """States on their way, and what tells that they have arrived."""

    rows: States = field(default_factory=list)
    event: Any = None


def can_park(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether an optimizer is known to treat each parameter on its own."""
    kind = type(optimizer)
    ours = kind.__module__.startswith("torch.optim") and kind.__name__ not in APART
    return ours and step_code(optimizer) is not None


class StateKeeper:
    """Keeps states of one optimizer on the host; does nothing until it is told how much."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        named: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.optimizer, self.device = optimizer, device
        self._model, self._names = named, {p: name for name, p in named.items()}
        self._step = step_code(optimizer)
        self.able = can_park(optimizer)
        self._quiet: Quiet = nullcontext
        self._seen: Seen = lambda state, name: None
        self.moved_bytes = 0
        """Copied each way since it was last told how much to keep."""
        self.kept_bytes = 0
        """On the host at that time."""
        self._park: Park | None = None
        self._slots: dict[Tensor, dict[str, tuple[Slab, Tensor]]] = {}
        self._lanes = _Lanes(device)
        self._hooks: list[Any] = []
        if optimizer is not None and self.able:
            self._take_hold(optimizer)

    # -- how much ----------------------------------------------------------------------------

    def keep(self, park: Park | None) -> None:
        """From now on, so many bytes of states are on the host between updates, or a few more."""
        if park is not None and not self._hooks:
            if self.able:
                warnings.warn(TAKEN_OVER, stacklevel=2)
            park = None
        self._park, self.moved_bytes = park, 0
        chosen = self._chosen()
        rows = [row for p in chosen for row in self._on_device(p)]
        if rows:
            self._send(rows)
            self._lanes.finish()
        stay = set(self._away()) - set(chosen)
        with suppress(torch.OutOfMemoryError):  # then they come back with the next update
            self._bring_back([p for p in self._away() if p in stay])
        self.kept_bytes = self.away_bytes

    def _take_hold(self, optimizer: torch.optim.Optimizer) -> None:
        link = _keepers.get(optimizer)
        earlier = link() if link is not None else None
        if earlier is not None:
            earlier.close()
        _keepers[optimizer] = weakref.ref(self)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_state_dict_pre_hook(lambda _: self._lanes.finish()),
        ]

    @property
    def names(self) -> set[str]:
        """The parameters whose states can be parked."""
        ours = set(self._params()) if self.able else set()
        return {name for name, p in self._model.items() if p in ours}

    @contextmanager
    def recorded(self, recorder: Recorder) -> Iterator[None]:
        """A step is recorded: states elsewhere count as its own, and copies are none of its ops."""
        for param in self._away():
            for name, host in self._hosted(param).items():
                recorder.name_absent(host, f"{self._names[param]}.{name}", "state")
        self._quiet, self._seen = partial(paused, recorder), recorder.came
        try:
            yield
        finally:
            self._quiet, self._seen = nullcontext, lambda state, name: None

    @property
    def away_bytes(self) -> int:
        """Bytes of states that are on the host now."""
        return sum(x.nbytes for p in self._away() for x in self._hosted(p).values())

    def here(self) -> Iterator[tuple[str, Tensor]]:
        """The states that are not on the host, by parameter and name."""
        for param, state in (self.optimizer.state if self.optimizer else {}).items():
            owner = self._names.get(param, "optimizer")
            hosted = self._hosted(param) if isinstance(param, Tensor) else {}
            for name, value in state.items() if isinstance(state, dict) else ():
                if name not in hosted:
                    leaves = (x for x in tree_leaves(value) if isinstance(x, Tensor))
                    yield from ((f"{owner}.{name}", x) for x in leaves)

    def _params(self) -> Iterator[Tensor]:
        assert self.optimizer is not None
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def _chosen(self) -> list[Tensor]:
        """Those whose states are to be on the host."""
        if self._park is None:
            return []
        able = self.names
        return [self._model[name] for name in self._park.params if name in able]

    def _away(self) -> list[Tensor]:
        return [p for p in self._slots if self._hosted(p)]

    def _hosted(self, param: Tensor) -> dict[str, Tensor]:
        """The states of a parameter that are in their places on the host."""
        assert self.optimizer is not None
        state, slots = self.optimizer.state.get(param, {}), self._slots.get(param, {})
        return {name: slot[1] for name, slot in slots.items() if state.get(name) is slot[1]}

    def _on_device(self, param: Tensor) -> States:
        """States of a parameter that can be parked and are not."""
        assert self.optimizer is not None
        found = self.optimizer.state.get(param, {})
        return [
            (param, name, x)
            for name, x in found.items()
            if type(x) is Tensor
            and x.device == param.device
            and x.layout is torch.strided
            and x.nbytes >= LEAST_BYTES
            and _is_dense(x)
            and name not in self._hosted(param)
        ]

    # -- an update ---------------------------------------------------------------------------

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The step that follows is given a stand-in."""
        rest = {k: v for k, v in kwargs.items() if k != "closure"}
        assert self._step is not None
        inner = partial(run_step, self._step, optimizer, **rest)
        updated = partial(self._updated, inner)
        return (StandIn(optimizer, self._step, updated), *args[1:]), kwargs

    def _updated(self, inner: Callable[[], Any]) -> bool:
        """Do all of an update if states are parked; whether they are."""
        if self._park is None and not self._away():
            return False
        self._update(inner)
        return True

    def _update(self, inner: Callable[[], Any]) -> None:
        """All parameters, wave by wave; what stays on the device first, while the first comes."""
        waves, chosen = self._waves(), set(self._chosen())
        coming, going = Batch(), Batch()
        try:
            for i, wave in enumerate(waves):
                self._arrive(coming)
                coming = self._fetch(waves[i + 1] if i + 1 < len(waves) else [])
                with self._only(wave):
                    inner()
                rows = [row for p in wave if p in chosen for row in self._on_device(p)]
                gone, going = going, self._send(rows)
                self._release(gone)
        finally:  # room that copies still use must not be given to others
            for batch in (coming, going):
                self._release(batch)
        kept = {*chosen, *self._away()}
        self._slots = {p: slots for p, slots in self._slots.items() if p in kept}

    def _waves(self) -> list[Wave]:
        """Parameters to update together: first those whose states stay, then some at a time."""
        away = dict.fromkeys((*self._chosen(), *self._away()))
        rows = {p: sum(x.nbytes for x in self._hosted(p).values()) or 2 * p.nbytes for p in away}
        waves: list[Wave] = [[p for p in self._params() if p not in away]]
        params = iter(rows)
        for sizes in pack(list(rows.values()), self._park.wave_bytes if self._park else 1):
            waves.append([next(params) for _ in sizes])
        return waves

    @contextmanager
    def _only(self, wave: Wave) -> Iterator[None]:
        """Have the optimizer see only these parameters."""
        optimizer, ours = self.optimizer, set(wave)
        assert optimizer is not None
        groups, params = optimizer.param_groups, [g["params"] for g in optimizer.param_groups]
        for group, mine in zip(groups, params, strict=True):
            group["params"] = [p for p in mine if p in ours]
        optimizer.param_groups = [group for group in groups if group["params"]]
        try:
            yield
        finally:
            optimizer.param_groups = groups
            for group, mine in zip(groups, params, strict=True):
                group["params"] = mine

    # -- copies ------------------------------------------------------------------------------

    def _fetch(self, wave: Wave) -> Batch:
        """Begin to copy a wave's states in; only those that will be asked for."""
        with self._quiet(), torch.no_grad():
            rows = [
                (param, name, torch.empty_like(host, device=self.device))
                for param in wave
                for name, host in (self._hosted(param) if param.grad is not None else {}).items()
            ]
            self._lanes.turn(out=False)
            for param, name, x in rows:
                self._lanes.copy(self._slots[param][name][1], x, out=False)
        self.moved_bytes += sum(x.nbytes for _, _, x in rows)
        return Batch(rows, self._lanes.mark(out=False))

    def _arrive(self, batch: Batch) -> None:
        """From here on the optimizer sees them on the device."""
        assert self.optimizer is not None
        self._lanes.wait(batch.event)
        for param, name, x in batch.rows:
            self._seen(x, f"{self._names[param]}.{name}")
            self.optimizer.state[param][name] = x
        batch.rows.clear()

    def _send(self, rows: States) -> Batch:
        """Begin to copy states out; the optimizer has those of the host from here on."""
        assert self.optimizer is not None
        with self._quiet(), torch.no_grad():
            self._make_slots(rows)
            self._lanes.turn(out=True)
            for param, name, x in rows:
                host = self._slots[param][name][1]
                self._lanes.copy(host, x, out=True)
                self.optimizer.state[param][name] = host
        return Batch(rows, self._lanes.mark(out=True))

    def _release(self, batch: Batch) -> None:
        """The room of states that went is free."""
        if batch.rows:
            self._lanes.wait(batch.event)
            batch.rows.clear()

    def _make_slots(self, rows: States) -> None:
        """A place on the host for each, of the same form, that anyone can copy from in one go."""
        new = []
        for param, name, x in rows:
            slot = self._slots.setdefault(param, {}).get(name)
            if slot is None or not _alike(slot[1], x):
                new.append((param, name, x))
        left = iter(new)
        for sizes in pack([round_up(x.nbytes) for _, _, x in new], PIECE_BYTES):
            slab, offset = Slab(sum(sizes), pin=self.device.type == "cuda", whole=True), 0
            for size in sizes:
                param, name, x = next(left)
                flat = slab.view(offset, x.nbytes).view(x.dtype)
                self._slots[param][name] = slab, flat.as_strided(x.size(), x.stride())
                offset += size

    def _bring_back(self, params: Sequence[Tensor]) -> None:
        """Have states on the device again at once."""
        if params:
            self._lanes.finish()
        for param in params:
            assert self.optimizer is not None
            for name, host in self._hosted(param).items():
                self.optimizer.state[param][name] = host.to(self.device, copy=True)
            del self._slots[param]

    def close(self) -> None:
        """Bring everything back to the device, and let the optimizer be.

        Where there is no room, states stay on the host, and updates go on as before.
        """
        self._park = None
        try:
            self._bring_back(self._away())
        except torch.OutOfMemoryError:
            warnings.warn(
                f"legroom: optimizer states of {format_bytes(self.away_bytes)} stay on the host: "
                "the device has no room for them; they come back with the next update",
                stacklevel=3,
            )
            return
        self._slots.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


_keepers: "weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[StateKeeper]]"
_keepers = weakref.WeakKeyDictionary()
"""Who has hold of an optimizer: one at a time, kept alive by the hooks alone."""


def _is_dense(state: Tensor) -> bool:
    """Whether its numbers lie side by side, in whatever order."""
    pairs = zip(state.size(), state.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs) == state.numel()


def _flat(state: Tensor) -> Tensor:
    """The bytes of a dense tensor, in the order in which they lie."""
    return state.as_strided((state.numel(),), (1,)).view(torch.uint8)


def _alike(host: Tensor, state: Tensor) -> bool:
    return (host.size(), host.stride(), host.dtype) == (state.size(), state.stride(), state.dtype)


class _Lanes:
    """Streams to and from the host; on a CPU, copies made at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[bool, torch.cuda.Stream] = {}

    def _stream(self, out: bool) -> torch.cuda.Stream | None:
        if self.device.type != "cuda":
            return None
        if out not in self._streams:
            self._streams[out] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._streams[out]

    def turn(self, *, out: bool) -> None:
        """What is copied from here on comes after what has been computed so far."""
        stream = self._stream(out)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, host: Tensor, state: Tensor, *, out: bool) -> None:
        """A state's bytes to their place on the host, or back."""
        stream = self._stream(out)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            target, source = (host, state) if out else (state, host)
            _flat(target).copy_(_flat(source), non_blocking=stream is not None)

    def mark(self, *, out: bool) -> Any:
        """Tells when all that was copied so far has arrived."""
        stream = self._stream(out)
        return stream.record_event() if stream is not None else None

    def wait(self, event: Any) -> None:
        """Go on computing only after that."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        """Wait until all bytes are on the host."""
        if True in self._streams:
            self._streams[True].synchronize()
