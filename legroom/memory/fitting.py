"""Fitting: which builds of the whole model to compile for the room there is.

Such a build takes a minute or more, and how much one that keeps some share will take is hard to
tell: torch's partitioner gives one and the same cut for many shares, and peaks do not always grow
with them. So shares are looked at by their forecast first, and only what should fit is compiled.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from legroom.memory.builds import Build
from legroom.memory.forecast import foresee
from legroom.memory.mechanisms.compiled import Compiler
from legroom.memory.memo import Memo
from legroom.memory.sample import Sample
from legroom.memory.simulate import Simulator
from legroom.memory.trial import Found, Subject, Way, build_ways, try_all, worth_having
from legroom.memory.whole import first_share, next_share, with_whole

log = logging.getLogger("legroom")
WHOLE_S = 150.0
"""Time to try builds of the model as one; one that was begun is made."""
MOST_BUILDS = 3
"""For one limit: where they take more than forecast, smaller ones follow."""


@dataclass
class Whole:
    """A call of the model itself, and what was found out by trying builds of it."""

    model: nn.Module
    device: torch.device
    sample: Sample
    found: Found = field(default_factory=list)
    foreseen: dict[float, int] = field(default_factory=dict)
    peaks: dict[float, int] = field(default_factory=dict)
    """Of steps, by the share that is kept: as forecast, and as measured."""
    left_s: float = WHOLE_S
    begun: bool = False
    memo: Memo = field(default_factory=lambda: Memo(None))

    def try_builds(self, compiler: Compiler, plain: Simulator, limit: int) -> None:
        """Have a build that fits a limit, and keeps about as much as can be.

        Once there are some, more are made only where none of them fits what is left.
        """
        fits = any(peak <= limit for peak in self.peaks.values())
        broken = self.begun and not self.found
        if self.left_s <= 0 or broken or fits or first_share(plain, limit) is None:
            return
        started, remember = time.perf_counter(), compiler.backend == "inductor"
        self.memo = Memo.of(self.sample, self.device) if remember else self.memo
        subjects = [Subject(self.sample, partial(self._ways, compiler, plain, limit))]
        (found,) = try_all(self.model, self.device, subjects, self.left_s, remember)
        self.found = worth_having([*self.found, *found])
        self.left_s -= time.perf_counter() - started

    def _ways(
        self, compiler: Compiler, plain: Simulator, limit: int, found: Found
    ) -> Iterator[Way]:
        for _ in range(MOST_BUILDS):
            share = self._share(plain, limit)
            if share is None or share in self.peaks:
                return
            log.info("compiling the model as one, to keep %.0f %%", 100 * share)
            self.begun = True
            yield from build_ways(compiler, self.model, [share])
            build = dict(found).get(share)
            if build is None:  # it did not even run
                return
            self.peaks[share] = _peak(plain, build)
            if self.peaks[share] <= limit:
                return

    def _share(self, plain: Simulator, limit: int) -> float | None:
        """The largest that should fit; one that may, of a model that cannot be followed."""
        first = first_share(plain, limit)
        both = self.peaks.keys() & self.foreseen.keys()
        limit -= max((self.peaks[share] - self.foreseen[share] for share in both), default=0)
        saved = sum(plain.step.storages[s].num_bytes for s in plain.step.saves)

        def following() -> float | None:
            return next_share(self.foreseen, saved, limit) if self.foreseen else first

        def shares(found: Found) -> Iterator[float]:
            while (share := following()) is not None:
                yield share
                self.memo.put(_forecast_name(share), found[-1][1])
                self.foreseen[share] = _peak(plain, found[-1][1])

        while (share := following()) is not None:
            build = self.memo.get(_forecast_name(share))
            if build is None:
                foresee(self.sample, shares, plain.machine, self.device)
                break
            self.foreseen[share] = _peak(plain, build)
        fitting = (share for share, peak in self.foreseen.items() if peak <= limit)
        return max(fitting, default=None) if self.foreseen else first


def _forecast_name(share: float) -> str:
    return f"forecast: keep {share:.0%}"


def _peak(plain: Simulator, build: Build) -> int:
    """Of a step in one build of the model."""
    return Simulator(with_whole(plain.step, build).step, plain.machine).shape([]).peak
