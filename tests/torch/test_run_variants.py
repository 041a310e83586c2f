"""Every variant a block can have is right, whatever the op times that led to it."""

import random

import msgspec
import pytest
import torch
from torch import Tensor, nn

from legroom.memory.actions import Recompute
from legroom.memory.trace import FULL, Step
from legroom.memory.variants import with_variants
from tests.torch.nets import ConvNorm, Each, Mlp, images, rows, stack
from tests.torch.support import Rig, assert_same, selective


class Decoder(nn.Module):
    """Layers of torch's own with a mask: they save their queries long after making them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(24))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return x


NETS = {
    "decoder": lambda: (Decoder(), torch.randn(4, 24, 32), None),
    "mlp": lambda: (stack(lambda: Mlp(p=0.3)), rows(), None),
    "conv": lambda: (stack(ConvNorm), images(), None),
}


def with_random_times(step: Step, seed: int) -> Step:
    """The same step with other op times, and so with other variants."""
    draw = random.Random(seed)
    ops = tuple(msgspec.structs.replace(op, time_s=draw.expovariate(1e4)) for op in step.ops)
    return with_variants(msgspec.structs.replace(step, ops=ops))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("net", NETS)
def test_every_variant_gives_the_same_gradients(net: str, seed: int) -> None:
    """Loss, gradients, buffers and random state equal those of the unplanned step."""
    rig = Rig(*NETS[net]())
    rig.step = with_random_times(rig.step, seed)
    plain = rig.plain()
    names = {v.name for block in rig.step.blocks for v in block.variants}
    assert names
    for name in names:
        chosen = [
            Recompute(block=b, variant=name)
            for b, block in enumerate(rig.step.blocks)
            if any(v.name == name for v in block.variants)
        ]
        rig.install(chosen)
        assert_same(rig.planned(), plain)
        assert not rig.runner.replayer.whole, "a replay fell back to running the whole block"
    rig.close()


def test_a_number_that_changes_from_step_to_step() -> None:
    """Ops run again with the arguments of this very step, not with those of the trace."""

    def fn(self: Each, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x) * now[0]) * now[0]).sigmoid() + x

    now = [1.5]
    rig = Rig(stack(lambda: Each(fn)), rows())
    actions = selective(rig.step)
    assert any(a.variant != FULL for a in actions)  # type: ignore[union-attr]
    for now[0] in (1.5, 0.25):
        plain = rig.plain()
        rig.install(actions)
        assert_same(rig.planned(), plain)
        rig.runner.remove()
    assert not rig.runner.replayer.whole
    rig.close()
