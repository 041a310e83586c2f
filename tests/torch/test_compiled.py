"""Compiled blocks: builds that agree, trials that leave nothing behind, and whole jobs.

Blocks are cut into forward and backward by torch's partitioner and not compiled further: what is
tested here does not depend on the kernels, and those take long to make.
"""

import gc
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from torch.nn import functional as F

import legroom.memory.workshop as workshop
from legroom.api import Job
from legroom.core.errors import InputError
from legroom.memory.builds import Build
from legroom.memory.device import CpuMeter
from legroom.memory.mechanisms import compiled
from legroom.memory.mechanisms.compiled import Compiler
from legroom.memory.run import Runner
from legroom.memory.sample import Sample
from legroom.memory.saved import weight_storages
from legroom.memory.trace import Step
from legroom.memory.trial import (
    Subject,
    Trial,
    Way,
    _Saved,
    build_ways,
    shares_by,
    try_all,
    worth_having,
)
from tests.torch.nets import Attention, ConvNorm, Mlp, Thirds, rows, stack
from tests.torch.support import (
    CPU,
    GIB,
    MACHINE,
    Start,
    assert_same,
    fitted,
    result_of,
    until_measured,
)

SHARES = (1.0, 0.5, 0.0)


@pytest.fixture(autouse=True)
def _cut_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr("legroom.memory.trial.SHARES", SHARES)


@pytest.fixture
def compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job takes compiled blocks, be they slower than eager ones."""
    plain = workshop._rank

    def rank(step: Step, *args: object) -> workshop.Rank:
        here = any(block.build for block in step.blocks)
        return plain(step, *args) if here else (float("inf"), 1 << 62)  # type: ignore[arg-type]

    monkeypatch.setattr(workshop, "_rank", rank)


class DropAttention(Attention):
    """Attention that drops some of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return x + self.out(y.transpose(1, 2).reshape(batch, time, width))


class Clipped(Mlp):
    """A block whose gradient is made anew on its way in: eager ones add to it in place."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class Widened(Mlp):
    """A norm in a wider dtype: eager ops save wide copies, builds the input they were given."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.double()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return x + self.down(self.act(self.up(wide.float())))


def tried(model: nn.Module, sample: Sample) -> list[tuple[float, Build]]:
    """The builds of one block."""
    (found,) = try_all(model, CPU, [Subject(sample, build_ways(Compiler(), sample.module, SHARES))])
    return found


def run(forward: object, x: Tensor, module: nn.Module) -> list[Tensor]:
    """Result and gradients from the same random state."""
    torch.manual_seed(3)
    out = forward(x)  # type: ignore[operator]
    found = torch.autograd.grad((out * out).sum(), [x, *module.parameters()])
    return [out.detach(), *found]


@pytest.mark.parametrize(
    "need, first", [(1.0, (1.0, 0.7)), (0.6, (0.7, 0.4)), (0.3, (0.2, 0.4)), (-0.5, (0.0, 0.2))]
)
def test_shares_close_to_what_fits_are_tried_first(
    need: float, first: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of them in the end."""
    monkeypatch.setattr("legroom.memory.trial.SHARES", (1.0, 0.7, 0.4, 0.2, 0.0))
    order = shares_by(need)
    assert tuple(order[:2]) == first and sorted(order) == [0.0, 0.2, 0.4, 0.7, 1.0]


@pytest.mark.parametrize("block", [Mlp, Attention, DropAttention])
def test_every_build_gives_the_same_gradients(block: type[nn.Module]) -> None:
    """What is drawn at random is kept, not drawn again: torch's own budget gets that wrong."""
    module, compiler = block(), Compiler()
    x = torch.randn(4, 16, 64, requires_grad=True)
    first = run(compiler.build(module, 1.0), x, module)
    for share in (0.5, 0.0):
        again = run(compiler.build(module, share), x, module)
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a, b), share


def test_a_smaller_share_saves_less() -> None:
    """From all that backward could use down to the block's own input."""
    model = stack(Mlp)
    sample = Sample.take("0", model[1], ((rows(),), {}), CPU)  # type: ignore[index]
    found = [
        Trial(model, sample, Compiler().build(sample.module, s), CPU).measure("") for s in SHARES
    ]
    sizes = [build.saved_bytes for build in found]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_blocks_of_one_class_share_their_code() -> None:
    """The second block compiles nothing, and neither does a second step with other hooks."""
    model, compiler = nn.Sequential(Mlp(), Mlp(), Mlp()), Compiler()
    compiler.place(dict(model.named_modules()), dict.fromkeys("012", 0.5))
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            model(rows().requires_grad_()).sum().backward()
    assert counters["stats"]["unique_graphs"] == before + 1


def test_blocks_with_other_weights_have_code_of_their_own() -> None:
    """Else each call of a block would look through what was compiled for all the others."""
    compiler = Compiler()
    one, same, other = (compiler.build(Mlp(width), 0.5) for width in (64, 64, 32))
    assert one.func is same.func is not other.func  # type: ignore[attr-defined]


def test_builds_are_put_in_place_and_taken_away() -> None:
    """As an attribute of the one module, and the module is as it was after."""
    model, compiler = nn.Sequential(Mlp(), Mlp()), Compiler()
    modules = dict(model.named_modules())
    compiler.place(modules, {"0": 1.0, "1": 0.0})
    first = model[0].forward
    compiler.place(modules, {"0": 1.0})
    assert model[0].forward is first and "forward" not in model[1].__dict__
    compiler.clear()
    assert "forward" not in model[0].__dict__


def test_a_trial_leaves_nothing_behind() -> None:
    """No gradients, no statistics, no random state."""
    model = nn.Sequential(ConvNorm(), ConvNorm())
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    sample = Sample.take("1", model[1], ((x,), {}), CPU)
    torch.manual_seed(5)
    expected, buffers = torch.rand(3), [b.clone() for b in model.buffers()]
    torch.manual_seed(5)
    assert tried(model, sample)
    assert torch.equal(torch.rand(3), expected)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))


def test_what_weighs_more_is_tried_in_more_ways_first() -> None:
    """A minute may not do for all ways of all blocks; each is tried in one before."""
    module, order = Mlp(), []

    def ways(name: str) -> Iterator[Way]:
        for i in range(3):
            order.append(name)
            yield float(i), str(i), module.forward

    sample = Sample.take("block", module, ((rows().requires_grad_(),), {}), CPU)
    subjects = [Subject(sample, ways(name), n) for name, n in (("a", 2), ("b", 6), ("c", 1))]
    assert all(try_all(module, CPU, subjects))
    assert "".join(order) == "bac" + "bba" + "ac" + "c"


class Counting(Mlp):
    """A block that counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_trial_leaves_attributes_as_they_were() -> None:
    """A counter in the block's forward counts steps, not trials."""
    model = nn.Sequential(Counting(), Counting())
    sample = Sample.take("0", model[0], ((rows().requires_grad_(),), {}), CPU)
    assert tried(model, sample)
    assert model[0].calls == 0


def test_builds_that_save_as_much_as_a_faster_one_are_left_out() -> None:
    """Only those that trade time for bytes are worth having."""
    model = stack(Mlp)
    sample = Sample.take("0", model[1], ((rows(),), {}), CPU)  # type: ignore[index]
    one = Trial(model, sample, Compiler().build(sample.module, 1.0), CPU).measure("a")
    fast = one._replace(name="fast", sizes=(100,), forward_s=1.0, backward_s=1.0, backward_bytes=50)
    same = fast._replace(name="same", sizes=(99,), forward_s=2.0)
    small = fast._replace(name="small", sizes=(10,), forward_s=3.0)
    large = fast._replace(name="large", sizes=(200,), forward_s=4.0)
    lean = fast._replace(name="lean", sizes=(110,), forward_s=5.0, backward_bytes=0)
    found = worth_having([(1.0, large), (0.7, same), (0.5, fast), (0.0, small), (0.3, lean)])
    assert [build.name for _, build in found] == ["fast", "small"]
    found = worth_having([(0.5, fast), (0.3, lean)])
    assert [build.name for _, build in found] == ["fast", "lean"]


def steps(job: Job, num_steps: int, start: Start, x: Tensor) -> tuple[object, ...]:
    """Loss and gradients of the last of some steps, each from the same state."""
    for i in range(num_steps):
        start.restore()
        job.meter.peaks = i == num_steps - 1  # type: ignore[attr-defined]
        with job.step():
            loss = job.model(x).square().mean()
            loss.backward()
    return result_of(job.model, loss)  # type: ignore[return-value]


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize("block", [Mlp, Attention, Clipped, Widened])
def test_the_peak_of_a_job_with_compiled_blocks_is_foreseen(block: type[nn.Module]) -> None:
    """Measured by the allocator, under several budgets."""
    model = nn.Sequential(nn.Linear(64, 64), *[block() for _ in range(6)], nn.Linear(64, 8))
    x, start = torch.randn(64, 64, 64), Start(model)
    with fitted(model, "keep_all") as job:
        steps(job, 4, start, x)
        natural = job.comparison().predicted.device_bytes
    for share in (1.2, 0.8):
        budget = {"device": int(natural * share), "disk": GIB, "host": GIB}
        with fitted(model, "auto", compile="blocks", budget=budget) as job:
            steps(job, 5, start, x)
            outcome = until_measured(job, lambda: steps(job, 1, start, x))
            assert job.current.outfit.shares and not job.runner.deviation  # type: ignore[union-attr]
            assert "6 blocks compiled (" in job.current.plan.why  # type: ignore[union-attr]
            assert outcome.measured is not None
            assert outcome.measured.device_bytes <= budget["device"]
            assert outcome.peak_error == pytest.approx(0, abs=0.01)


@pytest.mark.usefixtures("compiled_only")
def test_the_allocator_is_left_room_for_what_no_trace_shows() -> None:
    """Where tensors inside of compiled blocks come to lie is not known; the largest must fit."""
    model = nn.Sequential(nn.Linear(64, 64), *[Mlp() for _ in range(4)])
    x, start = torch.randn(64, 64), Start(model)
    with fitted(model, "auto", compile="blocks") as job:
        steps(job, 4, start, x)
        kind = job.current
        assert kind is not None
        widest = max(
            layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear)
        )
        assert kind.outfit.shares and kind.unseen_bytes == len(x) * widest * 4
        assert job.meter.slack == kind.unseen_bytes / job.budget["device"]


def test_a_job_that_has_no_such_room_to_leave_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the best that fits: compiled without that room, or eager with all of the budget."""
    monkeypatch.setattr(
        CpuMeter, "overhead", lambda self, budget: int(budget * self.slack), raising=True
    )
    model = nn.Sequential(nn.Linear(64, 64), *[Mlp() for _ in range(6)])
    x, start = torch.randn(64, 64, 64), Start(model)
    with fitted(model, "keep_all") as job:
        steps(job, 4, start, x)
        natural = job.comparison().predicted.device_bytes
    for share in (0.5, 0.55, 0.6, 0.65):
        budget = {"device": int(natural * share), "disk": GIB, "host": GIB}
        with fitted(model, "auto", compile="blocks", budget=budget) as job:
            steps(job, 5, start, x)
            kind = job.current
            assert kind is not None and kind.plan is not None
            assert bool(kind.outfit.shares) or not job.meter.slack


@pytest.mark.parametrize("large", [0.0, 1.0])
def test_builds_without_room_for_a_large_tensor_give_way_to_eager_blocks(
    large: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much faster: a step that finds no gap for it ends the job. Small ones find one."""
    monkeypatch.setattr(CpuMeter, "overhead", lambda self, budget: int(budget * self.slack))
    monkeypatch.setattr(workshop, "LARGE", large)

    def rank(step: Step, machine: object, budget: dict[str, int], policy: str) -> workshop.Rank:
        room = budget["device"] >= limit
        built = any(block.build for block in step.blocks)
        return (1e-6 if built else 1.0, 0) if room else (float("inf"), 1)

    monkeypatch.setattr(workshop, "_rank", rank)
    model = nn.Sequential(nn.Linear(64, 64), *[Mlp() for _ in range(4)])
    x, start, limit = torch.randn(64, 64), Start(model), 1 << 24
    with fitted(model, "auto", compile="blocks", budget={"device": limit, "host": GIB}) as job:
        steps(job, 4, start, x)
        assert bool(job.current.outfit.shares) == (large == 1.0)  # type: ignore[union-attr]


@pytest.mark.usefixtures("compiled_only")
def test_moves_do_not_change_what_compiled_blocks_compute() -> None:
    """Bit for bit the same with everything moved as with everything kept."""
    model = nn.Sequential(nn.Linear(64, 64), *[Mlp() for _ in range(4)])
    x, start, found = torch.randn(64, 64), Start(model), []
    for policy in ("keep_all", "swap_all"):
        with fitted(model, policy, compile="blocks") as job:
            found.append(steps(job, 5, start, x))
            assert job.current.outfit.shares  # type: ignore[union-attr]
            assert bool(job.current.plan.moves) == (policy == "swap_all")  # type: ignore[union-attr]
    assert_same(found[1], found[0])  # type: ignore[arg-type]


@pytest.mark.usefixtures("compiled_only")
def test_results_are_those_of_eager_blocks_up_to_rounding() -> None:
    """Without dropout, whose numbers are drawn in another way."""
    model = nn.Sequential(nn.Linear(64, 64), *[Mlp(p=0.0) for _ in range(3)])
    x, start = torch.randn(64, 64), Start(model)
    start.restore()
    loss = model(x).square().mean()
    loss.backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with fitted(model, "auto", compile="blocks") as job:
        steps(job, 4, start, x)
        assert job.current.outfit.shares  # type: ignore[union-attr]
    for mine, theirs in zip((p.grad for p in model.parameters()), plain, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.usefixtures("compiled_only")
def test_the_model_is_itself_outside_of_steps() -> None:
    """An evaluation between steps runs as it always did."""
    model = nn.Sequential(nn.Linear(64, 64), *[Mlp() for _ in range(3)])
    x, start = torch.randn(64, 64), Start(model)
    with fitted(model, "auto", compile="blocks") as job:
        steps(job, 4, start, x)
        assert not any("forward" in m.__dict__ for m in model.modules())
        start.restore()
        with job.step():
            job.model(x).sum().backward()
            assert "forward" in model[1].__dict__
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_a_block_that_does_not_compile_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named in a warning, the job goes on, and who keeps the error keeps nothing else."""
    errors = []

    def fails(self: Compiler, module: nn.Module, share: float) -> None:
        errors.append(RuntimeError("no such kernel"))
        raise errors[-1]

    monkeypatch.setattr(Compiler, "build", fails)
    model = nn.Sequential(nn.Linear(64, 64), *[Mlp() for _ in range(3)])
    start = Start(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fitted(model, "auto", compile="blocks") as job:
            steps(job, 4, start, rows())
            assert not job.current.outfit.shares  # type: ignore[union-attr]
    assert any("1 is not compiled: RuntimeError: no such kernel" in str(w.message) for w in caught)
    mark = weakref.ref(model)
    del model, start, job
    gc.collect()
    assert errors and mark() is None


def test_only_blocks_are_compiled() -> None:
    """Anything else is refused."""
    with pytest.raises(InputError, match="blocks"):
        import legroom

        legroom.fit(nn.Linear(2, 2), machine=MACHINE, compile="everything")


@pytest.mark.usefixtures("compiled_only")
def test_steps_of_two_sizes_that_take_turns_each_get_their_builds() -> None:
    """What one size was sampled with is not tried for the other."""
    model = nn.Sequential(nn.Linear(64, 64), *[Mlp(p=0.0) for _ in range(3)])
    start, xs = Start(model), (torch.randn(32, 64), torch.randn(48, 64))
    with fitted(model, "auto", compile="blocks") as job:
        for i in range(8):
            start.restore()
            with job.step():
                job.model(xs[i % 2]).square().mean().backward()
        assert [len(kind.outfit.shares) for kind in job.kinds.values()] == [3, 3]
        assert not job.runner.deviation
        inputs = [
            {k.capture.step.storages[r.storage].num_bytes for r in k.capture.step.saved_in(1)}  # type: ignore[union-attr]
            for k in job.kinds.values()
        ]
        assert 32 * 64 * 4 in inputs[0] and 48 * 64 * 4 in inputs[1]


def test_a_gradient_in_the_place_of_a_saved_tensor_is_another_one() -> None:
    """An address that is used again must not make scratch come out smaller in some trials."""
    module, found = Thirds(), set()
    build = Compiler().build(module, 1.0)
    for i in range(40):
        x = torch.randn(256, 256, requires_grad=True)
        sample = Sample.take("block", module, ((x,), {}), CPU)
        others = [torch.empty(256, 256) for _ in range(i % 5)]
        found.add(Trial(module, sample, build, CPU).measure("").backward_bytes)
        del others
    assert len(found) == 1, found


class Recurrent(nn.Module):
    """A layer that the compiler leaves to itself: the graph around it is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.LSTM(64, 64, batch_first=True), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x))[0]


@pytest.mark.usefixtures("compiled_only")
def test_hooks_of_a_job_are_not_compiled_with_a_block_that_breaks_its_graph() -> None:
    """They look at Python objects of all kinds: each save was compiled for anew."""
    model, x = stack(Recurrent, 3), torch.randn(4, 16, 64)
    with fitted(model, "test_swap", compile="blocks") as job:
        for _ in range(6):
            with job.step():
                model(x).pow(2).mean().backward()
        assert job.current is not None and job.current.outfit.shares
        assert job.current.plan is not None and job.current.plan.moves
    assert not _debug_get_cache_entry_list(Runner._pack.__code__)


def test_hooks_of_a_trial_are_not_compiled_with_a_block_that_breaks_its_graph() -> None:
    """For recurrent layers that took most of a minute."""
    saved = _Saved(CPU, weight_storages([]))

    layer = torch.compile(nn.LSTM(16, 64), backend="eager")
    with saved.hooks():
        layer(torch.randn(8, 4, 16, requires_grad=True))
    assert saved.tensors
    assert not _debug_get_cache_entry_list(_Saved._pack.__code__)
