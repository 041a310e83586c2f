"""The steps that come with legroom: recorded ones of well-known models, found by name.

`legroom/traces` holds a file for each and an index; its README says what they are and how they
were made.
"""

import gzip
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any, Self

import msgspec

from legroom.core.errors import RecordError, UnknownName
from legroom.core.files import Record
from legroom.memory.trace import Step

FOLDER = resources.files("legroom") / "traces"
INDEX = "index.json"
SUFFIX = ".json.gz"


class Shipped(msgspec.Struct, frozen=True, kw_only=True):
    """Where one of the recorded steps comes from, and what it takes as it is."""

    name: str
    """The model's name, and the batch."""
    job: str
    """The built-in example that was recorded."""
    sizes: dict[str, Any]
    """Keywords that it was built with."""
    shapes: str
    """Of the batch's tensors."""
    precision: str
    optimizer: str
    model: str
    """The model's class."""
    num_ops: int
    peak_bytes: int
    step_s: float


class ShippedSteps(Record, frozen=True, kw_only=True):
    """All recorded steps that come with legroom."""

    kind = "traces"

    machine: str
    """Whose rates the times come from."""
    torch: str
    transformers: str
    """Versions that they were recorded with."""
    command: str
    steps: tuple[Shipped, ...]

    def check(self) -> Self:
        """Each name once, and each starts with its job's."""
        if len({row.name for row in self.steps}) < len(self.steps):
            raise RecordError("traces: a name is there twice")
        for row in self.steps:
            if not row.name.startswith(f"{row.job}-"):
                raise RecordError(f"trace {row.name}: recorded from {row.job}")
        return self


@cache
def shipped_steps() -> ShippedSteps:
    """The index of them."""
    return ShippedSteps.from_bytes((FOLDER / INDEX).read_bytes(), INDEX)


def shipped_names() -> list[str]:
    """Names of the steps that come with legroom."""
    return [row.name for row in shipped_steps().steps]


def load_shipped(name: str, others: Iterable[str] = ()) -> Step:
    """The recorded step of that name.

    Raises UnknownName, with the nearest of these and of `others` that the name could have meant.
    """
    if name not in shipped_names():
        others = list(others)
        what = "example or recorded step" if others else "recorded step"
        raise UnknownName(what, name, [*others, *shipped_names()])
    data = (FOLDER / f"{name}{SUFFIX}").read_bytes()
    return Step.from_bytes(gzip.decompress(data), name)
