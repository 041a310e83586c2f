"""A step that leaves its trace is never wrong: what does not match is kept, and said."""

import random

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F

from legroom.memory.actions import Recompute
from legroom.memory.trace import Block, Step, Variant
from tests.torch.nets import Each, Mlp, rows, stack
from tests.torch.support import PLANS, Rig, assert_same

EVERY = pytest.mark.parametrize("plan", PLANS)


def early(step: Step, b: int) -> Block:
    """The block with one more variant: drop the norm's and the first layer's result."""
    block = step.blocks[b]
    saved = step.saved_in(b)
    variant = Variant(
        name="early",
        drops=(saved[1].storage, saved[2].storage),
        replays=(block.first, block.first + 1),
        last=block.first + 1,
    )
    return replace(block, variants=(*block.variants, variant))


def test_a_selective_replay_of_a_block_that_saves_less_than_traced() -> None:
    """A frozen layer saves no input, and the next save has the size of the one expected.

    The replay of the trace's variant skips the op whose result was saved: what it hands back
    then must not be memory that nobody wrote.
    """
    rig = Rig(stack(Mlp), rows())
    count = len(rig.step.blocks)
    rig.step = replace(rig.step, blocks=tuple(early(rig.step, b) for b in range(count)))
    rig.install([Recompute(block=b, variant="early") for b in range(count)])
    assert_same(rig.planned(), rig.plain())
    for block in rig.model:  # type: ignore[attr-defined]
        block.up.requires_grad_(False)
    mine, plain = rig.planned(), rig.plain()
    rig.close()
    assert_same(mine, plain)


@EVERY
@pytest.mark.parametrize("frozen", ["up", "down", "norm"])
def test_layers_frozen_since_the_trace(plan: str, frozen: str) -> None:
    """Other tensors are saved than traced; those that do not match are kept."""
    rig = Rig(stack(Mlp), rows())
    rig.install(PLANS[plan](rig.step))
    for block in rig.model:  # type: ignore[attr-defined]
        getattr(block, frozen).requires_grad_(False)
    plain = rig.plain()
    for _ in range(2):
        assert_same(rig.planned(), plain)
    rig.close()


@EVERY
def test_layers_left_out_at_random(plan: str) -> None:
    """Blocks are skipped by chance, outside of them: each step another set."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = stack(lambda: Mlp(p=0.0), 4)
            self.skip: set[int] = set()

        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = x * 1.5 if i in self.skip else block(x)
            return x

    model = Model()
    rig = Rig(model, rows())
    rig.install(PLANS[plan](rig.step))
    for seed in range(6):
        model.skip = set(random.Random(seed).sample(range(4), 2))
        assert_same(rig.planned(), rig.plain())
    rig.close()


@EVERY
def test_another_activation_than_traced(plan: str) -> None:
    """The same sizes by other ops: a selective replay notices, and runs the block whole."""

    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(self.norm(x))
            h = F.silu(h) if self.other else F.gelu(h)
            return x + self.down(h if not self.other else h * h.detach())

    Block.other = False  # type: ignore[attr-defined]
    rig = Rig(stack(Block), rows())
    rig.install(PLANS[plan](rig.step))
    Block.other = True  # type: ignore[attr-defined]
    for _ in range(2):
        assert_same(rig.planned(), rig.plain())
    rig.close()


@EVERY
def test_a_branch_inside_a_block(plan: str) -> None:
    """Which of two ways a block goes is another in each step, but not in a replay."""

    def fn(self: Each, x: Tensor) -> Tensor:
        h = self.up(x)
        h = torch.tanh(h) * h if getattr(self, "turn", False) else F.gelu(h).exp()
        return self.down(h)

    rig = Rig(stack(lambda: Each(fn)), rows())
    rig.install(PLANS[plan](rig.step))
    for turn in (True, False, True):
        for i, block in enumerate(rig.model):  # type: ignore[arg-type]
            block.turn = turn == bool(i % 2)
        assert_same(rig.planned(), rig.plain())
    rig.close()
