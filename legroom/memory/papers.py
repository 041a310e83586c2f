"""What papers report of their policies, and the same quantity by our policies and simulator.

A `Claim` is one figure of one paper, with the job and the machine it was measured on; `claimed`
computes ours. `legroom.memory.headlines` lists them. A paper's figures were measured, with its own
framework, kernels and allocator; ours come from a captured step and a machine's rates. Nothing is
fitted to match: docs/papers.md says where the two differ, and why.
"""

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

import msgspec

from legroom.core.errors import BudgetError
from legroom.core.units import format_bytes
from legroom.machine.spec import Machine
from legroom.memory.plan import Plan
from legroom.memory.planner import TIME_LIMIT_S, make_plan
from legroom.memory.retime import at_batch
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step

NONE = "keep_all"
"""The policy of a step as it is."""
CLOSE = 0.05
"""A largest batch is known to this share of it."""
NUM_BUDGETS = 7
"""Budgets that are tried for the least that works: it is known to 1/128 of what the step takes."""
NUM_TRIES = 3
"""Budgets to try where a policy names a smallest one, which its next plan may miss again."""
NO_TIME = 0.002
"""Share of the step that counts as no time lost: a wait for a copy takes 10 us at the least."""


class Measure(StrEnum):
    """Which quantity a claim is about."""

    MEMORY = "memory"  # what the step takes as it is, in GB of 1e9 bytes
    TIME = "step time"  # under a budget, over that with no limit
    SAVED = "memory saved"  # share of what the step takes as it is
    BATCH = "largest batch"  # that fits
    GAIN = "batch gain"  # the largest batch that fits over the largest with no policy
    PACE = "speed over"  # another policy's, both under one budget


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a paper, and what it was measured on; or our nearest to that."""

    name: str
    source: str
    """The paper, and what the figure is there."""
    policy: str
    measure: Measure
    figure: float
    machine: str
    job: str
    batch: int
    """For a largest batch, where the search begins."""
    sizes: dict[str, Any] = {}
    optimizer: str = "sgd-momentum"
    share: float | None = None
    """The budget as a share of what the step takes as it is; the whole device if absent, and as
    little as works if 0."""
    free: bool = False
    """For memory saved: at no cost in time."""
    rival: str = ""
    """For speed over it: the other policy."""
    unlike: str = ""
    """In what the job or the machine is not the paper's."""


class Ours(msgspec.Struct, frozen=True, kw_only=True):
    """Our figure for a claim."""

    figure: float | None = None
    """None where a policy has no plan."""
    note: str = ""
    kept: bool = True
    """Whether it is for the budget that was asked for; else it cannot be set beside theirs."""
    num_steps: int = 0
    """Steps captured for it."""
    num_plans: int = 0


StepAt = Callable[[int], Step]
"""The step at a batch."""


class Answer(NamedTuple):
    """A figure, how it came about, and whether in the budget that was asked for."""

    figure: float | None
    note: str = ""
    kept: bool = True


class Found(NamedTuple):
    """A plan, in the budget that was asked for or the least that the policy named instead."""

    plan: Plan
    limit: int
    kept: bool
    """Whether that was the budget asked for."""


class Bench:
    """Computes our figure for one claim: captures steps and makes plans, and counts both."""

    def __init__(
        self,
        claim: Claim,
        machine: Machine,
        limits: Mapping[str, int],
        step_at: StepAt,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self.claim, self.machine, self.limits = claim, machine, limits
        self.step_at, self.time_limit_s = cache(step_at), time_limit_s
        self.num_plans = 0

    def ours(self) -> Ours:
        """Our figure, and how it came about."""
        measures: dict[Measure, Callable[[], Answer]] = {
            Measure.MEMORY: self._memory,
            Measure.TIME: self._time,
            Measure.SAVED: self._saved,
            Measure.BATCH: self._batch,
            Measure.GAIN: self._gain,
            Measure.PACE: self._pace,
        }
        found = measures[self.claim.measure]()._asdict()
        num_steps = self.step_at.cache_info().currsize
        return Ours(**found, num_steps=num_steps, num_plans=self.num_plans)

    # -- one measure each ------------------------------------------------------------------------

    def _memory(self) -> Answer:
        return Answer(self._natural_bytes(self.claim.batch) / 1e9)

    def _time(self) -> Answer:
        step = self.step_at(self.claim.batch)
        found = self._nearest(self.claim.policy)
        if found is None:
            return Answer(None, "no plan")
        ratio = found.plan.predicted.step_s / self._free_s(step)
        note = f"{self._in_budget(found)}; {found.plan.why}"
        return Answer(ratio, note, found.kept or self.claim.share == 0)

    def _saved(self) -> Answer:
        """The least memory that a plan is found in, by halving."""
        step, natural = self.step_at(self.claim.batch), self._natural_bytes(self.claim.batch)
        longest_s = self._free_s(step) * (1 + NO_TIME) if self.claim.free else math.inf
        high, low, best = natural, 0, natural
        for _ in range(NUM_BUDGETS):
            middle = (low + high) // 2
            plan = self._plan(step, self.claim.policy, middle)
            if isinstance(plan, Plan) and plan.predicted.step_s <= longest_s:
                high, best = middle, min(best, plan.predicted.device_bytes)
            else:
                low = middle
        return Answer(1 - best / natural, f"{format_bytes(natural)} to {format_bytes(best)}")

    def _batch(self) -> Answer:
        return Answer(float(self._largest(self.claim.policy, self.claim.batch)))

    def _gain(self) -> Answer:
        without = self._largest(NONE, self.claim.batch)
        planned = self._largest(self.claim.policy, max(round(without * self.claim.figure), 1))
        return Answer(planned / without if without else None, f"{without} to {planned}")

    def _pace(self) -> Answer:
        mine, other = (self._nearest(name) for name in (self.claim.policy, self.claim.rival))
        if mine is None or other is None:
            return Answer(None, "no plan")
        names = ((self.claim.policy, mine), (self.claim.rival, other))
        missed = [f"{name} {self._in_budget(x)}" for name, x in names if not x.kept]
        note = "; ".join(missed) or self._in_budget(mine)
        pace = other.plan.predicted.step_s / mine.plan.predicted.step_s
        return Answer(pace, note, mine.kept and other.kept)

    # -- what they ask for -----------------------------------------------------------------------

    def _natural_bytes(self, batch: int) -> int:
        step = self.step_at(batch)
        return Simulator(step, self.machine).run([], NONE).device_bytes

    def _free_s(self, step: Step) -> float:
        return Simulator(step, self.machine).run([], NONE).step_s

    def _limit(self) -> int:
        if self.claim.share is None:
            return self.limits["device"]
        return max(int(self.claim.share * self._natural_bytes(self.claim.batch)), 1)

    def _plan(self, step: Step, policy: str, limit: int) -> Plan | BudgetError:
        self.num_plans += 1
        limits = {**self.limits, "device": limit}
        try:
            given = (step, self.machine, limits, policy)
            return make_plan(*given, time_limit_s=self.time_limit_s)
        except BudgetError as error:
            return error.with_traceback(None)  # whose frames hold the step

    def _nearest(self, policy: str) -> Found | None:
        """A plan in the claim's budget, else in the least that the policy then names."""
        step, wanted = self.step_at(self.claim.batch), self._limit()
        limit = wanted
        for _ in range(NUM_TRIES):
            plan = self._plan(step, policy, limit)
            if isinstance(plan, Plan):
                return Found(plan, limit, limit == wanted)
            limit = plan.smallest_bytes or 2 * limit
        return None

    def _in_budget(self, found: Found) -> str:
        asked = f", not {format_bytes(self._limit())}" if self.claim.share != 0 else ""
        return f"in {format_bytes(found.limit)}{'' if found.kept else asked}"

    def _fits(self, policy: str, batch: int) -> bool:
        plan = self._plan(self._linear(batch), policy, self.limits["device"])
        return isinstance(plan, Plan)

    def _linear(self, batch: int) -> Step:
        """The step at a batch, from two that were captured: a capture each would take minutes."""
        sizes = (self.claim.batch, 2 * self.claim.batch)
        small, large = (self.step_at(size) for size in sizes)
        return at_batch(small, large, sizes, batch, self.machine)

    def _largest(self, policy: str, start: int) -> int:
        """The largest batch that fits, found by doubling and then by halving what is between."""
        low, high = 0, start
        while self._fits(policy, high):
            low, high = high, 2 * high
        while high - low > max(CLOSE * high, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(policy, middle) else (low, middle)
        return low
