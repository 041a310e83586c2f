"""A training job under a budget: each kind of step is captured, planned, run and measured.

[Note: visits] Steps are told apart by their signature. The first visit of a signature runs under
a plan made from a fake capture, so the budget holds before anything was measured. The second is
recorded as it runs. From the third on the plan made from that recording is in force; measured
time and peak then stand beside the predicted ones, and a plan that stalls is made anew.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from legroom.core.errors import BudgetError, StepError
from legroom.core.outcome import Comparison, Outcome, Timeline
from legroom.core.units import format_bytes
from legroom.machine.spec import Machine
from legroom.memory.device import Meter, make_meter
from legroom.memory.plan import Plan
from legroom.memory.planner import make_plan
from legroom.memory.profile import Capture, capture_fake, capture_real
from legroom.memory.recorder import Recorder
from legroom.memory.run import Runner
from legroom.memory.script import Script
from legroom.memory.trace import Step
from legroom.memory.signature import signature_of
from legroom.memory.simulate import Simulator
from legroom.memory.tiers import Tiers
from legroom.memory.timeline import predicted_timeline
from legroom.memory.timers import CpuTimer, CudaTimer
from legroom.memory.verify import Snapshot, Verdict, verify_step

SAFE = 0.88
"""Share of the budget that the first, unmeasured plan of a signature may use."""
SETTLED = 3
"""Measured steps before a plan is judged."""
MAX_REPLANS = 3


@dataclass
class Kind:
    """One signature: its visits, its trace and plan, and what was measured."""

    signature: str
    visits: int = 0
    capture: Capture | None = None
    plan: Plan | None = None
    script: Script | None = None
    recorded: bool = False
    replans: int = 0
    seconds: list[float] = field(default_factory=list)
    peaks: list[dict[str, int]] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)

    @property
    def static_bytes(self) -> int:
        """What is on the device before the step begins."""
        assert self.capture is not None
        return sum(s.num_bytes for s in self.capture.step.storages if s.birth < 0)


class Job:
    """A model whose steps keep a budget. Made by `legroom.fit`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        device: torch.device,
        machine: Machine,
        budget: Mapping[str, int],
        policy: str,
        blocks: Sequence[str] | None,
        disk_dir: str | None,
        lossy: bool = False,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.machine, self.budget, self.policy = machine, dict(budget), policy
        self.blocks, self.lossy = blocks, lossy
        self.kinds: dict[str, Kind] = {}
        self.current: Kind | None = None
        self.runner = Runner(model, device)
        self.tiers = Tiers(device, disk_dir)
        self.meter: Meter = make_meter(device)
        self._stack: contextlib.ExitStack | None = None
        self._recording: tuple[Recorder, CpuTimer | CudaTimer] | None = None
        self._busy = False
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._closed = False

    # -- steps -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One training step: forward, backward, update."""
        if self._closed:
            raise StepError("this job is closed; make a new one with legroom.fit")
        if self._stack is not None:
            raise StepError("a step is already open: steps do not nest")
        self.current = None
        with contextlib.ExitStack() as stack:
            self._stack = stack
            stack.callback(self._forget)
            yield
        if self.current is None:
            warnings.warn(
                "legroom: the step ended without a forward of the fitted model", stacklevel=3
            )
            return
        self._after_step(self.current)

    def _forget(self) -> None:
        self._stack = None

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The first forward of a step: now its signature is known, and its plan taken up."""
        ready = self._stack is not None and self.current is None and not self._busy
        if not ready or not torch.is_grad_enabled() or model is not self.model:
            return
        self._check_inputs(args, kwargs)
        kind = self._kind(signature_of(model, args, kwargs))
        if kind.plan is None:
            self._first_plan(kind, args, kwargs)
        self._take_up(kind)
        self.current = kind
        assert self._stack is not None
        self._open(kind, self._stack)

    def _kind(self, signature: str) -> Kind:
        return self.kinds.setdefault(signature, Kind(signature))

    def _check_inputs(self, args: Any, kwargs: Any) -> None:
        param = next(self.model.parameters(), None)
        if param is not None and param.device.type != self.device.type:
            raise StepError(
                f"the model was fitted on {self.device} and is now on {param.device}: "
                "call legroom.fit after moving it"
            )

    def _open(self, kind: Kind, stack: contextlib.ExitStack) -> None:
        record = kind.visits == 1 and not kind.recorded
        recorder = None
        if record:
            timer = CudaTimer(self.device) if self.device.type == "cuda" else CpuTimer()
            recorder = Recorder(self.model, self.device, timer)
            self._name_states(recorder)
            self._recording = (recorder, timer)
            stack.enter_context(timer.running())
        stack.enter_context(self.meter.step(active=not record))
        stack.enter_context(self.runner.following(recorder))
        if recorder is not None:
            stack.enter_context(recorder.watch_modules())
            stack.enter_context(recorder)

    def _name_states(self, recorder: Recorder) -> None:
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                recorder.name_storage(param.grad, f"{name}.grad", "gradient")
        if self.optimizer is None:
            return
        for leaf in tree_leaves(dict(self.optimizer.state)):
            if isinstance(leaf, Tensor):
                recorder.name_storage(leaf, "optimizer state", "state")

    # -- planning ----------------------------------------------------------------------------

    def _first_plan(self, kind: Kind, args: Any, kwargs: Any) -> None:
        """A plan from fake tensors, before anything runs."""
        self._busy = True
        try:
            kind.capture = capture_fake(
                self.model,
                (args, kwargs),
                stand_in_loss,
                self.machine,
                device=self.device,
                optimizer=self._state_rule(),
                blocks=self.blocks,
                signature=kind.signature,
            )
        finally:
            self._busy = False
        kind.plan = self._safe_plan(kind.capture.step)
        kind.script = Script(kind.capture.step, kind.plan)

    def _safe_plan(self, step: Step) -> Plan:
        """A plan for steps not yet measured: with room for what fake tensors do not show.

        Those are scratch memory, and a loss computed outside the model.
        """
        budget = self.planning_budget()
        tight = {**budget, "device": int(budget["device"] * SAFE)}
        names = ("keep_all", "recompute_all", self.policy) if self.policy == "auto" else ()
        for name in names:
            with contextlib.suppress(BudgetError):
                return make_plan(step, self.machine, tight, name, lossy=self.lossy)
        return make_plan(step, self.machine, budget, self.policy, lossy=self.lossy)

    def _state_rule(self) -> str:
        if self.optimizer is None:
            return "none"
        name, group = type(self.optimizer).__name__.lower(), self.optimizer.param_groups[0]
        if name == "sgd":
            return "sgd-momentum" if group.get("momentum") else "sgd"
        foreach = group.get("foreach") or (
            group.get("foreach") is None and not group.get("fused") and self.device.type == "cuda"
        )
        return "adamw-foreach" if foreach else "adamw"

    def _plan(self, kind: Kind) -> None:
        assert kind.capture is not None
        kind.plan = make_plan(
            kind.capture.step, self.machine, self.planning_budget(), self.policy, lossy=self.lossy
        )
        kind.script = Script(kind.capture.step, kind.plan)

    def planning_budget(self) -> dict[str, int]:
        """The budget less what the allocator loses to rounding and gaps."""
        device = self.budget["device"]
        return {**self.budget, "device": device - self.meter.overhead(device)}

    def _take_up(self, kind: Kind) -> None:
        assert kind.capture is not None and kind.script is not None
        if self.runner.script is kind.script:
            return
        lanes = self.tiers.lanes_for(kind.script)
        if lanes is not None:
            lanes.timing = True
        self.runner.install(kind.script, lanes, kind.capture.forms)

    # -- after a step ------------------------------------------------------------------------

    def _after_step(self, kind: Kind) -> None:
        kind.visits += 1
        if self._recording is not None:
            self._use_recording(kind)
            return
        if self.runner.deviation and not kind.recorded:
            kind.visits = max(kind.visits, 1)
        if kind.recorded:
            self._measure(kind)

    def _measure(self, kind: Kind) -> None:
        seconds, peaks = self.meter.last()
        if "step" in peaks:
            peaks = {"device": peaks["step"] + kind.static_bytes}
        lanes = self.tiers.lanes
        if lanes is not None:
            kind.stalls.append(lanes.stall_s())
            lanes.reset_stall()
        kind.seconds.append(seconds)
        if peaks:
            kind.peaks.append(peaks)
            self._watch_budget(peaks.get("reserved", peaks["device"]))

    def _use_recording(self, kind: Kind) -> None:
        assert self._recording is not None and kind.capture is not None
        (recorder, timer), self._recording = self._recording, None
        self._busy = True
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                recorder.name_storage(param.grad, f"{name}.grad", "gradient")
        capture = capture_real(
            recorder,
            timer,
            self.model,
            self.machine,
            like=kind.capture.step,
            signature=kind.signature,
        )
        self._busy = False
        kind.capture, kind.recorded = capture, True
        self._plan(kind)

    def _watch_budget(self, peak: int) -> None:
        if peak > self.budget["device"]:
            warnings.warn(
                f"legroom: the step took {format_bytes(peak)} of device memory, over the budget "
                f"of {format_bytes(self.budget['device'])}",
                stacklevel=4,
            )

    # -- reports -----------------------------------------------------------------------------

    def comparison(self, kind: Kind | None = None) -> Comparison:
        """Predicted beside measured for a signature (the last one run by default)."""
        kind = self._known(kind)
        assert kind.capture is not None and kind.plan is not None
        unlimited = Simulator(kind.capture.step, self.machine).run([], "keep_all")
        return Comparison(
            predicted=kind.plan.predicted, measured=measured(kind), unlimited=unlimited
        )

    def timeline(self, kind: Kind | None = None) -> Timeline:
        """The step over time as the simulator sees it under the plan in force."""
        kind = self._known(kind)
        assert kind.capture is not None and kind.plan is not None
        simulator = Simulator(kind.capture.step, self.machine)
        return predicted_timeline(simulator, kind.plan.actions)

    def report(self) -> str:
        """Predicted beside measured, and what each action bought and cost, as text."""
        from legroom.views.table import comparison_table, costs_table, to_text

        kind = self._known(None)
        comparison = self.comparison(kind)
        text = to_text(comparison_table(comparison, kind.plan))
        if comparison.predicted.costs:
            text += "\n" + to_text(costs_table(comparison.predicted))
        return text

    def page(self, path: str) -> Path:
        """Write the report as one HTML file."""
        from legroom.views.page import write_page

        kind = self._known(None)
        assert kind.capture is not None and kind.plan is not None
        return write_page(
            path, kind.capture.step, kind.plan, self.comparison(kind), self.timeline(kind)
        )

    def verify(self, closure: Callable[[], Tensor]) -> Verdict:
        """Compare loss and gradients of a step with and without the plan, from the same state."""
        if not self._planned(closure):
            raise StepError("the closure ran no forward of the fitted model")
        assert self.current is not None and self.current.plan is not None
        exact = self.current.plan.exact
        return verify_step(self.model, self.device, closure, self.step, exact_plan=exact)

    def _planned(self, closure: Callable[[], Tensor]) -> bool:
        """Run the step until its plan comes from a recording; states are left as found."""
        keep = Snapshot(self.model, self.device)
        try:
            while True:
                keep.restore()
                for param in self.model.parameters():
                    param.grad = None
                with self.step():
                    closure().backward()  # type: ignore[no-untyped-call]
                if self.current is None or self.current.recorded:
                    return self.current is not None
        finally:
            keep.restore()

    def _known(self, kind: Kind | None) -> Kind:
        kind = kind or self.current
        if kind is None or kind.plan is None or kind.capture is None:
            raise StepError("nothing to report yet: run a step first")
        return kind

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks out of the model and give the tiers back."""
        if not self._closed:
            self._closed = True
            self._hook.remove()
            self.runner.remove()
            self.tiers.close()


def measured(kind: Kind) -> Outcome | None:
    """What was measured under the plan in force; None before its first step."""
    if not kind.seconds or kind.plan is None:
        return None
    peaks = {"device": 0}
    for row in kind.peaks:
        peaks |= {name: max(size, peaks.get(name, 0)) for name, size in row.items()}
    return Outcome(
        source="measured",
        policy=kind.plan.policy,
        peak_bytes=peaks,
        step_s=median(kind.seconds[-25:]),
        stall_s=median(kind.stalls[-25:]) if kind.stalls else 0.0,
        moved_bytes=dict(kind.plan.predicted.moved_bytes),
    )


def stand_in_loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss if it gives one, else a sum over all it returns."""
    args, kwargs = batch
    output = model(*args, **kwargs)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [
        x for x in tree_leaves(_plain(output)) if isinstance(x, Tensor) and x.requires_grad
    ]
    if not floats:
        raise StepError("the model returned nothing that needs a gradient")
    return torch.stack([x.float().sum() for x in floats]).sum()


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output
