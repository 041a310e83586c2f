"""What a recorder notes while a step runs, before a trace is made of it."""

from dataclasses import dataclass, field

from torch import nn

from legroom.memory.trace import Phase


@dataclass
class RawOp:
    """One op as it ran."""

    name: str
    module: str
    phase: Phase
    reads: list[int]
    writes: list[int]
    flops: float
    dtype: str
    random: bool
    sealed: bool
    """It draws from a generator of the user's own, which a replay could not rewind."""
    time_s: float = 0.0
    workspace_bytes: int = 0
    unpacked: int = -1
    """The saved row last asked for before it, in backward."""
    node: int = -1
    """Which node of the graph was running, in backward."""
    results: tuple[int, ...] = ()
    """Storage of each result, -1 where it is no tensor of the device."""
    sums: bool = False
    """Autograd adds up gradients in place here, where nobody watches."""


@dataclass
class RawStorage:
    """One storage as it lived; `death` None is still alive."""

    num_bytes: int
    dtype: str
    birth: int
    name: str
    role: str = ""
    """"weight", "state" or "gradient" where known; else it follows from its life."""
    release: int | None = None
    death: int | None = None
    lives: int = 1
    """Copies of it now on the device: the original, and one come back for backward."""
    done: int | None = None
    """When the copy that came back was free, if one did."""
    handles: int = 0
    """Tensors on it that the step itself made, and somebody holds."""
    let_go: int | None = None
    """When the last of them went."""


@dataclass
class RawSaved:
    """One saved tensor: storage, position packed, positions asked for."""

    storage: int
    packed: int
    unpacked: list[int] = field(default_factory=list)
    gone: int | None = None
    """When autograd let go of it; None if it has not."""


@dataclass
class RawCall:
    """One call of a module: which ops and saved rows fell inside."""

    path: str
    module: nn.Module
    depth: int
    call: int
    first_op: int
    first_saved: int
    grad: bool
    inputs: list[int]
    """Storages that came in as arguments."""
    before: object
    """Buffers by identity, and the states of Python's and numpy's generators, on entry."""
    wrapped: bool = False
    """It was given tensors of a transform of torch.func, which are nothing outside of that."""
    strays: bool = False
    """It set a buffer anew, or drew from a generator that a replay cannot rewind."""
    last_op: int = -1
    last_saved: int = -1
    nodes: range = range(0)
    """Of autograd's graph, by number: those it made; none of a call in backward."""
    wants: tuple[bool, ...] = ()
    """Which of the tensors that came in want a gradient."""
