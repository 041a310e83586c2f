"""`legroom demo`: two small models in less than half their activation memory, measured here."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from rich.console import RenderableType

from legroom.cli.answer import Advance, Answer, progress, verb
from legroom.cli.fit import check_gradients, last_kind
from legroom.cli.jobs import build, make_optimizer, pick_device, trace_job
from legroom.cli.options import AsJson, DeviceName
from legroom.cli.train import Training, lift_cap, train, train_plain
from legroom.core.units import format_bytes
from legroom.machine.spec import Machine
from legroom.views.table import comparison_table, over_budget

if TYPE_CHECKING:
    import torch


SHARE = 0.4
"""Of the memory a step takes above what is there before it."""
NUM_STEPS = 24
NUM_PLAIN_STEPS = 3
PARTS = NUM_STEPS + NUM_PLAIN_STEPS + 3
"""Parts of the progress bar per example: all steps, and the check of the gradients."""
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {"transformer": {}, "convnet": {}},
    "cuda": {
        "transformer": {"dim": 1024, "heads": 16, "batch": 16, "sequence": 1024, "vocab": 16000},
        "convnet": {"layers": (3, 4, 6, 3), "width": 64, "batch": 128, "image": 224},
    },
}
"""The examples of each kind of device; a GPU gets something to do."""


class Room(NamedTuple):
    """What a step takes as it is, and what the demo lets it have."""

    static_bytes: int
    natural_bytes: int

    @property
    def budget(self) -> int:
        """What is there before the step, and a share of what the step adds."""
        return self.static_bytes + int(SHARE * (self.natural_bytes - self.static_bytes))


@verb
def demo(device: DeviceName = None, as_json: AsJson = False) -> Answer:
    """Train two small models in 40 % of the memory their steps would add.

    Each is first run as it is, then under the budget; predicted, measured and unlimited stand
    side by side, gradients are compared bit for bit, and a page is written for each into the
    current directory. It takes about a minute on a CPU.

        legroom demo
    """
    from legroom.machine.probe import cached_probe

    target = pick_device(device)
    examples = SIZES[target.type]
    with progress("demo", len(examples) * PARTS + 1) as advance:
        advance("measuring this machine", 0.0)
        machine = cached_probe(str(target))
        advance()
        runs = []
        for name, sizes in examples.items():
            runs.append(run_example(name, sizes, target, machine, advance))
    fits = all(run["fits"] for run, _ in runs)
    shown = [part for _, parts in runs for part in parts]
    document = {"machine": machine.name, "fits": fits, "runs": [run for run, _ in runs]}
    return Answer(document, shown, fits)


def run_example(
    name: str, sizes: dict[str, Any], device: "torch.device", machine: Machine, advance: Advance
) -> tuple[dict[str, Any], list[RenderableType]]:
    """One example, plain and then under the budget: as a document, and as tables."""
    import legroom

    example = build(name, device, sizes)
    training = Training(example, make_optimizer("adamw", example.model), device)
    room = _room(training, machine)
    unlimited = train_plain(training, NUM_PLAIN_STEPS, room.static_bytes, advance)
    with legroom.fit(example.model, training.optimizer, budget=room.budget, machine=machine) as job:
        train(training, job, NUM_STEPS, advance)
        comparison = msgspec.structs.replace(job.comparison(), unlimited=unlimited)
        page = job.page(f"legroom-demo-{name}.html", comparison=comparison)
        plan = last_kind(job).plan
        assert plan is not None
        verdict = check_gradients(training, job)
        advance("comparing gradients")
    lift_cap(device)
    over = over_budget(comparison.peaks, job.budget)
    document = {"example": name, "fits": not over, "budget": room.budget, "why": plan.why}
    document |= {"comparison": comparison, "verdict": verdict, "page": page.resolve()}
    table = comparison_table(comparison, plan)
    table.columns[-1].header = "unlimited, measured"
    return document, [table, *_words(name, room, plan.why, verdict, page)]


def _room(training: Training, machine: Machine) -> Room:
    """Sizes from a capture with fake tensors: nothing has run yet."""
    from legroom.memory.simulate import Simulator

    step = trace_job(training.example, machine, "adamw")
    static = sum(storage.num_bytes for storage in step.storages if storage.birth < 0)
    return Room(static, Simulator(step, machine).run([], "keep_all").device_bytes)


def _words(name: str, room: Room, why: str, verdict: Any, page: Path) -> list[str]:
    budget, static = format_bytes(room.budget), format_bytes(room.static_bytes)
    return [
        f"{name}: budget {budget}: {static} there before the step (weights, optimizer states, "
        f"batch) and {SHARE:.0%} of what the step adds.",
        f"Plan: {why}.",
        f"Against a plain step: {verdict}.",
        f"Page: {page.resolve()}",
        "",
    ]
