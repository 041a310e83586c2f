"""Measure a step from outside: wall time and the allocator's own peak, not the runtime's books."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from legroom.memory.timers import memory_reports, reports_peak


class Meter(ABC):
    """Takes time and peak of whole steps."""

    @abstractmethod
    def step(self, active: bool = True) -> contextlib.AbstractContextManager[None]:
        """Measure one step."""

    @abstractmethod
    def last(self) -> tuple[float, dict[str, int]]:
        """Seconds and peaks of the last measured step; no peaks if they were not taken."""

    def overhead(self, budget: int) -> int:
        """Bytes of a budget that the allocator itself may take."""
        return 0


class CpuMeter(Meter):
    """The clock; and the peak where `peaks` is on, since asking for it slows a step down."""

    def __init__(self) -> None:
        self.peaks = False
        self._seconds = 0.0
        self._peaks: dict[str, int] = {}

    @contextlib.contextmanager
    def step(self, active: bool = True) -> Iterator[None]:
        """Measure one step; memory is counted from what the step finds on entry."""
        reports: list[tuple[int, int]] = []
        counting = active and self.peaks
        with memory_reports(reports) if counting else contextlib.nullcontext():
            start = time.perf_counter()
            yield
            self._seconds = time.perf_counter() - start
        self._peaks = {"step": reports_peak(reports)} if counting else {}

    def last(self) -> tuple[float, dict[str, int]]:
        """Seconds, and the peak above what was there on entry."""
        return self._seconds, self._peaks


class CudaMeter(Meter):
    """Events at both ends of the step; the allocator's own peaks."""

    SLACK = 0.03
    """Share of the budget left to the allocator's rounding and gaps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    @contextlib.contextmanager
    def step(self, active: bool = True) -> Iterator[None]:
        """Measure one step."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self._begin.record()
        yield
        self._end.record()

    def last(self) -> tuple[float, dict[str, int]]:
        """Seconds, and peaks of allocated and reserved bytes; waits for the step to end."""
        self._end.synchronize()
        seconds = self._begin.elapsed_time(self._end) / 1e3
        return seconds, {
            "device": torch.cuda.max_memory_allocated(self.device),
            "reserved": torch.cuda.max_memory_reserved(self.device),
        }

    def overhead(self, budget: int) -> int:
        """Bytes of a budget that the allocator itself may take."""
        return int(budget * self.SLACK)


def make_meter(device: torch.device) -> Meter:
    """The meter for a device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()
