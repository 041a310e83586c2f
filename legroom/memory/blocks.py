"""Find the blocks of a step among its module calls.

Repeated modules are blocks: two or more children of one parent, of one class, each with work
inside. Where nothing repeats, a module call is split into its children until no piece holds more
than a share of the saved bytes.
"""

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from legroom.core.errors import InputError
from legroom.memory.raw import RawCall
from legroom.memory.recorder import Recorder

SHARE = 1 / 12
"""A call that holds more of the saved bytes than this is split further."""
LEAST_KEPT = 0.5
"""Of what a call makes and saves, parts of it have to make this share to stand in its place."""


def find_blocks(recorder: Recorder, names: Sequence[str] | None = None) -> list[RawCall]:
    """The module calls to plan with, in order; `names` are paths or patterns of the user's.

    Raises InputError when a given name matches no module call of the step.
    """
    calls = [c for c in recorder.calls if c.grad and c.last_op >= c.first_op]
    if names is not None:
        return _named(calls, names)
    total = sum(_saved_bytes(recorder, c) for c in calls if c.depth == 0)
    splitter = _Splitter(recorder, calls, total * SHARE)
    chosen = [block for root in calls if root.depth == 0 for block in splitter.split(root)]
    return sorted(chosen, key=lambda c: c.first_op)


def _named(calls: list[RawCall], names: Sequence[str]) -> list[RawCall]:
    chosen: list[RawCall] = []
    for name in names:
        found = [c for c in calls if fnmatchcase(c.path, name)]
        if not found:
            paths = ", ".join(sorted({c.path for c in calls if c.path})[:20])
            raise InputError(f"no module call named {name!r} in the step; called: {paths}")
        chosen += found
    chosen = sorted({id(c): c for c in chosen}.values(), key=lambda c: c.first_op)
    for one, two in zip(chosen, chosen[1:], strict=False):
        if two.first_op <= one.last_op:
            raise InputError(f"blocks {one.path!r} and {two.path!r} overlap: name one of them")
    return chosen


def _children(call: RawCall, calls: list[RawCall]) -> list[RawCall]:
    return [
        c
        for c in calls
        if c.depth == call.depth + 1 and call.first_op <= c.first_op and c.last_op <= call.last_op
    ]


class _Splitter:
    """Splits calls of more than so many saved bytes into smaller ones that are worth it."""

    def __init__(self, recorder: Recorder, calls: list[RawCall], limit: float) -> None:
        self.calls, self.limit = calls, limit
        self.sizes = {id(c): _saved_bytes(recorder, c) for c in calls}
        self.made = {id(c): _born_inside(recorder, c) for c in calls}

    def split(self, call: RawCall, twin: bool = False) -> list[RawCall]:
        """The call itself as a block, or what its children split into; `twin`: its like repeats."""
        children = _children(call, self.calls)
        inner = Counter(type(c.module) for c in children if _children(c, self.calls))
        repeats = any(count > 1 for count in inner.values())
        large = self.sizes[id(call)] > self.limit
        container = isinstance(call.module, nn.Sequential)
        whole = [call] if self.made[id(call)] > self.limit / 20 else []
        # The root is no block: a replay of everything at once frees nothing at the peak.
        root = call.depth == 0
        if root or (repeats and (container or large)) or (inner and large and not twin):
            parts = [b for c in children for b in self.split(c, inner[type(c.module)] > 1)]
            kept = sum(self.made[id(part)] for part in parts)
            return parts if root or kept >= LEAST_KEPT * self.made[id(call)] else whole
        return whole


def _saved_bytes(recorder: Recorder, call: RawCall) -> int:
    ids = {row.storage for row in recorder.saved[call.first_saved : call.last_saved + 1]}
    return sum(recorder.storages[s].num_bytes for s in ids)


def _born_inside(recorder: Recorder, call: RawCall) -> int:
    """Saved bytes that the call itself made, and so could make again."""
    ids = {row.storage for row in recorder.saved[call.first_saved : call.last_saved + 1]}
    made = (recorder.storages[s] for s in ids if recorder.storages[s].birth >= call.first_op)
    return sum(storage.num_bytes for storage in made)
