"""A live job goes through all that training scripts do, and the results are those without it."""

import copy
import gc
import io
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from legroom.core.errors import LegroomError
from legroom.memory.device import CpuMeter, Reading
from legroom.memory.host import BOLD, CAUTION
from legroom.memory.kinds import MOST_ROOM, Kind
from legroom.memory.mechanisms.entry import Dropped
from legroom.memory.planner import POLICIES, Choice, make_placed_plan
from legroom.memory.relief import PRESSED
from tests.torch.nets import (
    WIDTH,
    Attention,
    ConvNorm,
    Each,
    Mlp,
    images,
    rows,
    stack,
    texts,
)
from tests.torch.support import LIVE, Start, fitted, full, live_check, selective, total, weigh

EACH = pytest.mark.parametrize("policy", LIVE)
Train = Callable[[nn.Module, torch.optim.Optimizer, Callable[[], Any]], None]


def same_training(
    policy: str, train: Train, make: Callable[[], nn.Module] = lambda: stack(Mlp), **given: Any
) -> None:
    """Run a training loop with and without a job; parameters and buffers end bit-identical."""
    ends = []
    for planned in (False, True):
        model = make()
        optimizer = given.get("optimizer", torch.optim.SGD)(model.parameters(), lr=0.01)
        torch.manual_seed(5)
        with fitted(model, policy, optimizer=optimizer) as job:
            train(model, optimizer, job.step if planned else _nothing)
        ends.append({**model.state_dict(), "rng": torch.get_rng_state()})
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value), f"{name} differs after training"


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@EACH
@pytest.mark.parametrize("zero", ["start", "end", "keep memory"])
def test_plain_training(policy: str, zero: str) -> None:
    """zero_grad first or last, gradients set to None or to zero, clipping, two optimizers."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any) -> None:
        for i in range(5):
            with step():
                if zero == "start":
                    optimizer.zero_grad()
                loss = weigh(model(rows(seed=i))) * 1e-3
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if zero != "start":
                    optimizer.zero_grad(set_to_none=zero == "end")

    make = torch.optim.SGD if zero == "end" else torch.optim.AdamW
    same_training(policy, train, optimizer=make)


@EACH
def test_steps_of_other_shapes(policy: str) -> None:
    """Every shape gets its plan; a last batch that is shorter is neither wrong nor an error."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any) -> None:
        for i, count in enumerate([32, 32, 7, 32, 32, 7, 64, 7, 64, 1, 64, 32]):
            with step():
                (weigh(model(rows(count=count, seed=i))) * 1e-3).backward()
                optimizer.step()
                optimizer.zero_grad()

    same_training(policy, train)


@EACH
def test_gradient_accumulation(policy: str) -> None:
    """Steps without an update, gradients already there; and several forwards within one step."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any) -> None:
        for i in range(8):
            with step():
                (weigh(model(rows(seed=i))) * 1e-3).backward()
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        for i in range(5):
            with step():
                for k in range(3):
                    (weigh(model(rows(seed=9 * i + k))) * 1e-3).backward()
                optimizer.step()
                optimizer.zero_grad()
        for i in range(5):
            with step():
                total = sum(weigh(model(rows(seed=9 * i + k))) * 1e-3 for k in range(3))
                total.backward()
                optimizer.step()
                optimizer.zero_grad()

    same_training(policy, train)


@EACH
def test_autocast_with_a_gradient_scaler(policy: str) -> None:
    """bf16 on the CPU: casts in a replay are those of the first run."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for i in range(5):
            with step():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = weigh(model(rows(seed=i)).float()) * 1e-3
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    same_training(policy, train)


@EACH
def test_evaluation_between_steps_and_no_grad_within(policy: str) -> None:
    """Forwards in eval mode or without gradients, inside and outside of steps."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any) -> None:
        for i in range(6):
            x = images(seed=i)
            with step():
                if i % 2:
                    with torch.no_grad():
                        target = model(x)
                    loss = (model(x) * target).mean()
                else:
                    loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(x)
            model(x).sum().backward()
            optimizer.zero_grad()
            model.train()

    same_training(policy, train, lambda: stack(ConvNorm))


@EACH
def test_two_jobs_on_two_models(policy: str) -> None:
    """A generator and a critic, each fitted, in turns and within each other's step."""

    def run(planned: bool) -> list[Tensor]:
        one, two = stack(Mlp), stack(ConvNorm)
        torch.manual_seed(3)
        with fitted(one, policy) as a, fitted(two, policy) as b:
            for i in range(5):
                with a.step() if planned else _nothing(), b.step() if planned else _nothing():
                    y = weigh(one(rows(seed=i)))
                    (weigh(two(images(seed=i))) * y * 1e-6).backward()
        return [p.grad for m in (one, two) for p in m.parameters() if p.grad is not None]

    assert all(torch.equal(x, y) for x, y in zip(run(True), run(False), strict=True))


@EACH
@pytest.mark.parametrize("foreign", ["parameter", "tensor"])
def test_a_fitted_model_inside_a_larger_one(policy: str, foreign: str) -> None:
    """Layers before and after the fitted part; a parameter of theirs may go into its blocks."""

    class Block(Mlp):
        def forward(self, x: Tensor, prompt: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * prompt) * prompt

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = stack(Block)

        def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, prompt)
            return x

    torch.manual_seed(0)
    before, inner, after = nn.Linear(WIDTH, WIDTH), Inner(), nn.Linear(WIDTH, WIDTH)
    prompt = nn.Parameter(torch.randn(32, WIDTH))
    everything = nn.ModuleList([before, inner, after, nn.ParameterList([prompt])])

    def closure() -> Tensor:
        given = prompt if foreign == "parameter" else prompt * 1.0
        return weigh(after(F.gelu(inner(before(rows()), given))))

    start = Start(everything)
    start.restore()
    closure().backward()
    plain = [p.grad.clone() for p in everything.parameters()]  # type: ignore[union-attr]
    with fitted(inner, policy) as job:
        for _ in range(4):
            start.restore()
            with job.step():
                closure().backward()
            mine = [p.grad.clone() for p in everything.parameters()]  # type: ignore[union-attr]
            assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))


@EACH
@pytest.mark.parametrize("when", [0, 1, 2])
@pytest.mark.parametrize("next_rows", [32, 16])
def test_a_step_that_raises_in_a_job(policy: str, when: int, next_rows: int) -> None:
    """The steps after it are right, also when it was the recorded one and another shape follows."""
    model = stack(lambda: Mlp(p=0.0))
    plain = {}
    for count in (32, 16):
        model.zero_grad()
        weigh(model(rows(count=count))).backward()
        plain[count] = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    with fitted(model, policy) as job:
        last = [next_rows, 32, 16, 32, 16, 32, 16, 32, 16, 32]
        for i, count in enumerate([32] * when + [0] + last):
            model.zero_grad()
            if not count:
                with pytest.raises(ZeroDivisionError), job.step():
                    weigh(model(rows())) / (1 // 0)
                continue
            with job.step():
                weigh(model(rows(count=count))).backward()
            mine = [p.grad for p in model.parameters()]
            assert all(
                torch.equal(a, b)  # type: ignore[arg-type]
                for a, b in zip(mine, plain[count], strict=True)
            ), f"step {i} is wrong"
            lost = job.runner.deviation if i > 8 + when else ""
            assert not lost, f"step {i} did not follow its plan: {lost}"


@EACH
def test_hooks_of_the_users_own(policy: str) -> None:
    """Hooks change what they change; they run once more on fake tensors, and in replays."""

    def run(planned: bool) -> tuple[list[Tensor], list[Tensor]]:
        model, seen = stack(lambda: Mlp(p=0.0)), []

        def note(_: nn.Module, __: Any, out: Tensor) -> None:
            seen.append(out.detach())
            out.register_hook(lambda g: seen.append(g.detach()))

        for block in model:
            block.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
            block.register_forward_hook(note)
            block.up.register_forward_hook(note)
            block.register_full_backward_hook(lambda *a: seen.append(torch.zeros(1)))
        with fitted(model, policy) as job:
            for i in range(4):
                x = rows(seed=i).requires_grad_()
                with job.step() if planned else _nothing():
                    weigh(model(x)).backward()
        return seen, [p.grad for p in model.parameters() if p.grad is not None]

    (seen, mine), (expected, plain) = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
    real = [x for x in seen if type(x) is Tensor]
    if policy in ("test_swap", "test_disk"):
        assert len(real) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(real, expected, strict=True))
    assert len(real) >= len(expected)


@EACH
def test_hooks_that_come_after_the_job(policy: str) -> None:
    """A hook that changes a block's input, set once the job runs, is part of the replay."""
    model = stack(lambda: Mlp(p=0.0))
    with fitted(model, policy) as job:
        for _ in range(3):
            model.zero_grad()
            with job.step():
                weigh(model(rows())).backward()
        for block in model:
            block.register_forward_pre_hook(lambda _, args: (args[0] * 3.0 + 1,))
        model.zero_grad()
        with job.step():
            weigh(model(rows())).backward()
    mine = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    weigh(model(rows())).backward()
    plain = [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))  # type: ignore[arg-type]


@EACH
def test_copies_and_files_of_a_fitted_model(policy: str) -> None:
    """Deepcopy (for an average of the weights), state_dict and torch.save work; copies are free."""
    model = stack(Mlp)
    names = list(model.state_dict())
    with fitted(model, policy) as job:
        for _ in range(3):
            with job.step():
                weigh(model(rows())).backward()
        assert list(model.state_dict()) == names
        torch.save(model.state_dict(), io.BytesIO())
        twin = copy.deepcopy(model)
    start = Start(model)
    start.restore()
    weigh(model(rows())).backward()
    Start(twin).restore()
    weigh(twin(rows())).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


# -- models that look at values, or keep things --------------------------------------------------


class Lazy(nn.Module):
    """Makes a table at its first call and keeps it as a plain attribute, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] < x.shape[0]:
            self.table = torch.sin(torch.arange(x.shape[0] * WIDTH).float()).view(-1, WIDTH)
        return F.gelu(self.lin(x) * self.table[: x.shape[0]])


@EACH
def test_tables_made_at_the_first_call(policy: str) -> None:
    """What a model keeps from its first call is real, not left over from a capture."""
    model = stack(Lazy)
    with fitted(model, policy) as job:
        for _ in range(3):
            with job.step():
                weigh(model(rows())).backward()
    for block in model:
        assert type(block.table) is Tensor


@EACH
@pytest.mark.filterwarnings("ignore:legroom. cannot plan")
@pytest.mark.parametrize("kind", ["item", "branch", "nonzero"])
def test_a_model_that_looks_at_values(policy: str, kind: str) -> None:
    """Control flow by data: the step runs as it would, or is refused in words; no crash."""

    def fn(self: Each, x: Tensor) -> Tensor:
        h = self.up(x)
        if kind == "item":
            h = h / max(h.detach().abs().max().item(), 1e-3)
        elif kind == "branch":
            h = h * 2 if bool(h.detach().sum() > 0) else h
        else:
            h = h.index_fill(0, h.detach().sum(1).gt(0).nonzero().flatten(), 0.5)
        return self.down(F.gelu(h))

    model = stack(lambda: Each(fn))
    try:
        live_check(model, policy, lambda: weigh(model(rows())))
    except LegroomError as error:
        assert "fake" not in str(error).lower()


@EACH
def test_an_op_that_fails_and_is_caught(policy: str) -> None:
    """A model that tries one way and falls back to another is recorded all the same."""

    def fn(self: Each, x: Tensor) -> Tensor:
        try:
            h = torch.mm(self.up(x), x)
        except RuntimeError:
            h = self.up(x) * x
        return self.down(F.gelu(h))

    model = stack(lambda: Each(fn))
    live_check(model, policy, lambda: weigh(model(rows())))


def test_the_measured_timeline_tops_out_at_the_measured_peak() -> None:
    """The allocator's reports over a step, static bytes included, reach the peak of the report."""
    model = stack(lambda: Mlp(p=0.0))
    with fitted(model, "test_full") as job:
        for i in range(5):
            job.meter.peaks = i == 4  # type: ignore[attr-defined]
            with job.step():
                weigh(model(rows())).backward()
            model.zero_grad()
        kind = job.known()
        timeline, measured = job.meter.timeline(kind.static_bytes), kind.measured()
    assert timeline is not None and measured is not None
    assert max(timeline.bytes_by_kind["measured"]) == measured.device_bytes
    assert list(timeline.times_s) == sorted(timeline.times_s)


def test_a_step_without_room_is_planned_with_less() -> None:
    """An allocator found no room: the error says what is done, and the next plan is tighter."""
    model, batch = stack(Mlp), rows()
    with fitted(model, "auto") as job:
        for _ in range(4):
            with job.step():
                model(batch).sum().backward()
        job.meter.overhead = lambda budget: int(budget * job.meter.slack)  # as on CUDA
        before = job.current.plan.budget["device"]
        with pytest.raises(torch.OutOfMemoryError) as caught, job.step():
            model(batch)
            raise torch.OutOfMemoryError("no room")
        assert "run this step" in " ".join(caught.value.__notes__)
        with job.step():
            model(batch).sum().backward()
        assert job.current.plan.budget["device"] < before


@EACH
@pytest.mark.parametrize("make", [Mlp, Attention, ConvNorm])
def test_a_step_recorded_under_a_plan_has_the_lives_of_the_plain_one(
    policy: str, make: Callable[[], nn.Module]
) -> None:
    """What is dropped, moved or shrunk while recorded is taken down as if it had stayed."""
    batch = {Mlp: rows, Attention: texts, ConvNorm: images}[make]()
    lives = []
    for way in ("keep_all", policy):
        model = stack(make)
        with fitted(model, way) as job:
            for _ in range(3):
                with job.step():
                    model(batch).sum().backward()
                model.zero_grad()
            step = job.current.capture.step
        assert step.capture == "real"
        saved = sorted(step.saves)
        rows_of = [step.storages[s] for s in saved]
        lives.append([(s.name, s.birth, s.release, s.death) for s in rows_of])
    assert lives[0] == lives[1]


def test_a_plan_that_cannot_be_made_tighter_stays() -> None:
    """The allocator is pressed and the budget is the smallest there is: the step is not lost."""
    model, batch = stack(Mlp), rows()
    with fitted(model, "keep_all") as job:
        last = job.meter.last
        for i in range(20):
            with job.step():
                model(batch).sum().backward()
            model.zero_grad()
            if i == 3:
                job.budget["device"] = job.current.plan.predicted.device_bytes
                job.meter.last = lambda: replace(last(), pressed=True)
                job.meter.overhead = lambda budget: int(budget * job.meter.slack)
        assert job.current.plan.policy == "keep_all" and job.current.cramped
        assert job.meter.slack == 0.0, "it is not asked of steps of other shapes"


def test_a_plan_that_presses_the_allocator_is_not_waited_for() -> None:
    """Two such steps are enough: the next may find no room at all. Others are preferred, too."""
    model, batch = stack(Mlp), rows()
    with fitted(model, "keep_all") as job:
        last, pressed = job.meter.last, True
        job.meter.last = lambda: replace(last(), pressed=pressed)
        seen = []
        for _ in range(20):
            with job.step():
                model(batch).sum().backward()
            model.zero_grad()
            kind = job.current
            if pressed and job.meter.slack:
                seen, pressed = [kind.visits, kind.replans, kind.best], False
    assert seen[0] <= 6 and seen[1] == 0 and seen[2].pressed
    assert job.meter.slack == PRESSED and kind.best is not None


def test_room_that_does_not_help_is_not_given_for_ever() -> None:
    """Something else presses the allocator: each plan takes its time, and none is better."""
    model, batch = stack(Mlp), rows()
    with fitted(model, "keep_all") as job:
        last = job.meter.last
        job.meter.last = lambda: replace(last(), pressed=True)
        for _ in range(60):
            with job.step():
                model(batch).sum().backward()
            model.zero_grad()
        assert job.current.still and job.current.cramped
        assert job.meter.slack == pytest.approx(MOST_ROOM * PRESSED)


def foretold(made: Any, caution: float, bold_s: float) -> Any:
    """A plan and its placement; a bold one with this step time predicted, a careful one with 1."""
    plan, placement = made
    step_s = bold_s if caution == BOLD else 1.0
    predicted = msgspec.structs.replace(plan.predicted, step_s=step_s)
    return msgspec.structs.replace(plan, predicted=predicted), placement


@pytest.mark.parametrize("bold_s, stays", [(0.8, True), (1.1, False)])
def test_a_bolder_plan_is_tried_where_the_host_is_busy(
    bold_s: float, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How bad a host's moments are is not known before: the faster of both stays, for good."""
    made = []

    def make(*args: Any, caution: float, **kwargs: Any) -> Any:
        made.append(caution)
        policy = "keep_all" if caution == BOLD else "test_full"
        return foretold(make_placed_plan(*args[:-1], policy, **kwargs), caution, 0.7)

    monkeypatch.setattr("legroom.memory.job.make_placed_plan", make)
    monkeypatch.setattr(Kind, "has_busy_host", True)
    model, batch = stack(Mlp), rows()
    with fitted(model, "test_full") as job:
        last = job.meter.last

        def timed() -> Any:
            bold = job.current.plan.policy == "keep_all"
            return replace(last(), seconds=lambda: bold_s if bold else 1.0)

        job.meter.last = timed
        for _ in range(24):
            with job.step():
                model(batch).sum().backward()
            model.zero_grad()
        assert made == [CAUTION, BOLD] and job.current.still
        assert job.current.plan.policy == ("keep_all" if stays else "test_full")
        assert job.current.bold == stays, "plans made later are as careful as the one in force"


@pytest.mark.parametrize("busy, promised", [(True, 0.995), (False, 0.5)])
def test_a_bolder_plan_is_not_tried_for_nothing(
    busy: bool, promised: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has to promise something, and the host to be a matter at all."""

    def make(*args: Any, caution: float, **kwargs: Any) -> Any:
        return foretold(make_placed_plan(*args, caution=caution, **kwargs), caution, promised)

    monkeypatch.setattr("legroom.memory.job.make_placed_plan", make)
    monkeypatch.setattr(Kind, "has_busy_host", busy)
    model, batch = stack(Mlp), rows()
    with fitted(model, "test_full") as job:
        last = job.meter.last
        job.meter.last = lambda: replace(last(), seconds=lambda: 1.0)
        for _ in range(12):
            with job.step():
                model(batch).sum().backward()
            model.zero_grad()
        assert job.current.still and not job.current.bold and len(job.current.verdicts) == 1
        assert job.current.plan.predicted.step_s == 1.0


def test_a_plan_is_made_for_the_room_that_was_left_for_nothing() -> None:
    """A watched step tells how much; the job settles after that."""
    model, batch = stack(Mlp), rows()
    with fitted(model, "keep_all") as job:
        backs, budgets, plan = iter([True, False, False, False]), [], job._plan

        def noted(kind: Kind, *given: float) -> None:
            budgets.append(kind.visits)
            plan(kind, *given)

        job._plan, job.meter.take_back = noted, lambda: next(backs)
        last = job.meter.last
        job.meter.last = lambda: replace(last(), seconds=lambda: job.current.plan.predicted.step_s)
        for _ in range(24):
            with job.step():
                model(batch).sum().backward()
            model.zero_grad()
        assert len(budgets) == 2 and job.current.still and next(backs) is False


def test_a_new_recording_leaves_old_plans_behind() -> None:
    """The fastest plan of another trace must not come back."""
    model, batch = stack(Mlp), rows()
    with fitted(model, "test_full") as job:
        for i in range(8):
            with job.step():
                model(batch).sum().backward()
            model.zero_grad()
            if i == 5:
                kind = job.current
                kind.best = (0.0, kind.capture, kind.plan, kind.script, kind.placement)
                kind.recorded = False
        assert job.current.recorded and job.current.best is None


def test_a_step_that_strays_teaches_no_pattern() -> None:
    """As many tensors saved as traced, but others: the next step drops what the plan says."""
    odd = False

    def switch(block: Any, x: Tensor) -> Tensor:
        h = block.up(x)
        h = torch.tanh(h[: len(h) // 2]).repeat(2, 1) if odd else torch.tanh(h).repeat(1, 1)
        return block.down(torch.sin(h))

    model, counts = stack(lambda: Each(switch)), []
    with fitted(model, "test_full") as job:
        for i in range(6):
            odd = i == 3
            with job.step():
                loss = model(rows(seed=i)).sum()
                counts.append(sum(type(x) is Dropped for x in gc.get_objects()))
                loss.backward()
            model.zero_grad()
    assert counts[4] == counts[5] == counts[2] > 0, counts


@pytest.mark.parametrize(
    "settings, cached",
    [
        ({"use_cache": True}, True),
        ({"use_cache": False}, False),
        ({"use_cache": True, "encoder": True}, False),
        ({"use_cache": True, "encoder": True, "is_decoder": True}, True),
        ({"use_cache": True, "encoder": True, "is_encoder_decoder": True}, True),
    ],
)
def test_a_cache_that_training_does_not_need_is_told(
    settings: dict[str, bool], cached: bool
) -> None:
    """Layers of transformers cannot be recomputed while they fill a cache; encoders fill none.

    A loaded model is in eval mode, and a trainer changes that only after its callbacks ran.
    """
    model = stack(Mlp).eval()
    if settings.get("encoder"):
        model.encoder = nn.Identity()
    model.config = SimpleNamespace(**settings)  # type: ignore[assignment]
    told = pytest.warns(UserWarning, match="use_cache = False") if cached else nullcontext()
    with told, fitted(model, "keep_all"):
        pass


@pytest.mark.parametrize("factor", [1.0, 1.5, 0.6])
def test_plans_settle_within_ten_steps(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where no prediction comes true and each plan is another one: then all is left alone."""
    model, jobs, builds = stack(Mlp), list[Any](), itertools.cycle([full, selective])
    turns = {"test_turns": lambda problem: Choice(next(builds)(problem.step), "by turns")}
    monkeypatch.setattr(POLICIES, "_entries", POLICIES._entries | turns)

    def last(meter: CpuMeter) -> Reading:
        current = jobs[0].current if jobs else None
        seconds = factor * current.plan.predicted.step_s if current is not None else 1.0
        return Reading(lambda: seconds, {})

    monkeypatch.setattr(CpuMeter, "last", last)
    optimizer, planned = torch.optim.SGD(model.parameters()), []
    with fitted(model, "test_turns", optimizer=optimizer) as job:
        jobs.append(job)
        for _ in range(20):
            with job.step():
                total(model, rows()).backward()
            if job.current.recorded:
                planned.append(job.current.still)
    assert planned.index(True) <= 10, planned


@pytest.mark.parametrize("warm", [2, 3])
def test_steps_are_timed_warm_before_one_is_recorded(
    warm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the device needs to come up to speed."""
    monkeypatch.setattr(CpuMeter, "warm", warm)
    model = stack(Mlp)
    with fitted(model, "test_full") as job:
        for i in range(warm + 2):
            with job.step():
                total(model, rows()).backward()
                model.zero_grad()
            assert job.current.recorded == (i >= warm)
            assert job.current.reference is not None


def test_a_step_recorded_anew_is_measured_by_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by what it took before it changed."""
    model, seconds = stack(Often), [1.0]
    monkeypatch.setattr(CpuMeter, "last", lambda meter: Reading(lambda: seconds[0], {}))
    with fitted(model, "test_full") as job:
        for i in range(7):
            if i == 5:
                seconds[0] = 5.0
                for block in model:
                    block.times = 2
            with job.step():
                total(model, rows()).backward()
                model.zero_grad()
            if i == 4:
                assert job.current.recorded and job.current.reference[0] == 1.0
        assert not job.current.recorded and job.current.reference[0] == 5.0


class Often(nn.Module):
    """Does what it does once, or more often if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(WIDTH, WIDTH), 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.layer(x).sin()
        return x


@pytest.mark.filterwarnings("ignore:legroom. a step took")
def test_the_online_rule_sends_away_what_is_larger_than_its_room() -> None:
    """One saved tensor alone may be more than may stay; each goes when the next one comes."""
    model, x = Peeks(), torch.randn(2048, 64)
    with fitted(model, "auto", budget={"device": 1 << 20, "disk": 1 << 30}) as job:
        job.meter.peaks = True  # type: ignore[attr-defined]
        with pytest.warns(UserWarning, match="online rule"), job.step():
            weigh(model(x)).backward()
        peak = job.meter.last().peaks["step"]
    plain = sum(4 * 2048 * 64 for _ in range(12))
    assert peak < plain / 2


class Peeks(nn.Module):
    """Fake tensors cannot follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin() if float(x.detach().sum()) > -1e9 else x
        return x


class Notes(nn.Module):
    """Layers of one size; notes where each result lies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))
        self.places: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
            self.places.append(0 if isinstance(x, FakeTensor) else x.data_ptr())
        return x


@pytest.mark.parametrize("policy", ["swap_all", "auto"])
def test_an_address_that_is_used_again_is_another_tensor(policy: str) -> None:
    """What moved away or was dropped leaves its place to the next result, within one forward."""
    torch.manual_seed(0)
    model, x = Notes(), torch.randn(2048, 256)
    weigh(model(x)).backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with fitted(model, policy, budget={"device": 14 << 20, "disk": 1 << 30}) as job:
        for _ in range(6):
            model.zero_grad()
            model.places.clear()
            with job.step():
                weigh(model(x)).backward()
            found = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert len(set(model.places)) < len(model.places)
