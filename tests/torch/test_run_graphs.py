"""Graphs used twice, late, never, or after other steps: right or refused, and nothing left over."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from legroom.core.errors import LegroomError
from legroom.memory.mechanisms.entry import Entry, Handle
from tests.torch.nets import Each, Mlp, rows, stack
from tests.torch.support import (
    LIVE,
    PLANS,
    Rig,
    Start,
    assert_same,
    fitted,
    result_of,
    total,
    weigh,
)

EVERY = pytest.mark.parametrize("plan", PLANS)
EACH_LIVE = pytest.mark.parametrize("policy", LIVE)


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def live_objects(kind: type) -> int:
    gc.collect()
    return sum(issubclass(type(o), kind) for o in gc.get_objects())


def clean(x: Tensor) -> Tensor:
    return x.clone().detach()


# -- autograd's version check --------------------------------------------------------------------


def spoiled(model: nn.Module, batch: Tensor) -> Tensor:
    """A saved tensor is changed in place after it was saved: autograd refuses the backward."""
    h = batch
    for block in model:  # type: ignore[attr-defined]
        h = torch.exp(block(h) * 0.1)
        kept = h
        h = h * 2
        with torch.no_grad():
            kept.zero_()
    return weigh(h)


def test_a_change_in_place_is_found_for_kept_tensors() -> None:
    """Hooks switch off autograd's own check; ours raises the same error."""
    rig = Rig(stack(Mlp), rows())
    rig.install(PLANS["full"](rig.step))
    with (
        rig.runner.following(),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        spoiled(rig.model, rows()).backward()
    rig.close()


@EVERY
def test_a_change_in_place_does_not_corrupt(plan: str) -> None:
    """For a moved tensor: autograd's error, or the gradient of what was saved; never a third."""
    model = stack(Mlp)
    x = rows()

    def loss(model: nn.Module, batch: Tensor, spoil: bool = True) -> Tensor:
        h, saved = batch, []
        for block in model:  # type: ignore[attr-defined]
            h = torch.exp(block(h) * 0.1)
            saved.append(h)
            h = h * 2
        found = weigh(h)
        if spoil:
            with torch.no_grad():
                for tensor in saved:
                    tensor.fill_(100.0)
        return found

    rig = Rig(model, x, lambda m, b: loss(m, b, spoil=False))
    plain = rig.plain()
    rig.loss_fn = loss
    rig.install(PLANS[plan](rig.step))
    try:
        mine = rig.planned()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert_same(mine, plain)
    finally:
        rig.close()


# -- more than one backward ----------------------------------------------------------------------


@EVERY
def test_two_backwards_through_one_graph(plan: str) -> None:
    """retain_graph: the second backward adds the same gradients again."""

    def twice(rig: Rig) -> Any:
        rig.start.restore()
        loss = rig.loss()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return result_of(rig.model, loss)

    rig = Rig(stack(Mlp), rows())
    plain = twice(rig)
    rig.install(PLANS[plan](rig.step))
    for _ in range(2):
        with rig.runner.following():
            mine = twice(rig)
        assert_same(mine, plain)
    rig.close()


@EVERY
def test_a_backward_of_part_of_the_graph_first(plan: str) -> None:
    """Gradients of some parameters, then of others, then all: each as without a plan."""

    def parts(rig: Rig) -> list[Tensor]:
        rig.start.restore()
        loss, params = rig.loss(), list(rig.model.parameters())
        half = len(params) // 2
        first = torch.autograd.grad(loss, params[half:], retain_graph=True)
        second = torch.autograd.grad(loss, params[:half], retain_graph=True)
        return [*first, *second, *torch.autograd.grad(loss, params)]

    rig = Rig(stack(Mlp), rows())
    plain = parts(rig)
    rig.install(PLANS[plan](rig.step))
    with rig.runner.following():
        assert equal(parts(rig), plain)
    rig.close()


@EVERY
def test_second_order_gradients(plan: str) -> None:
    """create_graph: right, or refused with an error that says so."""

    def penalty(rig: Rig) -> list[Tensor]:
        rig.start.restore()
        x = clean(rows()).requires_grad_()
        (slope,) = torch.autograd.grad(total(rig.model, x), x, create_graph=True)
        slope.square().sum().backward()
        return grads(rig.model)

    rig = Rig(stack(lambda: Mlp(p=0.0)), rows().requires_grad_())
    plain = penalty(rig)
    rig.install(PLANS[plan](rig.step))
    try:
        with rig.runner.following():
            mine = penalty(rig)
    except LegroomError:
        return
    finally:
        rig.close()
    assert equal(mine, plain)


@EVERY
def test_a_backward_after_the_step_has_ended(plan: str) -> None:
    rig = Rig(stack(Mlp), rows())
    plain = rig.plain()
    rig.install(PLANS[plan](rig.step))
    rig.start.restore()
    with rig.runner.following():
        loss = rig.loss()
    loss.backward()
    assert_same(result_of(rig.model, loss), plain)
    rig.close()


@EVERY
def test_a_graph_kept_over_later_steps(plan: str) -> None:
    """Later steps use its slots again; its backward is still right, twice over."""
    rig = Rig(stack(Mlp), rows())
    plain = rig.plain()
    rig.install(PLANS[plan](rig.step))
    rig.start.restore()
    with rig.runner.following():
        old = rig.loss()
    stream = torch.get_rng_state()
    rig.batch = rows(seed=9)
    for _ in range(3):
        rig.planned()
    for _ in range(2):
        rig.model.zero_grad()
        old.backward(retain_graph=True)
        torch.set_rng_state(stream)
        assert_same(result_of(rig.model, old), plain)
        rig.planned()
    rig.close()


@EVERY
def test_a_graph_half_used_before_later_steps(plan: str) -> None:
    """Some of its tensors are back when a later step takes their slots."""
    rig = Rig(stack(Mlp), rows())
    params = list(rig.model.parameters())
    half = len(params) // 2

    def finish(loss: Tensor) -> list[Tensor]:
        return [g for _ in range(2) for g in torch.autograd.grad(loss, params, retain_graph=True)]

    rig.start.restore()
    loss = rig.loss()
    torch.autograd.grad(loss, params[half:], retain_graph=True)
    plain = finish(loss)
    rig.install(PLANS[plan](rig.step))
    rig.start.restore()
    with rig.runner.following():
        old = rig.loss()
        torch.autograd.grad(old, params[half:], retain_graph=True)
    rig.batch = rows(seed=9)
    for _ in range(2):
        rig.planned()
    assert equal(finish(old), plain)
    rig.close()


@EACH_LIVE
@pytest.mark.parametrize("rest", [["same"] * 3, ["small"] * 3, ["large"] * 3, ["small", "large"]])
def test_a_graph_kept_over_later_plans(policy: str, rest: list[str]) -> None:
    """A job makes new plans, with other slots and storage numbers; an old graph stays right."""
    model = stack(lambda: Mlp(p=0.0))
    batches = {"same": rows(), "small": rows(count=16), "large": rows(count=96)}
    old = weigh(model(rows(seed=3)))
    old.backward()
    plain = grads(model)
    with fitted(model, policy) as job:
        with job.step():
            old = weigh(model(rows(seed=3)))
        for name in rest:
            model.zero_grad()
            with job.step():
                weigh(model(batches[name])).backward()
        for _ in range(2):
            model.zero_grad()
            old.backward(retain_graph=True)
            assert equal(grads(model), plain)


@EACH_LIVE
def test_losses_of_several_steps_with_one_backward(policy: str) -> None:
    """The graphs of three steps live on together until one backward at the end."""
    model = stack(lambda: Mlp(p=0.0))
    batches = [rows(seed=i, count=n) for i, n in enumerate((32, 32, 32, 16, 48))]
    torch.stack([weigh(model(x)) for x in batches]).sum().backward()
    plain = grads(model)
    with fitted(model, policy) as job:
        model.zero_grad()
        losses = []
        for x in batches:
            with job.step():
                losses.append(weigh(model(x)))
        torch.stack(losses).sum().backward()
    assert equal(grads(model), plain)


@EACH_LIVE
def test_a_backward_after_the_job_was_closed(policy: str) -> None:
    """The bytes may be gone: right, or refused with an error that says why; no assertion."""
    model = stack(lambda: Mlp(p=0.0))
    weigh(model(rows())).backward()
    plain = grads(model)
    with fitted(model, policy) as job:
        model.zero_grad()
        with job.step():
            loss = weigh(model(rows()))
    try:
        loss.backward()
    except LegroomError:
        return
    assert equal(grads(model), plain)


# -- nothing is left over ------------------------------------------------------------------------


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


@EVERY
def test_a_step_leaves_nothing_without_a_collection(plan: str) -> None:
    """After a whole step the inputs of its blocks are free at once: no cycle waits for gc."""
    rig = Rig(stack(Mlp), rows())
    rig.install(PLANS[plan](rig.step))
    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    for block in list(rig.model)[1:]:  # type: ignore[call-overload]
        block.register_forward_pre_hook(
            lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage()))
        )
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
