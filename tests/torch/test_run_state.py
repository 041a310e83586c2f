"""A replay draws the same random numbers, and counts no batch twice."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from legroom.core.errors import StepError
from legroom.memory.actions import Recompute
from legroom.memory.mechanisms.recompute import PythonState
from tests.torch.nets import WIDTH, ConvNorm, Each, Mlp, images, rows, stack
from tests.torch.support import LIVE, PLANS, Rig, fitted, live_check, total, weigh

EVERY = pytest.mark.parametrize("plan", PLANS)


@EVERY
def test_dropout_in_blocks(plan: str) -> None:
    """Masks of a replay are those of the first run; the stream goes on where it would have."""
    Rig(stack(lambda: Mlp(p=0.5)), rows()).check(PLANS[plan])


@EVERY
def test_many_draws_of_all_kinds(plan: str) -> None:
    """Dropout, noise and permutations, some results saved and some not."""

    def fn(self: Each, x: Tensor) -> Tensor:
        h = F.dropout(self.up(x), 0.3) + 0.1 * torch.randn_like(x)
        h = h[torch.randperm(h.shape[0])] * torch.rand(h.shape)
        h = F.dropout(F.gelu(h), 0.2) * torch.empty_like(h).bernoulli_(0.8)
        return self.down(h) + x

    Rig(stack(lambda: Each(fn)), rows()).check(PLANS[plan])


@EVERY
def test_an_op_that_fills_what_it_saved(plan: str) -> None:
    """The op rrelu saves its noise, then draws it: a copy made on saving has no values yet."""
    model = stack(lambda: Each(lambda m, x: m.down(F.rrelu(m.up(x), training=True))))
    Rig(model, rows()).check(PLANS[plan])


@EVERY
def test_batch_norm_counts_each_batch_once(plan: str) -> None:
    """Running mean, variance and count are those of the unplanned step."""
    Rig(stack(ConvNorm), images()).check(PLANS[plan])


@pytest.mark.parametrize("policy", LIVE)
@pytest.mark.filterwarnings("ignore:legroom. cannot plan")
def test_batch_norm_with_a_cumulative_average(policy: str) -> None:
    """With momentum=None the layer reads its count: no fake capture, and still right."""
    model, x = stack(lambda: ConvNorm(momentum=None)), images()
    live_check(model, policy, lambda: weigh(model(x)))


@pytest.mark.parametrize("policy", LIVE)
def test_statistics_over_several_live_steps(policy: str) -> None:
    """Statistics after five steps of training are those of five unplanned steps."""

    def train(planned: bool) -> dict[str, Tensor]:
        model = stack(ConvNorm)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with fitted(model, policy, optimizer=optimizer) as job:
            for i in range(5):
                x = images(seed=i)
                if planned:
                    with job.step():
                        weigh(model(x)).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                else:
                    weigh(model(x)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return model.state_dict()

    mine, plain = train(True), train(False)
    for name, value in plain.items():
        assert torch.equal(mine[name], value), name


@EVERY
def test_batch_norm_in_eval_within_training(plan: str) -> None:
    """A frozen norm uses its running statistics in the replay as well."""
    model = stack(ConvNorm)
    for block in model:
        block.norm.eval()
    Rig(model, images()).check(PLANS[plan])


@EVERY
def test_instance_and_group_norms(plan: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)
            self.one = nn.InstanceNorm2d(8, track_running_stats=True, affine=True)
            self.two = nn.GroupNorm(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.two(F.gelu(self.one(self.conv(x))))

    Rig(stack(Block), images()).check(PLANS[plan])


class Average(nn.Module):
    """Keeps an average of its input; `how` says by which idiom, `used` whether it reads it."""

    def __init__(self, how: str, used: bool) -> None:
        super().__init__()
        self.how, self.used = how, used
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        if self.how == "in place":
            self.mean.mul_(0.9).add_(now, alpha=0.1)
        elif self.how == "copy_":
            self.mean.copy_(0.9 * self.mean + 0.1 * now)
        else:
            self.mean = 0.9 * self.mean + 0.1 * now
        x = x - self.mean if self.used else x
        return self.down(F.gelu(self.up(x) * (1 + self.mean if self.used else 1)))


@EVERY
@pytest.mark.parametrize("how", ["in place", "copy_", "set"])
def test_a_buffer_that_only_counts(plan: str, how: str) -> None:
    """An average that the forward keeps but does not read is updated once per step."""
    Rig(stack(lambda: Average(how, used=False)), rows()).check(PLANS[plan])


@EVERY
@pytest.mark.parametrize("how", ["in place", "copy_", "set"])
def test_a_buffer_that_the_forward_reads_too(plan: str, how: str) -> None:
    """A replay must see the buffer as the first run saw it, and leave it as that left it."""
    Rig(stack(lambda: Average(how, used=True)), rows()).check(PLANS[plan])


@EVERY
def test_spectral_norm(plan: str) -> None:
    """Each forward in training takes one step of power iteration, and uses what it found."""
    model = stack(lambda: nn.Sequential(spectral_norm(nn.Linear(64, 64)), nn.GELU(), Mlp(p=0.0)))
    Rig(model, rows()).check(PLANS[plan])


@EVERY
def test_weight_norm(plan: str) -> None:
    """The weight is computed in the forward, and is not a parameter."""
    model = stack(lambda: nn.Sequential(weight_norm(nn.Linear(64, 64)), nn.GELU(), Mlp(p=0.0)))
    Rig(model, rows()).check(PLANS[plan])


@EVERY
def test_a_generator_of_the_users_own(plan: str) -> None:
    """It cannot be rewound from outside: the block is barred, and its numbers are drawn once."""
    generator = torch.Generator().manual_seed(3)

    def fn(self: Each, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=generator)
        return self.down(F.gelu(self.up(x) * noise))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        generator.manual_seed(3)
        return total(model, batch)

    rig = Rig(stack(lambda: Each(fn)), rows(), loss)
    assert all(b.barred for b in rig.step.blocks)
    rig.check(PLANS[plan])


@EVERY
@pytest.mark.parametrize("source", ["numpy", "python"])
def test_random_numbers_from_elsewhere(plan: str, source: str) -> None:
    """Numbers drawn by numpy or Python inside a block are the same in its replay."""

    def fn(self: Each, x: Tensor) -> Tensor:
        factor = np.random.rand() if source == "numpy" else random.random()
        return self.down(F.gelu(self.up(x) * factor))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        np.random.seed(0)
        random.seed(0)
        return total(model, batch)

    Rig(stack(lambda: Each(fn)), rows(), loss).check(PLANS[plan])


@EVERY
def test_a_plain_attribute_that_counts_calls(plan: str) -> None:
    """A replay is not a call: Python numbers kept by a block are as in the unplanned step."""

    def fn(self: Each, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return self.down(F.gelu(self.up(x)))

    model = stack(lambda: Each(fn))
    rig = Rig(model, rows())
    rig.install(PLANS[plan](rig.step))
    for block in model:
        block.calls = 0
    rig.planned()
    rig.close()
    assert [block.calls for block in model] == [1, 1, 1]


@pytest.mark.parametrize("policy", LIVE)
def test_training_with_dropout_leaves_the_same_stream(policy: str) -> None:
    """Capture, recording and replays draw nothing from the global generator."""
    model = stack(lambda: Mlp(p=0.5))
    x = rows()
    live_check(model, policy, lambda: weigh(model(x)))


@EVERY
def test_a_weight_changed_between_forward_and_backward(plan: str) -> None:
    """Where autograd takes it (the weight is not saved), a plan is as right, or refuses."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x + self.bias) + torch.tanh(x * 2 + self.bias)

    model = stack(Shift)
    start = [p.detach().clone() for p in model.parameters()]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            for p, value in zip(model.parameters(), start, strict=True):
                p.copy_(value)
        found = total(model, batch)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.5)
        return found

    rig = Rig(model, rows(), loss)
    if any(isinstance(a, Recompute) for a in PLANS[plan](rig.step)):
        with pytest.raises(StepError, match="was changed between forward and backward"):
            rig.check(PLANS[plan])
    else:
        rig.check(PLANS[plan])


@pytest.mark.parametrize("found", [True, False], ids=["raw", "as told"])
def test_pythons_generator_goes_back_to_where_it_was(found: bool) -> None:
    """Uniform and normal draws alike; also where its bytes are not to be found."""
    state = PythonState()
    assert state._address, "this Python keeps its generator elsewhere"
    state._address *= found
    random.seed(7)
    random.gauss(0, 1)  # leaves half a pair behind
    for draws in range(0, 1300, 130):
        then, told = state.take(), random.getstate()
        assert state.take() == then
        first = [random.gauss(0, 1), *(random.random() for _ in range(draws)), random.gauss(0, 1)]
        assert state.take() != then
        state.put(then)
        assert random.getstate() == told and state.take() == then
        assert first[:2] == [random.gauss(0, 1), random.random() if draws else random.gauss(0, 1)]
