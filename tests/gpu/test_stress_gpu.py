"""Random plans on random networks while all streams are held up at random: no bit may differ."""

import random

import pytest
import torch

from tests.torch.random_nets import random_net
from tests.torch.support import Rig, anyhow, assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]

STEPS = 50


def hold_up(rig: Rig, draw: random.Random, beside: torch.cuda.Stream, busy: torch.Tensor) -> None:
    """Keep the streams of the lanes, of the compute and one more busy for up to a millisecond."""
    streams = [torch.cuda.current_stream(), beside]
    if rig.tiers.lanes is not None:
        streams += [rig.tiers.lanes._out, rig.tiers.lanes._in]  # type: ignore[attr-defined]
    for stream in streams:
        if draw.random() < 0.6:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(draw.randrange(1, 1_500_000))
    with torch.cuda.stream(beside):
        torch.mm(busy, busy)


@pytest.mark.parametrize("seed", range(4))
def test_fifty_steps_under_stress(seed: int) -> None:
    """A new plan every other step, a hold-up before, within and after each."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    draw, beside = random.Random(seed), torch.cuda.Stream()
    busy = torch.randn(512, 512, device="cuda")
    model, batch = random_net(seed, size=8)
    rig = Rig(model.cuda(), batch.cuda(), device=torch.device("cuda", 0))
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(
                lambda *_: hold_up(rig, draw, beside, busy) if draw.random() < 0.1 else None
            )
    try:
        plain = rig.plain()
        for i in range(STEPS):
            if i % 2 == 0:
                rig.install(anyhow(rig.step, 100 * seed + i, share=draw.random()))
            hold_up(rig, draw, beside, busy)
            assert_same(rig.planned(), plain)
    finally:
        rig.close()
        torch.use_deterministic_algorithms(False)
