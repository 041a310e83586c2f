"""Published policies on real models: they plan their traces, and what they plan runs exactly."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import legroom
from legroom.core.errors import BudgetError
from legroom.examples import EXAMPLES
from legroom.memory.planner import POLICIES, make_plan
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step
from tests.torch.nets import Attention, ConvNorm, Mlp, images, stack, texts
from tests.torch.support import fitted, live_check, until_measured, weigh

ALL = sorted(name for name in POLICIES if not name.startswith("test_"))
RUN = [
    *("vdnn", "vdnn_all", "meng17", "layrub", "tflms", "tflms_v1", "autoswap", "dymem", "sentinel"),
    *("flashneuron", "g10", "tmof", "home", "capuchin", "deepum"),
    *("torch_budget", "checkmate", "checkmate_lp", "superneurons", "dtr", "poet"),
    *("autotm", "autotm_sync", "autotm_static", "swapadvisor"),
    *("zero_offload", "zero_infinity", "ocdnn", "dragon"),
]
"""All that move, or choose among blocks; their actions are the runtime's own."""
GAP = 0.02
SIZES = {"convnet": {"batch": 8}, "transformer": {"batch": 4}, "unet": {"batch": 2}, "lstm": {}}


@cache
def trace(name: str) -> Step:
    example = EXAMPLES[name](device="meta", **SIZES[name])
    given = {"machine": "a100-40g", "loss_fn": example.loss_fn}
    return legroom.trace(example.model, example.make_batch(), **given)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
@pytest.mark.parametrize("name", SIZES)
def test_every_policy_plans_every_trace_or_says_why_not(name: str, share: float) -> None:
    """And none of them is faster than auto."""
    step, machine = trace(name), legroom.find_machine("a100-40g")
    limit = int(share * Simulator(step, machine).shape([]).peak)
    limits, found = {"device": limit, "host": 8 << 30, "disk": 0}, {}
    for policy in ALL:
        try:
            plan = make_plan(step, machine, limits, policy)
        except BudgetError as error:
            assert error.missing_bytes > 0 and error.smallest_bytes is not None
        else:
            assert plan.predicted.device_bytes <= limit
            found[policy] = plan.predicted.step_s
    if found:
        assert found["auto"] <= min(found.values()) * (1 + GAP)


def net(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name == "conv":
        return stack(ConvNorm), images()
    return (stack(Attention), texts()) if name == "attention" else (stack(Mlp), torch.randn(64, 64))


@pytest.mark.parametrize("name", ["conv", "attention", "mlp"])
@pytest.mark.parametrize("policy", RUN)
def test_what_they_plan_runs_bit_for_bit(policy: str, name: str) -> None:
    """With room for everything, and with as little as the policy can do with."""
    model, x = net(name)
    live_check(model, policy, lambda: weigh(model(x)))


@pytest.mark.filterwarnings("ignore:legroom. a step took")
@pytest.mark.parametrize("policy", RUN)
def test_their_peaks_are_as_predicted(policy: str) -> None:
    """At two thirds of what the step takes by itself, or at the least the policy can do with."""
    model, x = net("conv")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    disk = {"disk": 1 << 30}

    def peaks(device: int) -> tuple[int, int]:
        def step() -> None:
            with job.step():
                weigh(model(x)).backward()
                optimizer.step()
                optimizer.zero_grad()

        budget = {"device": device, **disk}
        with fitted(model, policy, optimizer=optimizer, budget=budget) as job:
            for i in range(5):
                job.meter.peaks = i > 2  # type: ignore[attr-defined]
                step()
            both = until_measured(job, step)
            return both.predicted.device_bytes, both.measured.device_bytes

    natural = peaks(1 << 30)[0] if policy in ("home", "auto") else 3 << 20
    limit, smallest = int(natural * 0.66), 0
    for _ in range(4):
        try:
            predicted, measured = peaks(limit)
            break
        except BudgetError as error:
            smallest = error.smallest_bytes or 0
            limit = max(smallest, limit) + 1024
    else:
        pytest.fail(f"no budget works; the last that was named is {smallest}")
    assert measured == pytest.approx(predicted, rel=0.01)
    assert measured <= limit + 1024


def test_the_example_of_the_docs_works() -> None:
    """A policy of the reader's own: registered, planned and run."""
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    before = dict(POLICIES._entries)
    try:
        exec(compile(code, "docs/policies.md", "exec"), {})
        assert "largest_first" in POLICIES
        step, machine = trace("convnet"), legroom.find_machine("a100-40g")
        limit = int(0.7 * Simulator(step, machine).shape([]).peak)
        plan = make_plan(step, machine, {"device": limit, "host": 8 << 30}, "largest_first")
        assert plan.moves and plan.predicted.device_bytes <= limit
        model, x = net("conv")
        live_check(model, "largest_first", lambda: weigh(model(x)))
    finally:
        POLICIES._entries.clear()
        POLICIES._entries.update(before)


def test_every_policy_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    table = text.split("## Your own")[0]
    for name in ALL:
        short = "_" + name.removeprefix("autoswap_")
        assert f"`{name}`" in table or f"`{short}`" in table, name
