"""Train a named job for some steps, under a budget or without, and measure it."""

from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from legroom.cli.answer import Advance
from legroom.core.outcome import Outcome

if TYPE_CHECKING:
    import torch

    from legroom.api import Job
    from legroom.examples import Job as Example
    from legroom.memory.device import Meter

VISITS = ("planning from fake tensors", "warming up", "recording", "measuring")
"""What a job does in its first step, in the others before one is recorded, in that, and later."""


class Training(NamedTuple):
    """A job on a device, with its optimizer."""

    example: "Example"
    optimizer: "torch.optim.Optimizer | None"
    device: "torch.device"

    def step(self, batch: Any) -> float:
        """Forward, backward, update; the loss."""
        loss = self.example.loss_fn(self.example.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            self.optimizer.step()
        self.example.model.zero_grad()
        return float(loss.detach())


def train(training: Training, job: "Job", num_steps: int, advance: Advance) -> list[float]:
    """Run steps under the job's budget; the losses, in order.

    On the CPU asking the allocator for the peak slows a step, so that only the last one is asked.
    """
    losses = []
    for i in range(num_steps):
        batch = training.example.make_batch(seed=i)
        advance(_visit(i, job), 0.0)
        ask_for_peaks(job.meter, i == num_steps - 1)
        with job.step():
            losses.append(training.step(batch))
        advance(_visit(i + 1, job))
    return losses


def _visit(i: int, job: "Job") -> str:
    warm = job.meter.warm
    return VISITS[min(i, 1) if i < warm else 2 + (i > warm)]


def train_plain(training: Training, num_steps: int, static_bytes: int, advance: Advance) -> Outcome:
    """Run steps with no plan under the meter a job uses; the first and last are not timed.

    `static_bytes` is what is there before the step, which the CPU's meter does not see.
    """
    from legroom.memory.device import make_meter

    meter, seconds, peak = make_meter(training.device), [], 0
    for i in range(num_steps + 2):
        batch = training.example.make_batch(seed=i)
        ask_for_peaks(meter, i == num_steps + 1)
        with meter.step():
            training.step(batch)
        reading = meter.last()
        seconds.append(reading.seconds())
        peak = reading.peaks.get("device", reading.peaks.get("step", 0) + static_bytes)
        advance("unlimited")
    return Outcome(
        source="measured",
        policy="keep_all",
        peak_bytes={"device": peak},
        step_s=median(seconds[1:-1]),
    )


def ask_for_peaks(meter: "Meter", wanted: bool) -> None:
    """Let a meter that can do without take peaks, or not."""
    if hasattr(meter, "peaks"):
        meter.peaks = wanted


def lift_cap(device: "torch.device") -> None:
    """Let the allocator have the whole device again: the unplanned step may need it."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
