"""The first plan of a kind of step, before any has run: from fake tensors, with room to spare.

Where the model as it is leaves no such room, it is tried in what needs less: with slim gradients,
and with its loss in chunks.
"""

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from legroom.core.errors import BudgetError
from legroom.memory.kinds import Kind, Outfit
from legroom.memory.mechanisms.slim import slim_modules
from legroom.memory.planner import make_safe_plan
from legroom.memory.profile import StandInLoss, capture_unseen, foreseen_update, held_bytes
from legroom.memory.script import Script
from legroom.memory.trace import Step

if TYPE_CHECKING:
    from legroom.memory.job import MemoryJob


def first_plan(job: "MemoryJob", kind: Kind, given: Any) -> None:
    """Plan a step that is about to run with these arguments; not if fake tensors cannot follow."""
    unseen = capture(job, kind, given)
    if kind.capture is None:
        return
    others = outfits(job, kind.capture.step)
    while others:
        with contextlib.suppress(BudgetError):
            return plan(job, kind, unseen, tight=False)
        kind.base = kind.outfit = others.pop(0)
        job.place(kind.outfit)
        unseen = capture(job, kind, given)
    plan(job, kind, unseen, tight=True)


def outfits(job: "MemoryJob", step: Step) -> list[Outfit]:
    """What needs less memory than the model as it is, that which needs least last."""
    least = job.workshop.least() if job.workshop is not None else Outfit()
    slim = slim_modules(job.slimmer.found, step)
    return [Outfit(slim=slim)] * bool(slim) + [least._replace(slim=slim)] * least.changes


def capture(job: "MemoryJob", kind: Kind, given: Any) -> int:
    """Capture a step with fake tensors; what a loss outside of the model will take."""
    job.foreseeing, loss = True, StandInLoss()
    try:
        kind.capture = capture_unseen(
            job.model,
            given,
            loss,
            job.machine,
            device=job.device,
            optimizer=foreseen_update(job.optimizer, job.model, job.device),
            blocks=job.blocks,
            signature=kind.signature,
            visitor=job.slimmer,
        )
    finally:
        job.foreseeing = False
    if kind.capture is not None:
        held = held_bytes(job.model, job.optimizer, job.device, given)
        kind.capture = job.counted(kind.capture, None, job.meter.found(), held)
    return loss.num_bytes


def plan(job: "MemoryJob", kind: Kind, loss_bytes: int, *, tight: bool) -> None:
    """Make a plan for it; raises BudgetError where there is none."""
    if kind.capture is None:
        return
    unseen = (loss_bytes + job.meter.scratch, loss_bytes, 0)
    make = partial(make_safe_plan, lossy=job.lossy, unseen=unseen, tight=tight)
    kind.plan = make(kind.capture.step, job.machine, job.planning_budget(), job.policy)
    kind.script = Script(kind.capture.step, kind.plan, kind.capture.forms)
