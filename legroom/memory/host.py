"""What the host does for a step, and when that holds the device up.

[Note: queue] The device runs ops in order, and none before the host has enqueued it. So a step
takes, for the worst of its ops, as long as the host needs to come to that op and the device from
there on. A forward that keeps the host busy with notes is slow even if backward leaves it idle.

A host that is far ahead waits, too: the device's queue takes about a thousand ops, and enqueuing
one more lasts until there is room. So how long it was at a step is only the most it can have been
busy; up to the end of forward, which finds the queue empty, it seldom has to wait.

The times are as seen on ResNet-152 and a Llama beside an H200; calibration corrects their sum.
"""

from collections.abc import Sequence

import numpy as np

from legroom.memory.actions import Compress, Move
from legroom.memory.plan import moving_blocks
from legroom.memory.trace import FULL, Op, Phase, Step

FRAME_S = 0.5e-3
"""Of a block call that will run again, in forward."""
NOTE_S = 45e-6
"""Of each op looked at for a tape, in forward."""
AGAIN_S, PLAY_S = 40e-6, 60e-6
"""Of each op run again whole, and from a tape."""
MOVE_S = 0.6e-3
"""Of one move, out and back."""
WATCH_S = 25e-6
"""Of a saved tensor that is watched."""
BACKWARD = 2.0
"""An op in backward takes the host this much longer than one in forward."""
LEAST_OWN = 0.3
"""Share of the host's time that is the step's own, however much its actions are thought to take."""
CAUTION, BOLD = 1.4, 1.1
"""A host has bad moments, and a plan that leaves it no time to spare is slow in each of them; how
many times as long as usual it may take in a plan, and in one that is tried after that."""
GAIN = 0.01
"""Share of a step's time that the bolder one has to promise."""
BUSY = 0.3
"""A host at work for this share of a step, unplanned, matters to its plans."""

Work = list[tuple[int, float]]
"""Positions, and how long the host is busy there."""


def noting_s(variant: str, num_ops: int) -> float:
    """For a block of so many ops that will run again."""
    return FRAME_S if variant == FULL else FRAME_S + NOTE_S * num_ops


def again_s(variant: str, num_replays: int) -> float:
    """For running so many ops again."""
    return num_replays * (AGAIN_S if variant == FULL else PLAY_S)


def host_weight(op: Op) -> float:
    """How long the host takes for an op, next to one in forward."""
    return BACKWARD if op.phase is Phase.BACKWARD else 1.0


class Host:
    """The host's time over one step; nothing where the step does not tell it."""

    def __init__(self, step: Step, pace: float = 1.0) -> None:
        self.step, self.pace = step, pace
        """The step, and how many times slower than usual the host is."""
        weights = [host_weight(op) for op in step.ops]
        until = np.concatenate(([0.0], np.cumsum(weights)))
        self.step_s = step.host_s * pace
        """How long it is busy with the unplanned step."""
        self.until_s: list[float] = (until * (self.step_s / max(until[-1], 1.0))).tolist()
        """When it comes to each op of the unplanned step."""
        self.turn = next((i for i, op in enumerate(step.ops) if op.phase is Phase.BACKWARD), 0)
        """Where backward begins: there the host has done all of forward."""
        self.forward_share = float(until[self.turn] / max(until[-1], 1.0))
        """Share of its time that it has spent by then."""

    def work(
        self,
        moves: Sequence[Move],
        codes: Sequence[Compress],
        replays: Sequence[tuple[int, int, float, float]],
    ) -> Work:
        """What actions add; replays as (position, block, noting, running again)."""
        work: Work = []
        blocks, again = self.step.blocks, set()
        for position, block, before_s, after_s in replays:
            work += [(blocks[block].last, before_s), (position, after_s)]
            again.add(block)
        for move in moves:
            work += [(move.out_start, MOVE_S / 2), (move.in_start, MOVE_S / 2)]
        for block in moving_blocks(self.step, [*moves, *codes]) - again:
            rows = self.step.saved_in(block)
            if rows:
                work.append((rows[0].packed, WATCH_S * len(rows)))
        return sorted((position, seconds * self.pace) for position, seconds in work)

    def total_s(self, work: Work) -> float:
        """How long the host is busy in all."""
        return self.step_s + sum(seconds for _, seconds in work)

    def seen_s(self, work: Work, all_s: float, forward_s: float) -> float:
        """How long it was busy at the most, if it was at the step for that long in all.

        And at its forward, which tells more: see [Note: queue]; 0 where that was not taken.
        """
        if not forward_s or not self.forward_share:
            return all_s
        early_s = sum(seconds for position, seconds in work if position < self.turn)
        own_s = max(forward_s - early_s, LEAST_OWN * forward_s) / self.forward_share
        return min(all_s, own_s + sum(seconds for _, seconds in work))

    def end_s(self, work: Work, marks: Sequence[tuple[int, float]], device_s: float) -> float:
        """When the step is over, if the device alone is at each marked position at that time."""
        latest, busy_s, at = device_s, 0.0, 0
        for position, now_s in marks:
            while at < len(work) and work[at][0] <= position:
                busy_s += work[at][1]
                at += 1
            latest = max(latest, self.until_s[position] + busy_s + device_s - now_s)
        return max(latest, self.total_s(work))
