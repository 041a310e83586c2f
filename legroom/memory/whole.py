"""The whole model in one build, where what lies between its blocks is what takes the time.

Blocks compiled on their own leave the ops between them eager, and the host calls each one. A model
of many small kernels, or one that is glued together by large copies, runs faster as one graph; but
it keeps all it saves until its backward, and nothing of it can be moved. So it is one more choice,
tried where it is likely to pay, and measured as any build is.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from legroom.memory.builds import Build
from legroom.memory.mix import fitting_share, with_builds
from legroom.memory.rebuild import Rebuilt
from legroom.memory.simulate import Simulator
from legroom.memory.trace import ROOT, Block, Kind, Phase, Root, Saved, Step

GLUE = 0.06
"""Share of a step in builds that ops between them take, if the model may do better as one."""
LATE = 0.5
"""Share of a step that its host is busy, likewise."""
LEAST = 0.2
"""Where a build of the whole could keep no more than this, moves and mixes do better."""
GRAIN = 0.05
"""Shares that are tried differ by this much, at the least."""
MOST = 5
"""And are no more than this."""


def is_worth(made: Step, root: Root | None, step_s: float) -> bool:
    """Whether a model is likely to do better as one, given its best mix of builds."""
    built = {b for b, block in enumerate(made.blocks) if block.build}
    between = (op for op in made.ops if op.phase != Phase.UPDATE and op.block not in built)
    glue_s = sum(op.time_s for op in between)
    return root is not None and (glue_s > GLUE * step_s or made.host_s > LATE * step_s)


def first_share(simulator: Simulator, limit: int) -> float | None:
    """What a build of the whole may keep, so that it about fits; None where that is too little."""
    fits = fitting_share(simulator, limit)
    return _rounded(fits) if fits >= LEAST else None


def next_share(peaks: Mapping[float, int], saved: int, limit: int) -> float | None:
    """What to try next, by the peaks of the shares that were tried, to just fit a limit.

    `saved` is about what lies between a share of 0 and one of 1. None if there is nothing between.
    """
    low = max((share for share, peak in peaks.items() if peak <= limit), default=None)
    over = (share for share, peak in peaks.items() if peak > limit and share > (low or -1.0))
    high = min(over, default=None)
    known, slope = low if low is not None else high, float(max(saved, 1))
    if known is None or len(peaks) >= MOST:
        return None
    if low is not None and high is not None:
        slope = (peaks[high] - peaks[low]) / (high - low)
    guess = _rounded(known + (limit - peaks[known]) / slope)
    least = 0.0 if low is None else low + GRAIN
    most = 1.0 if high is None else high - GRAIN
    tried = min(max(guess, least), most)
    return round(tried, 2) if least <= most + 1e-9 and round(tried, 2) not in peaks else None


def _rounded(share: float) -> float:
    """Down to what is worth a build of its own."""
    return round(min(max(math.floor(share / GRAIN + 1e-6) * GRAIN, 0.0), 1.0), 2)


def with_whole(step: Step, build: Build) -> Rebuilt:
    """The step with the model in one build: two ops, and what it saves lies outside of blocks."""
    assert step.root is not None
    made = with_builds(_as_block(step, step.root), {0: build})
    ops = tuple(msgspec.structs.replace(op, block=-1) for op in made.step.ops)
    in_turn = sorted(made.step.saved, key=lambda row: (row.packed, -row.block, row.ordinal))
    rows = tuple(_numbered(in_turn, lambda i: -1))  # the build's own first, then the loss's
    bare = msgspec.structs.replace(made.step, ops=ops, saved=rows, blocks=())
    return made._replace(step=bare.check())


def _as_block(step: Step, root: Root) -> Step:
    """The same with all of the model as its one block."""

    def mine(i: int) -> bool:
        is_back = i >= root.back and step.ops[i].phase == Phase.BACKWARD
        return root.first <= i <= root.last or is_back

    ops = [msgspec.structs.replace(op, block=0 if mine(i) else -1) for i, op in enumerate(step.ops)]
    reads = (s for op in ops[root.first : root.last + 1] for s in op.reads)
    inputs = dict.fromkeys(
        s
        for s in reads
        if step.storages[s].birth < root.first and step.storages[s].kind != Kind.WEIGHT
    )
    block = Block(module=ROOT, first=root.first, last=root.last, inputs=tuple(inputs))
    saves = range(root.first_saved, root.last_saved + 1)
    rows = _numbered(step.saved, lambda i: 0 if i in saves else -1)
    return msgspec.structs.replace(step, ops=tuple(ops), saved=tuple(rows), blocks=(block,)).check()


def _numbered(rows: Iterable[Saved], block_of: Callable[[int], int]) -> Iterator[Saved]:
    """Rows given to other blocks, counted anew in each."""
    counts: dict[int, int] = {}
    for i, row in enumerate(rows):
        block = block_of(i)
        counts[block] = counts.get(block, -1) + 1
        yield msgspec.structs.replace(row, block=block, ordinal=counts[block])
