"""torch's own layers in loops as people write them: the peak is the one that was predicted."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import legroom
from legroom.core.errors import BudgetError, StepError
from tests.torch.nets import Mlp, rows, stack
from tests.torch.support import Rig, fitted, until_measured

PEAK_ERROR = 0.001
SHARES = (1.0, 0.75, 0.55)


class Encoder(nn.Module):
    """Attention with batches first: linear layers meet transposed inputs, and copy them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Attentions(nn.Module):
    """Attention and nothing else: what comes into a block is saved by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(64, 4, batch_first=True) for _ in "1234")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


class Turned(nn.Module):
    """Linear layers on transposed inputs: a product, and a bias that is added in place."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in "1234")
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(self.apply_to(layer, x.transpose(0, 1)))
        return x

    def apply_to(self, layer: nn.Module, x: Tensor) -> Tensor:
        """The layer; written out, its bias is added to a copy."""
        assert isinstance(layer, nn.Linear)
        return x @ layer.weight.t() + layer.bias if self.by_hand else layer(x)


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "encoder": lambda: (Encoder(), torch.randn(16, 24, 64)),
    "attentions": lambda: (Attentions(), torch.randn(16, 24, 64)),
    "turned": lambda: (Turned(), torch.randn(48, 32, 96)),
    "turned by hand": lambda: (Turned(by_hand=True), torch.randn(48, 32, 96)),
}


def peaks(case: str, budget: int, hold: bool) -> tuple[int, int]:
    """Predicted and measured device bytes, once the plan has settled."""
    torch.manual_seed(0)
    model, x = CASES[case]()
    optimizer = torch.optim.AdamW(model.parameters())
    last: list[Tensor] = []

    def step() -> None:
        nonlocal last
        with job.step():
            out = model(x)
            last = [out] if hold else []  # what was held before goes here
            out.pow(2).mean().backward()
            del out
            optimizer.step()
            optimizer.zero_grad()

    with legroom.fit(model, optimizer, budget=budget) as job:
        job.meter.peaks = True  # type: ignore[attr-defined]
        for _ in range(5):
            step()
        found = until_measured(job, step)
        return found.predicted.device_bytes, found.measured.device_bytes


@pytest.mark.filterwarnings("ignore:legroom. a step took")  # before it is recorded
@pytest.mark.parametrize("hold", [False, True], ids=["let go", "held"])
@pytest.mark.parametrize("case", CASES)
def test_peaks_are_as_predicted(case: str, hold: bool) -> None:
    """With and without results of the step before, at several budgets."""
    natural, static, tried = 0, sum(x.nbytes for x in CASES[case]()[0].parameters()) * 4, 0
    for share in SHARES:
        budget = static + int((natural - static) * share) if natural else 1 << 30
        try:
            predicted, measured = peaks(case, budget, hold)
        except BudgetError:
            continue
        natural, tried = natural or measured, tried + 1
        assert measured == pytest.approx(predicted, rel=PEAK_ERROR), f"at {share:.0%}"
        assert measured <= budget
    assert tried > 1


class Depth(nn.Module):
    """As many blocks as it is told, or as the dice say."""

    def __init__(self, chance: float = 1.0) -> None:
        super().__init__()
        self.blocks = stack(Mlp, 8)
        self.chance = chance

    def forward(self, x: Tensor, depth: int) -> Tensor:
        for block in self.blocks[:depth]:
            if float(torch.rand(())) < self.chance:
                x = block(x)
        return x


@pytest.mark.parametrize("depths, chance", [((4, 8), 1.0), ((8,), 0.6)], ids=["told", "dice"])
@pytest.mark.filterwarnings("ignore:legroom. (a step took|steps of this kind|cannot plan)")
def test_steps_that_always_differ_end_under_a_rule_that_keeps_the_budget(
    depths: tuple[int, ...], chance: float
) -> None:
    """No plan made from one of them suits the next; gradients are right all the same."""
    torch.manual_seed(0)
    model, x = Depth(chance), rows(count=256)
    plain = Depth(chance)
    plain.load_state_dict(model.state_dict())
    static = 2 * sum(p.nbytes for p in model.parameters())
    limit, late = static + 8 * 4 * 256 * 64 * 4, list[int]()  # about half of what eight blocks save
    with legroom.fit(model, None, budget=limit) as job:
        job.meter.peaks = True  # type: ignore[attr-defined]
        for i in range(40):
            for net in (model, plain):
                torch.manual_seed(i)
                net.zero_grad()
                with job.step() if net is model else contextlib.nullcontext():
                    net(x, depths[i % len(depths)]).pow(2).mean().backward()
            for one, two in zip(model.parameters(), plain.parameters(), strict=True):
                assert (one.grad is None) == (two.grad is None)
                assert one.grad is None or torch.equal(one.grad, two.grad)
            kind = job.current
            assert kind is not None
            late += [m.peaks["device"] for m in kind.measurements[-1:] if i >= 30]
        assert kind.restless and "its steps differ" in job.report()
        assert late and max(late) <= limit


def check_training(make: Callable[[], nn.Module], x: Tensor, num_steps: int = 5) -> None:
    """Some steps, recorded and planned, leave the weights that plain ones do."""
    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    with legroom.fit(model, None, budget="1GiB") as job:
        for net in (model, plain):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(num_steps):
                with job.step() if net is model else contextlib.nullcontext():
                    net(x).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert job.current is not None and job.current.recorded
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)


class Mapped(nn.Module):
    """Submodules that are called in a transform of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.func.vmap(lambda row, layer=layer: torch.tanh(layer(row)))(x)
        return x


def test_models_of_torch_func_train() -> None:
    check_training(Mapped, rows())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_submodules_are_a_part_of_their_caller() -> None:
    """They take no hooks."""

    def make() -> nn.Module:
        inner = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
        return nn.Sequential(nn.Linear(64, 64), inner, nn.Linear(64, 64))

    check_training(make, rows())


@pytest.mark.parametrize("size", [(1, 64), (4, 64), (2, 128)])
def test_inputs_too_small_to_act_on(size: tuple[int, int]) -> None:
    """Autograd holds them; nobody thinks that they are gone."""
    count, width = size

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8))

    check_training(make, rows(width, count))


def test_data_of_the_users_own_that_goes_in_a_step_is_not_counted() -> None:
    """Whether it goes in the step that is recorded or in another is chance."""
    model, x, data = stack(Mlp, 4), rows(), [torch.zeros(16 << 20, dtype=torch.uint8)]
    with legroom.fit(model, None, budget="8MiB") as job:
        for i in range(5):
            with job.step():
                if i == 2:
                    data.clear()
                model(x).pow(2).mean().backward()
            model.zero_grad()
        assert job.current is not None and job.current.recorded
        assert job.current.static_bytes < 1 << 20


def update(param: Tensor) -> None:
    """Gradient descent, as soon as a gradient is there."""
    assert param.grad is not None
    with torch.no_grad():
        param.sub_(0.01 * param.grad)


def test_weights_updated_in_backward_once_nobody_needs_them() -> None:
    """Ops that run again read weights that are not yet updated: others do not matter."""
    model, x = stack(Mlp, 4), rows()
    plain = copy.deepcopy(model)
    for p in (*model.parameters(), *plain.parameters()):
        p.register_post_accumulate_grad_hook(update)
    with fitted(model, "test_selective") as job:
        for net in (model, plain):
            for i in range(6):
                torch.manual_seed(i)
                with job.step() if net is model else contextlib.nullcontext():
                    net(x).pow(2).mean().backward()
                net.zero_grad()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)


def test_jobs_around_each_other_measure_no_nonsense() -> None:
    """There is one profiler: the outer one is told nothing."""
    one, two, x = stack(Mlp, 2), stack(Mlp, 2), rows()
    with (
        legroom.fit(one, None, budget="1GiB") as outer,
        legroom.fit(two, None, budget="1GiB") as inner,
    ):
        for job in (outer, inner):
            job.meter.peaks = True  # type: ignore[attr-defined]
        for _ in range(6):
            with outer.step(), inner.step():
                two(one(x)).pow(2).mean().backward()
            one.zero_grad()
            two.zero_grad()
        assert outer.meter.last().peaks == {}
        assert inner.meter.last().peaks["step"] > 0


class Adapted(nn.Module):
    """A linear layer with a low-rank one beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapters(nn.Module):
    """A block with two of those."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(width), Adapted(width), Adapted(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.nn.functional.gelu(self.one(self.norm(x))))


def test_blocks_with_parts_that_repeat_are_blocks() -> None:
    """Where those parts make little of what the block saves."""
    model = nn.Sequential(nn.Linear(64, 64), *(Adapters() for _ in range(6)))
    step = Rig(model, rows()).step
    assert [b.module for b in step.blocks if b.variants] == [str(i) for i in range(1, 7)]


class Hoarder(torch.optim.SGD):
    """Its state grows with every step, as that of LBFGS does for a while."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("past", []).append(p.detach().clone())


def test_states_that_grow_are_measured() -> None:
    """By all that came since the step was recorded."""
    model, x = stack(Mlp, 2), rows()
    optimizer, sizes = Hoarder(model.parameters(), lr=0.1), list[int]()
    with legroom.fit(model, optimizer, budget="1GiB") as job:
        job.meter.peaks = True  # type: ignore[attr-defined]
        for _ in range(8):
            with job.step():
                model(x).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            kind = job.current
            assert kind is not None
            sizes += [m.peaks["device"] for m in kind.measurements[-1:]]
    grown = sum(p.nbytes for p in model.parameters())
    assert sizes[-1] - sizes[-2] == pytest.approx(grown, rel=0.01)


class Prefixed(nn.Module):
    """A weight that is joined to the rows in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix, self.layer = nn.Parameter(torch.randn(4, 64)), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(torch.cat([self.prefix, x]).exp()))[4:]


def test_a_weight_in_a_list_that_was_changed_before_its_op_runs_again_is_told() -> None:
    """By the block's name, as one that is an argument of its own."""
    model, x = stack(Prefixed, 3), rows()
    with fitted(model, "test_selective") as job, pytest.raises(StepError, match="was changed"):
        for _ in range(6):
            with job.step():
                loss = model(x).pow(2).mean()
                with torch.no_grad():
                    model[1].prefix.mul_(0.5)
                loss.backward()
