"""The head of a language model and its loss, as one more block of a step.

In a trace they are ops outside of all blocks. Where the loss can be computed in chunks, those ops
are marked as a block, so that builds of it can take their place as they do for any other.
"""

from collections.abc import Iterator

import msgspec

from legroom.memory.trace import Block, Op, Phase, Step

LOSS, SLOPE = "aten.nll_loss_forward", "aten.nll_loss_backward"
ENDS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.sum")
"""Ops that take gradients of logits and give others."""
CALL = 1
"""The head's first call puts logits off, its second makes the loss."""


def with_head(step: Step, module: str) -> Step | None:
    """The step with head and loss as its last block.

    None where there is no such part, or where anybody else looks at the logits.
    """
    found = _Finder(step, module)
    if not found.there or found.mixed() or found.looked_at():
        return None
    return found.marked()


class _Finder:
    """Looks for the ops from the head to the loss, and for those of their backward."""

    def __init__(self, step: Step, module: str) -> None:
        self.step, self.module = step, module
        firsts = (i for i, op in self._forward() if op.module == module)
        self.first = next(firsts, len(step.ops))
        ends = [i for i, op in self._forward() if i > self.first and op.name.startswith(LOSS)]
        self.last = ends[-1] if ends else -1
        backs = (i for i, op in enumerate(step.ops) if op.name.startswith(SLOPE))
        self.back = next(backs, len(step.ops))
        self.there = bool(ends) and self.back < len(step.ops)
        self.behind = self._end_of_slopes() if self.there else -1
        keep = [b for b in step.blocks if b.module != module]
        self.index = len(keep)
        self.blocks = keep if keep == list(step.blocks[: self.index]) else None

    def _forward(self) -> Iterator[tuple[int, Op]]:
        return ((i, op) for i, op in enumerate(self.step.ops) if op.phase == Phase.FORWARD)

    def _end_of_slopes(self) -> int:
        """The last op that reads a gradient of logits."""
        slopes, last = set(self.step.ops[self.back].writes), self.back
        for i in range(self.back + 1, len(self.step.ops)):
            op = self.step.ops[i]
            if slopes.isdisjoint(op.reads):
                continue
            last = i
            if not op.name.startswith(ENDS):
                slopes.update(op.writes)
        return last

    def _inside(self, i: int) -> bool:
        return self.first <= i <= self.last or self.back <= i <= self.behind

    def mixed(self) -> bool:
        """Whether other things lie between, or blocks come after."""
        if self.blocks is None or any(b.last >= self.first for b in self.blocks):
            return True
        spans = ((self.first, self.last, Phase.FORWARD), (self.back, self.behind, Phase.BACKWARD))
        return any(
            op.phase != phase or (op.block >= 0 and op.block != self.index)
            for low, high, phase in spans
            for op in self.step.ops[low : high + 1]
        )

    def _made(self) -> set[int]:
        """Storages that only the logits and their loss need."""
        result = set(self.step.ops[self.last].writes)
        rows = enumerate(self.step.storages)
        return {s for s, x in rows if self.first <= x.birth <= self.last and s not in result}

    def looked_at(self) -> bool:
        """Whether ops elsewhere read what is made on the way to the loss."""
        made = self._made()
        others = (op for i, op in enumerate(self.step.ops) if not self._inside(i))
        return any(not made.isdisjoint((*op.reads, *op.writes)) for op in others)

    def marked(self) -> Step:
        """The step with the block, and no logits that a caller merely holds on."""
        made, step, end = self._made(), self.step, self.behind
        storages = tuple(
            msgspec.structs.replace(x, death=end, release=min(x.release, end), done=-1)
            if s in made and x.death > end
            else x
            for s, x in enumerate(step.storages)
        )
        ops = tuple(
            msgspec.structs.replace(op, block=self.index) if self._inside(i) else op
            for i, op in enumerate(step.ops)
        )
        saved = tuple(
            msgspec.structs.replace(row, block=self.index)
            if self.first <= row.packed <= self.last + 1 and self._is_used_inside(row.unpacked)
            else row
            for row in step.saved
        )
        read = {s for op in ops[self.first : self.last + 1] for s in op.reads}
        given = (s for s in sorted(read) if 0 <= step.storages[s].birth < self.first)
        block = Block(
            module=self.module,
            call=CALL,
            group=1 + max((b.group for b in step.blocks), default=-1),
            first=self.first,
            last=self.last,
            inputs=tuple(given),
            barred="its loss is all that is needed of it",
        )
        assert self.blocks is not None
        blocks = (*self.blocks, block)
        made_step = msgspec.structs.replace(
            step, ops=ops, storages=storages, saved=saved, blocks=blocks
        )
        return made_step.check()

    def _is_used_inside(self, unpacked: tuple[int, ...]) -> bool:
        return bool(unpacked) and all(self.back <= p <= self.behind for p in unpacked)
