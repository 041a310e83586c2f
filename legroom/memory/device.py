"""Measure a step from outside: wall time and the allocator's own peak, not the runtime's books."""

import contextlib
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from legroom.core.errors import StepError
from legroom.core.outcome import Timeline
from legroom.memory.arena import Placement
from legroom.memory.layout import Layout
from legroom.memory.timers import memory_reports, reports_peak, timing_event

MAX_POINTS = 1500
"""Points of a measured timeline."""
MARGIN, MOST_MARGIN = 32 << 20, 64 << 20
"""Device bytes left for small blocks and for libraries when memory is taken in advance."""
MARGIN_SHARE, SMALL_SHARE = 1 / 96, 1 / 16
"""Large jobs are left this share of the cap, if that is more; small ones have small blocks, and are
left no more than that."""
GRAIN = 20 << 20
"""The allocator takes memory by this much, and looks at the cap before it rounds up."""
MOST_SLACK = 0.15
"""Share of a budget that may be left to the allocator, at most."""


@dataclass(frozen=True)
class Reading:
    """One step as measured."""

    seconds: Callable[[], float]
    """How long it took; asking waits for the step to end on the device."""
    peaks: dict[str, int]
    """Bytes by name; none if they were not taken."""
    host_s: tuple[float, float] = (0.0, 0.0)
    """How long the host was at it, and at its forward if that is one; 0 where it is not told."""
    pressed: bool = False
    """Whether allocations had to wait for cached memory to be given back: that is slow."""


class Meter(ABC):
    """Takes time and peak of whole steps."""

    warm = 2
    """Steps of a kind before one is recorded: the first finds everything cold."""
    slack = 0.0
    """Share of the budget left to what the trace does not show, beyond the allocator's overhead."""
    firm = False
    """Whether some of that was needed."""

    @abstractmethod
    def step(
        self, model: nn.Module | None = None, *, apart: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Measure one step, and the forward of a model in it.

        `apart`: the device is to end what it is at before.
        """

    @abstractmethod
    def last(self) -> Reading:
        """The last measured step."""

    def timeline(self, static_bytes: int) -> Timeline | None:
        """Memory over the last step whose peak was taken, where the allocator tells."""
        return None

    def found(self) -> int:
        """Bytes that lie on the device now, whosoever they are; 0 where that cannot be told."""
        return 0

    def overhead(self, budget: int) -> int:
        """Bytes of a budget that the allocator itself may take."""
        return 0

    def give_way(self, share: float) -> bool:
        """Leave more of a budget to the allocator, for good; whether there was more to leave."""
        self.firm = True
        return self._leave(share)

    def leave(self, gap: int, budget: int) -> bool:
        """Leave the allocator room for a gap of this size; whether that is more than so far."""
        return self._leave(max(gap - self.overhead(budget), 0) / budget)

    def _leave(self, share: float) -> bool:
        before, self.slack = self.slack, min(self.slack + share, MOST_SLACK)
        return self.slack > before

    def take_back(self) -> bool:
        """Leave the allocator no more than steps have needed; whether that is less than so far."""
        return False

    def unlearn(self) -> None:
        """The last step was not like others of its kind."""
        return None

    def usable(self, budget: Mapping[str, int]) -> dict[str, int]:
        """A budget less what the allocator itself may take."""
        return {**budget, "device": budget["device"] - self.overhead(budget["device"])}

    @property
    def scratch(self) -> int:
        """Bytes that libraries may take for themselves in the first steps."""
        return 0

    def room(self, budget: int) -> int:
        """Bytes of a budget that plans can be laid out in; 0 where the allocator takes none."""
        return 0

    @abstractmethod
    def make_room(self, placement: Placement) -> Placement:
        """Take memory at once, in stretches kept apart, the largest last; none: leave it be.

        What the placement is from now on: once a step has run, it may be known better; and where
        there is less room than the plan reckoned with, by how much.
        """

    @abstractmethod
    def cap(self, limit: int) -> None:
        """Let the allocator itself refuse more than the budget, where it can."""

    @abstractmethod
    def uncap(self) -> None:
        """Take the cap away."""


class CpuMeter(Meter):
    """The clock; and the peak where `peaks` is on, since asking for it slows a step down."""

    def __init__(self) -> None:
        self.peaks = False
        self._seconds = 0.0
        self._peaks: dict[str, int] = {}
        self._reports: list[tuple[int, int]] = []
        self._start_ns = 0

    @contextlib.contextmanager
    def step(self, model: nn.Module | None = None, *, apart: bool = False) -> Iterator[None]:
        """Measure one step; memory is counted from what the step finds on entry."""
        reports: list[tuple[int, int]] = []
        counting = self.peaks
        with memory_reports(reports) if counting else contextlib.nullcontext():
            start, start_ns = time.perf_counter(), time.time_ns()
            yield
            self._seconds = time.perf_counter() - start
        self._peaks = {"step": reports_peak(reports)} if reports else {}
        if counting:
            self._reports, self._start_ns = reports, start_ns

    def last(self) -> Reading:
        """Seconds, and the peak above what was there on entry."""
        seconds = self._seconds
        return Reading(lambda: seconds, self._peaks)

    def timeline(self, static_bytes: int) -> Timeline | None:
        """The allocator's reports of that step, added up; the highest of each stretch."""
        if not self._reports:
            return None
        levels = np.cumsum([n for _, n in self._reports]) + static_bytes
        edges = np.linspace(0, len(levels), min(len(levels), MAX_POINTS) + 1).astype(int)
        spots = [int(a + levels[a:b].argmax()) for a, b in itertools.pairwise(edges) if b > a]
        return Timeline(
            source="measured",
            times_s=tuple((self._reports[i][0] - self._start_ns) / 1e9 for i in spots),
            bytes_by_kind={"measured": tuple(int(levels[i]) for i in spots)},
        )

    def make_room(self, placement: Placement) -> Placement:
        """The CPU's allocator is left alone."""
        return placement

    def cap(self, limit: int) -> None:
        """The CPU's allocator takes no cap."""

    def uncap(self) -> None:
        """Nothing to take away."""


@contextlib.contextmanager
def noting_ends(model: nn.Module, into: list[float]) -> Iterator[None]:
    """Note when forwards of a model end, by the host's clock."""
    hook = model.register_forward_hook(lambda *_: into.append(time.perf_counter()))
    try:
        yield
    finally:
        hook.remove()


class CudaMeter(Meter):
    """Events at both ends of the step; the allocator's own peaks."""

    SLACK = 0.015
    """Share of a budget that the allocator takes, at the least."""
    warm = 3
    """The second has memory mapped for it, and a host that is slow at first touch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._limit = 0
        self._grows = self._capped = False
        self.layout = Layout(device)
        self._retries = 0
        self._host_s = (0.0, 0.0)
        self._begin, self._end = timing_event(), timing_event()

    @contextlib.contextmanager
    def step(self, model: nn.Module | None = None, *, apart: bool = False) -> Iterator[None]:
        """Measure one step."""
        if apart:
            torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._begin, self._end = timing_event(), timing_event()
        self._retries = self._count_retries()
        ends: list[float] = []
        noting = noting_ends(model, ends) if model is not None else contextlib.nullcontext()
        self._begin.record()
        start = time.perf_counter()
        with noting, self.layout.watched():
            yield
        self._host_s = (time.perf_counter() - start, ends[0] - start if len(ends) == 1 else 0.0)
        self._end.record()

    def last(self) -> Reading:
        """Seconds between the events, and peaks of allocated and reserved bytes."""
        begin, end = self._begin, self._end

        def seconds() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        peaks = {
            "device": stats["allocated_bytes"]["all"]["peak"],
            "reserved": stats["reserved_bytes"]["all"]["peak"],
        }
        before, self._retries = self._retries, stats["num_alloc_retries"]
        pressed = self._retries > before
        if pressed:
            self.layout.give_up()
        return Reading(seconds, peaks, self._host_s, pressed)

    def found(self) -> int:
        """Bytes allocated by this process, less walls: layouts have their own count of those."""
        return torch.cuda.memory_allocated(self.device) - self.layout.walls_bytes

    def overhead(self, budget: int) -> int:
        """Bytes of a budget that the allocator itself may take.

        Growing segments: a grain at the cap, one, or what was found, for those in part filled with
        what stays, and the margin, which is outside of the room that plans are laid out in.
        """
        return max(int(budget * self.SLACK), self._gaps(budget)) + self._left(budget)

    def _gaps(self, budget: int) -> int:
        lost = max(self.layout.lost, GRAIN)
        gaps = GRAIN + lost + self._margin(budget - GRAIN) if self._grows else 0
        return min(gaps, int(budget * MOST_SLACK))

    def _left(self, budget: int) -> int:
        """What is left to it beyond that, in whole grains."""
        more = int(budget * self.slack)
        return -(-more // GRAIN) * GRAIN if self._grows else more

    def _margin(self, limit: int) -> int:
        least = min(MARGIN, int(limit * SMALL_SHARE))
        return min(MOST_MARGIN, max(least, int(limit * MARGIN_SHARE)))

    @property
    def scratch(self) -> int:
        """For matrix products in forward and in backward, 32 MiB each on large cards; and more."""
        return 128 << 20

    def room(self, budget: int) -> int:
        """All but those gaps, and a grain to spare: once laid out, tensors leave no others.

        What weights leave of their segments is looked up first; a layout is then made anew.
        """
        if not self._grows:
            return 0
        if self._capped:
            self.layout.look()
        return max(budget - self._gaps(budget) - self._left(budget) - GRAIN, 0)

    def make_room(self, placement: Placement) -> Placement:
        """Map memory for all of a step, in stretches, and leave them to the allocator."""
        if not self._grows or not self._capped:
            return placement
        return self.layout.take_up(placement, self._limit - self._margin(self._limit))

    def take_back(self) -> bool:
        """Where the last layout that was watched had room to spare."""
        if not self.slack or self.firm:
            return False
        share = self.layout.spare_bytes() / max(self._limit, 1)
        before, self.slack = self.slack, max(self.slack - share, 0.0)
        return self.slack < before

    def unlearn(self) -> None:
        """What it asked the allocator for says nothing of them."""
        self.layout.unlearn()

    def _count_retries(self) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self.device)["num_alloc_retries"])

    def cap(self, limit: int) -> None:
        """Cap reserved memory, and keep the allocator from breaking its segments up."""
        settings = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        if not any(os.environ.get(name) for name in settings):
            # Growing segments waste least; the user's own settings, if any, hold.
            setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
            (setter or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
            self._grows = True
        self._limit, self._capped = limit - (GRAIN if self._grows else 0), True
        self._clear()
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, max(self._limit, 0) / total), self.device
        )

    def _clear(self) -> None:
        """Give back what earlier work left with the allocator, where that counts against the cap.

        Workspaces of libraries are taken once, from whatever segment had a gap, and then hold all
        of it; a library that finds none takes another.
        """
        if torch.cuda.memory_reserved(self.device) > self._limit:
            torch.cuda.synchronize(self.device)
            getattr(torch._C, "_cuda_clearCublasWorkspaces", int)()
            torch.cuda.empty_cache()

    def uncap(self) -> None:
        """Allow the whole device again."""
        self.layout.forget()
        self._capped = False
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)


def make_meter(device: torch.device) -> Meter:
    """The meter for a device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def check_device(model: nn.Module, device: torch.device) -> None:
    """Raise StepError for a model that went elsewhere since."""
    param = next(model.parameters(), None)
    if param is not None and param.device.type != device.type:
        raise StepError(
            f"the model was fitted on {device} and is now on {param.device}: "
            "call legroom.fit after moving it"
        )
