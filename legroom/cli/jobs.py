"""Make the job a command names: model, batches, loss, optimizer, and the machine to plan for."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from legroom.core.errors import InputError, LegroomError, UnknownName
from legroom.machine.spec import Machine, find_machine

if TYPE_CHECKING:
    import torch

    from legroom.examples import Builder, Job
    from legroom.memory.plan import Plan
    from legroom.memory.trace import Step

LEARNING_RATE = 1e-3


def build(name: str, device: Any, sizes: dict[str, Any]) -> "Job":
    """The named job on a device ("meta": nothing is allocated).

    Raises UnknownName for a name or keyword that is not there, InputError for a value that a
    built-in job cannot use.
    """
    from legroom.examples import EXAMPLES, load_job

    builder = load_job(name)
    if name not in EXAMPLES:
        return builder(device=device, **sizes)
    if sizes:
        _check_sizes(name, builder, sizes)
    return builder(device=device, **sizes)


def _check_sizes(name: str, builder: "Builder", sizes: dict[str, Any]) -> None:
    known = {
        key: parameter.default
        for key, parameter in inspect.signature(builder).parameters.items()
        if key != "device"
    }
    for key, value in sizes.items():
        if key not in known:
            raise UnknownName(f"size of {name}", key, known)
        if not _alike(value, known[key]):
            raise InputError(f"--set {key}={value}: wanted something like {key}={known[key]}")
    _try_sizes(name, builder, sizes)


def _try_sizes(name: str, builder: "Builder", sizes: dict[str, Any]) -> None:
    """A forward on the meta device: sizes that do not go together fail here, at no cost."""
    try:
        job = builder(device="meta", **sizes)
        job.loss_fn(job.model, job.make_batch(seed=0))
    except LegroomError:
        raise
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        if "meta tensor" in str(error):
            return  # the model asks for values, which these have not
        given = ", ".join(f"{key}={value}" for key, value in sizes.items())
        raise InputError(f"{name} does not work with {given}: {error}") from error


def _alike(value: Any, default: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value) is type(default)
    return value >= 0 and isinstance(default, float if isinstance(value, float) else int | float)


def make_optimizer(name: str, model: Any) -> "torch.optim.Optimizer | None":
    """A real optimizer by the name `estimate` knows it by; raises UnknownName."""
    from torch.optim import SGD, Adam, AdamW

    makers: dict[str, Any] = {
        "none": lambda _: None,
        "sgd": lambda p: SGD(p, LEARNING_RATE),
        "sgd-momentum": lambda p: SGD(p, LEARNING_RATE, momentum=0.9),
        "adam": lambda p: Adam(p, LEARNING_RATE, fused=True),
        "adamw": lambda p: AdamW(p, LEARNING_RATE, fused=True),
        "adamw-foreach": lambda p: AdamW(p, LEARNING_RATE, foreach=True),
    }
    if name not in makers:
        raise UnknownName("optimizer", name, makers)
    made: torch.optim.Optimizer | None = makers[name](model.parameters())
    return made


def pick_device(name: str | None) -> "torch.device":
    """The device to run on, by default the GPU if there is one; raises InputError."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"no device is called {name!r}: use cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"cannot run on {name!r}: use cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"no device {name!r} on this machine; 'cpu' is always there")
    return device


def machine_or_this(name: str | None) -> Machine:
    """The named machine, or the one this runs on (measured once, and kept)."""
    if name is not None:
        return find_machine(name)
    from legroom.machine.probe import cached_probe

    return cached_probe()


def trace_job(job: "Job", machine: Machine, optimizer: str) -> "Step":
    """The job's step on a machine, captured with fake tensors."""
    from legroom.ahead import trace

    return trace(
        job.model, job.make_batch(seed=0), machine=machine, optimizer=optimizer, loss_fn=job.loss_fn
    )


PlanFor = Callable[..., "Plan"]
"""The plan for a budget by a policy."""


def plans_of(
    job: "Job", machine: Machine, optimizer: str, compile_what: str | None
) -> tuple["Step", PlanFor]:
    """The job's step as it is, and what plans it for a budget, compiled if that is asked for."""
    from legroom.ahead import check_compile, fake_capture, forecaster
    from legroom.memory.planner import make_plan

    check_compile(compile_what)
    capture = fake_capture(job.model, job.make_batch(seed=0), machine, optimizer, job.loss_fn)
    if compile_what is None:
        step = capture().step
        return step, partial(make_plan, step, machine)
    found = forecaster(job.model, capture, machine)

    def plan(budget: Mapping[str, int], policy: str, quick: bool = False) -> "Plan":
        made = found.made(budget, policy)
        plan = make_plan(made.capture.step, machine, budget, policy, quick=quick)
        how = f"{made.outfit}; " if made.outfit.changes else ""
        return msgspec.structs.replace(plan, why=how + plan.why)

    return found.plain.step, plan


def check_policy(name: str) -> None:
    """Raise UnknownName for a policy that does not exist."""
    import legroom.memory.policies  # noqa: F401  (fills the registry)
    from legroom.memory.planner import POLICIES

    _ = POLICIES[name]
