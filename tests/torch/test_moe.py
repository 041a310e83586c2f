"""A mixture of experts, whose shapes depend on the data, under a budget."""

import pytest
import torch

import legroom
from legroom.examples import EXAMPLES
from legroom.memory.simulate import Simulator
from tests.torch.support import GIB, MACHINE

SIZES = {"layers": 3, "dim": 64, "heads": 4, "vocab": 512, "batch": 4, "sequence": 128}
COUNT = 7


def losses(share: float = 0.0) -> tuple[list[float], "legroom.Job | None"]:
    """Of steps on one batch after the other, under a share of the natural peak if given."""
    torch.manual_seed(0)
    example, job, found = EXAMPLES["moe"](**SIZES), None, []
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1)
    if share:
        step = legroom.trace(
            example.model, example.make_batch(0), machine=MACHINE, loss_fn=example.loss_fn
        )
        peak = Simulator(step, MACHINE).shape([]).peak
        static = sum(s.num_bytes for s in step.storages if s.birth < 0)
        limits = {"device": static + int(share * (peak - static)), "host": GIB, "disk": GIB}
        job = legroom.fit(example.model, optimizer, budget=limits, machine=MACHINE)
    for i in range(COUNT):
        if job is None:
            loss = example.loss_fn(example.model, example.make_batch(i))
            loss.backward()
            optimizer.step()
        else:
            with job.step():
                loss = example.loss_fn(example.model, example.make_batch(i))
                loss.backward()
                optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if job is not None:
        batch = example.make_batch(99)
        verdict = job.verify(lambda: example.loss_fn(example.model, batch))
        assert verdict.holds, str(verdict)
    return found, job


@pytest.mark.parametrize("share", [0.55, 0.4])
def test_experts_train_bit_for_bit_under_a_budget(share: float) -> None:
    """Every batch sends other numbers of tokens to an expert than the recorded one did."""
    plain, _ = losses()
    mine, job = losses(share)
    assert job is not None and job.current is not None and job.current.plan is not None
    assert mine == plain
    assert job.current.plan.actions
    job.close()
