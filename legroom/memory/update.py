"""What an optimizer will keep and take: its own step is run on fake tensors, one of each form.

So whatever it is, and however it is set, its first steps are planned with the states it will have
and the scratch it will need, before any of them is there.
"""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from legroom.memory.mechanisms.recompute import undrawn

STEPS = 8
"""Some do other arithmetic after the first few."""
NOTE = 0.01
"""Smaller parts of all parameters are not tried by themselves."""
SEVERAL, TOGETHER = 4, 2.5
"""So many parameters take more times the scratch of one only where they are worked at together."""
PLAIN = (bool, int, float, str, type(None))


class Update(NamedTuple):
    """What an optimizer keeps for each parameter, and what its update takes on top for a moment."""

    name: str
    states: Mapping[str, int]
    """Bytes by the parameter's name."""
    single_bytes: int
    """Scratch for one parameter at a time: of the one that takes most."""
    joint_bytes: int
    """Scratch for all parameters together: less where fewer are updated at once."""


class _Need(NamedTuple):
    states: float
    scratch: float


def foresee_update(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], device: torch.device
) -> Update | None:
    """What the optimizer will keep for these parameters; None where fake tensors cannot tell."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None  # its step may talk to others
    names = {param: name for name, param in named.items()}
    try:
        with undrawn(device):
            trials = [_Trials(optimizer, group, device) for group in optimizer.param_groups]
            needs = [(t, p, t.need(p)) for t in trials for p in t.params]
    except Exception:  # whatever a step does that fake tensors cannot
        return None
    joint = sum(need.scratch for trial, _, need in needs if trial.together)
    single = max((need.scratch for trial, _, need in needs if not trial.together), default=0)
    states = {names[p]: int(need.states) for _, p, need in needs if p in names}
    return Update(type(optimizer).__name__.lower(), states, int(single), int(joint))


class _Trials:
    """One for each form of note among a group's parameters; small ones take as the largest does."""

    def __init__(self, optimizer: Any, group: Any, device: torch.device) -> None:
        self.params = [p for p in group["params"] if p.requires_grad and p.nbytes]
        self._total = sum(p.nbytes for p in self.params)
        self._run = partial(_try, optimizer, group, device=device)
        self._known: dict[Any, _Need] = {}
        self._largest = max(self.params, key=lambda p: p.nbytes, default=None)
        self.together = False
        if self._largest is not None:
            one, several = self.need(self._largest), self._run([self._largest] * SEVERAL)
            self.together = several.scratch > TOGETHER * one.scratch

    def need(self, param: Tensor) -> _Need:
        """What a parameter needs."""
        form = (param.size(), param.stride(), param.dtype)
        if form not in self._known:
            small = param is not self._largest and param.nbytes < NOTE * self._total
            self._known[form] = self._scaled(param) if small else self._run([param])
        return self._known[form]

    def _scaled(self, param: Tensor) -> _Need:
        assert self._largest is not None
        share = param.nbytes / self._largest.nbytes
        return _Need(*(share * size for size in self.need(self._largest)))


def _try(optimizer: Any, group: Any, like: list[Tensor], device: torch.device) -> _Need:
    """Run some steps for such parameters alone."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [_fake(param, device) for param in like]
    ghost = _ghost(optimizer)
    ghost.param_groups = [{**group, "params": params}]
    if group.get("foreach", True) is None and not group.get("fused"):
        ghost.param_groups[0]["foreach"] = device.type == "cuda"  # as torch would choose
    kind = type(optimizer)
    step, scratch = getattr(kind.step, "__wrapped__", kind.step), 0
    with _Ledger() as ledger, torch.no_grad():
        for _ in range(STEPS):
            ledger.most = 0
            step(ghost)
            scratch = max(scratch, ledger.most - ledger.level())
    kept = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes()
        for state in ghost.state.values()
        for x in tree_leaves(state)
        if isinstance(x, Tensor) and x.device == params[0].device
    }
    return _Need(sum(kept.values()) / len(params), scratch)


def _fake(param: Tensor, device: torch.device) -> Tensor:
    made, grad = (
        torch.empty_strided(param.size(), param.stride(), dtype=param.dtype, device=device)
        for _ in range(2)
    )
    made.requires_grad_()
    made.grad = grad
    return made


def _ghost(optimizer: Any) -> Any:
    """The same optimizer without parameters and states, its own plain attributes copied."""
    ghost = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        ghost.__dict__[name] = copy.deepcopy(value) if _is_plain(value) else value
    ghost.__dict__["state"] = defaultdict(dict)
    return ghost


def _is_plain(value: Any) -> bool:
    return all(isinstance(x, PLAIN) for x in tree_leaves(value))


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of what is made; numbers that a step asks for are ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._rows: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(x) for x in self._tensors((args, kwargs or {}))}
        if func is torch.ops.aten._local_scalar_dense.default and given:
            with contextlib.suppress(Exception):
                return func(*args, **(kwargs or {}))
            return 1.0
        out = func(*args, **(kwargs or {}))
        for x in self._tensors(out):
            storage = x.untyped_storage()
            if storage._cdata not in given:
                link = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._rows[storage._cdata] = link, storage.nbytes()
        self.most = max(self.most, self.level())
        return out

    def level(self) -> int:
        """Bytes alive now."""
        rows = self._rows.items()
        self._rows = {k: row for k, row in rows if not row[0].expired()}  # type: ignore[no-untyped-call]
        return sum(size for _, size in self._rows.values())

    def _tensors(self, tree: Any) -> Iterator[Tensor]:
        return (x for x in tree_leaves(tree) if isinstance(x, Tensor))

    def _key(self, x: Tensor) -> int:
        return int(x.untyped_storage()._cdata)
