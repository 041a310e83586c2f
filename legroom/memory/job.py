"""A training job under a budget: each kind of step is captured, planned, run and measured.

[Note: visits] Steps are told apart by their signature. The first visit of a signature runs under
a plan made from a fake capture, so the budget holds before anything was measured; a model that
fake tensors cannot follow runs under the online rule instead. The second visit runs the same way,
warm, and is timed as a whole, and so does the third where the device is a card; the next is
recorded op by op, and its times are brought to the scale of the fastest of those. From then on its
plan is in force and is measured; one whose time comes out otherwise is made anew.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch
from torch import Tensor, nn

from legroom.core.errors import BudgetError, StepError
from legroom.machine.spec import Machine
from legroom.memory.calibrate import as_predicted, foresee, learn, to_scale
from legroom.memory.device import Meter, check_device, make_meter
from legroom.memory.escape import check_real
from legroom.memory.host import BOLD, CAUTION, GAIN
from legroom.memory.kinds import Kind, Outfit
from legroom.memory.measure import early_peak, measure
from legroom.memory.mechanisms.hooks import Live, check_hooks, innermost
from legroom.memory.mechanisms.states import StateKeeper
from legroom.memory.online import make_evictor
from legroom.memory.ops import in_backward
from legroom.memory.parking import held_fast, with_states
from legroom.memory.planner import make_first_plan, make_placed_plan, rough_placement
from legroom.memory.profile import (
    Capture,
    StandInLoss,
    capture_real,
    capture_unseen,
    foreseen_update,
    held_bytes,
    name_states,
    naming_gradients,
    state_bytes,
    with_others,
)
from legroom.memory.recorder import Recorder
from legroom.memory.relief import PRESSED, after_failure, is_over, make_room, or_first, waits
from legroom.memory.run import Runner
from legroom.memory.script import Script
from legroom.memory.signature import Signer
from legroom.memory.strays import OVER, note_step
from legroom.memory.tiers import Tiers
from legroom.memory.timers import CpuTimer, CudaTimer, is_taken
from legroom.memory.trace import Step
from legroom.memory.verify import Verdict, settle, verify_step

if TYPE_CHECKING:
    from legroom.memory.workshop import Workshop

MAX_REPLANS = 2
"""Most often that a signature is planned anew."""


class MemoryJob:
    """A model whose steps keep a budget."""

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
        compile_blocks: bool = False,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.machine, self.budget, self.policy = machine, dict(budget), policy
        self.blocks, self.lossy = blocks, lossy
        self.kinds: dict[str, Kind] = {}
        self.current: Kind | None = None
        self.signer = Signer(model)
        self.runner = Runner(model, device, shielded=compile_blocks)
        self.tiers = Tiers(device, disk_dir, before_close=self.runner.mover.evacuate)
        self.states = StateKeeper(optimizer, dict(model.named_parameters()), device)
        self.workshop: Workshop | None = None
        if compile_blocks:  # the compiler is imported only where it is asked for
            from legroom.memory import workshop

            self.workshop = workshop.Workshop(model, device)
        self.meter: Meter = make_meter(device)
        self.meter.cap(self.budget["device"])
        self._stack: contextlib.ExitStack | None = None
        self._recording: tuple[Recorder, CpuTimer | CudaTimer, int] | None = None
        self._busy = self._closed = self._warned = self._refused = False
        me = weakref.WeakMethod(self._before_forward)  # the model must not hold the job

        def before(*given: Any) -> None:
            if (call := me()) is not None:
                call(*given)

        self._hook = model.register_forward_pre_hook(Live(before), with_kwargs=True)

    # -- steps -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One training step: forward, backward, update."""
        if self._closed:
            raise StepError("this job is closed; make a new one with legroom.fit")
        if self._stack is not None:
            raise StepError("a step is already open: steps do not nest")
        self.current = self._recording = None
        self._around = innermost()
        try:
            with contextlib.ExitStack() as self._stack:
                yield
        except BaseException as error:
            self._recording = None
            self.tiers.drain()
            if isinstance(error, torch.OutOfMemoryError):
                error.add_note(after_failure(self.current, self.meter, self._plan))
            raise
        finally:
            self._stack = None
            self._place(Outfit())
        self._after_step()

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The first forward of a step: now its signature is known, and its plan taken up."""
        ready = self._stack is not None and self.current is None and not self._busy
        learns = torch.is_grad_enabled() and not in_backward()
        if not ready or not learns or model is not self.model:
            return
        check_device(self.model, self.device)
        check_hooks(self._around)
        signature = self.signer.signature(args, kwargs)
        kind = self.kinds.setdefault(signature, Kind(signature))
        if kind.visits == 0 and kind.plan is None:
            self._first_plan(kind, args, kwargs)
        if self._stack is None:  # what failed on fake tensors made the caller close the step
            return
        self._take_up(kind)
        self.current = kind
        self._open(kind, self._stack, args, kwargs)

    def _open(self, kind: Kind, stack: contextlib.ExitStack, args: Any, kwargs: Any) -> None:
        warm, shop = self.meter.warm, self.workshop
        if shop is not None and kind.visits == warm - 1 and kind.capture is not None:
            stack.enter_context(shop.sampling(kind.capture.step, (args, kwargs)))
        wanted = self.device.type == "cpu" and is_taken()  # the profiler that recording needs
        if kind.visits < warm or kind.recorded or wanted:
            stack.enter_context(self.meter.step(self.model, apart=kind.learning))
            stack.enter_context(self.runner.following())
            return
        timer = CudaTimer(self.device) if self.device.type == "cuda" else CpuTimer()
        recorder = Recorder(self.model, self.device, timer)
        name_states(recorder, self.model, self.states.here())
        if self.workshop is None:  # else the next steps will hold other results than the last did
            recorder.name_leftovers()
        self._recording = (recorder, timer, self.meter.found() + self.states.away_bytes)
        stack.enter_context(self.states.recorded(recorder))
        stack.enter_context(naming_gradients(recorder, self.model))
        stack.enter_context(timer.running())
        stack.enter_context(self.runner.following(recorder))
        stack.enter_context(recorder.watch_modules())
        recorder.enter_module(self.model, args, kwargs)  # it is being called already
        stack.enter_context(recorder)

    # -- planning ----------------------------------------------------------------------------

    def _first_plan(self, kind: Kind, args: Any, kwargs: Any) -> None:
        """A plan before anything runs, in other code if the model's own leaves no room to spare."""
        least = self.workshop.least() if self.workshop is not None else Outfit()
        try:
            self._plan_unseen(kind, args, kwargs, tight=not least.changes)
        except BudgetError:
            if not least.changes:
                raise
            kind.base = kind.outfit = least
            self._place(least)
            self._plan_unseen(kind, args, kwargs, tight=True)

    def _plan_unseen(self, kind: Kind, args: Any, kwargs: Any, *, tight: bool) -> None:
        """A plan from fake tensors; none if they cannot follow the model."""
        self._busy, loss = True, StandInLoss()
        try:
            kind.capture = capture_unseen(
                self.model,
                (args, kwargs),
                loss,
                self.machine,
                device=self.device,
                optimizer=foreseen_update(self.optimizer, self.model, self.device),
                blocks=self.blocks,
                signature=kind.signature,
            )
        finally:
            self._busy = False
        if kind.capture is None:
            return
        held = held_bytes(self.model, self.optimizer, self.device, (args, kwargs))
        kind.capture = self._counted(kind.capture, None, self.meter.found(), held)
        unseen = (loss.num_bytes + self.meter.scratch, loss.num_bytes, 0)
        make = partial(make_first_plan, lossy=self.lossy, unseen=unseen, tight=tight)
        kind.plan = make(kind.capture.step, self.machine, self.planning_budget(), self.policy)
        kind.script = Script(kind.capture.step, kind.plan, kind.capture.forms)

    def _counted(self, capture: Capture, like: Step | None, *sizes: int) -> Capture:
        """With what else is on the device, and with what can be parked told from that."""
        step = with_states(with_others(capture, *sizes).step, like)
        return capture._replace(step=held_fast(step, self.states.names))

    def _plan(self, kind: Kind, least_gain: float = 0.0) -> None:
        """Make a plan, and have it in force if it is faster than the one there is, by a share."""
        assert kind.capture is not None
        options: Any = {"lossy": self.lossy, "caution": BOLD if kind.bold else CAUTION}
        options["room"] = self.meter.room(self.budget["device"])  # which tells the overhead, too
        budget, step, old = self.planning_budget(), kind.capture.step, kind.plan
        plan, placement = make_placed_plan(step, self.machine, budget, self.policy, **options)
        if least_gain and old and plan.predicted.step_s > (1 - least_gain) * old.predicted.step_s:
            return
        kind.placement = placement
        kind.plan = msgspec.structs.replace(plan, why=kind.compiled + plan.why)
        kind.script = Script(step, kind.plan, kind.capture.forms)
        if old is None or kind.plan.actions != old.actions:
            kind.start_anew()

    def planning_budget(self) -> dict[str, int]:
        """The budget less what the allocator loses to rounding and gaps."""
        return self.meter.usable(self.budget)

    def _take_up(self, kind: Kind) -> None:
        self._park(kind)
        make_room(kind, self.meter, self.budget["device"], self._plan)
        self._park(kind)
        if kind.script is None:
            self._take_up_rule(kind)
        elif self.runner.script is not kind.script:
            lanes = self.tiers.lanes_for(kind.script.tier_bytes)
            if lanes is not None:
                lanes.timing = True
            self.runner.install(kind.script, lanes)
        self._refused = not self._place(kind.outfit)

    def _park(self, kind: Kind) -> None:
        """States are where the kind at hand needs them, and others that come again."""
        plans = [k.plan for k in self.kinds.values() if k is kind or k.recorded]
        parks = [plan.park for plan in plans if plan is not None and plan.park is not None]
        self.states.keep(max(parks, key=lambda park: park.num_bytes, default=None))

    def _place(self, outfit: Outfit) -> bool:
        """Compiled blocks in place of eager ones, while a step runs; whether that could be done."""
        return self.workshop is None or self.workshop.place(outfit)

    def _take_up_rule(self, kind: Kind) -> None:
        """Saved tensors may take a share of what weights and states leave free."""
        static = max(held_bytes(self.model, self.optimizer, self.device), self.meter.found())
        evictor = make_evictor(self.planning_budget(), static, kind.saved_bytes)
        lanes = self.tiers.lanes_for({evictor.tier: evictor.tier_bytes})
        assert lanes is not None
        self.runner.install_online(evictor, lanes)

    # -- after a step ------------------------------------------------------------------------

    def _after_step(self) -> None:
        kind = self.current
        if kind is None:
            return warnings.warn("legroom: a step ran no forward with gradients", stacklevel=4)
        kind.visits += 1
        if kind.visits == 1:  # libraries and optimizer have taken what they keep
            check_real(self.model)
            room, limit = self.meter.room(self.budget["device"]), self.planning_budget()["device"]
            kind.placement = rough_placement(kind.plan, limit, room)
        if self._recording is not None:
            self._use_recording(kind, *self._recording)
        elif not kind.recorded:
            self._refer(kind)
        else:
            self._after_planned(kind)

    def _refer(self, kind: Kind) -> None:
        reading = self.meter.last()
        peak = early_peak(kind, reading, self.model, self.states)
        self._warned = self._warned or is_over(peak, self.budget["device"])
        kind.refer((reading.seconds(), *reading.host_s), reading.pressed)

    def _after_planned(self, kind: Kind) -> None:
        """File what a step took under its plan; see whether it followed it, and judge the plan."""
        reading, limit = self.meter.last(), self.budget["device"]
        fresh, peak = measure(kind, reading, self.runner, self.tiers.lanes, self.states)
        kind.presses += reading.pressed
        self._warned = self._warned or is_over(peak, limit)
        strayed = bool(self.runner.deviation) or self._refused or peak > OVER * limit
        if strayed:
            self.meter.unlearn()
        if note_step(kind, strayed, self.budget):
            self.signer = Signer(self.model)
            self._refer(kind)
            return
        kind.file(fresh)
        if kind.ripe and (kind.pressed or not kind.still) and not kind.restless:
            self._calibrate(kind)

    def _use_recording(self, kind: Kind, recorder: Recorder, timer: Any, found: int) -> None:
        self._recording = None
        if not recorder.backward_seen and waits(kind):  # then the next one is recorded
            return
        first, like = kind.capture, kind.capture.step if kind.capture is not None else None
        name_states(recorder, self.model)
        kind.state_bytes = state_bytes(self.optimizer, self.device)
        known: Any = {"like": like, "blocks": self.blocks, "signature": kind.signature}
        kind.capture = capture_real(recorder, timer, self.model, self.machine, **known)
        kind.capture = to_scale(kind, self._counted(kind.capture, like, found), self.machine)
        self.runner.remove()  # what is compiled now is to know nothing of the old plan
        if self.workshop is not None and like is not None:
            self.workshop.dress(kind, like, self.machine, self.meter, self.budget, self.policy)
        kind.take_up_recording()
        with or_first(kind, first, capped=isinstance(timer, CudaTimer)):
            self._plan(kind)

    def _calibrate(self, kind: Kind) -> None:
        """Judge a settled plan: if it came out otherwise, plan again; the fastest seen stays."""
        # Where the allocator took the time, that says nothing of ops, links or host.
        pressed, slack = kind.pressed, self.meter.slack
        expected = as_predicted(kind)
        roomier = kind.wants_room and self.meter.give_way(PRESSED)
        shifted = roomier or (expected and self.meter.take_back())
        tried = kind.bold or kind.replans >= MAX_REPLANS
        kind.still = not shifted and (pressed or expected or tried)
        if not pressed and not expected:
            self.machine = learn(kind, self.machine)
        learned, outfit = kind.capture, kind.outfit
        put_back = kind.judge(last=kind.still)
        if kind.still:
            kind.cramped |= pressed
            if put_back or not expected:
                foresee(kind, learned if kind.outfit == outfit else kind.capture, self.machine)
            elif not pressed and not kind.dared:
                self._plan_boldly(kind)
            return
        kind.replans, kind.given_room = kind.replans + (not pressed), kind.given_room + roomier
        kind.presses, force = 0, kind.force
        if self.workshop is not None:
            self.workshop.remake(kind, self.machine, self.planning_budget(), self.policy)
        try:
            self._plan(kind)
        except BudgetError:  # then what is in force stays
            kind.put_back(force)
            self.meter.slack, kind.cramped = slack, kind.cramped or roomier

    def _plan_boldly(self, kind: Kind) -> None:
        """Try a plan that leaves a busy host less time to spare; the faster of both stays."""
        kind.bold, kind.dared, settled = True, True, kind.plan
        with contextlib.suppress(BudgetError):
            if kind.has_busy_host:
                self._plan(kind, GAIN)
        kind.still, kind.bold = kind.plan is settled, kind.plan is not settled

    # -- verify and close --------------------------------------------------------------------

    def verify(self, closure: Callable[[], Tensor]) -> Verdict:
        """Compare loss and gradients of a step with and without the plan, from the same state.

        The unplanned step needs the memory it needs: the cap is lifted for it.
        """
        warned, self._warned = self._warned, True
        self.meter.uncap()
        try:
            settle(self.model, self.device, closure, self.step, lambda: self.current)
            assert self.current is not None and self.current.plan is not None
            exact = self.current.plan.exact and not self.current.outfit.changes
            return verify_step(self.model, self.device, closure, self.step, exact_plan=exact)
        finally:
            self._warned = warned
            self.meter.cap(self.budget["device"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks out of the model, give the tiers back and lift the cap."""
        if not self._closed:
            self._closed = True
            self._hook.remove()
            if self.workshop is not None:
                self.workshop.clear()
            self.runner.remove()
            self.meter.uncap()  # first: what is still out comes back, however little room there was
            self.tiers.close()
            self.states.close()
