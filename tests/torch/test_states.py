"""Optimizer states on the host: every update gives the bits it would have given."""

import contextlib
import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import legroom
from legroom.memory.actions import Park
from legroom.memory.mechanisms import pool, states
from legroom.memory.mechanisms.states import StateKeeper, can_park
from legroom.memory.parking import param_states
from legroom.memory.simulate import Simulator
from tests.torch.support import until_measured

CPU, GIB = torch.device("cpu"), 1 << 30
MACHINE = legroom.find_machine("h200")
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": x, "lr": 1e-2 / (i + 1)} for i, x in enumerate(p)]
    ),
}


class Block(nn.Module):
    """Two products, twice."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(6)])


def batch(i: int) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(i))


def park(model: nn.Module, names: int = 24) -> Park:
    """The states of so many parameters, in small waves."""
    params = tuple(name for name, _ in model.named_parameters())[:names]
    return Park(params=params, num_bytes=1, wave_bytes=150_000, window_bytes=1)


class Rig:
    """A model, its optimizer, and what keeps its states on the host."""

    def __init__(self, maker: str = "adamw", keep: bool = True) -> None:
        self.model = make_model()
        self.optimizer = MAKERS[maker](self.model.parameters())
        self.keeper = StateKeeper(self.optimizer, dict(self.model.named_parameters()), CPU)
        if keep:
            self.keeper.keep(park(self.model))

    def train(self, start: int, end: int, **step: Any) -> None:
        for i in range(start, end):
            self.model(batch(i)).square().mean().backward()
            self.optimizer.step(**step)
            self.optimizer.zero_grad()

    def same_as(self, other: "Rig") -> bool:
        """Weights and states, bit for bit."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return all(
            torch.equal(a, b) and equal_states(self.optimizer.state[a], other.optimizer.state[b])
            for a, b in pairs
        )


def equal_states(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(x, theirs[n]) for n, x in mine.items())


@pytest.mark.parametrize("maker", MAKERS)
def test_updates_are_the_same_bit_for_bit(maker: str) -> None:
    """Of every optimizer, over states that are made, that leave, that come back, and that stay."""
    plain, mine = Rig(maker, keep=False), Rig(maker)
    for rig in (plain, mine):
        rig.train(0, 3)
    assert mine.keeper.away_bytes > 0 and mine.keeper.moved_bytes == 2 * mine.keeper.away_bytes
    mine.keeper.keep(park(mine.model, 7))
    for rig in (plain, mine):
        rig.train(3, 5)
    assert mine.same_as(plain)
    away = sum(x.nbytes for p in list(mine.model.parameters())[:7]
               for x in mine.optimizer.state[p].values() if x.nbytes >= 1024)  # fmt: skip
    assert mine.keeper.away_bytes == away
    mine.keeper.close()
    assert mine.keeper.away_bytes == 0 and not mine.optimizer._optimizer_step_pre_hooks
    for rig in (plain, mine):
        rig.train(5, 6)
    assert mine.same_as(plain)


def test_states_that_are_there_leave_at_once() -> None:
    """A job may begin with an optimizer that has run."""
    rig, plain = Rig(keep=False), Rig(keep=False)
    for one in (rig, plain):
        one.train(0, 2)
    rig.keeper.keep(park(rig.model, 4))
    sizes = [p.nbytes for p in list(rig.model.parameters())[:4]]
    assert rig.keeper.away_bytes == 2 * sum(size for size in sizes if size >= 1024)
    for one in (rig, plain):
        one.train(2, 4)
    assert rig.same_as(plain)


def test_parameters_without_a_gradient_are_left_alone() -> None:
    """Frozen ones, and all of them at once."""
    rig, plain = Rig(), Rig(keep=False)
    for one in (rig, plain):
        one.train(0, 2)
        one.optimizer.step()
        for param in list(one.model.parameters())[::3]:
            param.requires_grad_(False)
        one.train(2, 4)
    assert rig.same_as(plain)


def test_a_closure_runs_once() -> None:
    """Its loss is what the step gives."""
    rig, plain = Rig(), Rig(keep=False)
    for one in (rig, plain):
        calls = []

        def closure(one: Rig = one, calls: list[float] = calls) -> Tensor:
            one.optimizer.zero_grad()
            loss = one.model(batch(len(calls))).square().mean()
            loss.backward()
            calls.append(loss.item())
            return loss

        losses = [one.optimizer.step(closure).item() for _ in range(3)]
        assert losses == calls
    assert rig.same_as(plain)


@pytest.mark.parametrize("late", [False, True])
def test_schedulers_go_on_counting(late: bool, recwarn: pytest.WarningsRecorder) -> None:
    """Made before or after; they wrap the step as well."""
    rigs = []
    for keep in (True, False):
        rig = Rig(keep=False)
        makes = [
            lambda rig=rig, keep=keep: rig.keeper.keep(park(rig.model) if keep else None),
            lambda rig=rig: torch.optim.lr_scheduler.StepLR(rig.optimizer, 2, 0.1),
        ]
        made = [make() for make in (makes if late else reversed(makes))]
        scheduler = made[1] if late else made[0]
        for i in range(5):
            rig.train(i, i + 1)
            scheduler.step()
        rig.keeper.close()
        rig.train(5, 6)
        rigs.append(rig)
    assert rigs[0].same_as(rigs[1])
    assert not [w for w in recwarn if "scheduler" in str(w.message)]


def test_hooks_of_the_user_are_called_once() -> None:
    """Not with every wave."""
    rig, seen = Rig(), []
    rig.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    rig.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    rig.train(0, 2)
    assert seen == ["before", "after"] * 2


def clip(optimizer: Any, *_: Any) -> None:
    """As a user's hook: by the optimizer's own list."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    assert params
    nn.utils.clip_grad_value_(params, 1e-4)


def decay(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.7


def clear(optimizer: Any, *_: Any) -> None:
    optimizer.zero_grad()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("when", "hook"), [("pre", clip), ("pre", decay), ("post", decay)])
def test_hooks_of_the_user_see_the_optimizer_as_it_is(when: str, hook: Any, late: bool) -> None:
    """Before or after a step, registered before or after ours."""
    rigs = Rig(keep=False), Rig(keep=False)
    for rig, ours in zip(rigs, (True, False), strict=True):
        register = getattr(rig.optimizer, f"register_step_{when}_hook")
        if not late:
            register(hook)
        if ours:
            rig.keeper = StateKeeper(rig.optimizer, dict(rig.model.named_parameters()), CPU)
            rig.keeper.keep(park(rig.model))
        if late:
            register(hook)
        rig.train(0, 5)
    assert rigs[0].keeper.away_bytes > 0 and rigs[0].same_as(rigs[1])
    lrs = [rig.optimizer.param_groups[0]["lr"] for rig in rigs]
    assert lrs[0] == lrs[1]


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_may_look_at_what_the_step_was_called_with(when: str) -> None:
    """The optimizer is among it, and is as it is to them there, too."""
    rig, plain = Rig(), Rig(keep=False)

    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        groups = args[0].param_groups
        assert sum(len(group["params"]) for group in groups) == 24
        for group in groups:
            group["lr"] *= 0.5

    for one in (rig, plain):
        getattr(one.optimizer, f"register_step_{when}_hook")(halve)
        one.train(0, 4)
    assert rig.keeper.away_bytes > 0 and rig.same_as(plain)
    assert rig.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("wraps", [True, False])
def test_a_step_that_others_put_theirs_around(wraps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tracers do, on the class: it can be parked if its name is kept, and else is left alone."""
    plain_step = torch.optim.AdamW.step

    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain_step(self, *args, **kwargs)

    around = functools.wraps(plain_step)(traced) if wraps else traced
    monkeypatch.setattr(torch.optim.AdamW, "step", around)
    rig, plain = Rig(), Rig(keep=False)
    for one in (rig, plain):
        one.train(0, 3)
    assert rig.same_as(plain) and bool(rig.keeper.away_bytes) is wraps


def test_a_hook_that_clears_gradients_or_breaks_finds_its_parameters() -> None:
    """And a checkpoint can be written after it broke."""
    rig = Rig(keep=False)
    rig.optimizer.register_step_post_hook(clear)
    rig.keeper = StateKeeper(rig.optimizer, dict(rig.model.named_parameters()), CPU)
    rig.keeper.keep(park(rig.model))

    def breaks(*_: Any) -> None:
        raise RuntimeError("a hook of the user's")

    rig.optimizer.register_step_post_hook(breaks)
    rig.model(batch(0)).square().mean().backward()
    with pytest.raises(RuntimeError, match="of the user's"):
        rig.optimizer.step()
    assert all(p.grad is None for p in rig.model.parameters())
    assert len(rig.optimizer.state_dict()["state"]) == len(list(rig.model.parameters()))


def test_checkpoints_hold_all_states() -> None:
    """A state dict of parked states restores an optimizer that knows nothing of it, and back."""
    rig, plain = Rig(), Rig(keep=False)
    rig.train(0, 3)
    plain.model.load_state_dict(rig.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(rig.optimizer.state_dict()))
    assert rig.same_as(plain)
    rig.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    for one in (rig, plain):
        one.train(3, 5)
    assert rig.same_as(plain) and rig.keeper.away_bytes > 0


def test_an_update_that_breaks_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was updated is, the rest is as it was; and the next one works."""
    rig = Rig()
    rig.train(0, 2)
    params = list(rig.model.parameters())
    before = [p.detach().clone() for p in params]
    rig.model(batch(2)).square().mean().backward()
    inner, count = rig.optimizer._init_group, 0  # type: ignore[attr-defined]

    def breaks(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise ValueError("broken")
        return inner(*args)

    with monkeypatch.context() as patch:
        patch.setattr(rig.optimizer, "_init_group", breaks)
        with pytest.raises(ValueError, match="broken"):
            rig.optimizer.step()
    assert sum(len(g["params"]) for g in rig.optimizer.param_groups) == len(params)
    changed = [not torch.equal(a, b) for a, b in zip(params, before, strict=True)]
    assert any(changed) and not all(changed)
    rig.keeper.keep(park(rig.model))
    rig.optimizer.zero_grad()
    rig.train(3, 4)
    assert all(torch.isfinite(p).all() for p in params)


def test_optimizers_that_mix_parameters_are_not_split() -> None:
    """Nor those that are not known."""

    class Own(torch.optim.SGD):
        pass

    params = [nn.Parameter(torch.zeros(4))]
    assert can_park(torch.optim.AdamW(params)) and can_park(torch.optim.SGD(params))
    assert not can_park(torch.optim.LBFGS(params)) and not can_park(Own(params, lr=0.1))
    assert not can_park(None)


# -- jobs ----------------------------------------------------------------------------------------


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def limits(share: float) -> dict[str, int]:
    """So much less than the natural peak, as a share of the states."""
    step = legroom.trace(
        make_model(), batch(0), machine=MACHINE, loss_fn=loss_of, optimizer="adamw"
    )
    peak = Simulator(step, MACHINE).shape([]).peak
    states = sum(param_states(step).values())
    return {"device": int(peak - share * states), "host": GIB, "disk": GIB}


def one_more(model: nn.Module, optimizer: Any, job: Any) -> None:
    with job.step():
        loss_of(model, batch(99)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(share: float | None, steps: int = 9, maker: str = "adamw") -> tuple[Any, ...]:
    model, job = make_model(), None
    optimizer = MAKERS[maker](model.parameters())
    if share is not None:
        job = legroom.fit(model, optimizer, budget=limits(share), machine=MACHINE)
        job.meter.peaks = True
    for i in range(steps):
        with job.step() if job is not None else contextlib.nullcontext():
            loss_of(model, batch(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, job


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_job_smaller_than_its_states_trains_bit_for_bit(share: float) -> None:
    """Weights and gradients alone fit; what the plan says is what is measured."""
    plain, _, _ = train(None)
    model, optimizer, job = train(share)
    assert job.current.plan.park is not None and job.states.away_bytes > 0
    assert "optimizer states" in job.current.plan.why
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    both = until_measured(job, lambda: one_more(model, optimizer, job))
    assert both.measured.peak_bytes["device"] <= job.budget["device"]
    assert -0.005 <= both.peak_error < 0.05, both  # scratch of the update is guessed from above
    assert both.measured.moved_bytes == both.predicted.moved_bytes
    assert "optimizer states" in str(job.report())
    job.close()
    assert job.states.away_bytes == 0
    assert all(x.is_cpu for state in optimizer.state.values() for x in state.values())


def test_a_job_dropped_without_closing_goes_on() -> None:
    """The optimizer still finds its states."""
    plain, _, _ = train(None, 11)
    model, optimizer, job = train(0.5)
    del job
    gc.collect()
    for i in range(9, 11):
        loss_of(model, batch(i)).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("every", [2, 3, 4])
def test_steps_without_an_update_know_of_parked_states(every: int) -> None:
    """Gradients are added up over several steps, and any of them may be the one recorded."""
    trained = []
    for share in (None, 0.4):
        model, job = make_model(), None
        optimizer = MAKERS["adamw fused"](model.parameters())
        if share is not None:
            job = legroom.fit(model, optimizer, budget=limits(share), machine=MACHINE)
            job.meter.peaks = True
        for i in range(6 * every):
            with job.step() if job is not None else contextlib.nullcontext():
                loss_of(model, batch(i)).backward()
                if i % every == every - 1:
                    optimizer.step()
                    optimizer.zero_grad()
        trained.append(copy.deepcopy(model))
        if job is not None:
            assert all(kind.plan.park is not None for kind in job.kinds.values() if kind.recorded)
            both = until_measured(job, functools.partial(one_more, model, optimizer, job))
            assert both.measured.peak_bytes["device"] <= job.budget["device"]
            job.close()
    pairs = zip(*(model.parameters() for model in trained), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_closure_that_brings_the_plan_is_parked_from_the_first_step() -> None:
    """The forward inside of it is the first that the job sees."""
    plain, _, _ = train(None, 3)
    model = make_model()
    optimizer = MAKERS["adamw"](model.parameters())
    with legroom.fit(model, optimizer, budget=limits(0.5), machine=MACHINE) as job:
        for i in range(3):

            def closure(i: int = i) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch(i))
                loss.backward()
                return loss

            with job.step():
                optimizer.step(closure)
            assert job.states.away_bytes > 0
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_step_that_others_call_by_an_earlier_name_is_parked_too() -> None:
    """As mixed precision of some trainers does."""
    rig, plain = Rig(keep=False), Rig(keep=False)
    for one in (rig, plain):
        earlier = one.optimizer.step
        if one is rig:
            one.keeper.keep(park(one.model))
        for i in range(3):
            one.model(batch(i)).square().mean().backward()
            earlier()
            one.optimizer.zero_grad()
    assert rig.keeper.away_bytes > 0 and rig.same_as(plain)


def test_states_that_are_to_stay_come_back_at_once() -> None:
    """Before the room of a step is made: what is on the device then counts."""
    rig, plain = Rig(), Rig(keep=False)
    for one in (rig, plain):
        one.train(0, 2)
    fewer = park(rig.model, 5)
    rig.keeper.keep(fewer)
    away = {name for name, p in rig.model.named_parameters() if rig.keeper._hosted(p)}
    assert away and away <= set(fewer.params)
    for one in (rig, plain):
        one.train(2, 4)
    assert rig.same_as(plain)


def test_a_state_on_the_host_can_be_copied_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses a copy from two registered pieces, and anyone may make one."""
    monkeypatch.setattr(pool, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(states, "PIECE_BYTES", 1 << 16)
    rig = Rig()
    rig.train(0, 2)
    slabs = {slot[0] for slots in rig.keeper._slots.values() for slot in slots.values()}
    assert len(slabs) > 1 and max(slab.num_bytes for slab in slabs) >= 1 << 16
    assert all(len(slab.cuts(0, slab.num_bytes)) == 1 for slab in slabs)


@pytest.mark.parametrize("closes", [True, False])
def test_a_job_that_is_over_holds_nothing(closes: bool) -> None:
    """Model, optimizer and states go with their last user, closed or not."""
    model, optimizer, job = train(0.5)
    marks = [weakref.ref(x) for x in (model, optimizer, job, model[0].up.weight)]
    if closes:
        job.close()
    del model, optimizer, job
    gc.collect()
    assert [mark() for mark in marks] == [None] * 4


def test_a_second_job_takes_an_optimizer_over() -> None:
    """Without closing the first, as when a cell of a notebook is run again."""
    rig, plain = Rig(), Rig(keep=False)
    for one in (rig, plain):
        one.train(0, 2)
    second = StateKeeper(rig.optimizer, dict(rig.model.named_parameters()), CPU)
    assert rig.keeper.away_bytes == 0
    with pytest.warns(UserWarning, match="another job keeps the states"):
        rig.keeper.keep(park(rig.model, 5))
    assert rig.keeper.away_bytes == 0
    second.keep(park(rig.model, 5))
    for one in (rig, plain):
        one.train(2, 4)
    assert rig.same_as(plain) and second.away_bytes > 0


def test_states_of_parameters_elsewhere_are_not_counted_on() -> None:
    """An optimizer may have parameters that the fitted model has not."""
    model, other = make_model(), nn.Linear(64, 2000)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()], fused=True)
    beside = sum(p.nbytes for p in other.parameters())
    budget = limits(0.4)
    with legroom.fit(
        model,
        optimizer,
        budget={**budget, "device": budget["device"] + 5 * beside},
        machine=MACHINE,
    ) as job:
        for i in range(6):
            with job.step():
                (loss_of(model, batch(i)) + other(batch(i)).square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
        for kind in job.kinds.values():
            known = set(dict(model.named_parameters()))
            assert kind.plan.park is None or known.issuperset(kind.plan.park.params)


def test_a_device_without_room_keeps_states_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing says so, and updates go on."""
    rig, plain = Rig(), Rig(keep=False)
    for one in (rig, plain):
        one.train(0, 2)
    away = rig.keeper.away_bytes

    def full(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", full)
        with pytest.warns(UserWarning, match="stay on the host"):
            rig.keeper.close()
    assert rig.keeper.away_bytes == away
    for one in (rig, plain):
        one.train(2, 3)
    assert rig.same_as(plain) and rig.keeper.away_bytes == 0


def test_what_cannot_be_split_is_refused_as_before() -> None:
    """The budget named is one without parking."""
    model = make_model()

    class Own(torch.optim.AdamW):
        pass

    job = legroom.fit(model, Own(model.parameters()), budget=limits(0.7), machine=MACHINE)
    with pytest.raises(legroom.BudgetError), job.step():
        loss_of(model, batch(0)).backward()
    job.close()
