"""Where tensors are being saved: one call of a block, or all that lies outside of blocks.

[Note: patterns] Autograd saves many tensors that a plan does not care for, weights above all, and
telling them apart takes longer than many an op. So a script remembers by their number which saves
of a block mattered, and the others are passed over the next time. Passing one over is always
right: autograd then holds it as it would have. In a block that runs again whole, and where nothing
else is to be done, the number also says which saves are dropped: its replay makes the same saves
in the same order, since it is the same call.
"""

from torch import Tensor

from legroom.memory.mechanisms.entry import Dropped
from legroom.memory.mechanisms.recompute import Frame
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
        if script is not None:
            watched = recording or block in script.watched
            self.rows = script.rows.get(block, []) if watched else None
        learns = script is not None and not recording and block >= 0
        self.pattern = script.patterns.get(block) if script is not None and learns else None
        self.plain = self.pattern is not None and script is not None and block in script.plain
        self._learns = learns
        self._count = self._ordinal = 0
        self._seen: list[type] = []

    def skim(self, tensor: Tensor) -> object:
        """What to hold for the next save if its number alone tells; None if it does not."""
        index, self._count = self._count, self._count + 1
        if self.rows is None:
            return tensor, tensor._version
        if self.pattern is None:
            return None
        kind = self.pattern[index] if index < len(self.pattern) else tuple
        if self.plain and kind is Dropped and self.frame is not None:
            return Dropped(self.frame, index, tensor)
        return (tensor, tensor._version) if self.plain or kind is tuple else None

    def learn(self, packed: object) -> None:
        """Note what became of a save whose number did not tell."""
        if self._learns:
            self._seen.append(type(packed))

    @property
    def index(self) -> int:
        """The number of the save at hand, among all."""
        return self._count - 1

    def next_row(self, num_bytes: int) -> Row | None:
        """The row for the next save that is ours; None if it is not the one expected."""
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        rows = self.rows or ()
        if ordinal < len(rows) and rows[ordinal].num_bytes == num_bytes:
            return rows[ordinal]
        if self.frame is not None:
            self.frame.whole = True
        return None

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
            return self.block != UNKNOWN
        as_traced = self.plain or self._ordinal == len(self.rows)
        if self.pattern is not None:
            as_traced = as_traced and self._count == len(self.pattern)
        if self.frame is not None:
            self.frame.whole |= not as_traced
        if not as_traced:
            self.script.patterns.pop(self.block, None)
        elif self._learns and self.pattern is None:
            self.script.patterns[self.block] = tuple(self._seen)
        return as_traced

    @property
    def name(self) -> str:
        """For messages."""
        known = self.script is not None and self.block >= 0
        return self.script.step.blocks[self.block].name if known and self.script else "the step"
