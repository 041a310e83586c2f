"""Compiled blocks and a loss in chunks on CUDA: the same training, within the cap."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import legroom
from legroom.examples import EXAMPLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler's own
]
SIZES = {"layers": 4, "dim": 256, "heads": 4, "vocab": 16000, "batch": 16, "sequence": 512}
ROWS = SIZES["batch"] * SIZES["sequence"]


@pytest.fixture(autouse=True)
def few_builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compilers are slow; and what one test leaves must not count against the next one."""
    monkeypatch.setattr("legroom.memory.trial.SHARES", (1.0, 0.0))
    yield
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def losses(count: int, budget: int = 0) -> tuple[list[float], Any]:
    """Of steps on one batch, and the job if there is a budget."""
    torch.manual_seed(0)
    example = EXAMPLES["llama-1b"](device="cuda", **SIZES)
    optimizer = torch.optim.AdamW(example.model.parameters(), lr=1e-4, fused=True)
    batch, found, job = example.make_batch(0), [], None
    if budget:
        job = legroom.fit(example.model, optimizer, budget=budget, compile="blocks")
    while len(found) < count or (job and not job.comparison().measured):
        if job is None:
            loss = example.loss_fn(example.model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with job.step():
                loss = example.loss_fn(example.model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(loss.item())
    return found, job


def test_a_job_below_the_size_of_its_logits_trains_as_the_model_does() -> None:
    """From the first step on; the peak is the predicted one, and the cap holds."""
    count = 12
    plain, _ = losses(count)
    logits = ROWS * SIZES["vocab"] * 4
    gc.collect()
    torch.cuda.empty_cache()
    budget = int(2.2 * logits)
    mine, job = losses(count, budget)
    outfit, both = job.current.outfit, job.comparison()
    assert mine[:count] == pytest.approx(plain, rel=0.02)
    assert outfit.chunks and outfit.shares and not job.runner.deviation
    assert torch.cuda.max_memory_reserved() <= budget
    assert both.measured.device_bytes == pytest.approx(both.predicted.device_bytes, rel=0.03)
    job.close()
