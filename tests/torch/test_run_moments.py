"""What is there when a block first runs counts, not what is there when backward comes."""

import copy
import functools
import gc
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import legroom
from legroom.core.errors import StepError
from legroom.memory.actions import Recompute
from legroom.memory.trace import FULL
from tests.torch.nets import WIDTH, ConvNorm, Each, Mlp, images, rows, stack
from tests.torch.support import (
    LIVE,
    MACHINE,
    Rig,
    assert_same,
    fitted,
    movable,
    moves,
    until_measured,
    weigh,
)

EACH = pytest.mark.parametrize("policy", LIVE)
Closure = Callable[[nn.Module, int], None]


def plainly(model: nn.Module, i: int) -> None:
    """Forward and backward on new data."""
    weigh(model(rows(seed=i))).backward()


def same_steps(policy: str, model: nn.Module, closure: Closure = plainly, steps: int = 7) -> None:
    """Each step of a job gives the gradients of a twin without one, data new each time."""
    twin = copy.deepcopy(model)
    with fitted(model, policy) as job:
        for i in range(steps):
            for one, around in ((twin, nullcontext()), (model, job.step())):
                torch.manual_seed(i)
                random.seed(i)
                np.random.seed(i)
                one.zero_grad()
                with around:
                    closure(one, i)
            pairs = zip(twin.named_parameters(), model.parameters(), strict=True)
            for (name, ours), theirs in pairs:
                assert ours.grad is not None and theirs.grad is not None
                assert torch.equal(ours.grad, theirs.grad), f"step {i}: {name} differs"


@EACH
def test_a_counter_that_its_forward_uses(policy: str) -> None:
    """The replay runs with the count of its own call, and counts nothing."""

    def count(block: Any, x: Tensor) -> Tensor:
        block.calls = getattr(block, "calls", 0) + 1
        return block.down(torch.tanh(block.up(x) * block.calls))

    same_steps(policy, stack(lambda: Each(count)))


@EACH
def test_a_list_that_its_forward_fills(policy: str) -> None:
    """Auxiliary losses are collected once, and what the list held is what the replay finds."""

    def collect(block: Any, x: Tensor) -> Tensor:
        h = block.up(x)
        block.losses.append(h.pow(2).mean())
        return block.down(F.gelu(h) * len(block.losses))

    def make() -> nn.Module:
        block = Each(collect)
        block.losses = []  # type: ignore[assignment]
        return block

    def closure(model: nn.Module, i: int) -> None:
        for block in model.children():
            block.losses.clear()  # type: ignore[union-attr, operator]
        y = weigh(model(rows(seed=i)))
        losses = [loss for block in model.children() for loss in block.losses]  # type: ignore[union-attr]
        assert len(losses) == 3
        (y + torch.stack(losses).sum()).backward()

    same_steps(policy, stack(make), closure)


@EACH
def test_a_model_in_eval_before_backward(policy: str) -> None:
    """Norm layers run again as they ran, whatever mode the model is in by then."""

    def closure(model: nn.Module, i: int) -> None:
        loss = weigh(model(images(seed=i)))
        model.eval()
        loss.backward()
        model.train()

    same_steps(policy, stack(ConvNorm), closure)


@EACH
@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_branches_that_come_later(policy: str, draw: Callable[[], float]) -> None:
    """Python's or numpy's generator is first drawn from after the trace: layer drop by schedule."""
    share = 0.0

    def coin(block: Any, x: Tensor) -> Tensor:
        h = block.up(x)
        return block.down(torch.sigmoid(h) if share and draw() < share else torch.tanh(h))

    def closure(model: nn.Module, i: int) -> None:
        nonlocal share
        share = 0.5 if i > 3 else 0.0
        plainly(model, i)

    same_steps(policy, stack(lambda: Each(coin)), closure, steps=10)


@EACH
def test_a_norm_that_reads_its_statistics(policy: str) -> None:
    """Batch renorm: what it reads is no more there when it runs again, so it is left alone."""

    class Renorm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            assert self.running_var is not None
            before = self.running_var.clone()
            return super().forward(x) * (1 + before)

    def make() -> nn.Module:
        block = Each(lambda b, x: b.down(torch.tanh(b.norm(b.up(x)))))
        block.norm = Renorm(WIDTH)
        return block

    same_steps(policy, stack(make))


def test_parameters_thawed_before_backward_are_refused() -> None:
    """The replay would save other tensors than the first run."""
    model = stack(Mlp)
    with fitted(model, "test_full") as job, pytest.raises(StepError, match="thawed"), job.step():
        model[1].requires_grad_(False)
        loss = weigh(model(rows()))
        model[1].requires_grad_(True)
        loss.backward()


@pytest.mark.parametrize("kind", ["lru_cache", "global", "attribute"])
def test_tables_cached_in_forward_stay_real(kind: str) -> None:
    """A table made at the first call must not be one of the fake tensors of the capture."""
    shared: dict[int, Tensor] = {}

    def make(n: int) -> Tensor:
        return torch.sin(torch.arange(n * WIDTH).float()).view(-1, WIDTH)

    cached = functools.lru_cache(make)

    def table(block: Any, n: int) -> Tensor:
        if kind == "lru_cache":
            return cached(n)
        tables = shared if kind == "global" else block.tables
        if n not in tables:
            tables[n] = make(n)
        return tables[n]

    def block() -> nn.Module:
        one = Each(lambda b, x: b.down(F.gelu(b.up(x) * table(b, len(x)))))
        one.tables = {}  # type: ignore[assignment]
        return one

    model = stack(block)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model[0].up.weight.detach().clone()  # type: ignore[union-attr, operator]
    with legroom.fit(model, optimizer, budget="1GiB", machine=MACHINE) as job:
        for i in range(4):
            with job.step():
                loss = weigh(model(rows(seed=i)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert type(loss) is Tensor
    assert not torch.equal(before, model[0].up.weight)  # type: ignore[union-attr, arg-type]


def test_features_that_a_hook_collects_are_real() -> None:
    """The capture calls hooks too, and takes what it made out of their lists."""
    model, features = stack(Mlp), []
    model[1].register_forward_hook(lambda *given: features.append(given[2]))
    with fitted(model, "keep_all") as job:
        for i in range(3):
            with job.step():
                plainly(model, i)
    assert len(features) == 3 and all(type(x) is Tensor for x in features)


def test_weights_are_free_after_close() -> None:
    """Nothing of the job keeps the model alive."""
    model = stack(Mlp)
    weight = weakref.ref(model[0].up.weight)
    with fitted(model, "test_full") as job, job.step():
        plainly(model, 0)
    del model, job
    gc.collect()
    assert weight() is None


def test_a_block_called_without_gradients_inside_another() -> None:
    """It is no part of the trace, and the outer block goes on when it ends."""

    class Outer(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.peers: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            if self.peers and torch.is_grad_enabled():
                with torch.no_grad():
                    x = x + self.peers[0](x)
            return super().forward(x)

    model = stack(Outer, 6)
    for i in (3, 4, 5):
        model[i].peers.append(model[i - 3])  # type: ignore[union-attr, operator]
    with fitted(model, "test_full") as job:
        for i in range(6):
            with job.step():
                plainly(model, i)
            model.zero_grad()
            assert i < 3 or not job.runner.deviation, "planned from a recording, it goes as traced"


def test_sparse_gradients_of_an_earlier_step() -> None:
    """They have no storage to count."""
    model = nn.Sequential(nn.Embedding(32, WIDTH, sparse=True), Mlp(), Mlp())
    tokens = torch.randint(0, 32, (64,))
    weigh(model(tokens)).backward()
    with fitted(model, "keep_all") as job, job.step():
        weigh(model(tokens)).backward()
    assert job.current is not None and job.current.capture is not None, "planned before it ran"


def test_casts_that_autocast_keeps_are_counted() -> None:
    """Weights in half precision stay in its cache until the forward is over."""
    model, batch = stack(lambda: Mlp(256), 6), rows(256, 512)
    with fitted(model, "test_full") as job:
        job.meter.peaks = True

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with job.step():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = weigh(model(batch).float())
                loss.backward()

        for _ in range(6):
            step()
        both = until_measured(job, step)
    assert both.measured is not None
    assert both.measured.device_bytes == pytest.approx(both.predicted.device_bytes, rel=0.01)


def test_an_argument_changed_after_it_was_moved_away() -> None:
    """Its old bytes lie below, and the block that runs again wants the new ones."""
    late = False

    class Blend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                Each(lambda b, x: b.down(torch.tanh(b.up(torch.relu(x))))) for _ in range(3)
            )
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x * 1.5
                side = torch.sin(x)
                if late:
                    self.kept.append(side)  # so that its saved tensor is not let go
                    with torch.no_grad():
                        x.add_(1.0)
                x = layer(x) + (side.detach() if late else side) * 0.1
            return x

    rig = Rig(Blend(), rows(), blocks=["layers.0", "layers.1", "layers.2"])
    again = [Recompute(block=b, variant=FULL) for b in range(3)]
    away = [
        msgspec.structs.replace(m, out_wait=rig.step.packed(m.storage) + 1)
        for m in moves(rig.step, movable(rig.step, again), "host", again)
    ]
    assert away
    rig.install([*again, *away])
    for step in range(4):
        late = step > 1
        planned = rig.planned()
        assert_same(planned, rig.plain())
        rig.model.kept.clear()  # type: ignore[union-attr, operator]
    rig.close()
