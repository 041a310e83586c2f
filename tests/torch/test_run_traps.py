"""Blocks that once came back wrong without a word: now the same bits, or left alone."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from legroom.memory.actions import Recompute
from legroom.memory.trace import FULL
from tests.torch.nets import WIDTH, Each, Mlp, rows, stack
from tests.torch.support import LIVE, Rig, assert_same, fitted, live_check, selective


def check_all(rig: Rig, before: Callable[[], None] | None = None) -> set[str]:
    """Every variant of every block, compared with the unplanned step; the variants' names."""
    names = {v.name for block in rig.step.blocks for v in block.variants}
    if before is not None:
        before()
    plain = rig.plain()
    for name in sorted(names):
        rig.install(
            [
                Recompute(block=b, variant=name)
                for b, block in enumerate(rig.step.blocks)
                if any(v.name == name for v in block.variants)
            ]
        )
        assert_same(rig.planned(), plain)
        rig.runner.remove()
    rig.close()
    return names


class Pair(nn.Module):
    """Two layers, for blocks that differ in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def test_blocks_alike_in_ops_and_not_in_wiring() -> None:
    """The same ops on tensors of the same sizes, another of them changed in place."""

    class Either(Pair):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first = first

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x).exp()
            a, b, c = h + 1, h + 2, h + 3
            (a if self.first else c).mul_(2)
            out: Tensor = self.down(a.sin() + b.cos() + c.sin()) + x
            return out

    model = nn.Sequential(*[Either(i % 2 == 1) for i in range(4)])
    assert len(check_all(Rig(model, rows() * 0.1))) > 1


def test_wiring_that_changes_from_step_to_step() -> None:
    """Names and sizes are as traced, the tensors others."""
    swapped: list[bool] = []

    def fn(self: Each, x: Tensor) -> Tensor:
        h = self.up(x)[:, :WIDTH]
        a, b = h + 1, h + 2
        p, q = (b, a) if swapped else (a, b)
        return (p.sin() + q.cos()) * x

    rig = Rig(stack(lambda: Each(fn)), rows())
    assert len(check_all(rig, lambda: swapped.append(True))) > 1


def test_random_numbers_that_the_trace_did_not_draw() -> None:
    """A share of rows dropped, from some step on: the mask is too small to be seen as saved."""
    share = [0.0]

    def fn(self: Each, x: Tensor) -> Tensor:
        h = self.up(x)
        if share[0]:
            h = h * h.new_empty((h.shape[0], 1)).bernoulli_(1 - share[0])
        return self.down(torch.tanh(h).sin()) + x

    def raise_it() -> None:
        share[0] = 0.3

    assert check_all(Rig(stack(lambda: Each(fn)), rows()), raise_it)


def test_a_buffer_that_is_changed_after_the_block() -> None:
    """It is not as it was when the block would run again: the block is left alone."""

    class Shifted(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(x) + self.shift)) + x

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Shifted() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                with torch.no_grad():
                    layer.shift.mul_(1.5)
            return x

    assert not check_all(Rig(Root(), rows()))


def test_statistics_that_no_norm_module_keeps() -> None:
    """A functional batch norm would update them twice: the block is left alone."""

    class Own(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("var", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = F.batch_norm(self.up(x), self.mean, self.var, training=True)
            return self.down(torch.tanh(y)) + x

    assert not check_all(Rig(nn.Sequential(Own(), Own(), Own()), rows()))


def test_a_norm_called_in_eval_and_then_in_train_mode() -> None:
    """The second call changes what the first one read."""

    class Normed(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.norm(self.up(x)))) + x

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Normed() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                still = layer.eval()(x)
                x = layer.train()(x) + still
            return x

    assert check_all(Rig(Both(), rows()))


def test_a_view_of_a_parameter_of_another_model() -> None:
    """It is a weight in the replay as well: the numbers of saved tensors must not shift."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            h = x @ weight
            return self.up(torch.tanh(h) * torch.sigmoid(h)) + x

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Given() for _ in range(3))

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, weight)
            return x

    foreign = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
    model, x = Root(), rows()
    for policy in LIVE:
        live_check(model, policy, lambda: model(x, foreign.t()).sum())


def test_a_block_called_inside_of_another() -> None:
    """Only in a later step: nothing stays hooked, and the gradients are right."""
    others: list[nn.Module] = []

    def fn(self: Each, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x).sin()).cos())
        return y + others[0](x) if others and self is not others[0] else y + x

    model = stack(lambda: Each(fn))
    rig = Rig(model, rows())
    actions = selective(rig.step)
    assert any(a.variant != FULL for a in actions)  # type: ignore[union-attr]
    others.append(model[0])  # type: ignore[index]
    plain = rig.plain()
    rig.install(actions)
    assert_same(rig.planned(), plain)
    rig.close()
    assert not _get_current_dispatch_mode_stack()


def test_reports_in_between_do_not_stop_the_plan_from_being_judged() -> None:
    """Asking after every step files each measurement early, and it still counts."""
    with fitted(stack(Mlp), "auto") as job:
        for _ in range(18):
            with job.step():
                job.model(rows()).sum().backward()
            job.comparison()
        kind = job.current
        assert kind is not None and (kind.judged or kind.still)
