"""One saved storage under the runtime's care, and the handles autograd holds on it.

[Note: ownership] Autograd owns handles, handles own the entry, the entry owns the bytes wherever
they are. When a graph is freed its handles go, and with the last handle the entry and its bytes.
The runtime itself keeps only weak references, so nothing is left behind by a step that raised.
"""

import weakref
from enum import Enum
from typing import TYPE_CHECKING

from torch import Tensor

from legroom.core.errors import StepError
from legroom.memory.mechanisms.compress import Packed as Small
from legroom.memory.mechanisms.tickets import Place, Ticket
from legroom.memory.saved import ViewOf

if TYPE_CHECKING:
    from legroom.memory.mechanisms.recompute import Frame


class State(Enum):
    """Where a storage's bytes are."""

    HERE = "here"  # on the device: just saved, or back
    LEAVING = "leaving"  # on the device, with a copy out under way
    AWAY = "away"  # in a lower tier alone: after the wait for the copy out
    COMING = "coming"  # room taken on the device, copy in under way
    SMALL = "small"  # compressed on the device


class Entry:
    """A storage that autograd saved once or more often."""

    __slots__ = (
        "__weakref__", "flat", "note", "num_bytes", "packed", "place", "source", "spoiled", "state",
        "storage", "ticket", "version", "waiting",
    )  # fmt: skip

    def __init__(self, storage: int, num_bytes: int, version: int) -> None:
        self.storage = storage
        """Its number in the trace, -1 if unplanned."""
        self.num_bytes = num_bytes
        self.version = version
        self.state = State.HERE
        self.flat: Tensor | None = None
        """A tensor on the storage while it is on the device: flat bytes, or as it was saved."""
        self.place: Place | None = None
        """Its copy in a lower tier; valid from LEAVING on."""
        self.ticket: Ticket | None = None
        self.packed: Small | None = None
        self.source: Tensor | None = None
        """The tensor that was saved, while its copy out is under way: it knows its version."""
        self.spoiled: RuntimeError | None = None
        """Raised to who asks for it: it was changed in place before its copy was complete."""
        self.note = -1
        """Its number in a recorder, if one is running."""
        self.waiting = 0
        """Handles not yet asked for."""


class Packed:
    """What autograd holds for a saved tensor, and where the trace asks for it."""

    __slots__ = ("__weakref__", "asked", "note", "step", "unpacked")

    def __init__(self, note: int, unpacked: tuple[int, ...], step: int) -> None:
        self.note = note
        """Its row in a recorder, if one is running."""
        self.unpacked = unpacked
        """Positions where the trace asks for it."""
        self.step = step
        """Which of the runner's steps it belongs to."""
        self.asked = 0


class Handle(Packed):
    """Stands for a view of an entry."""

    __slots__ = ("entry", "version", "view")

    def __init__(
        self,
        entry: Entry,
        view: ViewOf,
        version: int,
        note: int = -1,
        unpacked: tuple[int, ...] = (),
        step: int = -1,
    ) -> None:
        super().__init__(note, unpacked, step)
        self.entry, self.view, self.version = entry, view, version
        entry.waiting += 1


class Dropped(Packed):
    """Stands for a saved tensor that is nowhere: running its block again brings it back."""

    __slots__ = ("back", "frame", "index", "shape", "storage", "version", "view")

    def __init__(
        self,
        frame: "Frame",
        index: int,
        tensor: Tensor,
        storage: int = -1,
        note: int = -1,
        unpacked: tuple[int, ...] = (),
        step: int = -1,
    ) -> None:
        super().__init__(note, unpacked, step)
        self.frame, self.index, self.storage = frame, index, storage
        """The block call, and the tensor's number among all that call saved."""
        self.shape = tensor.shape
        self.view = ViewOf.of(tensor) if storage >= 0 else None
        self.back: Tensor | None = None
        """The tensor, from the replay until autograd asks for it."""
        self.version = 0
        frame.dropped.append(weakref.ref(self))

    def put(self, tensor: Tensor) -> None:
        """A replay has it."""
        if tensor.shape != self.shape:
            raise StepError(
                f"running {self.frame.how.name} again saved a tensor of another size: "
                f"{list(tensor.shape)}, not {list(self.shape)}"
            )
        self.back, self.version = tensor, tensor._version

    def take(self) -> Tensor:
        """The tensor a replay has put here, given away."""
        tensor, self.back = self.back, None
        assert tensor is not None
        check_version(tensor, self.version)
        return tensor


class Kept(Packed):
    """A tensor left alone, with the version it was saved at."""

    __slots__ = ("tensor", "version")

    def __init__(
        self, tensor: Tensor, note: int = -1, unpacked: tuple[int, ...] = (), step: int = -1
    ) -> None:
        super().__init__(note, unpacked, step)
        self.tensor, self.version = tensor, tensor._version

    def open(self) -> Tensor:
        """The tensor, if nobody changed it in place since."""
        check_version(self.tensor, self.version)
        return self.tensor


def check_version(tensor: Tensor, version: int) -> None:
    """Raise autograd's own error when a saved tensor was changed in place."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
            f"expected version {version} instead. Hint: enable anomaly detection to find the "
            "operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )
