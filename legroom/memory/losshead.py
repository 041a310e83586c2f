"""The head of a language model and its loss, as one more block of a step.

In a trace they are ops outside of all blocks. Where the loss can be computed in chunks, those ops
are marked as a block, so that builds of it can take their place as they do for any other. The step
may have been traced with logits in full, or in chunks: then all is done in one call of the head,
and backward does no more than scale the gradients that it made.
"""

from collections.abc import Iterator

import msgspec

from legroom.memory.trace import Block, Op, Phase, Step, Storage

LOSS, SLOPE = "aten.nll_loss_forward", "aten.nll_loss_backward"
ENDS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.sum")
"""Ops that take gradients of logits and give others."""
SCALES = ("aten.mul", "aten._to_copy")
CALL = 1
"""The head's first call puts logits off, its second makes the loss."""


def with_head(step: Step, module: str) -> Step | None:
    """The step with head and loss as its last block.

    None where there is no such part, or where anybody else looks at the logits.
    """
    found = _Finder(step, module)
    if found.mixed() or found.looked_at():
        return None
    return found.marked()


class _Finder:
    """Looks for the ops from the head to the loss, and for those of their backward."""

    def __init__(self, step: Step, module: str) -> None:
        self.step, self.module = step, module
        ours = [i for i, op in self._forward() if op.module == module]
        self.first = ours[0] if ours else len(step.ops)
        ends = [i for i, op in self._forward() if i > self.first and op.name.startswith(LOSS)]
        self.last, self.back, self.behind = -1, len(step.ops), -1
        self.chunked = bool(ends) and ends[-1] < ours[-1]
        if self.chunked:
            self.last = ours[-1]
            self._find_scaling()
        elif ends:
            self.last = ends[-1]
            self._find_slopes()
        keep = [b for b in step.blocks if b.module != module]
        self.index = len(keep)
        self.blocks = keep if keep == list(step.blocks[: self.index]) else None

    def _forward(self) -> Iterator[tuple[int, Op]]:
        return ((i, op) for i, op in enumerate(self.step.ops) if op.phase == Phase.FORWARD)

    def _find_slopes(self) -> None:
        """From the loss to the last op that reads a gradient of logits."""
        ops = enumerate(self.step.ops)
        self.back = next((i for i, op in ops if op.name.startswith(SLOPE)), self.back)
        slopes: set[int] = set()
        for i in range(self.back, len(self.step.ops)):
            op = self.step.ops[i]
            if i > self.back and slopes.isdisjoint(op.reads):
                continue
            self.behind = i
            if not op.name.startswith(ENDS):
                slopes.update(op.writes)

    def _find_scaling(self) -> None:
        """The ops that take the saved gradients, one after the other."""
        uses = [p for row in self.step.saved if self._is_saved(row.packed) for p in row.unpacked]
        self.back = min(uses, default=self.back)
        for i in range(self.back, len(self.step.ops)):
            if not self.step.ops[i].name.startswith(SCALES):
                break
            self.behind = i

    def _is_saved(self, packed: int) -> bool:
        return self.first <= packed <= self.last + 1

    def _inside(self, i: int) -> bool:
        return self.first <= i <= self.last or self.back <= i <= self.behind

    def mixed(self) -> bool:
        """Whether other things lie between, or blocks come after."""
        if self.behind < 0 or self.blocks is None or any(b.last >= self.first for b in self.blocks):
            return True
        spans = ((self.first, self.last, Phase.FORWARD), (self.back, self.behind, Phase.BACKWARD))
        return any(
            op.phase != phase or (op.block >= 0 and op.block != self.index)
            for low, high, phase in spans
            for op in self.step.ops[low : high + 1]
        )

    def _made(self) -> set[int]:
        """Storages that only the logits and their loss need."""
        result = self.step.ops[self.last].writes
        rows = enumerate(self.step.storages)
        return {s for s, x in rows if self.first <= x.birth <= self.last and s not in result}

    def looked_at(self) -> bool:
        """Whether ops elsewhere read what is made on the way to the loss."""
        made = set() if self.chunked else self._made()
        others = (op for i, op in enumerate(self.step.ops) if not self._inside(i))
        return any(not made.isdisjoint((*op.reads, *op.writes)) for op in others)

    def marked(self) -> Step:
        """The step with the block, and no logits that a caller merely holds on."""
        step = self.step
        lasting = {s for s in self._made() if step.storages[s].death > self.behind}
        storages = tuple(
            self._shortened(x) if s in lasting else x for s, x in enumerate(step.storages)
        )
        ops = tuple(
            self._marked(i, op, lasting) if self._inside(i) else op for i, op in enumerate(step.ops)
        )
        saved = tuple(
            msgspec.structs.replace(row, block=self.index)
            if self._is_saved(row.packed) and self._is_used_inside(row.unpacked)
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

    def _marked(self, i: int, op: Op, lasting: set[int]) -> Op:
        if self.chunked and i <= self.last:  # before the gradients it makes begin
            reads, writes = (tuple(s for s in x if s not in lasting) for x in (op.reads, op.writes))
            op = msgspec.structs.replace(op, reads=reads, writes=writes)
        return msgspec.structs.replace(op, block=self.index)

    def _shortened(self, storage: Storage) -> Storage:
        """Logits held on end with their last use; gradients made in forward begin in backward."""
        if self.chunked:
            release = max(storage.release, self.back)
            return msgspec.structs.replace(storage, birth=self.back, release=release)
        end = self.behind
        return msgspec.structs.replace(
            storage, death=end, release=min(storage.release, end), done=-1
        )

    def _is_used_inside(self, unpacked: tuple[int, ...]) -> bool:
        return bool(unpacked) and all(self.back <= p <= self.behind for p in unpacked)
