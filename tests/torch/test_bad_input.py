"""What a user may get wrong: a clear error each, nothing changed, no hooks left behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import legroom
from legroom.memory.mechanisms import pool
from tests.torch.nets import Mlp, rows, stack
from tests.torch.support import MACHINE, weigh


def fit(model: nn.Module, **given: Any) -> legroom.Job:
    """A job with a machine given, so that nothing is probed."""
    return legroom.fit(model, **{"budget": "1GiB", "machine": MACHINE, **given})


def hooks(model: nn.Module) -> int:
    """How many forward hooks the model carries."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policy": "autoo"}, "Did you mean 'auto'"),
        ({"machine": "h20"}, "Did you mean 'h200'"),
        ({"machine": "no/such/file.json"}, "no machine file"),
        ({"budget": "16"}, "a number and a unit"),
        ({"budget": "16 bananas"}, "unknown unit"),
        ({"budget": -5}, "above zero"),
        ({"budget": "-1GiB"}, "above zero"),
        ({"budget": {"device": 0}}, "above zero"),
        ({"budget": "900TiB"}, "larger than the device"),
        ({"budget": {"device": "1GiB", "disk": "9000TiB"}}, "larger than the disk"),
        ({"budget": {"device": "1GiB", "host": "900TiB"}}, "larger than the host"),
        ({"budget": {"device": "1GiB", "pinned": "900TiB"}}, "larger than the pinned"),
        ({"budget": {"host": "1GiB"}}, "names 'device'"),
        ({"budget": {"device": "1GiB", "tape": "1GiB"}}, "tape"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], words: str) -> None:
    """The error says what is wrong and what would be right, and the model stays free of hooks."""
    model = stack(Mlp)
    with pytest.raises(legroom.InputError, match=words):
        fit(model, **given)
    assert hooks(model) == 0


def test_the_optimizer_of_another_model_is_refused() -> None:
    """It would update weights that no step of this job touches."""
    model, other = stack(Mlp), stack(Mlp)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(legroom.InputError, match="none of the model's parameters"):
        fit(model, optimizer=optimizer)
    assert hooks(model) == 0


def test_a_model_without_values_is_refused() -> None:
    """A model on the meta device cannot train."""
    with pytest.raises(legroom.InputError, match="meta device"):
        fit(nn.Linear(4, 4, device="meta"))
    with pytest.raises(legroom.InputError, match="no parameters"):
        fit(nn.ReLU())


def test_a_step_without_backward_leaves_nothing_behind() -> None:
    """The next step is planned and right all the same."""
    model = stack(Mlp)
    with fit(model) as job:
        with job.step():
            weigh(model(rows()))
        with job.step():
            weigh(model(rows())).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert hooks(model) == 0


def test_a_step_without_backward_is_said_when_it_is_to_be_recorded() -> None:
    """Once; the first one that runs backward is recorded."""
    model = stack(Mlp)
    with fit(model) as job:
        with pytest.warns(UserWarning, match="forward but no backward") as told:
            for _ in range(5):
                with job.step():
                    weigh(model(rows()))
        assert len(told) == 1
        for _ in range(3):
            with job.step():
                weigh(model(rows())).backward()
                model.zero_grad()
        assert job.current is not None and job.current.recorded


def test_pinned_memory_bounds_what_goes_to_the_host() -> None:
    budget = {"device": "1GiB", "host": "2GiB", "pinned": "1GiB"}
    with fit(stack(Mlp), budget=budget) as job:
        assert job.budget["host"] == 1 << 30 and "pinned" not in job.budget


def test_a_first_step_over_the_budget_is_said() -> None:
    """What the loop itself makes is in no plan from fake tensors."""
    model = stack(Mlp)
    with fit(model, budget="40MiB") as job:
        job.meter.peaks = True
        with pytest.warns(UserWarning, match="over the budget"), job.step():
            loss = weigh(model(rows()))
            held = torch.ones(60 << 18)
            loss.backward()
            del held


def test_a_step_without_a_forward_warns() -> None:
    """Nothing was planned: most likely another model was called."""
    model = stack(Mlp)
    with fit(model) as job, pytest.warns(UserWarning, match="ran no forward"), job.step():
        pass


@pytest.mark.filterwarnings("ignore:legroom. a step ran no")
def test_steps_do_not_nest_and_end_with_the_job() -> None:
    """Both are said in words."""
    model = stack(Mlp)
    job = fit(model)
    with job.step(), pytest.raises(legroom.StepError, match="do not nest"), job.step():
        pass
    job.close()
    with pytest.raises(legroom.StepError, match="closed"), job.step():
        pass


@pytest.mark.filterwarnings("ignore:legroom. a step ran no")
def test_a_budget_that_cannot_be_kept_is_refused_with_figures() -> None:
    """By how much, the smallest that works, and which tensors dominate."""
    model = stack(Mlp)
    with fit(model, budget=1000) as job, job.step():
        with pytest.raises(legroom.BudgetError, match="smallest budget that works") as caught:
            model(rows())
        assert caught.value.missing_bytes > 0
        assert caught.value.smallest_bytes is not None
        weigh(nn.functional.linear(rows(), torch.ones(64, 64, requires_grad=True))).backward()
    assert hooks(model) == 0


def test_a_disk_that_cannot_be_written_is_a_tier_error(tmp_path: Path) -> None:
    """The folder is named; the model is free afterwards."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    model = stack(Mlp)
    budget = {"device": "1GiB", "disk": "1GiB"}
    with (
        pytest.raises(legroom.TierError, match="file"),
        fit(model, budget=budget, policy="swap_all", disk_dir=str(blocked)) as job,
        job.step(),
    ):
        weigh(model(rows())).backward()
    assert hooks(model) == 0


def test_host_memory_that_is_not_there_is_a_tier_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how much is missing, before anything is taken."""

    def refuse(num_bytes: int) -> None:
        raise legroom.TierError(f"{num_bytes} bytes of host memory are missing")

    monkeypatch.setattr(pool, "_check_available", refuse)
    model = stack(Mlp)
    budget = {"device": "1GiB", "host": "1GiB"}
    with (
        pytest.raises(legroom.TierError, match="host memory"),
        fit(model, budget=budget, policy="swap_all") as job,
        job.step(),
    ):
        weigh(model(rows())).backward()
    assert hooks(model) == 0


def test_what_is_no_model_is_told_so() -> None:
    """In one line, as a budget without a device is."""
    with pytest.raises(legroom.InputError, match=r"takes a torch.nn.Module to train, not NoneType"):
        legroom.fit(None, budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(legroom.InputError, match=r"names 'device'.*; got 'host'"):
        legroom.fit(stack(Mlp), budget={"host": "1GiB"})


@pytest.mark.parametrize("budget", ["1GiB", "2MiB"])
def test_a_model_inside_of_a_checkpoint_is_refused(budget: str) -> None:
    """Hooks that end before the step does would take ours along: gradients came out wrong."""
    model, x = stack(Mlp), rows()
    with fit(model, budget=budget) as job:
        for _ in range(4):
            with pytest.raises(legroom.StepError, match="hooks for saved tensors"), job.step():
                weigh(checkpoint(model, x, use_reentrant=False)).backward()
        for _ in range(4):  # and the job is as good as new
            with job.step():
                weigh(model(x)).backward()
        assert job.current is not None and job.current.recorded


@pytest.mark.filterwarnings("ignore:legroom. a step ran no")
def test_a_reentrant_checkpoint_around_the_model_is_left_alone() -> None:
    """Its forward runs with gradients in backward only, where no step begins."""
    model, x = stack(lambda: Mlp(p=0.0)), rows().requires_grad_()
    weigh(checkpoint(model, x, use_reentrant=True)).backward()
    plain = [p.grad for p in model.parameters()]
    with fit(model, budget="1GiB") as job:
        for _ in range(4):
            model.zero_grad()
            with job.step():
                weigh(checkpoint(model, x, use_reentrant=True)).backward()
            for expected, p in zip(plain, model.parameters(), strict=True):
                assert expected is not None and p.grad is not None
                assert torch.equal(expected, p.grad)


def test_a_model_called_with_other_weights_is_recorded() -> None:
    """Some of them no leaves of the graph, on which no hook for gradients can be hung."""
    model, x = stack(Mlp), rows()
    with fit(model, budget="1GiB") as job:
        for _ in range(4):
            with job.step():
                weights = {name: 1.0 * p for name, p in model.named_parameters()}
                weigh(torch.func.functional_call(model, weights, (x,))).backward()
        assert job.current is not None and job.current.recorded


def test_a_profiler_of_the_users_own_keeps_what_it_sees() -> None:
    """There is one; a step is recorded once it is free."""
    model, x = stack(Mlp), rows()
    with fit(model, budget="1GiB") as job:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(4):
                with job.step():
                    weigh(model(x)).backward()
        assert job.current is not None and not job.current.recorded
        names = {event.name for event in profile.events()}
        assert "aten::addmm" in names or "aten::linear" in names
        with job.step():
            weigh(model(x)).backward()
        assert job.current.recorded
