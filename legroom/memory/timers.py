"""Time and scratch memory of each op while a real step is recorded.

On CUDA, events around each op give its time, and the allocator's peak its scratch. On CPU the
clock gives the time, and the profiler's memory reports, which carry the same clock, the scratch.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from legroom.core.quiet import silenced
from legroom.memory.raw import RawOp

CYCLES_PER_S = 3e9
"""No card has a faster clock."""
SLEEP_S, AWAKE_S = 60e-3, 40e-3
"""How long the device is put to sleep, and after how long it is again: the host may be at one op
for the time between before the device can wake in it."""
LONGEST_SLEEP_S = 0.5


def timing_event() -> torch.cuda.Event:
    """An event that takes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def put_to_sleep(seconds: float) -> None:
    """Have the device do nothing for at least so long."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_S))  # type: ignore[no-untyped-call]


class CudaTimer:
    """Events around each op; scratch from the allocator's own peak.

    The device is put to sleep again before it can wake, so that ops are all enqueued when it does
    and run back to back: else a short op would be charged for the host's own pace.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slept_at = -math.inf
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._scratch: list[int] = []

    def start(self) -> None:
        """An op is about to run."""
        now = time.perf_counter()
        if now - self._slept_at > AWAKE_S:
            self._slept_at = now
            put_to_sleep(SLEEP_S)
        torch.cuda.reset_peak_memory_stats(self.device)
        begin = timing_event()
        self._events.append((begin, timing_event()))
        begin.record()

    def stop(self) -> None:
        """It has run: what it held above what it leaves is scratch."""
        self._events[-1][1].record()
        peak = torch.cuda.max_memory_allocated(self.device)
        self._scratch.append(max(0, peak - torch.cuda.memory_allocated(self.device)))

    def cancel(self) -> None:
        """It raised: as if it had not begun."""
        self._events.pop()

    def fill(self, ops: list[RawOp], births: list[int]) -> None:
        """Write times and scratch into the recorded ops."""
        torch.cuda.synchronize(self.device)
        for op, (begin, end), scratch in zip(ops, self._events, self._scratch, strict=True):
            op.time_s = begin.elapsed_time(end) / 1e3
            op.workspace_bytes = scratch

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Nothing to set up."""
        yield


class CpuTimer:
    """The clock around each op; scratch from the memory reports between."""

    def __init__(self) -> None:
        self._windows: list[list[int]] = []
        self.reports: list[tuple[int, int]] = []

    def start(self) -> None:
        """An op is about to run."""
        self._windows.append([time.time_ns(), 0])

    def stop(self) -> None:
        """It has run."""
        self._windows[-1][1] = time.time_ns()

    def cancel(self) -> None:
        """It raised: as if it had not begun."""
        self._windows.pop()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Collect memory reports while the step runs."""
        with memory_reports(self.reports):
            yield

    def fill(self, ops: list[RawOp], births: list[int]) -> None:
        """Write times and scratch into the recorded ops; `births` is what each op leaves."""
        times = np.array([t for t, _ in self.reports], dtype=np.int64)
        levels = np.cumsum([n for _, n in self.reports], dtype=np.int64)
        for op, (begin, end), left in zip(ops, self._windows, births, strict=True):
            op.time_s = (end - begin) / 1e9
            low, high = np.searchsorted(times, [begin, end])
            if high > low:
                before = int(levels[low - 1]) if low else 0
                op.workspace_bytes = max(0, int(levels[low:high].max()) - before - left)


SPAN = "legroom: "
"""How names of spans begin."""
Spans = dict[str, tuple[int, int]]
"""By name, first and last ns."""


_nested: list[bool] = []
"""Collections under way, and whether another one has begun in each."""


def is_taken() -> bool:
    """Whether the one profiler there is runs for somebody else, who is to keep it."""
    return not _nested and torch._C._autograd._profiler_enabled()


@contextlib.contextmanager
def memory_reports(into: list[tuple[int, int]], spans: Spans | None = None) -> Iterator[None]:
    """Collect (time in ns, bytes taken or given back) of torch's CPU allocator.

    And the spans of what `torch.profiler.record_function` names: their times are by the same clock,
    which differs from others by more than there is between two reports. There is one profiler: of
    collections around another one, only the innermost gets any; none does while it is taken.
    """
    if is_taken():
        yield
        return
    _nested[:] = [True] * len(_nested) + [False]
    cpu = torch.profiler.ProfilerActivity.CPU
    profile = torch.profiler.profile(activities=[cpu], profile_memory=True)
    with silenced(2):
        profile.start()
    try:
        yield
    finally:
        with silenced(2):
            profile.stop()
        results: Any = profile.profiler
        for event in () if _nested.pop() else results.kineto_results.events():
            if (
                event.name() == "[memory]"
                and event.device_type() == torch._C._autograd.DeviceType.CPU
            ):
                into.append((event.start_ns(), event.nbytes()))
            elif spans is not None and event.name().startswith(SPAN):
                spans[event.name()] = event.start_ns(), event.start_ns() + event.duration_ns()
        into.sort(key=lambda row: row[0])


def reports_peak(reports: list[tuple[int, int]]) -> int:
    """Most bytes taken at once, above what was there when the reports began."""
    levels = np.cumsum([n for _, n in reports], dtype=np.int64)
    return max(int(levels.max(initial=0)), 0)


class CpuClock:
    """Takes the time at marks."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        """Now."""
        self._marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Seconds between marks."""
        return [b - a for a, b in itertools.pairwise(self._marks)]

    def host_spans(self) -> list[float]:
        """Seconds of the host between marks; a CPU that computes has none."""
        return [0.0] * (len(self._marks) - 1)


class CudaClock(CpuClock):
    """Events, with the device asleep until all is enqueued: the host's own pace does not count."""

    def __init__(self, host_s: float) -> None:
        super().__init__()
        self._events: list[torch.cuda.Event] = []
        put_to_sleep(min(1.5 * host_s, LONGEST_SLEEP_S))

    def mark(self) -> None:
        """Now, for both."""
        super().mark()
        self._events.append(timing_event())
        self._events[-1].record()

    def spans(self) -> list[float]:
        """Seconds of the device between marks."""
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self._events)]

    def host_spans(self) -> list[float]:
        """Seconds of the host between marks, where it waits for nothing."""
        return [b - a for a, b in itertools.pairwise(self._marks)]
