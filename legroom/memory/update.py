"""What an optimizer will keep and take: its own step is run on fake tensors, one of each form.

So the first steps are planned with the states that will be there and the scratch that updates will
need, before any of them is. Only code of torch's own is run: what others do in a step is theirs.
"""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from legroom.memory.mechanisms.recompute import undrawn
from legroom.memory.mechanisms.standin import run_step, step_code

STEPS = 8
"""Some do other arithmetic after the first few."""
NOTE = 0.01
"""Smaller parts of all parameters are not tried by themselves."""
SEVERAL, TOGETHER = 4, 2.5
"""So many parameters take more times the scratch of one only where they are worked at together."""
PLAIN = (bool, int, float, str, type(None))
HARMLESS = ("__init__", "step")
"""What a subclass may have: `step` is torch's own if its code is, whatever is around it."""
OWN_OPTIONS = ("params", "lr", "initial_lr", "weight_decay", "name", "param_names")
"""Of a group, what makes no difference to what its parameters need."""


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
    if not _is_known(optimizer):
        return None
    names = {param: name for name, param in named.items()}
    try:
        with undrawn(device):
            alike: dict[str, list[Any]] = {}
            for group in optimizer.param_groups:
                alike.setdefault(_options(group), []).append(group)
            trials = [_Trials(optimizer, groups, device) for groups in alike.values()]
            needs = [(t, p, t.need(p)) for t in trials for p in t.params]
    except Exception:  # whatever a step does that fake tensors cannot
        return None
    joint = sum(need.scratch for trial, _, need in needs if trial.together)
    single = max((need.scratch for trial, _, need in needs if not trial.together), default=0)
    states = {names[p]: int(need.states) for _, p, need in needs if p in names}
    return Update(type(optimizer).__name__.lower(), states, int(single), int(joint))


def states_there(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], device: torch.device
) -> Update | None:
    """What an optimizer keeps that has run already; None for one without states."""
    found = {}
    for name, param in named.items():
        leaves = tree_leaves(optimizer.state.get(param, {}))
        sizes = [x.nbytes for x in leaves if isinstance(x, Tensor) and x.device.type == device.type]
        found[name] = sum(sizes)
    return Update(type(optimizer).__name__.lower(), found, 0, 0) if any(found.values()) else None


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all code of its step is torch's: of a subclass, none but what makes it is its own."""
    if step_code(optimizer) is None:
        return False
    for kind in type(optimizer).__mro__:
        if f"{kind.__module__}.".startswith("torch.optim."):
            return kind is not torch.optim.Optimizer
        if any(callable(x) for name, x in vars(kind).items() if name not in HARMLESS):
            return False
    return False


def _options(group: Mapping[str, Any]) -> str:
    """All that two groups must have in common for their parameters to need alike."""
    return repr(sorted((k, repr(v)) for k, v in group.items() if k not in OWN_OPTIONS))


class _Trials:
    """One for each form of note among parameters; small ones take as the largest does."""

    def __init__(self, optimizer: Any, groups: Sequence[Any], device: torch.device) -> None:
        group, params = groups[0], (p for g in groups for p in g["params"])
        self.params = [p for p in params if p.requires_grad and p.nbytes]
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
    step, scratch = step_code(optimizer), 0
    assert step is not None
    with _Ledger() as ledger:
        for _ in range(STEPS):
            ledger.most = 0
            run_step(step, ghost)
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
