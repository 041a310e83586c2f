"""Builds: ways a block was compiled, as measured."""

from typing import NamedTuple

OWN, GIVEN, RESULT = "own", "given", "result"
"""Where a saved tensor lies: in storage the block made for backward alone, its input, its output.
"""


class Save(NamedTuple):
    """One tensor a build saves for backward."""

    where: str
    rank: int
    """Among the build's own storages, what it was given, or its results."""
    num_bytes: int


class Build(NamedTuple):
    """One way a block was compiled, and what it takes."""

    name: str
    forward_s: float
    backward_s: float
    forward_bytes: int
    backward_bytes: int
    """Most bytes held on top of what was there, and of what is left after."""
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Of its own storages."""
    saves: tuple[Save, ...]
    host_s: float = 0.0
    """How long the host is busy with it, both ways."""

    @property
    def saved_bytes(self) -> int:
        """What stays on the device from forward to backward."""
        return sum(self.sizes)

    @property
    def seconds(self) -> float:
        """Both ways."""
        return self.forward_s + self.backward_s

    def at(self, pace: "Pace") -> "Build":
        """The same where things take longer than in its trial."""
        return self._replace(
            forward_s=self.forward_s * pace.ops,
            backward_s=self.backward_s * pace.ops,
            host_s=self.host_s * pace.host,
        )


class Pace(NamedTuple):
    """How many times longer than measured the device takes for its ops, and the host."""

    ops: float = 1.0
    host: float = 1.0


SAME = Pace()
