"""The model compiled as one: where it is tried, what its trace is like, and jobs that run it."""

import copy
import inspect
import io
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import legroom.memory.fitting as fitting
import legroom.memory.workshop as workshop
from legroom.memory.builds import OWN, Build, Save
from legroom.memory.mechanisms import compiled
from legroom.memory.mechanisms.compiled import Compiler, Route, can_compile
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Phase, Step
from legroom.memory.whole import LEAST, MOST, first_share, is_worth, next_share, with_whole
from tests.torch.nets import Mlp
from tests.torch.support import (
    GIB,
    MACHINE,
    Start,
    assert_same,
    fitted,
    result_of,
    until_measured,
)

BUILD = Build("keep 50%", 2.0, 3.0, 100, 200, (4096, 8192), ("float32",) * 2, (
    Save(OWN, 0, 4096), Save(OWN, 1, 8192),
))  # fmt: skip


@pytest.fixture(autouse=True)
def _whole_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's jobs try the whole model, and take it, be it slower; nothing is compiled further."""
    plain = workshop._rank

    def rank(step: Step, *args: Any) -> workshop.Rank:
        return plain(step, *args) if is_one(step) else (float("inf"), 1 << 62)

    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr("legroom.memory.trial.SHARES", (1.0,))
    monkeypatch.setattr(workshop, "WHOLE_ON", ("cpu",))
    monkeypatch.setattr(workshop, "_rank", rank)
    monkeypatch.setattr(workshop, "is_worth", lambda *_: True)


def is_one(step: Step) -> bool:
    """Whether a step has a build and no blocks."""
    return not step.blocks and any(op.name.startswith(" (keep") for op in step.ops)


class Glued(nn.Module):
    """Blocks with ops between them, and statistics that are updated."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(p=0.0) for _ in range(3))
        self.norm = nn.BatchNorm1d(64)
        self.out = nn.Linear(128, 64)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        first = x
        for block in self.blocks:
            x = F.relu(block(x)) * scale
        return self.out(torch.cat((self.norm(x), first), -1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, scale=0.5).square().mean()


def trace_of(model: nn.Module, x: Tensor) -> Step:
    """A recorded step."""
    with fitted(model, "keep_all") as job:
        for _ in range(4):
            with job.step():
                loss_of(model, x).backward()
        assert job.current is not None and job.current.capture is not None
        return job.current.capture.step


def test_the_models_own_call_is_known() -> None:
    """Its ops, their backward, and what they save; those of the loss are not among them."""
    step = trace_of(Glued(), torch.randn(32, 64))
    root = step.root
    assert root is not None
    names = [op.name for op in step.ops]
    assert names[root.last] == "aten.addmm" and root.first == 0
    assert names[root.last + 1].startswith("aten.pow")
    assert step.ops[root.back].phase is Phase.BACKWARD and root.back > step.turn
    assert names[root.back] in ("aten.mm", "aten.sum.dim_IntList")
    assert 0 == root.first_saved < root.last_saved < len(step.saved)


def test_a_model_that_is_called_twice_has_no_call_of_its_own() -> None:
    model, x = Glued(), torch.randn(32, 64)
    with fitted(model, "keep_all") as job:
        for _ in range(4):
            with job.step():
                (loss_of(model, x) + loss_of(model, x)).backward()
        assert job.current is not None and job.current.capture is not None
        assert job.current.capture.step.root is None


def test_one_build_is_two_ops_and_saves_outside_of_blocks() -> None:
    step = trace_of(Glued(), torch.randn(32, 64))
    made = with_whole(step, BUILD).step
    ours = [op for op in made.ops if "keep 50%" in op.name]
    assert [op.time_s for op in ours] == [2.0, 3.0] and not made.blocks and made.root is None
    assert step.root is not None
    others = len(step.ops) - (step.root.last + 1) - sum(
        op.phase is Phase.BACKWARD for op in step.ops[step.root.back :]
    )  # fmt: skip
    assert len(made.ops) == others + 2
    assert [row.block for row in made.saved] == [-1] * len(made.saved)
    assert [row.ordinal for row in made.saved] == list(range(len(made.saved)))
    sizes = [made.storages[row.storage].num_bytes for row in made.saved]
    assert sizes[:2] == [4096, 8192]
    assert Simulator(made, MACHINE).shape([]).peak < Simulator(step, MACHINE).shape([]).peak


def test_it_is_tried_where_ops_between_blocks_or_the_host_take_the_time() -> None:
    step = trace_of(Glued(), torch.randn(32, 64))
    time_s = sum(op.time_s for op in step.ops)
    assert is_worth(step, step.root, time_s) and not is_worth(step, None, time_s)
    assert not is_worth(step, step.root, 100 * time_s)
    simulator = Simulator(step, MACHINE)
    peak, saved = simulator.shape([]).peak, sum(step.storages[s].num_bytes for s in step.saves)
    assert first_share(simulator, peak) == 1.0
    assert first_share(simulator, peak - int(0.28 * saved)) == 0.7
    assert first_share(simulator, peak - int((1.05 - LEAST) * saved)) is None


def test_a_smaller_share_that_takes_more_is_no_limit() -> None:
    """The partitioner's builds are not in order at the low end."""
    assert next_share({0.1: 96, 0.7: 85}, 40, 92) == 0.85
    assert next_share({0.1: 96, 0.7: 85, 0.85: 95}, 40, 92) == 0.8


@pytest.mark.parametrize("first", [1.0, 0.7, 0.5, 0.35])
@pytest.mark.parametrize("limit, best", [(100, 1.0), (93, 0.9), (65, 0.6), (59, 0.2), (39, None)])
def test_the_share_that_just_fits_is_found(first: float, limit: int, best: float | None) -> None:
    """Though what a share gives is not known before it is tried; in a few tries, none twice."""

    def peak(share: float) -> int:
        return 40 + int(60 * share**2) if share > 0.4 else 55 - int(25 * share)

    share, peaks = first, dict[float, int]()
    while share is not None:
        assert share not in peaks and len(peaks) < MOST
        peaks[share] = peak(share)
        share = next_share(peaks, 70, limit)
    fitting = [share for share, size in peaks.items() if size <= limit]
    if best is None:
        assert not fitting
    else:
        assert fitting and peak(max(fitting)) >= peak(best) - 7


@pytest.mark.parametrize("draws", [False, True])
def test_a_job_runs_the_model_as_one(draws: bool) -> None:
    """With the gradients of eager training, statistics and draws included, as it was foreseen."""
    torch.manual_seed(0)
    model = Glued()
    if draws:
        model.blocks[1] = Mlp(p=0.5)
    x, start = torch.randn(32, 64), Start(model)
    start.restore()
    loss = loss_of(model, x)
    loss.backward()
    plain = result_of(model, loss)
    with fitted(model, "auto", compile="blocks", budget={"device": GIB, "host": GIB}) as job:
        for _ in range(6):
            start.restore()
            with job.step():
                loss = loss_of(model, x)
                loss.backward()
        kind = job.current
        assert kind is not None and kind.plan is not None and not job.runner.deviation
        assert set(kind.outfit.shares) == {""} and "the model compiled" in kind.plan.why
        if not draws:  # graphs draw by seeds of their own
            found = result_of(model, loss)
            torch.testing.assert_close(found.loss, plain.loss)
            for name, grad in plain.grads.items():
                torch.testing.assert_close(found.grads[name], grad)
            for name, buffer in plain.buffers.items():
                torch.testing.assert_close(found.buffers[name], buffer)
    assert "forward" not in model.__dict__
    start.restore()
    loss = loss_of(model, x)
    loss.backward()
    assert_same(result_of(model, loss), plain)


def test_its_peak_is_as_foreseen() -> None:
    model, x = Glued(), torch.randn(512, 64)
    with fitted(model, "auto", compile="blocks", budget={"device": GIB, "host": GIB}) as job:
        job.meter.peaks = True  # type: ignore[attr-defined]

        def step() -> None:
            with job.step():
                loss_of(model, x).backward()
            model.zero_grad()

        for _ in range(7):
            step()
        both, kind = until_measured(job, step), job.current
        assert kind is not None and set(kind.outfit.shares) == {""} and not job.runner.deviation
        assert both.measured.device_bytes == pytest.approx(both.predicted.device_bytes, rel=0.01)


def test_a_route_runs_the_build_that_is_there() -> None:
    """It tells what it takes, can be copied with its model, and goes when all is cleared."""
    model, compiler, x = Glued(), Compiler("eager"), torch.randn(8, 64)
    before = inspect.signature(model.forward)
    compiler.route(model)
    assert not can_compile(model) and inspect.signature(model.forward) == before
    plain = model(x)
    assert compiler.place({"": model}, {"": 0.5})
    route = model.__dict__["forward"]
    assert isinstance(route, Route) and route.build is not None
    torch.testing.assert_close(model(x), plain)
    twin = copy.deepcopy(model)
    assert twin.__dict__["forward"].build is None
    compiler.place({"": model}, {})
    assert route.build is None and model.__dict__["forward"] is route
    with torch.no_grad():
        twin.out.bias.add_(1)
    torch.testing.assert_close(twin(x), plain + 1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), plain)
    compiler.clear()
    assert "forward" not in model.__dict__


def test_a_forward_of_the_users_own_is_left_alone() -> None:
    model, compiler = Glued(), Compiler("eager")
    model.forward = lambda x: x  # type: ignore[method-assign]
    compiler.route(model)
    assert not isinstance(model.__dict__["forward"], Route)
    compiler.clear()
    assert "forward" in model.__dict__


def test_a_forward_that_is_put_in_place_later_ends_builds_of_the_whole() -> None:
    """The eager step is planned then: a plan for the build would exceed the budget."""
    model, x = Glued(), torch.randn(32, 64)
    with fitted(model, "auto", compile="blocks", budget={"device": GIB, "host": GIB}) as job:
        for i in range(16):
            if i == 6:
                assert job.current is not None and set(job.current.outfit.shares) == {""}
                model.forward = partial(type(model).forward, model)  # type: ignore[method-assign]
            with job.step():
                loss_of(model, x).backward()
            model.zero_grad()
        kind = job.current
        assert kind is not None and kind.plan is not None and not kind.outfit.shares
        assert not job.runner.deviation and "compiled" not in kind.plan.why


def test_what_a_job_that_was_never_closed_left_goes_with_the_next() -> None:
    model, first, second = Glued(), Compiler("eager"), Compiler("eager")
    first.route(model)
    del first
    second.route(model)
    second.clear()
    assert "forward" not in model.__dict__


def test_a_build_that_no_longer_fits_is_followed_by_a_smaller_one() -> None:
    """Where the allocator turns out to need more room; and once one fits, nothing is compiled."""
    model, x = Glued(), torch.randn(512, 64)
    with fitted(model, "auto", compile="blocks", budget={"device": GIB, "host": GIB}) as job:
        for _ in range(7):
            with job.step():
                loss_of(model, x).backward()
            model.zero_grad()
        kind, shop = job.current, job.workshop
        assert kind is not None and kind.plan is not None and shop is not None
        assert kind.outfit.shares == {"": 1.0}
        (whole,) = shop._wholes.values()
        assert whole.foreseen == pytest.approx(whole.peaks, rel=0.02)
        small = dict(job.budget) | {"device": kind.plan.predicted.device_bytes - 200_000}
        shop.remake(kind, job.machine, small, "auto")
        (share,) = kind.outfit.shares.values()
        assert share < 1.0 and whole.peaks[share] <= small["device"]
        tried = dict(whole.peaks)
        shop.remake(kind, job.machine, small, "auto")
        shop.remake(kind, job.machine, dict(job.budget), "auto")
        assert whole.peaks == tried


@pytest.mark.parametrize("limit, share", [(100, 0.9), (60, 0.5), (25, None)])
def test_what_takes_more_than_forecast_is_followed_by_less(
    monkeypatch: pytest.MonkeyPatch, limit: int, share: float | None
) -> None:
    """Peaks are off by 7 of 100; one build finds that out, and the next one fits."""
    compiled_shares: list[float] = []

    def foresee(sample: Any, shares: Any, *_: Any) -> None:
        found: Any = []
        for one in shares(found):
            found.append((one, BUILD._replace(name=f"{100 * one:.0f}")))
            assert len(found) <= MOST

    def try_all(model: Any, device: Any, subjects: Any, *_: Any) -> Any:
        found: Any = []
        for one, _name, _forward in subjects[0].ways(found):
            compiled_shares.append(one)
            found.append((one, BUILD._replace(name=f"{100 * one + 7:.0f}")))
        return [found]

    monkeypatch.setattr(fitting, "foresee", foresee)
    monkeypatch.setattr(fitting, "try_all", try_all)
    monkeypatch.setattr(fitting, "_peak", lambda plain, build: int(build.name))
    monkeypatch.setattr(fitting, "first_share", lambda plain, limit: 0.7 if limit > 30 else None)
    step = SimpleNamespace(saves=[0], storages=[SimpleNamespace(num_bytes=70)])
    plain: Any = SimpleNamespace(step=step, machine=None)
    whole = fitting.Whole(Glued(), torch.device("cpu"), cast("Any", None))
    whole.try_builds(Compiler("eager"), plain, limit)
    fits = [one for one, peak in whole.peaks.items() if peak <= limit]
    assert (max(fits) if fits else None) == share and len(compiled_shares) <= 2
