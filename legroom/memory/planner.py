"""From a policy's name to a checked plan, or by how much it misses."""

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from legroom.core.errors import BudgetError
from legroom.core.registry import Registry
from legroom.core.units import format_bytes
from legroom.machine.spec import Machine
from legroom.memory.actions import Action
from legroom.memory.arena import NOWHERE, WHOLE, Placement, place
from legroom.memory.host import CAUTION
from legroom.memory.plan import Plan
from legroom.memory.play import tier_peaks
from legroom.memory.scratch import with_scratch
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step

TIME_LIMIT_S = 5.0


class Problem(NamedTuple):
    """What a policy is given: the step on its machine, and the budget per tier."""

    simulator: Simulator
    budget: Mapping[str, int]
    lossy: bool = False
    """Whether lossy compression is allowed."""
    quick: bool = False
    """Whether a plan is wanted only to compare steps by: a good one soon is better than the best.
    """
    time_limit_s: float = TIME_LIMIT_S
    """How long searches may take; they return their best so far."""

    @property
    def step(self) -> Step:
        """The trace."""
        return self.simulator.step

    @property
    def limit(self) -> int:
        """The device's budget."""
        return self.budget["device"]

    def fits(self, actions: Sequence[Action]) -> bool:
        """Whether these actions keep the device's budget."""
        return self.simulator.shape(actions).peak <= self.limit

    def keeps(self, actions: Sequence[Action]) -> bool:
        """Whether they keep the budgets of all tiers."""
        used = tier_peaks(self.step, actions)
        over = any(size > self.budget.get(tier, 0) for tier, size in used.items())
        return not over and self.fits(actions)

    def tiers(self) -> list[str]:
        """Lower tiers that can be reached and have a budget, nearest first."""
        order = ("host", "disk")
        return [t for t in order if self.simulator.routes.get(t) and self.budget.get(t, 0) > 0]


class Choice(NamedTuple):
    """What a policy answers."""

    actions: list[Action]
    why: str


Policy = Callable[[Problem], Choice]
POLICIES: Registry[Policy] = Registry("policy")


LOSS_OPS = ("log_softmax", "nll_loss")
SAFE = 0.88
"""Share of the budget that a plan for steps not yet measured may use."""
SHARES = (1.0, 0.98, 0.965, 0.95, 0.93, 0.9, 0.85, 0.8)
"""Shares of the device's budget to plan for, until an allocator finds room for all tensors."""
LINK_SHARE = 0.88
"""Of the rate of each link, a plan counts on this: copies wait for each other and for the host, and
a plan that leaves a link no time to spare waits for every late one."""
FAR = 0.7
"""A peak below this share of the budget leaves the allocator room in plenty."""
LEISURE_S = 3.0
"""Time for plans at leisure, one of which is made in any case."""
NEAR, HOPE = 0.01, 0.03
"""A plan that lacks less than this share of the budget is made once more, for that much less; a
quick one that lacks less than the second, at leisure."""
DEAR = 1.1
"""Where no plan finds room for all, one that lacks less may take so many times as long."""
WIDE = 1.01
"""A plan that needs all the room there is for its layout has to be faster by this much."""
LARGE = 0.05
"""A tensor of this share of the budget leaves gaps that matter."""


def careful_simulator(step: Step, machine: Machine, caution: float) -> Simulator:
    """With links and a host that are slower than they are known to be."""
    return Simulator(step, machine.with_links(LINK_SHARE), host_pace=caution)


def make_plan(
    step: Step,
    machine: Machine,
    budget: Mapping[str, int],
    policy: str = "auto",
    *,
    lossy: bool = False,
    quick: bool = False,
    caution: float = CAUTION,
    beside: int = 0,
    time_limit_s: float = TIME_LIMIT_S,
) -> Plan:
    """Let a policy choose, replay its choice, and return the plan.

    It chooses for a host that takes `caution` times as long as usual, and for slower links. Who
    is told of a budget that works is told of one with `beside` more bytes on the device. Policies
    that search answer after about `time_limit_s` at the latest.

    Raises BudgetError when the plan does not keep the budget of some tier, UnknownName for a
    policy that does not exist.
    """
    import legroom.memory.policies  # noqa: F401  (fills the registry)

    choose = POLICIES[policy]
    started = time.perf_counter()
    careful = careful_simulator(step, machine, caution)
    choice = choose(Problem(careful, dict(budget), lossy, quick, time_limit_s))
    outcome = Simulator(step, machine).run(choice.actions, policy)
    plan = Plan(
        policy=policy,
        why=choice.why,
        machine=machine.name,
        model=step.model,
        signature=step.signature,
        budget=dict(budget),
        actions=tuple(choice.actions),
        predicted=outcome,
        planning_s=time.perf_counter() - started,
    ).check_against(step)
    for tier, limit in budget.items():
        if outcome.peak_bytes.get(tier, 0) > limit:
            raise budget_error(plan, step, tier, beside if tier == "device" else 0)
    return plan


def make_first_plan(
    step: Step,
    machine: Machine,
    budget: Mapping[str, int],
    policy: str,
    *,
    lossy: bool = False,
    unseen: Sequence[int] = (0,),
    tight: bool = True,
) -> Plan:
    """A plan for steps not yet measured, with room for what kernels may take for themselves.

    Where that cannot be had, the one that comes closest to it. A BudgetError names what would
    do with that room.
    """
    make = partial(make_safe_plan, machine=machine, budget=budget, policy=policy, lossy=lossy)
    heavy = with_scratch(step)
    if heavy is step:
        return make(step, unseen=unseen, tight=tight)
    try:
        return make(heavy, unseen=unseen, tight=tight)
    except BudgetError as error:
        told = error
    try:
        limit = {**budget, "device": budget["device"] + told.missing_bytes}
        close = make_plan(heavy, machine, limit, policy, lossy=lossy)
        outcome = Simulator(step, machine).run(close.actions, policy)
        if all(outcome.peak_bytes.get(tier, 0) <= size for tier, size in budget.items()):
            return msgspec.structs.replace(close, budget=dict(budget), predicted=outcome)
        return make(step, unseen=unseen, tight=tight)
    except BudgetError:
        raise told from None
    finally:
        del told  # its frames hold all callers' tensors


def make_safe_plan(
    step: Step,
    machine: Machine,
    budget: Mapping[str, int],
    policy: str,
    *,
    lossy: bool = False,
    unseen: Sequence[int] = (0,),
    tight: bool = True,
) -> Plan:
    """A plan for steps not yet measured: with room for what fake tensors do not show.

    That is scratch memory, a loss computed outside the model, and what libraries take: `unseen`
    bytes, the first of these that can be had; and a gap for a large tensor, if that can be had.
    Where no such room can be had, a `tight` plan leaves half of what it could at most, or none;
    else BudgetError is raised.
    """
    names = ("keep_all", "recompute_all", "auto") if policy == "auto" else (policy,)
    limit, make = budget["device"], partial(make_plan, step, machine, lossy=lossy)
    spare = spared_bytes(step, limit)
    rooms = [max(int(limit * SAFE) - num_bytes, 0) for num_bytes in unseen]
    *others, last = itertools.product(rooms, names)
    roomy = max(rooms[0] - spare, 0)
    others[:0] = [(roomy, name) for name in names[:-1] if spare]  # if that is simple
    for room, name in others:
        with contextlib.suppress(BudgetError):
            return make({**budget, "device": room}, name)
    room, name = last
    try:
        return make({**budget, "device": room}, name)
    except BudgetError as error:  # not kept: it would hold all callers' tensors in a cycle
        if not tight:
            raise
        smallest = min(room + error.missing_bytes, limit)
    with contextlib.suppress(BudgetError):
        return make({**budget, "device": (smallest + limit) // 2}, policy)
    least = min((num_bytes for num_bytes in unseen if num_bytes), default=0)
    return make(budget, policy, beside=least)


def rough_placement(plan: Plan | None, limit: int, room: int) -> Placement:
    """For a plan of steps not yet recorded: all of the room, unless that is far more than enough.

    An allocator that has to find it piece by piece, at its cap, is slow, and so is the step that
    is timed meanwhile.
    """
    tight = plan is not None and plan.predicted.device_bytes >= FAR * limit
    return WHOLE if room and tight else NOWHERE


def make_placed_plan(
    step: Step,
    machine: Machine,
    budget: Mapping[str, int],
    policy: str,
    *,
    lossy: bool = False,
    room: int | None = None,
    caution: float = CAUTION,
) -> tuple[Plan, Placement]:
    """A plan whose tensors find room in the device's budget as its allocator places them.

    Where none does, the allocator has to tidy up in mid-step, which is slow and may fail: the plan
    that comes closest is taken. `room` is what tensors may lie in at the most, where those that lie
    in the budget find none; where it is 0, since the allocator cannot be helped, or is plenty,
    nothing is placed.
    """
    make = partial(make_plan, step, machine, policy=policy, lossy=lossy, caution=caution)
    if room == 0:
        return make(budget), NOWHERE
    careful, limit = careful_simulator(step, machine, caution), budget["device"]
    wide = limit if room is None else room
    limit = min(limit, wide)

    def placed(share: float, quick: bool) -> _Placed:
        plan = make({**budget, "device": round(limit * share)}, quick=quick)
        seconds, tight = careful.time(plan.actions), plan.predicted.device_bytes >= FAR * limit
        if not tight:
            return _Placed(0, seconds, plan, NOWHERE)
        placement = place(careful, plan.actions, limit)
        in_wide = placement.missing_bytes > 0 and wide > limit
        if in_wide:
            placement, seconds = place(careful, plan.actions, wide), WIDE * seconds
        placement = placement._replace(whose=step.signature)
        return _Placed(placement.missing_bytes, seconds, plan, placement, in_wide)

    found, tried = list[_Placed](), list[float]()
    with contextlib.suppress(BudgetError):
        for share in SHARES:
            found.append(placed(share, quick=True))
            tried.append(share)
            least = min(one.seconds for one in found)
            placed_well = not found[-1].missing_bytes and not found[-1].in_wide
            if placed_well and found[-1].seconds <= DEAR * least:
                break
    until = time.monotonic() + LEISURE_S
    near = [s for s, one in zip(tried, found, strict=True) if one.missing_bytes < HOPE * limit]
    others = [share for share in near if share != tried[-1]]
    for share in (*tried[-1:], *others):  # at leisure; they may find room in a larger one, too
        if share != tried[-1] and time.monotonic() > until:
            break
        with contextlib.suppress(BudgetError):
            found.append(placed(share, quick=False))
            missing = found[-1].missing_bytes / limit
            if 0 < missing < NEAR:
                found.append(placed(share - 2 * missing, quick=False))
            if share != tried[-1] and not found[-1].missing_bytes:
                break
    if not found:
        found.append(placed(budget["device"] / limit, quick=False))
    best = best_placed(found)
    return best.plan, best.placement


def best_placed(found: "Sequence[_Placed]") -> "_Placed":
    """The fastest that finds room for all; else what lacks least of those not much slower."""
    least = min(one.seconds for one in found)
    fits = [one for one in found if not one.missing_bytes]
    if fits:
        return min(fits, key=lambda one: one.seconds)
    quick = (one for one in found if one.seconds <= DEAR * least)
    return min(quick, key=lambda one: (one.missing_bytes, one.seconds))


class _Placed(NamedTuple):
    missing_bytes: int
    """By how much the room is too small."""
    seconds: float
    """What it takes on a bad day, and a little more if there is little room."""
    plan: Plan
    placement: Placement
    in_wide: bool = False
    """Whether it lies in more than the budget."""


def spared_bytes(step: Step, limit: int) -> int:
    """The largest tensor, where that is large beside the budget; else nothing."""
    largest = max((s.num_bytes for s in step.storages if s.birth >= 0), default=0)
    return largest if largest >= LARGE * limit else 0


def budget_error(plan: Plan, step: Step, tier: str, beside: int = 0) -> BudgetError:
    """Say by how much a plan is over, what works, and which tensors dominate."""
    peak, limit = plan.predicted.peak_bytes[tier], plan.budget[tier]
    told = ", by the shapes of its tensors," if step.capture == "fake" else ""
    works = f"The smallest budget that works with it{told} is {_exactly(peak)}. "
    if beside:
        works += (
            f"A loss outside of the model, of which nothing is known before a step has run, may "
            f"take up to {format_bytes(beside)} more: {_exactly(peak + beside)}. "
        )
    parts = sorted(plan.predicted.peak_parts.items(), key=lambda x: -x[1])
    made_of = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in parts)
    largest = sorted(step.storages, key=lambda s: -s.num_bytes)[:3]
    names = ", ".join(f"{s.name or 'unnamed'} {format_bytes(s.num_bytes)}" for s in largest)
    message = (
        f"policy {plan.policy!r} needs {format_bytes(peak)} of {tier} for {plan.model}, "
        f"{format_bytes(peak - limit)} over the budget of {format_bytes(limit)}. "
        f"{works}The peak is at {plan.predicted.peak_at}: {made_of}. Largest tensors: {names}. "
        f"Try a larger budget, a smaller batch, or a lower tier with more room{_hint(plan)}."
    )
    return BudgetError(message, missing_bytes=peak - limit, smallest_bytes=peak + beside)


def _exactly(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} ({num_bytes} bytes)"


def _hint(plan: Plan) -> str:
    """What else helps, where the loss of a language model is what takes most."""
    at_loss = any(op in plan.predicted.peak_at for op in LOSS_OPS)
    return '; or compile="blocks", which computes the loss in chunks' if at_loss else ""
