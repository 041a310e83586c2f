"""The error tree: what a user can get from legroom, and what each one carries.

LegroomError
  InputError          what the user gave cannot be used (also a ValueError)
    UnknownName       no such policy, machine or example; names the nearest
    UnitError         a size or time that cannot be read
  RecordError         a file or record that breaks its own law (also a ValueError)
  BudgetError         the job cannot run in the budget; says by how much
  StepError           the step was used in a way the runtime cannot follow
  TierError           a tier cannot take its bytes: full, missing or not writable
"""

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from types import FrameType


class LegroomError(Exception):
    """Anything legroom raises on purpose."""


class InputError(LegroomError, ValueError):
    """What the user gave cannot be used."""


class UnknownName(InputError):
    """No entry of that name; the message lists the known ones and the nearest."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        self.known = sorted(known)
        starts = [k for k in self.known if k.startswith(name)] if name else []
        near = starts or get_close_matches(name, self.known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {what} {name!r}.{hint} Known: {', '.join(self.known)}.")


class UnitError(InputError):
    """A size or time that cannot be read."""


class RecordError(LegroomError, ValueError):
    """A file or record that breaks its own law; names the row at fault."""


class BudgetError(LegroomError):
    """The job cannot run in the budget.

    ``missing_bytes`` is how far the best plan is over, ``smallest_bytes`` the smallest
    budget that works (None when not searched).
    """

    def __init__(
        self, message: str, *, missing_bytes: int = 0, smallest_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.smallest_bytes = smallest_bytes


class StepError(LegroomError, RuntimeError):
    """The step was used in a way the runtime cannot follow."""


class TierError(LegroomError, RuntimeError):
    """A tier cannot take its bytes: full, missing or not writable."""


def in_short(error: BaseException) -> str:
    """The kind of an error, and how its message begins."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:200]


def forget_frames(error: BaseException) -> None:
    """Let go of what an error that is dealt with holds: whoever keeps it would keep all callers.

    What led to it forgets as well, but for an error that a caller is dealing with.
    """
    frame: FrameType | None = sys._getframe(1)
    running = set()
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    error.__traceback__ = None
    left, seen = [error.__cause__, error.__context__], {id(error)}
    while left:
        cause = left.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        trace = cause.__traceback__
        if trace is None or trace.tb_frame not in running:
            cause.__traceback__ = None
            left += [cause.__cause__, cause.__context__]
