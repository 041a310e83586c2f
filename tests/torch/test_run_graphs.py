"""Graphs used twice, late, in part or after other steps: right, or refused in words."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from legroom.core.errors import LegroomError
from tests.torch.nets import Mlp, rows, stack
from tests.torch.support import (
    LIVE,
    PLANS,
    Rig,
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
    if rig.tiers.lanes is not None:
        # The copies out begin late, as behind others on a busy link.
        rig.tiers.lanes._out.submit(time.sleep, 0.3)  # type: ignore[attr-defined]
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


@pytest.mark.filterwarnings("ignore:legroom. a step ran forward but")
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
