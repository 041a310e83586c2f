"""Slim gradients: the same bits, and no room for a whole gradient of which only a part waits."""

import pytest
import torch
from torch import Tensor, nn

import legroom
from legroom.ahead import Preview
from legroom.examples import EXAMPLES
from legroom.memory.mechanisms import slim
from legroom.memory.mechanisms.slim import Slimmer, slim_modules
from legroom.memory.planner import make_plan
from legroom.memory.trace import Step
from tests.torch.support import MACHINE

SIZES = {"width": 8, "depth": 3, "batch": 2, "image": 64}


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slim, "LEAST_BYTES", 0)


class Skips(nn.Module):
    """A skip around layers that take most, put before or after what they make."""

    def __init__(self, first: bool, width: int = 8) -> None:
        super().__init__()
        self.first = first
        self.low, self.top = nn.Linear(width, width), nn.Linear(2 * width, width)
        wide = nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        self.middle = nn.Sequential(*wide)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.low(x)
        made = self.middle(skip)
        both = torch.cat((skip, made) if self.first else (made, skip), 1)
        y: Tensor = self.top(both)
        return y


@pytest.mark.parametrize("first", [True, False])
def test_the_part_that_waits_is_copied_and_the_other_is_not(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward goes on with what was made last."""
    copied = []
    plain = slim._copy_out

    def note(late: frozenset[int], *grads: slim.Grads) -> slim.Grads:
        copied.append(late)
        given, found = grads[0], plain(late, *grads)
        for i, (mine, theirs) in enumerate(zip(found, given, strict=True)):
            assert (mine is theirs) == (i not in late)
            assert torch.equal(mine, theirs)  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(slim, "_copy_out", note)
    model = Skips(first)
    slimmer = Slimmer(model)
    with slimmer.slimming(("top",)):
        model(torch.randn(4, 8)).sum().backward()
    assert copied == [{0} if first else {1}]


def test_parts_of_weights_or_without_gradients_are_left_alone() -> None:
    """A weight takes its gradient at once; what needs none has none."""
    weight, top = nn.Parameter(torch.randn(4, 8)), nn.Linear(16, 8)
    slimmer = Slimmer(top)
    with slimmer.slimming(("",)):
        for other in (torch.randn(4, 8), (weight * 2)):
            top(torch.cat((weight, other), 1)).sum().backward()
    assert weight.grad is not None


def unet() -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    example = EXAMPLES["unet-512"](device="cpu", **SIZES)
    return example.model.train(), example


def test_a_unet_needs_less_with_the_same_bits() -> None:
    """Its skips of the first level are there from the first block to the last."""
    model, example = unet()
    preview = Preview(model, example.make_batch(0), MACHINE, loss_fn=example.loss_fn)  # type: ignore[attr-defined]
    assert preview.slim == tuple(f"up.{i}" for i in range(SIZES["depth"]))
    grads = []
    for names in ((), preview.slim):
        with Slimmer(model).slimming(names):
            model.zero_grad()
            example.loss_fn(model, example.make_batch(0)).backward()  # type: ignore[attr-defined]
        grads.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def smallest(step: Step) -> int:
    with pytest.raises(legroom.BudgetError) as caught:
        make_plan(step, MACHINE, {"device": 1 << 20, "host": 1 << 32}, "auto")
    assert caught.value.smallest_bytes is not None
    return caught.value.smallest_bytes


@pytest.mark.parametrize("first", [True, False])
def test_a_job_below_what_it_takes_as_it_is_runs_slim(first: bool) -> None:
    """Under a budget that refuses the model as it is: the same gradients, and no hook outside."""
    torch.manual_seed(0)
    model, x = Skips(first, 64), torch.randn(4096, 64)
    preview = Preview(model, x, MACHINE, "none")
    assert preview.slim == ("top",)
    plain, slimmer = (smallest(preview._captured(x).step) for x in ((), preview.slim))
    assert slimmer < 0.95 * plain
    limits = {"device": (plain + slimmer) // 2, "host": 1 << 32}
    assert preview.plan(limits, "auto").predicted.device_bytes <= limits["device"]
    model(x).sum().backward()
    theirs = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    before = [len(m._forward_pre_hooks) for m in model.modules()]
    limits["device"] += 1 << 20
    with legroom.fit(model, machine=MACHINE, budget=limits) as job:
        for _ in range(5):
            model.zero_grad()
            with job.step():
                model(x).sum().backward()
            mine = [p.grad for p in model.parameters()]
            assert job.current is not None and job.current.base.slim == ("top",)
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))  # type: ignore[arg-type]
        assert not job.runner.deviation
        assert job.comparison().measured.device_bytes <= limits["device"]
    assert [len(m._forward_pre_hooks) for m in model.modules()] == before


def test_what_is_inside_of_a_block_is_left_to_it() -> None:
    """A block may be compiled or run again: its own concatenations are its own affair."""
    model, example = unet()
    preview = Preview(model, example.make_batch(0), MACHINE, loss_fn=example.loss_fn)  # type: ignore[attr-defined]
    assert slim_modules(["up.0", "up.0.0", "other"], preview.plain.step) == ("up.0", "other")
