"""What the tests of the runtime share: a machine, plans by hand, and the two runs to compare."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import legroom.memory.policies  # noqa: F401  (fills the registry)
from legroom.api import Job
from legroom.core.outcome import Outcome
from legroom.machine.spec import Link, Machine, Tier
from legroom.memory.actions import Action, Compress, Move, Recompute
from legroom.memory.plan import Plan, first_need, held_inputs
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.profile import Capture, capture_fake
from legroom.memory.run import Runner
from legroom.memory.schedule import Want, schedule
from legroom.memory.script import Script
from legroom.memory.simulate import Simulator
from legroom.memory.tiers import Tiers
from legroom.memory.trace import FULL, Step

CPU = torch.device("cpu")
GIB = 1 << 30
ROOM = {"device": 16 * GIB, "host": GIB, "disk": GIB}

MACHINE = Machine(
    name="by hand",
    device="cpu",
    origin="made for tests",
    tiers=(
        Tier(name="device", num_bytes=16 * GIB),
        Tier(name="host", num_bytes=GIB),
        Tier(name="disk", num_bytes=GIB),
    ),
    links=(
        Link(source="device", target="host", bytes_per_s=8e9),
        Link(source="host", target="device", bytes_per_s=8e9),
        Link(source="device", target="disk", bytes_per_s=1e9, latency_s=1e-5),
        Link(source="disk", target="device", bytes_per_s=1e9, latency_s=1e-5),
    ),
    matrix_flops={"float32": 5e10},
    vector_flops=1e10,
    memory_bytes_per_s=1e10,
    launch_s=2e-6,
)

Closure = Callable[[], Tensor]
Build = Callable[[Step], list[Action]]


# -- plans ---------------------------------------------------------------------------------------


def by_hand(step: Step, actions: Sequence[Action]) -> Plan:
    """A plan with these actions, checked; its prediction is the simulator's."""
    return Plan(
        policy="hand",
        machine=MACHINE.name,
        model=step.model,
        budget=dict(ROOM),
        actions=tuple(actions),
        predicted=Simulator(step, MACHINE).run(actions) if actions else _nothing(),
    ).check_against(step)


def _nothing() -> Outcome:
    return Outcome(source="predicted", peak_bytes={"device": 0}, step_s=0.0)


def full(step: Step) -> list[Action]:
    """Every block that can be is run again whole."""
    return [Recompute(block=b, variant=FULL) for b, x in enumerate(step.blocks) if x.variants]


def selective(step: Step) -> list[Action]:
    """Every block that has one runs in its middle selective variant, else whole."""
    return [
        Recompute(block=b, variant=x.variants[(len(x.variants) - 1) // 2].name)
        for b, x in enumerate(step.blocks)
        if x.variants
    ]


def movable(step: Step, recomputes: Sequence[Recompute] = ()) -> list[int]:
    """Saved storages that a plan may move beside these recomputes."""
    gone = {
        s
        for a in recomputes
        for v in step.blocks[a.block].variants
        if v.name == a.variant
        for s in v.drops
    }
    held = held_inputs(step, list(recomputes))
    return [
        s
        for s in step.saves
        if s not in gone
        and s not in step.unsettled
        and step.storages[s].num_bytes > 0
        and step.storages[s].release < first_need(step, s, held)
        and step.packed(s) < first_need(step, s, held) < len(step.ops)
    ]


def moves(
    step: Step, storages: Sequence[int], tier: str = "host", recomputes: Sequence[Recompute] = ()
) -> list[Move]:
    """Moves of these storages, at the positions the scheduler finds."""
    wants = [Want(s, tier) for s in storages]
    return schedule(Simulator(step, MACHINE), wants, list(recomputes))


def swap(step: Step, tier: str = "host") -> list[Action]:
    """Every saved storage that is free in between is moved."""
    return list(moves(step, movable(step), tier))


def swap_disk(step: Step) -> list[Action]:
    """The same, to disk."""
    return swap(step, "disk")


def anyhow(step: Step, seed: int = 0, *, share: float = 0.7) -> list[Action]:
    """A random mix: variants by block, moves to both tiers, bits on masks."""
    draw = random.Random(seed)
    recomputes = [
        Recompute(block=b, variant=draw.choice(x.variants).name)
        for b, x in enumerate(step.blocks)
        if x.variants and draw.random() < share
    ]
    free = [s for s in movable(step, recomputes) if draw.random() < share]
    bits = [s for s in free if step.storages[s].dtype == "bool" and draw.random() < 0.5]
    wants = [Want(s, draw.choice(["host", "disk"])) for s in free if s not in bits]
    placed = schedule(Simulator(step, MACHINE), wants, recomputes)
    return [*recomputes, *placed, *(Compress(storage=s, codec="bits") for s in bits)]


def mixed(step: Step) -> list[Action]:
    """One such mix."""
    return anyhow(step, 1)


PLANS: dict[str, Build] = {
    "full": full,
    "selective": selective,
    "swap": swap,
    "disk": swap_disk,
    "mixed": mixed,
}
"""Ways to plan a step that a test goes through."""


def _policy(build: Build) -> Callable[[Problem], Choice]:
    return lambda problem: Choice(build(problem.step), "made for a test")


for _name, _build in PLANS.items():
    POLICIES.register(f"test_{_name}")(_policy(_build))
LIVE = [f"test_{name}" for name in PLANS]
"""The same as policies of a live job: they act whatever the budget is."""


# -- runs ----------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What a step leaves behind."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    rng: Tensor


def result_of(model: nn.Module, loss: Tensor) -> Result:
    """Copies of all that a step left behind."""
    return Result(
        loss.detach().clone(),
        {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        {n: b.detach().clone() for n, b in model.named_buffers()},
        torch.get_rng_state(),
    )


def assert_same(mine: Result, plain: Result) -> None:
    """Every bit of loss, gradients, buffers and random state is the same."""
    assert torch.equal(mine.rng, plain.rng), "the random stream differs"
    assert mine.grads.keys() == plain.grads.keys()
    for name, grad in plain.grads.items():
        other = mine.grads[name]
        assert (other is None) == (grad is None), f"{name} has a gradient on one side only"
        if grad is not None and other is not None:
            assert same_bits(other, grad), f"gradient of {name} is off by {gap(other, grad):.3e}"
    assert mine.buffers.keys() == plain.buffers.keys()
    for name, buffer in plain.buffers.items():
        assert same_bits(mine.buffers[name], buffer), f"buffer {name} differs"
    assert same_bits(mine.loss, plain.loss), "the loss differs"


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    one, two = one.contiguous().flatten(), two.contiguous().flatten()
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def gap(one: Tensor, two: Tensor) -> float:
    """Largest difference."""
    return float((one - two).abs().max()) if one.numel() else 0.0


class Start:
    """Random state and buffers to begin each of two runs from; gradients are dropped."""

    def __init__(self, model: nn.Module, seed: int = 7) -> None:
        self.model, self.seed = model, seed
        self.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}

    def restore(self) -> None:
        """Back to the beginning."""
        torch.manual_seed(self.seed)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name])
        self.model.zero_grad(set_to_none=True)


class Rig:
    """A model, its traced step, and a runner with tiers: the low-level route."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
        *,
        blocks: Sequence[str] | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.model, self.batch = model, batch
        self.loss_fn = loss_fn or total
        self.start = Start(model)
        self.capture: Capture = capture_fake(
            model, batch, self.loss_fn, MACHINE, device=device, blocks=blocks
        )
        self.step = self.capture.step
        self.runner = Runner(model, device)
        self.tiers = Tiers(device, None, before_close=self.runner.mover.evacuate)

    def install(self, actions: Sequence[Action]) -> Script:
        """Take up these actions."""
        script = Script(self.step, by_hand(self.step, actions), self.capture.forms)
        self.runner.install(script, self.tiers.lanes_for(script.tier_bytes))
        return script

    def close(self) -> None:
        """Take the hooks out and give the tiers back."""
        self.runner.remove()
        self.tiers.close()

    def loss(self) -> Tensor:
        """The forward."""
        return self.loss_fn(self.model, self.batch)

    def plain(self) -> Result:
        """The step with no plan, from the start."""
        self.start.restore()
        loss = self.loss()
        loss.backward()
        return result_of(self.model, loss)

    def planned(self) -> Result:
        """The step under what is installed, from the start."""
        self.start.restore()
        with self.runner.following():
            loss = self.loss()
            loss.backward()
        return result_of(self.model, loss)

    def check(self, build: Build, *, follows: bool = True) -> Script:
        """Install a plan, and compare three steps under it with the unplanned one."""
        plain = self.plain()
        script = self.install(build(self.step))
        try:
            for _ in range(3):
                assert_same(self.planned(), plain)
                assert not follows or not self.runner.deviation, self.runner.deviation
        finally:
            self.close()
        return script


def total(model: nn.Module, batch: Any) -> Tensor:
    """A loss that weighs every output element differently."""
    out = model(*batch) if isinstance(batch, tuple) else model(batch)
    return weigh(out)


def weigh(out: Tensor) -> Tensor:
    """Sum with weights, so that gradients are not all alike."""
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device)
    return (out * weights.view(out.shape)).sum()


@contextlib.contextmanager
def fitted(model: nn.Module, policy: str, **given: Any) -> Iterator[Job]:
    """A live job with room for everything and a policy that acts all the same."""
    import legroom

    given = {"budget": dict(ROOM), "machine": MACHINE, **given}
    with legroom.fit(model, given.pop("optimizer", None), policy=policy, **given) as job:
        yield job


def until_measured(job: Job, step: Callable[[], object]) -> Any:
    """The comparison; after more steps, where the plan was made anew in the last one."""
    for _ in range(20):
        if job.comparison().measured is not None:
            break
        step()
    return job.comparison()


def live_check(
    model: nn.Module, policy: str, closure: Closure, *, num_steps: int = 4, **given: Any
) -> None:
    """Each of the first steps of a job (fake plan, recorded, planned) equals the unplanned one."""
    start = Start(model)
    start.restore()
    loss = closure()
    loss.backward()
    plain = result_of(model, loss)
    with fitted(model, policy, **given) as job:
        for _ in range(num_steps):
            start.restore()
            with job.step():
                loss = closure()
                loss.backward()
            assert_same(result_of(model, loss), plain)
