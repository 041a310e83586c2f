"""What came of a plan, predicted or measured: peaks, times, stalls, bytes."""

from typing import Literal, NamedTuple, Self

import msgspec

from legroom.core.errors import RecordError
from legroom.core.files import Record


class ActionCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one action bought and cost."""

    label: str
    """The action in words, with the full name of its block or tensor."""
    freed_bytes: int = 0
    """Device bytes it takes off between forward and backward."""
    moved_bytes: int = 0
    """Bytes it sends over a link, one way."""
    stall_s: float = 0.0
    """Time the device waits for it."""
    recompute_s: float = 0.0
    """Device time it spends doing work again."""


class Outcome(Record, frozen=True, kw_only=True):
    """Peaks, times, stalls and bytes of one step."""

    kind = "outcome"

    source: Literal["predicted", "measured"]
    policy: str = ""
    peak_bytes: dict[str, int]
    """Peak per tier; "device" is always there."""
    step_s: float
    compute_s: float = 0.0
    """Time of the unplanned ops alone."""
    stall_s: float = 0.0
    recompute_s: float = 0.0
    moved_bytes: dict[str, int] = {}
    """Bytes per link, "device->host" and so on."""
    costs: tuple[ActionCost, ...] = ()
    peak_at: str = ""
    """The op at the device's peak, with its module."""
    peak_parts: dict[str, int] = {}
    """What makes the device's peak: bytes by kind, or by tensor name."""

    def check(self) -> Self:
        """The device's peak is named, and no time or size is below zero."""
        if "device" not in self.peak_bytes:
            raise RecordError("outcome: the peaks must name the device tier")
        times = (self.step_s, self.compute_s, self.stall_s, self.recompute_s)
        sizes = (*self.peak_bytes.values(), *self.moved_bytes.values())
        if not all(x >= 0 for x in (*times, *sizes)):
            raise RecordError("outcome: a time or size is below zero")
        return self

    @property
    def device_bytes(self) -> int:
        """The device's peak."""
        return self.peak_bytes["device"]


class Point(NamedTuple):
    """One budget, and what the best plan for it is predicted to do."""

    budget_bytes: int
    peak_bytes: int
    step_s: float
    why: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted beside measured, and the step with no plan."""

    predicted: Outcome
    measured: Outcome | None = None
    unlimited: Outcome | None = None

    @property
    def peaks(self) -> Outcome:
        """The outcome whose peak counts: the measured one, if its peak was taken."""
        taken = self.measured is not None and self.measured.device_bytes
        return self.measured if self.measured is not None and taken else self.predicted

    @property
    def peak_error(self) -> float | None:
        """Predicted over measured peak, less one."""
        if self.measured is None or not self.measured.device_bytes:
            return None
        return self.predicted.device_bytes / self.measured.device_bytes - 1

    @property
    def time_error(self) -> float | None:
        """Predicted over measured step time, less one."""
        if self.measured is None or not self.measured.step_s:
            return None
        return self.predicted.step_s / self.measured.step_s - 1


class Span(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One bar on a lane of the timeline."""

    lane: str
    """"compute", "device->host", "host->device", "disk" or such."""
    start_s: float
    end_s: float
    label: str
    kind: str = ""
    """"forward", "backward", "update", "recompute", "stall", "copy"."""


class Timeline(Record, frozen=True, kw_only=True):
    """One step over time: device bytes by kind, and who was busy when."""

    kind = "timeline"

    source: Literal["predicted", "measured"]
    times_s: tuple[float, ...]
    bytes_by_kind: dict[str, tuple[int, ...]]
    """For each kind of storage, device bytes at each of `times_s`."""
    spans: tuple[Span, ...] = ()
