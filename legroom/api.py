"""The public functions for a job that runs: fit and verify."""

import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped, unused-ignore]
import torch
from rich.table import Table
from torch import nn

from legroom.ahead import Budget, call_with, check_compile
from legroom.core.errors import InputError, StepError
from legroom.core.outcome import Comparison, Point, Timeline
from legroom.core.units import format_bytes, parse_bytes
from legroom.machine.probe import cached_probe
from legroom.machine.spec import Machine, find_machine
from legroom.memory.frontier import NUM_POINTS, frontier, next_steps
from legroom.memory.job import MemoryJob
from legroom.memory.kinds import Kind, Made
from legroom.memory.plan import Plan
from legroom.memory.planner import POLICIES, make_plan
from legroom.memory.profile import LossFn
from legroom.memory.simulate import Simulator
from legroom.memory.timeline import predicted_timeline
from legroom.memory.verify import Verdict
from legroom.views.blocks import blocks_table
from legroom.views.page import write_page
from legroom.views.table import comparison_table, costs_table, to_text


class Job(MemoryJob):
    """A model whose steps keep a budget, with its reports. Made by `legroom.fit`."""

    def comparison(self, kind: Kind | None = None) -> Comparison:
        """Predicted beside measured for a signature (the last one run by default)."""
        kind = self.known(kind)
        assert kind.capture is not None and kind.plan is not None
        free = Simulator((kind.plain or kind.capture).step, self.machine).run([], "keep_all")
        return Comparison(predicted=kind.plan.predicted, measured=kind.measured(), unlimited=free)

    def timeline(self, kind: Kind | None = None) -> Timeline:
        """The step over time as the simulator sees it under the plan in force."""
        kind = self.known(kind)
        assert kind.capture is not None and kind.plan is not None
        return predicted_timeline(Simulator(kind.capture.step, self.machine), kind.plan.actions)

    def known(self, kind: Kind | None = None) -> Kind:
        """A kind that has a plan, the last one run by default; raises StepError before that."""
        kind = kind or self.current
        if kind is None or kind.plan is None or kind.capture is None:
            raise StepError("nothing to report yet: run a step first")
        kind.file()
        return kind

    def report(self) -> str:
        """Predicted beside measured, and what each block and action bought and cost, as text."""
        parts = (to_text(x) if isinstance(x, Table) else f"{x}\n" for x in self.parts())
        return "\n".join(parts)

    def parts(self) -> list[Table | str]:
        """What a report shows, in order: tables and lines."""
        kind = self.known()
        assert kind.plan is not None and kind.capture is not None
        comparison, plan, step = self.comparison(kind), kind.plan, kind.capture.step
        parts: list[Table | str] = [comparison_table(comparison, plan), f"How: {plan.why}."]
        parts.append(f"With other budgets, as predicted: {self.next_steps()}.")
        if step.blocks and (plan.actions or kind.outfit.changes):
            parts.append(blocks_table(step, plan))
        if comparison.predicted.costs:
            parts.append(costs_table(comparison.predicted))
        return parts

    def frontier(self, num_points: int = NUM_POINTS) -> list[Point]:
        """Predicted step time and peak from the smallest budget that works to one without plan."""
        kind = self.known()
        capture = kind.plain or kind.capture
        step = capture.step if capture is not None else None
        assert step is not None
        natural = Simulator(step, self.machine).shape([]).peak
        return list(frontier(self._plan_at, natural, num_points))

    def next_steps(self) -> str:
        """What a GiB more would buy and one less would cost ("+1.00 GiB: -3 ms; ...")."""
        return next_steps(self._plan_at, self.planning_budget()["device"])

    def _plan_at(self, limit: int) -> Plan:
        """A plan of the step at hand for another budget; builds are chosen anew."""
        kind = self.known()
        assert kind.capture is not None
        budget, step, how = {**self.planning_budget(), "device": limit}, kind.capture.step, ""
        if self.workshop is not None and kind.plain is not None:
            plain, made = Made(kind.plain, kind.base), self.workshop.make
            best = made(plain, step, self.machine, budget, self.policy, kind.pace)
            step, how = best.capture.step, f"{best.outfit}; " if best.outfit.changes else ""
        plan = make_plan(step, self.machine, budget, self.policy, lossy=self.lossy, quick=True)
        return msgspec.structs.replace(plan, why=how + plan.why)

    def page(
        self, path: str | Path, *, comparison: Comparison | None = None, budgets: bool = True
    ) -> Path:
        """Write the report as one HTML file; with `budgets`, other ones are planned for as well."""
        kind = self.known()
        assert kind.capture is not None and kind.plan is not None
        measured = self.meter.timeline(kind.static_bytes - self.states.kept_bytes)
        points = self.frontier() if budgets else ()
        both, timeline = comparison or self.comparison(kind), self.timeline(kind)
        step = kind.capture.step
        return write_page(path, step, kind.plan, both, timeline, measured, points=points)


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: Budget = "auto",
    policy: str = "auto",
    machine: str | Path | Machine | None = None,
    blocks: Sequence[str] | None = None,
    disk_dir: str | None = None,
    lossy: bool = False,
    compile: str | None = None,
) -> Job:
    """Make a model's training steps keep a memory budget.

    `budget` is the most bytes the device may hold at any moment: "16GiB", an int, "auto" for what
    the card has, or a mapping by tier ("device", "host", "disk"; and "pinned" for how much of the
    host's memory may be pinned, as it is where tensors are moved to). Use the job around each step:

        job = legroom.fit(model, optimizer, budget="16GiB")
        for batch in loader:
            with job.step():
                loss = model(**batch).loss
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
        print(job.report())

    With `compile="blocks"` each block is compiled on its own, in the build (how much of what it
    could save is kept) that the plan chooses for it. Results are then those of compiled code: equal
    to eager ones up to rounding, with other random numbers for dropout.

    Raises InputError for a budget, policy, machine or optimizer that cannot be used.
    """
    import legroom.memory.policies  # noqa: F401  (fills the registry)

    _ = POLICIES[policy]
    check_compile(compile)
    if not isinstance(model, nn.Module):
        raise InputError(f"fit takes a torch.nn.Module to train, not {type(model).__name__}")
    device = model_device(model)
    _check_optimizer(model, optimizer)
    _check_cache(model)
    found = find_machine(machine) if machine else cached_probe(device.type, disk_dir)
    limits = read_budget(budget, found, device, disk_dir)
    return Job(
        model,
        optimizer,
        device=device,
        machine=found,
        budget=limits,
        policy=policy,
        blocks=blocks,
        disk_dir=disk_dir,
        lossy=lossy,
        compile_blocks=compile == "blocks",
    )


def _check_cache(model: nn.Module) -> None:
    """Warn of a setting that spoils plans for models of transformers; encoders pass it over."""
    config, base = getattr(model, "config", None), getattr(model, "base_model", model)
    decodes = any(getattr(config, name, False) for name in ("is_decoder", "is_encoder_decoder"))
    if getattr(config, "use_cache", False) is True and (decodes or not hasattr(base, "encoder")):
        warnings.warn(
            "legroom: transformers keeps keys and values (config.use_cache=True), which training "
            "does not need and which bars its layers from being recomputed: set "
            "model.config.use_cache = False",
            stacklevel=3,
        )


def model_device(model: nn.Module) -> torch.device:
    """The one device a model lives on; raises InputError for several, or for meta."""
    devices = {p.device for p in (*model.parameters(), *model.buffers())}
    kinds = {d.type for d in devices}
    if (
        len(devices) > 1
        and len(kinds - {"cpu"}) > 0
        and len({d for d in devices if d.type != "cpu"}) > 1
    ):
        raise InputError(
            f"the model is spread over {sorted(map(str, devices))}: one device is needed"
        )
    if "meta" in kinds:
        raise InputError("the model is on the meta device: it has no values to train")
    if not devices:
        raise InputError("the model has no parameters")
    accelerators = [d for d in devices if d.type != "cpu"]
    device = accelerators[0] if accelerators else devices.pop()
    if device.type not in ("cuda", "cpu"):
        raise InputError(f"cannot plan for device {device}: only cuda and cpu")
    return device


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is None:
        return
    mine = {id(p) for p in model.parameters()}
    theirs = [p for g in optimizer.param_groups for p in g["params"]]
    if theirs and not any(id(p) in mine for p in theirs):
        raise InputError(
            "the optimizer holds none of the model's parameters: it was made for another model, "
            "or before the model was moved or wrapped"
        )


def read_budget(
    budget: Budget, machine: Machine, device: torch.device, disk_dir: str | None
) -> dict[str, int]:
    """Bytes per tier; raises InputError for a budget larger than the device."""
    given = dict(budget) if isinstance(budget, Mapping) else {"device": budget}
    unknown = set(given) - {"device", "pinned", "host", "disk"}
    if unknown or "device" not in given:
        names = ", ".join(repr(name) for name in given) or "nothing"
        raise InputError(
            f"a budget names 'device', and may name 'pinned', 'host' and 'disk'; got {names}"
        )
    limits = _default_limits(machine, device, disk_dir)
    for tier, value in given.items():
        if tier == "device" and value == "auto":
            limits["device"] = device_bytes(device) - _reserve(device)
            continue
        limits[tier] = parse_bytes(value, or_none=tier != "device")
    for tier, size in _sizes(device, disk_dir).items():
        if limits.get(tier, 0) > size:
            raise InputError(
                f"the {tier} budget of {format_bytes(limits[tier])} is larger than the {tier}, "
                f"which has {format_bytes(size)}"
            )
    if "pinned" in limits:  # what goes to the host goes to pinned memory
        pinned = limits.pop("pinned")
        limits["host"] = min(limits.get("host", pinned), pinned)
    return limits


def _sizes(device: torch.device, disk_dir: str | None) -> dict[str, int]:
    """What there is of each tier in all."""
    directory = Path(disk_dir or tempfile.gettempdir())
    sizes = {"device": device_bytes(device), "host": int(psutil.virtual_memory().total)}
    sizes["pinned"] = sizes["host"]
    return sizes | ({"disk": shutil.disk_usage(directory).total} if directory.is_dir() else {})


def device_bytes(device: torch.device) -> int:
    """What the device has in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def _reserve(device: torch.device) -> int:
    """Bytes others hold on the device now, and some for the driver."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device)) + (256 << 20)
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available) + (512 << 20)


def _default_limits(machine: Machine, device: torch.device, disk_dir: str | None) -> dict[str, int]:
    limits: dict[str, int] = {}
    if device.type == "cuda":
        limits["host"] = int(psutil.virtual_memory().available * 0.6)
    disk = machine.tier("disk")
    if disk is not None and (disk_dir is not None or device.type == "cpu"):
        limits["disk"] = (disk.num_bytes - disk.reserve_bytes) // 2
    return limits


def verify(
    model: nn.Module,
    batch: Any,
    *,
    budget: Budget,
    loss_fn: LossFn | None = None,
    policy: str = "auto",
    machine: str | Path | Machine | None = None,
    blocks: Sequence[str] | None = None,
    lossy: bool = False,
) -> Verdict:
    """Fit a model, run a step with and without the plan, and compare loss and gradients."""
    with fit(
        model, None, budget=budget, policy=policy, machine=machine, blocks=blocks, lossy=lossy
    ) as job:
        return job.verify(lambda: (loss_fn or call_with)(model, batch))
