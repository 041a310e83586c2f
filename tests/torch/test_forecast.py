"""Forecasts of builds: they save what builds save, and what they take is counted as kernels."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module

import legroom
from legroom.core.errors import BudgetError, InputError
from legroom.examples import EXAMPLES
from legroom.memory.builds import Build
from legroom.memory.fake import fake_weights
from legroom.memory.forecast import _forecasts, forecast
from legroom.memory.mechanisms import compiled
from legroom.memory.mechanisms.compiled import Compiler
from legroom.memory.roofline import op_time
from legroom.memory.sample import Sample
from legroom.memory.trial import Trial
from tests.torch.nets import Attention, ConvNorm, Mlp, Thirds
from tests.torch.support import CPU, MACHINE

SHARES = (1.0, 0.5, 0.0)


def foretold(module: nn.Module, *inputs: Tensor, shares: tuple[float, ...] = SHARES) -> list[Build]:
    """The builds of a module as forecast."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [torch.empty_like(x, device="cpu").requires_grad_(x.requires_grad) for x in inputs]
        with mode, _reparametrize_module(module, fake_weights(module, CPU)):
            sample = Sample.take("block", module, (tuple(given), {}), CPU)
            return [build for _, build in _forecasts(sample, shares, MACHINE)]


def tried(module: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Build]:
    """The same as measured, cut by the partitioner and not compiled further."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    sample, compiler = Sample.take("block", module, ((x,), {}), CPU), Compiler()
    return [
        Trial(module, sample, compiler.build(module, share), CPU).measure(f"keep {share:.0%}")
        for share in SHARES
    ]


INPUTS = {Mlp: (16, 64), Attention: (4, 16, 64), ConvNorm: (4, 8, 16, 16)}


@pytest.mark.parametrize("block", list(INPUTS))
def test_a_forecast_saves_what_a_build_saves(
    block: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tensors in the same order, for each share."""
    module = block().train()
    x = torch.randn(INPUTS[block], requires_grad=True)
    mine, theirs = foretold(module, x), tried(module, x, monkeypatch)
    for one, other in zip(mine, theirs, strict=True):
        assert (one.name, one.sizes, one.dtypes) == (other.name, other.sizes, other.dtypes)
        assert one.saves == other.saves


class Chain(nn.Module):
    """Nothing but pointwise ops: one kernel each way."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * 2 + 1)


class Wide(nn.Module):
    """A product with ops around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x + 1))


def test_ops_between_products_are_one_kernel() -> None:
    """It reads what it is given and writes what others read, once."""
    x = torch.randn(1 << 16, requires_grad=True)
    build = foretold(Chain(), x, shares=(0.0,))[0]
    assert build.forward_s == op_time(MACHINE, 0, 2 * x.nbytes, "")
    assert build.backward_s == op_time(MACHINE, 0, 3 * x.nbytes, ""), "input, gradient, result"
    assert build.sizes == () and [s.where for s in build.saves] == ["given"]
    assert build.forward_bytes == 0


def test_a_product_is_a_kernel_and_its_operands_lie_in_memory() -> None:
    """With the arithmetic it takes; what is made for it alone is gone after it."""
    x = torch.randn(1024, 256, requires_grad=True)
    build = foretold(Wide(), x, shares=(1.0,))[0]
    out, weight = 1024 * 512 * 4, 512 * 256 * 4
    product = op_time(MACHINE, 2 * 1024 * 256 * 512, x.nbytes + weight + out, "float32")
    before, after = 2 * x.nbytes, 2 * out
    rest = build.forward_s - product
    assert rest == pytest.approx((before + after) / MACHINE.memory_bytes_per_s, rel=0.3)
    assert build.forward_bytes <= x.nbytes + out
    two = 2 * op_time(MACHINE, 2 * 1024 * 256 * 512, x.nbytes + weight + out, "float32")
    assert build.backward_s > two, "one product for each operand"


def test_a_block_that_cannot_be_traced_is_named() -> None:
    """It stays as it is."""

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with FakeTensorMode() as mode, mode:
        x = torch.empty(8, requires_grad=True)
        sample = Sample.take("layers.3", Looks(), ((x,), {}), CPU)
        with pytest.warns(UserWarning, match=r"layers\.3"):
            assert forecast(sample, SHARES, MACHINE) == []


def estimate(budget: int | None = None, compile: str | None = None) -> legroom.Outcome:
    """Of a small language model whose logits are large."""
    sizes = {"layers": 4, "dim": 128, "heads": 4, "vocab": 8000, "batch": 8, "sequence": 256}
    example = EXAMPLES["llama-1b"](device="meta", **sizes)
    batch, loss_fn = example.make_batch(0), example.loss_fn
    return legroom.estimate(
        example.model, batch, machine="l4", loss_fn=loss_fn, budget=budget, compile=compile
    )


def test_compiled_blocks_are_estimated_to_take_less() -> None:
    """Less time; and less memory than logits in full, where eager steps have no plan."""
    plain, built = estimate(), estimate(compile="blocks")
    assert built.step_s < plain.step_s and built.device_bytes < plain.device_bytes
    logits = 8 * 256 * 8000 * 4
    with pytest.raises(BudgetError):
        estimate(logits)
    tight = estimate(logits, "blocks")
    assert tight.device_bytes <= logits and tight.step_s >= built.step_s


def test_what_is_short_is_told_of_the_leanest_builds() -> None:
    """Not of eager blocks, which need more."""
    with pytest.raises(BudgetError) as eager:
        estimate(1 << 20)
    with pytest.raises(BudgetError) as built:
        estimate(1 << 20, "blocks")
    assert built.value.smallest_bytes < eager.value.smallest_bytes  # type: ignore[operator]


def test_other_things_cannot_be_compiled() -> None:
    """An error that says what can."""
    with pytest.raises(InputError, match="blocks"):
        estimate(compile="model")


def test_an_estimate_leaves_the_model_alone() -> None:
    """Weights, statistics, attributes and random numbers are as they were."""
    example = EXAMPLES["llama-tiny"](device="cpu", batch=2, sequence=16)
    model, before = example.model, copy.deepcopy(example.model.state_dict())
    attributes = [sorted(m.__dict__) for m in model.modules()]
    batch, state = example.make_batch(0), torch.get_rng_state()
    legroom.estimate(
        model, batch, machine="l4", loss_fn=example.loss_fn, compile="blocks", budget="1GiB"
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert [sorted(m.__dict__) for m in model.modules()] == attributes
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_scratch_is_that_of_a_build_where_nothing_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Views of one storage are freed once, and a weight that is saved stays."""
    x, module = torch.randn(256, 256, requires_grad=True), Thirds()
    for one, other in zip(foretold(module, x), tried(module, x, monkeypatch), strict=True):
        assert one.forward_bytes == other.forward_bytes
        assert one.backward_bytes == pytest.approx(other.backward_bytes, abs=8)


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
        if tied:
            self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).sin())  # type: ignore[no-any-return]


def test_tied_weights_get_both_their_gradients() -> None:
    """As many products as without the tie."""
    x = torch.randn(4096, 256, requires_grad=True)
    tied, free = (foretold(Tied(kind), x, shares=(1.0,))[0] for kind in (True, False))
    assert tied.backward_s == pytest.approx(free.backward_s, rel=0.02)


def test_recurrent_blocks_have_no_forecast() -> None:
    """Their steps would be traced one by one, and the compiler leaves them alone."""
    with FakeTensorMode() as mode, mode:
        x = torch.empty(2, 500, 64, requires_grad=True)
        sample = Sample.take("rnn", nn.LSTM(64, 64), ((x,), {}), CPU)
        with pytest.warns(UserWarning, match="recurrent"):
            assert forecast(sample, SHARES, MACHINE) == []
