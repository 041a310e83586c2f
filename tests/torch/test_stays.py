"""What a plan is laid out by is what its step asks an allocator for, in that order."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from legroom.memory.arena import _events, stays
from legroom.memory.simulate import Simulator
from tests.torch.nets import Attention, Gated, Mlp, rows, stack, texts
from tests.torch.support import fitted

LEAST = 6 << 10
"""Smaller blocks come from libraries, too."""
COUNT = 256
WAYS = ("keep_all", "test_full", "test_selective", "test_swap", "test_mixed")


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
@pytest.mark.parametrize("block", [Mlp, Attention, Gated])
def test_events_are_those_of_the_step(block: Any, policy: str) -> None:
    """Also while a block runs again, op by op."""
    batch = {Mlp: rows(count=COUNT), Attention: texts(), Gated: texts().repeat(4, 1, 1)}[block]
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
    model_events = [(take, size) for take, _, size in _events(list(stays(simulator, actions)))]
    assert in_runs(asked) == in_runs(model_events)
