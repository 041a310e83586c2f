"""The plan of the very first step, made before anything ran."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import legroom
from legroom.core.errors import StepError
from legroom.examples import EXAMPLES
from legroom.memory.trace import Phase
from tests.torch.nets import Mlp
from tests.torch.support import MACHINE, fitted


def test_a_loss_outside_of_the_model_has_room_in_the_first_step() -> None:
    """Logits dwarf all else: the first plan, made without the loss, still leaves room for it."""
    model = nn.Sequential(nn.Embedding(64, 64), *[Mlp() for _ in range(16)], nn.Linear(64, 2048))
    tokens = torch.randint(0, 64, (1024,))

    def step() -> None:
        F.cross_entropy(model(tokens), tokens).backward()

    weights = sum(p.nbytes for p in model.parameters())
    logits = 1024 * 2048 * 4
    budget = 2 * weights + 6 * logits
    with legroom.fit(model, None, budget=budget) as job:
        job.meter.peaks = True
        with job.step():
            step()
        peak = job.meter.last().peaks["step"] + weights + tokens.nbytes
    assert peak <= budget, (peak, budget)


def test_a_first_plan_holds_nothing_of_the_step_it_is_made_for() -> None:
    """Plans that were tried and did not fit leave no frames behind, and no outputs in them."""
    model = nn.Sequential(*[Mlp() for _ in range(8)])
    x = torch.randn(1024, 64)
    with pytest.raises(legroom.BudgetError) as caught:
        legroom.estimate(model, x, machine=MACHINE, budget=1024)
    least = caught.value.smallest_bytes
    assert least is not None
    gc.collect()
    gc.disable()
    try:
        job = legroom.fit(model, None, budget=int(1.05 * least), machine=MACHINE)
        with job, job.step():
            out = model(x)
            mark = weakref.ref(out)
            out.square().mean().backward()
            del out
            assert mark() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["transformer", "convnet", "unet", "lstm", "llama-tiny"])
def test_the_budget_that_a_refusal_names_works(name: str) -> None:
    """Also where kernels take scratch that shapes do not show: no step of the next try is refused.

    The third is recorded, and from there on all is known.
    """
    told: list[int] = []
    for budget in (1 << 20, 0):
        example = EXAMPLES[name]()
        optimizer = torch.optim.AdamW(example.model.parameters(), fused=True)
        batch = example.make_batch()
        with legroom.fit(example.model, optimizer, budget=budget or told[0]) as job:
            job.meter.peaks = True
            try:
                for _ in range(5):
                    with job.step():
                        example.loss_fn(example.model, batch).backward()
                        optimizer.step()
                        optimizer.zero_grad()
            except legroom.BudgetError as error:
                told.append(error.smallest_bytes or 0)
            else:
                measured = job.comparison().measured
                assert measured is not None and measured.device_bytes <= told[0]
    assert len(told) == 1 and told[0] > 1 << 20


def test_gradients_that_go_with_their_step_are_known_as_such() -> None:
    """As in most loops: `zero_grad` is in the step, and the peak is made of gradients, too."""
    model = nn.Sequential(*[Mlp() for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    with legroom.fit(model, optimizer, budget="64MiB") as job:
        for _ in range(4):
            with job.step():
                model(torch.randn(4, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        parts = job.current.plan.predicted.peak_parts  # type: ignore[union-attr]
    assert parts["gradient"] == parts["weight"] == sum(p.nbytes for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_where_the_loss_takes_most_an_error_says_what_helps() -> None:
    """Chunks do, for language models; elsewhere they are not spoken of."""
    model = nn.Sequential(nn.Embedding(64, 64), Mlp(), nn.Linear(64, 4096))
    tokens = torch.randint(0, 64, (1024,))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch), batch)

    with pytest.raises(legroom.BudgetError, match='compile="blocks"'):
        legroom.estimate(model, tokens, machine=MACHINE, loss_fn=loss, budget=1 << 20)
    with pytest.raises(legroom.BudgetError) as caught:
        legroom.estimate(model[:2], tokens, machine=MACHINE, budget=1 << 10)
    assert "compile" not in str(caught.value)


@pytest.mark.parametrize("off", [{"disk": 0}, {"disk": "0GiB", "host": "0"}])
def test_a_tier_with_nothing_is_left_alone(off: dict[str, int | str]) -> None:
    """All that is left is to run blocks again."""
    model, x = nn.Sequential(*[Mlp() for _ in range(8)]), torch.randn(512, 64)
    natural = legroom.estimate(model, x, machine=MACHINE, optimizer="none").device_bytes
    budget = {"device": int(0.6 * natural), **off}
    with legroom.fit(model, None, budget=budget, machine=MACHINE) as job:
        for _ in range(4):
            with job.step():
                model(x).sum().backward()
            model.zero_grad()
        plan = job.current.plan  # type: ignore[union-attr]
    assert plan.recomputes and set(plan.predicted.peak_bytes) == {"device"}


def test_what_others_hold_on_the_device_counts() -> None:
    """A second model, or a library's scratch, is part of the peak and takes of the budget."""
    model = nn.Sequential(*[Mlp() for _ in range(6)])
    batch = torch.randn(256, 64)
    weights = sum(p.nbytes for p in model.parameters())

    def peak(others: int) -> int:
        with legroom.fit(model, None, budget="64MiB") as job:
            known = weights + batch.nbytes
            job.meter.found = lambda: known + others  # type: ignore[method-assign]
            for visit in range(4):
                with job.step():
                    model(batch).sum().backward()
                model.zero_grad()
                assert job.current is not None and job.current.plan is not None
                parts = job.current.plan.predicted.peak_parts
                assert parts.get("other", 0) == others, (visit, parts)
            return job.current.plan.predicted.device_bytes

    assert peak(20 << 20) - peak(0) == 20 << 20


def test_backward_of_what_comes_before_the_blocks_is_in_none_of_them() -> None:
    """An embedding saves nothing of note: its gradient must not count as the first block's."""
    model = nn.Sequential(nn.Embedding(500, 64), *[Mlp() for _ in range(3)])
    step = legroom.trace(model, torch.zeros(4, 16, dtype=torch.long), machine=MACHINE)
    behind = [op for op in step.ops if op.phase == Phase.BACKWARD]
    after = [op for op in behind if op.name == "aten.embedding_dense_backward"]
    assert [op.block for op in after] == [-1]
    products = [op.block for op in behind if op.name.startswith("aten.mm")]
    assert products == sorted(products, reverse=True) and set(products) == {0, 1, 2}


class Inner(torch.autograd.Function):
    """Builds and runs a graph of its own in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            again = given[0] @ given[1]
        return torch.autograd.grad(again, given, grad)


class Twice(nn.Module):
    """A block whose backward runs such a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + Inner.apply(x, self.weight).sin()  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.parametrize("block", [Mlp, Twice])
def test_backward_ops_are_in_the_block_whose_nodes_they_run(block: type[nn.Module]) -> None:
    """Of two forwards in a step, and of graphs made inside of backward."""
    model = nn.Sequential(nn.Linear(64, 64), *[block() for _ in range(3)])
    with legroom.fit(model, None, budget="1GiB", machine=MACHINE) as job:
        for _ in range(4):
            with job.step():
                for _ in range(2):
                    model(torch.randn(256, 64)).square().mean().backward()
        step = job.current.capture.step
    behind = [op for op in step.ops if op.phase == Phase.BACKWARD and op.name.startswith("aten.mm")]
    counts = Counter(op.block for op in behind)
    assert counts.pop(-1) == 2, "of the first layer, whose input wants no gradient"
    assert set(counts) == set(range(6)) and len(set(counts.values())) == 1


def test_a_module_under_two_names_is_itself_after_an_estimate() -> None:
    """Its weights are put back, whatever it is called."""
    layer = nn.Linear(64, 64)
    model, x = nn.Sequential(layer, nn.ReLU(), layer), torch.randn(8, 64)
    before = model(x)
    legroom.estimate(model, x, machine="l4")
    assert torch.equal(model(x), before) and len(list(model.parameters())) == 2
    assert sorted(model.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_blocks_that_are_asked_for_other_gradients_are_of_other_groups() -> None:
    """The first one's input wants none, which makes a product less."""
    model = nn.Sequential(*[Mlp() for _ in range(4)])
    step = legroom.trace(model, torch.randn(8, 64), machine=MACHINE)
    first, *others = (block.group for block in step.blocks)
    assert len(set(others)) == 1 and first not in others


def test_a_model_that_looks_at_its_numbers_cannot_be_estimated() -> None:
    """An error says so."""

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(StepError, match="can be fitted, but not estimated"):
        legroom.estimate(Looks(8, 8), torch.randn(2, 8), machine="l4")


def test_mistakes_of_the_users_own_are_shown_as_they_are() -> None:
    """They are no limit of estimates."""

    def broken(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).no_such_thing()  # type: ignore[no-any-return]

    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    with pytest.raises(AttributeError, match="no_such_thing"):
        legroom.estimate(model, x, machine="l4", loss_fn=broken)
    with pytest.raises(StepError, match="loss_fn gave NoneType"):
        legroom.estimate(model, x, machine="l4", loss_fn=lambda *_: None)  # type: ignore[arg-type,return-value]


class Borrows(nn.Module):
    """Uses a trainable tensor that is not among its own."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.layer, self.borrowed = nn.Linear(16, 16), [scale]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.borrowed[0]
        return y


def test_a_leaf_that_the_model_does_not_own_gets_its_real_gradient() -> None:
    """The capture ends in a backward of fake tensors, which must not reach it."""
    scale = torch.randn(16, requires_grad=True)
    model, x = Borrows(scale), torch.randn(4, 16)
    model(x).sum().backward()
    plain, scale.grad = scale.grad, torch.ones(16)
    with fitted(model, "auto") as job:
        for i in range(5):
            with job.step():
                model(x).sum().backward()
            assert type(scale.grad) is Tensor and plain is not None
            torch.testing.assert_close(scale.grad, 1 + (i + 1) * plain)


@pytest.mark.filterwarnings("ignore:legroom. a step ran forward but")
def test_steps_that_never_run_backward_are_not_recorded_for_ever() -> None:
    """A loop may call backward after the step: then recordings are taken as they are."""
    model, x = nn.Sequential(*[Mlp(p=0.0) for _ in range(4)]), torch.randn(64, 64)
    with fitted(model, "auto") as job:
        for _ in range(8):
            with job.step():
                loss = model(x).sum()
            loss.backward()
            model.zero_grad()
        assert job.current is not None and job.current.recorded


@pytest.mark.filterwarnings("ignore:legroom. a step ran forward but")
@pytest.mark.parametrize("given_up", [{2}, {2, 3}, {0, 1, 2}])
def test_a_step_that_was_given_up_is_not_what_plans_are_made_from(given_up: set[int]) -> None:
    """A loop may skip a bad batch after its forward: the next step is recorded instead."""
    model, x = nn.Sequential(*[Mlp(p=0.0) for _ in range(4)]), torch.randn(64, 64)
    with fitted(model, "auto") as job:
        for i in range(8):
            with job.step():
                loss = model(x).sum()
                if i not in given_up:
                    loss.backward()
            model.zero_grad()
        kind = job.current
        assert kind is not None and kind.recorded and kind.capture is not None
        assert any(op.phase is Phase.BACKWARD for op in kind.capture.step.ops)
