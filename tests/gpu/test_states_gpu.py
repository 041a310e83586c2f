"""Optimizer states on the host, on CUDA: the same weights bit for bit, within the cap."""

import contextlib
import gc

import pytest
import torch
from torch import Tensor, nn

import legroom
from legroom.memory.actions import Park
from legroom.memory.mechanisms.pool import PIECE_BYTES
from legroom.memory.mechanisms.states import StateKeeper
from tests.torch.test_states import Block

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB, GIB = 1 << 20, 1 << 30


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(1024) for _ in range(8)]).cuda()  # 32 MiB of weights each


def batch(i: int) -> Tensor:
    return torch.randn(256, 1024, generator=torch.Generator().manual_seed(i)).cuda()


def train(budget: int = 0, steps: int = 12) -> tuple[list[Tensor], object, int]:
    """Weights after some steps, on the host; the budget is beside what others left there.

    And the job, and the most that any of its steps had reserved.
    """
    most = 0
    budget += torch.cuda.memory_allocated() if budget else 0
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    job = None
    if budget:
        job = legroom.fit(model, optimizer, budget={"device": budget, "host": 4 * GIB})
    for i in range(steps):
        with job.step() if job is not None else contextlib.nullcontext():
            model(batch(i)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        most = max(most, torch.cuda.max_memory_reserved())
    return [p.detach().cpu() for p in model.parameters()], job, most


@pytest.mark.parametrize("budget", [950 * MIB, 820 * MIB])
def test_a_job_smaller_than_its_states_trains_bit_for_bit(budget: int) -> None:
    """Weights and gradients take 512 MiB, states as much again."""
    plain, _, _ = train()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    mine, job, most = train(budget)
    assert job is not None and job.states.away_bytes > 0
    assert most <= job.budget["device"]
    assert all(torch.equal(a, b) for a, b in zip(plain, mine, strict=True))
    job.close()
    assert job.states.away_bytes == 0


def test_a_host_far_ahead_of_the_device_changes_nothing() -> None:
    """Waves of all sizes while the device is kept busy: copies wait for what they need."""
    found = []
    for keep in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        keeper = StateKeeper(optimizer, dict(model.named_parameters()), torch.device("cuda", 0))
        names = tuple(name for name, _ in model.named_parameters())
        for i in range(6):
            if keep:
                size = (1, 40 * MIB, 100 * MIB)[i % 3]
                keeper.keep(Park(params=names, num_bytes=1, wave_bytes=size, window_bytes=1))
            model(batch(i)).square().mean().backward()
            torch.cuda._sleep(20_000_000)
            optimizer.step()
            optimizer.zero_grad()
        states = optimizer.state_dict()["state"].values()
        found.append([x.cpu() for state in states for x in state.values()])
        keeper.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_states_of_any_size_come_and_go_in_one_copy() -> None:
    """One that is larger than what is registered at a time, and what anyone does with it."""
    torch.manual_seed(0)
    model = nn.Linear(1024, PIECE_BYTES // 4096 + 1000, bias=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    keeper = StateKeeper(optimizer, dict(model.named_parameters()), torch.device("cuda", 0))
    model(batch(0)).square().mean().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["exp_avg"].clone()
    keeper.keep(Park(params=("weight",), num_bytes=1, wave_bytes=1, window_bytes=1))
    away = optimizer.state[model.weight]["exp_avg"]
    assert away.device.type == "cpu" and torch.equal(away.cuda(), before)
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[model.weight]["exp_avg"].cuda(), before)
    keeper.keep(None)
    back = optimizer.state[model.weight]["exp_avg"]
    assert back.device.type == "cuda" and torch.equal(back, before)
    keeper.close()
