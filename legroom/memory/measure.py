"""What a step took under its plan: time, peaks, stalls, and bytes moved."""

from collections.abc import Callable

from torch import nn

from legroom.memory.device import Reading
from legroom.memory.kinds import Kind, Measurement
from legroom.memory.mechanisms.lanes import Lanes
from legroom.memory.mechanisms.states import StateKeeper
from legroom.memory.profile import held_bytes, state_bytes
from legroom.memory.run import Runner


def measure(
    kind: Kind, reading: Reading, runner: Runner, lanes: Lanes | None, states: StateKeeper
) -> tuple[Callable[[], Measurement], int]:
    """The measurement of a step just enqueued, and its peak; asking for it waits for its end."""
    mover, peaks = runner.mover, reading.peaks
    moved = {f"device->{tier}": n for tier, n in mover.out_bytes.items()}
    moved |= {f"{tier}->device": n for tier, n in mover.in_bytes.items()}
    for name in ("device->host", "host->device") if states.moved_bytes else ():
        moved[name] = moved.get(name, 0) + states.moved_bytes
    if "step" in peaks:  # above what was there before; states may have grown since the recording
        grown = state_bytes(states.optimizer, runner.device) - kind.state_bytes
        static = kind.static_bytes + max(grown, 0)
        peaks = {"device": peaks["step"] + static - states.kept_bytes}
    stall = lanes.take_stall() if lanes is not None else float
    rest = (runner.replayer.seconds, moved, *reading.host_s)
    peak = peaks.get("reserved", peaks.get("device", 0))
    return lambda: Measurement(reading.seconds(), peaks, stall(), *rest), peak


def early_peak(kind: Kind, reading: Reading, model: nn.Module, states: StateKeeper) -> int:
    """The peak of a step that is not recorded yet; 0 where it was not measured, or is capped."""
    if "step" not in reading.peaks:
        return 0
    there = kind.state_bytes  # before it; what it made itself is in its own peak
    kind.state_bytes = state_bytes(states.optimizer, states.device)
    static = held_bytes(model, None, states.device) + there
    return reading.peaks["step"] + static - states.kept_bytes
