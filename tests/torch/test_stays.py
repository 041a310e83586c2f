"""What a plan is laid out by is what its step asks an allocator for, in that order."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from legroom.core.errors import BudgetError
from legroom.memory.arena import ordered, stays
from legroom.memory.simulate import Simulator
from tests.torch.nets import Attention, Chosen, Gated, Mlp, rows, stack, texts
from tests.torch.support import GIB, fitted, until_measured

LEAST = 6 << 10
"""Smaller blocks come from libraries, too."""
COUNT = 256
WAYS = ("keep_all", "test_full", "test_selective", "test_swap", "test_mixed")


class Pushed(Mlp):
    """A hook of the user's own adds to a gradient that is needed no more."""

    def forward(self, x: Tensor) -> Tensor:
        y, shift = super().forward(x), 0.01 * x.detach()
        if y.requires_grad:
            y.register_hook(lambda grad: grad + shift)
        return y


def asked_for(run: Any) -> list[tuple[bool, int]]:
    """(whether it is taken, bytes) of all blocks taken while something runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    found: list[tuple[int, int, int]] = []
    nodes = list(prof.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    for node in nodes:  # grows
        if node.tag == torch._C._profiler._EventType.Allocation:
            found.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size))
        nodes += node.children
    here, events = dict[int, int](), []
    for _, address, size in sorted(found, key=lambda row: row[0]):
        if size > 0:
            here[address] = size
            events.append((True, size))
        elif address in here:
            events.append((False, here.pop(address)))
    return events


def in_runs(events: Iterable[tuple[bool, int]]) -> list[tuple[bool, list[int]]]:
    """What goes between two that come, in any order."""
    large = [event for event in events if event[1] >= LEAST]
    return [(take, sorted(n for _, n in group)) for take, group in groupby(large, lambda e: e[0])]


@pytest.mark.parametrize("policy", WAYS)
@pytest.mark.parametrize("block", [Mlp, Attention, Gated, Pushed, Chosen])
def test_events_are_those_of_the_step(block: Any, policy: str) -> None:
    """Also while a block runs again, op by op."""
    batches = {Attention: texts(), Gated: texts().repeat(4, 1, 1)}
    batch = batches.get(block, rows(count=COUNT))
    model = stack(block)

    with fitted(model, policy) as job:

        def step() -> None:
            with job.step():
                model(batch).sum().backward()
            model.zero_grad()

        for _ in range(6):
            step()
        asked = asked_for(step)
        assert not job.runner.deviation
        actions, simulator = (
            job.current.plan.actions,
            Simulator(job.current.capture.step, job.machine),
        )
    assert bool(actions) == (policy != "keep_all")
    model_events = [(take, size) for take, _, size in ordered(list(stays(simulator, actions)))]
    assert in_runs(asked) == in_runs(model_events)


class States(nn.Module):
    """Returns what each block made, as models do that are asked for their hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        made = []
        for block in self.blocks:
            x = block(x)
            made.append(x)
        return torch.tanh(x), made


def holding(model: nn.Module, batch: Tensor) -> None:
    """All that was returned is there through backward."""
    out = model(batch)
    out[0].sum().backward()


def holding_on(model: nn.Module, batch: Tensor) -> None:
    """It is there for a while after the model's own forward, in which the peak is."""
    out, made = model(batch)
    loss = torch.exp(out[:, :8]).sum()
    wide = out.detach().repeat(1, 32).sum() * 0
    loss = loss + torch.exp(out[:, 8:16]).sum() + wide.item()
    del out, made
    loss.backward()


def peak_of(budget: int, policy: str = "auto", body: Any = holding) -> tuple[int, int]:
    """Predicted and measured, of a step whose results are held."""
    model, batch = States(), rows(count=COUNT)
    with fitted(model, policy, budget={"device": budget, "host": GIB}) as job:
        job.meter.peaks = True  # type: ignore[attr-defined]

        def step() -> None:
            with job.step():
                body(model, batch)
            model.zero_grad()

        for _ in range(7):
            step()
        both = until_measured(job, step)
        assert not job.runner.deviation
    return both.predicted.device_bytes, both.measured.device_bytes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", [holding, holding_on])
def test_what_the_user_holds_counts(way: str, body: Any) -> None:
    """However long: the peak is as measured, not as if autograd alone had it."""
    predicted, measured = peak_of(GIB, way, body)
    assert measured == pytest.approx(predicted, rel=0.002)


@pytest.mark.filterwarnings("ignore:legroom. a step took")
@pytest.mark.parametrize("share", [0.45, 0.3])
def test_a_budget_that_was_exceeded_is_not_said_to_be_kept(share: float) -> None:
    """No first plan knows what the user will hold; the error names a budget that works."""
    _, most = peak_of(GIB, "keep_all")
    with pytest.raises(BudgetError) as caught:
        peak_of(int(share * most))
    smallest = caught.value.smallest_bytes
    predicted, measured = peak_of(smallest)
    assert predicted <= smallest and measured <= smallest < most
