"""The plan of the very first step, made before anything ran."""

import torch
from torch import nn
from torch.nn import functional as F

import legroom
from legroom.memory.trace import Phase
from tests.torch.nets import Mlp
from tests.torch.support import MACHINE


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
