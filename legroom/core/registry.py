"""Names to things: policies, examples. An unknown name answers with the known ones."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from legroom.core.errors import UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """A dict of named entries, filled by decorator."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: file the decorated thing under `name`."""

        def file(entry: T) -> T:
            assert name not in self._entries, f"{self.what} {name!r} registered twice"
            self._entries[name] = entry
            return entry

        return file

    def __getitem__(self, name: str) -> T:
        """The entry of that name; raises UnknownName."""
        if name not in self._entries:
            raise UnknownName(self.what, name, self._entries)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
