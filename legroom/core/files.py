"""Record files: a header with kind and version, then the record, as readable JSON."""

import gzip
import os
import zlib
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from legroom.core.errors import InputError, RecordError


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen record that can be checked, saved and loaded."""

    kind: ClassVar[str] = ""
    version: ClassVar[int] = 1

    def check(self) -> Self:
        """Return self if the record keeps its law; raise RecordError naming the row at fault."""
        return self

    def to_json(self) -> str:
        """The record as one JSON text, header included."""
        text = msgspec.json.encode(
            {"legroom": self.kind, "version": self.version, "body": msgspec.to_builtins(self)}
        )
        return msgspec.json.format(text, indent=1).decode()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the record to `path` in one move (gzip if it ends in .gz); return the path."""
        target = Path(path)
        raw = self.to_json().encode()
        data = gzip.compress(raw, mtime=0) if target.suffix == ".gz" else raw
        partial = target.with_name(target.name + ".partial")
        partial.write_bytes(data)
        partial.replace(target)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check a record; raise RecordError when the file is damaged or too new."""
        return cls.from_bytes(_read(Path(path), cls.kind), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, origin: str = "text") -> Self:
        """Read and check a record from its JSON bytes; `origin` names it in errors."""
        body = _open(data, cls, origin)
        try:
            record = msgspec.convert(body, cls)
        except msgspec.ValidationError as error:
            raise RecordError(f"{origin} is not a whole {cls.kind} record: {error}") from None
        return record.check()


def _read(path: Path, kind: str) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"no {kind} file at {path}") from None
    except OSError as error:
        raise InputError(f"cannot read the {kind} file {path}: {error.strerror}") from None
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise RecordError(f"{path} is damaged: {error}") from None


def _open(data: bytes, cls: type[Record], origin: str) -> Any:
    try:
        head = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise RecordError(f"{origin} is damaged: {error}") from None
    if not isinstance(head, dict) or "legroom" not in head:
        raise RecordError(f"{origin} is no legroom file (it has no 'legroom' header)")
    if head["legroom"] != cls.kind:
        raise RecordError(f"{origin} holds a {head['legroom']!r} record, wanted {cls.kind!r}")
    version = head.get("version")
    if not isinstance(version, int) or version < 1:
        raise RecordError(f"{origin} has no valid format version")
    if version > cls.version:
        raise RecordError(
            f"{origin} has {cls.kind} format {version}, this legroom reads up to {cls.version}: "
            "upgrade legroom"
        )
    return head.get("body")


def cache_dir() -> Path:
    """Where what was measured is kept for later processes; it need not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "legroom"
