"""Gaps of a step: how long each saved storage is not needed, and could be somewhere else.

[Note: layers] Published policies speak of layers: one call of an operator with weights, and what
follows it. Here a layer is a stretch of forward that begins with a product, a convolution or an
attention, and ends before the next; the storages saved in it are its inputs and results. Its
backward begins where the first of them is asked for.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from legroom.memory.actions import Move
from legroom.memory.planner import Problem
from legroom.memory.schedule import Want, schedule, tighten
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Phase, Step

CONVOLUTIONS = ("convolution", "conv2d")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "rnn_layer", "embedding")
ATTENTIONS = ("scaled_dot_product",)


class Gap(NamedTuple):
    """A saved storage between its last use in forward and its first in backward."""

    storage: int
    num_bytes: int
    start: int
    """First position where nothing but backward needs it."""
    end: int
    """First use in backward."""
    start_s: float
    end_s: float
    """The same by the clock of the unplanned step."""

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.end_s - self.start_s


def find_gaps(problem: Problem, least_bytes: int = 1) -> list[Gap]:
    """The gaps of all storages that can be moved, in order of their start."""
    step, until = problem.step, problem.simulator.until_s
    found = []
    for s in movable(problem):
        size, end = step.storages[s].num_bytes, step.first_use(s)
        start = max(step.packed(s), step.storages[s].release + 1)
        if size >= least_bytes:
            found.append(Gap(s, size, start, end, until[start], until[end]))
    return sorted(found, key=lambda gap: (gap.start, gap.storage))


def movable(problem: Problem) -> list[int]:
    """Saved storages that are free between forward and backward once their copy is out."""
    step = problem.step
    found = []
    for s in step.saves:
        storage, use = step.storages[s], step.first_use(s)
        used = step.packed(s) < use < len(step.ops)
        if used and storage.release < use and storage.num_bytes > 0 and s not in step.unsettled:
            found.append(s)
    return found


class Layer(NamedTuple):
    """A stretch of forward; see [Note: layers]."""

    first: int
    last: int
    convolves: bool
    """Whether it begins with a convolution."""
    storages: tuple[int, ...]
    """Those first saved in it."""
    back: int
    """Where its backward begins, after that of all later ones."""


def find_layers(step: Step) -> list[Layer]:
    """The layers of a step, in order of forward."""
    heads = [i for i in range(step.turn) if is_heavy(step.ops[i].name)]
    starts = sorted({0, *heads})
    owned: list[list[int]] = [[] for _ in starts]
    for s in step.saves:  # an op's inputs are saved at its own position, its results at the next
        at = min(step.packed(s), max(step.turn - 1, 0))
        mine = at if step.ops and s in step.ops[at].reads else max(at - 1, 0)
        owned[bisect_right(starts, mine) - 1].append(s)
    ends, back, layers = [*starts[1:], step.turn], 0, list[Layer]()
    for first, end, storages in reversed(list(zip(starts, ends, owned, strict=True))):
        used = min((step.first_use(s) for s in storages), default=back)
        back = max(back, used)  # forks may be asked for sooner: a layer comes after the later ones
        convolves = is_convolution(step.ops[first].name) if step.ops else False
        layers.append(Layer(first, end - 1, convolves, tuple(sorted(storages)), back))
    return layers[::-1]


def is_convolution(name: str) -> bool:
    """Whether an op convolves."""
    return any(part in name for part in CONVOLUTIONS)


def is_heavy(name: str) -> bool:
    """Whether an op is a product, a convolution or an attention: dear to run again."""
    plain = name.removeprefix("aten.").partition(".")[0]
    return is_convolution(name) or plain in PRODUCTS or any(part in name for part in ATTENTIONS)


def read_in_forward(step: Step, wanted: Sequence[str]) -> set[int]:
    """Storages that an op of the forward reads whose name has one of these words in it."""
    ops = (op for op in step.ops if op.phase is Phase.FORWARD)
    return {s for op in ops if any(word in op.name for word in wanted) for s in op.reads}


def nearest_tier(problem: Problem, num_bytes: int, room: dict[str, int]) -> str | None:
    """The first lower tier that still has room; takes it."""
    for tier in problem.tiers():
        if room.setdefault(tier, problem.budget[tier]) >= num_bytes:
            room[tier] -= num_bytes
            return tier
    return None


def link_s(simulator: Simulator, tier: str, num_bytes: int, out: bool) -> float:
    """Time that a copy takes alone, there or back; there, until its source is free."""
    route = simulator.routes[tier]
    assert route is not None
    hops = route[0][:1] if out else route[1]
    return sum(h.latency_s for h in hops) + num_bytes / min(h.bytes_per_s for h in hops)


def make_move(step: Step, gap: Gap, tier: str, out_wait: int, in_start: int) -> Move:
    """A move over a gap: waits and fetches are brought to where a runtime can act, and in order."""
    start = step.packed(gap.storage)
    leave = min(max(tick_at_or_after(step.ticks, out_wait), start), gap.end)
    back = min(max(tick_at_or_before(step.ticks, in_start), leave), gap.end)
    return Move(
        storage=gap.storage,
        tier=tier,
        out_start=start,
        out_wait=leave,
        in_start=back,
        in_wait=gap.end,
    )


def assign(problem: Problem, gaps: Iterable[Gap], tight: bool = True) -> list[Move]:
    """Positions for moves over these gaps: copies one after another, back just in time.

    Where the device would be too full, copies are waited for sooner and fetched later. Those that
    no tier has room for stay.
    """
    room: dict[str, int] = {}
    found = ((gap, nearest_tier(problem, gap.num_bytes, room)) for gap in gaps)
    wants = [Want(gap.storage, tier) for gap, tier in found if tier is not None]
    moves = schedule(problem.simulator, wants, [])
    return tighten(problem.simulator, moves, [], problem.limit) if tight else moves


def fewest(
    problem: Problem, count: int, made: Callable[[int], list[Move]], least: int = 0
) -> list[Move]:
    """The moves made of the smallest number of tensors that fits; of all, if none does.

    By halving: more tensors are taken to need no more of the device.
    """
    counts = range(least, count + 1)
    at = bisect_left(counts, True, key=lambda n: problem.fits(made(n)))
    return made(counts[min(at, len(counts) - 1)])


def eager_prefetch(simulator: Simulator, moves: Sequence[Move], limit: int) -> list[Move]:
    """Fetch as early as there is room, those first that have to come first."""
    levels = simulator.shape(list(moves)).during.astype(np.int64).copy()
    ticks, storages = simulator.step.ticks, simulator.step.storages
    found = []
    for move in sorted(moves, key=lambda move: (move.in_start, move.storage)):
        size, at = storages[move.storage].num_bytes, bisect_left(ticks, move.in_start)
        while at > 0 and ticks[at - 1] >= move.out_wait:
            before = levels[ticks[at - 1] : ticks[at]]
            if before.max(initial=0) + size > limit:
                break
            before += size
            at -= 1
        start = min(max(ticks[at], move.out_wait), move.in_wait)
        found.append(msgspec.structs.replace(move, in_start=start))
    return found


def tick_at_or_after(ticks: Sequence[int], position: int) -> int:
    """First tick from a position on; the last one if there is none."""
    return ticks[min(bisect_left(ticks, position), len(ticks) - 1)]


def tick_at_or_before(ticks: Sequence[int], position: int) -> int:
    """Last tick up to a position."""
    return ticks[max(bisect_right(ticks, position) - 1, 0)]
