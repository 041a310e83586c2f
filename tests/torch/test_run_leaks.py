"""Nothing is left over: of a step, of a graph without backward, of an error, of a closed job."""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from legroom.memory.mechanisms.entry import Entry, Handle
from legroom.memory.recorder import Recorder
from legroom.memory.timers import CpuTimer
from tests.torch.nets import WIDTH, Each, Mlp, rows, stack
from tests.torch.support import CPU, LIVE, PLANS, Rig, Start, assert_same, fitted, weigh

EVERY = pytest.mark.parametrize("plan", PLANS)
EACH_LIVE = pytest.mark.parametrize("policy", LIVE)


def live_objects(kind: type) -> int:
    gc.collect()
    return sum(issubclass(type(o), kind) for o in gc.get_objects())


@EVERY
def test_a_graph_freed_without_backward_frees_its_slots(plan: str) -> None:
    """Handles own the bytes: with the graph they go, at once and without a collection."""
    rig = Rig(stack(Mlp), rows())
    rig.install(PLANS[plan](rig.step))
    gc.collect()
    gc.disable()
    try:
        before = sum(type(o) in (Entry, Handle) for o in gc.get_objects())
        with rig.runner.following():
            loss = rig.loss()
            marks = [weakref.ref(e()) for e in rig.runner._entries.values() if e() is not None]
            del loss
        assert not any(mark() is not None for mark in marks)
        assert sum(type(o) in (Entry, Handle) for o in gc.get_objects()) == before
    finally:
        gc.enable()
        rig.close()


def mark_inputs(rig: Rig) -> list[weakref.ref[torch.UntypedStorage]]:
    """Weak references to what blocks after the first are given, filled as they run."""
    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    for block in list(rig.model)[1:]:  # type: ignore[call-overload]
        block.register_forward_pre_hook(
            lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage()))
        )
    return inputs


class Exp(torch.autograd.Function):
    """Saves what it returns, and has made nodes of other ops since its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x.detach().requires_grad_().sin().cos()
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad * out


class Saves(nn.Module):
    """Ops that save what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(Exp.apply((x * self.scale).tanh().exp()))


class Gated(nn.Module):
    """Ops in place on a few bytes, that make nodes between their own and what they save."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        gate = (x[:1, :4] * 1).cumprod_(1).pow_(self.scale[:4])
        several = [gate * 1, gate * 2]
        torch._foreach_sigmoid_(several)
        return x * sum(several).mean()  # type: ignore[union-attr]


@pytest.mark.parametrize("block", [Saves, Gated])
@pytest.mark.parametrize("plan", [*PLANS, "recorded"])
def test_a_result_that_its_own_op_saved_goes_with_the_graph(
    plan: str, block: type[nn.Module]
) -> None:
    """Autograd gives a hook the result itself: held as it is, it would hold its own graph."""
    rig = Rig(stack(block), rows())
    rig.install(PLANS[plan](rig.step) if plan in PLANS else [])
    recorder = Recorder(rig.model, CPU, CpuTimer()) if plan == "recorded" else None
    inputs = mark_inputs(rig)
    gc.collect()
    gc.disable()
    try:
        with rig.runner.following(recorder), recorder or contextlib.nullcontext():
            loss = rig.loss()
            del loss
        if rig.tiers.lanes is not None:
            rig.tiers.lanes.drain()
        assert inputs and not any(mark() is not None for mark in inputs)
    finally:
        gc.enable()
        rig.close()


@EVERY
def test_a_step_leaves_nothing_without_a_collection(plan: str) -> None:
    """After a whole step the inputs of its blocks are free at once: no cycle waits for gc."""
    rig = Rig(stack(Mlp), rows())
    rig.install(PLANS[plan](rig.step))
    inputs = mark_inputs(rig)
    gc.collect()
    gc.disable()
    try:
        rig.planned()
        assert inputs and not any(mark() is not None for mark in inputs)
    finally:
        gc.enable()
        rig.close()


class Fault(Exception):
    """Raised by a test in the middle of something."""


class Raises(torch.autograd.Function):
    """Passes values on, and raises in forward or backward when told to."""

    when = ""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if Raises.when == "forward":
            raise Fault
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Raises.when == "backward":
            raise Fault
        return grad


@EVERY
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_step_that_raises_leaves_nothing_behind(plan: str, when: str) -> None:
    """The next step is right, and no tensor, entry or handle of the failed one is alive."""
    model = stack(lambda: Each(lambda m, x: m.down(Raises.apply(F.gelu(m.up(x))))))
    rig = Rig(model, rows())
    plain = rig.plain()
    rig.install(PLANS[plan](rig.step))
    assert_same(rig.planned(), plain)
    rig.model.zero_grad()
    tensors, things = live_objects(Tensor), live_objects(Entry) + live_objects(Handle)
    Raises.when = when
    try:
        with pytest.raises(Fault):
            rig.planned()
    finally:
        Raises.when = ""
    rig.model.zero_grad()
    if rig.tiers.lanes is not None:
        rig.tiers.lanes.drain()
    assert live_objects(Entry) + live_objects(Handle) == things
    assert live_objects(Tensor) <= tensors
    assert_same(rig.planned(), plain)
    rig.close()


@EACH_LIVE
def test_a_closed_job_leaves_no_trace_in_the_model(policy: str) -> None:
    """Hooks, attributes and state_dict are as before; nothing of the job is held by the model."""
    model = stack(Mlp)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    fields = [sorted(m.__dict__) for m in model.modules()]
    start = Start(model)
    with fitted(model, policy) as job:
        for _ in range(3):
            start.restore()
            with job.step():
                weigh(model(rows())).backward()
        mark = weakref.ref(job)
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert fields == [sorted(m.__dict__) for m in model.modules()]
    del job
    gc.collect()
    assert mark() is None
