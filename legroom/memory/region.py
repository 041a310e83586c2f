"""Where tensors are being saved: one call of a block, or all that lies outside of blocks.

[Note: patterns] Autograd saves many tensors that a plan does not care for, weights above all, and
telling them apart takes longer than many an op. So a script remembers by their number which saves
of a block mattered, and the others are passed over the next time. Passing one over is always
right: autograd then holds it as it would have. Where a block runs again and nothing else is to be
done in it, a save that matters need not be looked at closely either: a tape knows its tensors, and
a block that runs again whole makes the same saves in the same order, since it is the same call.
"""

from torch import Tensor

from legroom.memory.mechanisms.entry import Dropped
from legroom.memory.mechanisms.recompute import Frame
from legroom.memory.saved import hold
from legroom.memory.script import Row, Script

OUTSIDE, UNKNOWN = -1, -2
"""In place of a block's number: outside of all blocks; a call that the trace does not have."""


class Region:
    """Counts the saves made in one place, and says what the script has for them."""

    def __init__(self, script: Script | None, block: int, recording: bool) -> None:
        self.script, self.block = script, block
        self.frame: Frame | None = None
        """The call, if it will run again."""
        self.rows: list[Row] | None = []
        """The saves to expect; None where none of them matters."""
        self.row: Row | None = None
        """The one at hand, if it is known."""
        self._pattern: tuple[Row | None, ...] | None = None
        self._learns = self._strayed = self.sure = False
        if script is not None:
            watched = recording or block in script.watched
            self.rows = script.rows.get(block, []) if watched else None
            self._learns = watched and not recording and block >= 0
            self._pattern = script.patterns.get(block) if self._learns else None
            self.sure = self._pattern is not None and block not in script.moving
        self._count = self._ordinal = 0
        self._seen: list[Row | None] = []

    def skim(self, tensor: Tensor) -> object:
        """What to hold for the next save if its number alone tells; None if it does not."""
        index, self._count = self._count, self._count + 1
        if self.rows is None:
            return hold(tensor)
        self.row = None
        if self._pattern is None:
            return None
        self.row = self._pattern[index] if index < len(self._pattern) else None
        if self.row is None:
            return hold(tensor)
        if self.sure and self.frame is not None and self.frame.tape is None:
            return Dropped(self.frame, index, tensor)
        return None

    def learn(self) -> None:
        """Note whether the save at hand matters, where its number did not tell."""
        if self._learns and self._pattern is None and self.script is not None:
            row, wants = self.row, self.frame.how.wants if self.frame is not None else ()
            acted = row is not None and (row.storage in self.script.acted or row.storage in wants)
            self._seen.append(row if acted or self.block in self.script.moving else None)

    @property
    def index(self) -> int:
        """The number of the save at hand, among all."""
        return self._count - 1

    def next_row(self, num_bytes: int) -> Row | None:
        """The row for the next save that is ours; None if it is not the one expected."""
        if self._pattern is None:
            ordinal, self._ordinal = self._ordinal, self._ordinal + 1
            self.row = self.rows[ordinal] if self.rows and ordinal < len(self.rows) else None
        if self.row is None or self.row.num_bytes != num_bytes:
            self.row, self._strayed = None, True
            if self.frame is not None:
                self.frame.whole = True
        return self.row

    def is_other(self, tensor: Tensor, storage: int) -> bool:
        """Whether a tape knows a saved tensor as another one than the trace has there."""
        frame = self.frame
        if frame is None or frame.tape is None or frame.tape.is_storage(tensor, storage):
            return False
        frame.whole = True
        return True

    def close(self) -> bool:
        """The call is over: whether it saved what it should; if so, remember which saves matter."""
        if self.script is None or self.rows is None or self.block < 0:
            return self.block != UNKNOWN or not self._count
        if self._pattern is not None:
            as_traced = self._count == len(self._pattern)
        else:
            as_traced = self._ordinal == len(self.rows)
        as_traced = as_traced and not self._strayed
        if self.frame is not None:
            self.frame.whole |= not as_traced
        if not as_traced:
            self.script.patterns.pop(self.block, None)
        elif self._learns and self._pattern is None:
            self.script.patterns[self.block] = tuple(self._seen)
        return as_traced

    @property
    def name(self) -> str:
        """For messages."""
        known = self.script is not None and self.block >= 0
        return self.script.step.blocks[self.block].name if known and self.script else "the step"
