"""Bytes and seconds: read "16GiB", print them."""

import re

from legroom.core.errors import UnitError

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"^\s*([+-]?\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*$")


def parse_bytes(text: str | int, *, or_none: bool = False) -> int:
    """Read a size: an int is bytes, a text needs a unit ("16GiB", "500 MB").

    Raises UnitError for a text with no unit, an unknown unit, or a size not above zero: 0 is one
    only `or_none`.
    """
    if or_none and text in ("0", 0) and not isinstance(text, bool):
        return 0
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise UnitError(f"a size is an int of bytes or a text such as '16GiB', not {text!r}")
    size = text if isinstance(text, int) else _read(text)
    if size < 0 or (size == 0 and not or_none):
        raise UnitError(f"a size must be above zero, not {text!r}")
    return size


def _read(text: str) -> int:
    match = _SIZE.match(text)
    if match is None:
        raise UnitError(
            f"cannot read the size {text!r}: write a number and a unit, such as '16GiB' or '900MB'"
        )
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower())
    if factor is None:
        raise UnitError(f"unknown unit {unit!r} in {text!r}: use B, KiB, MiB, GiB, TiB or KB..TB")
    return round(float(number) * factor)


def format_bytes(size: float) -> str:
    """Print a size for a person: "15.3 GiB"."""
    sign, size = ("-" if size < 0 else ""), abs(size)
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            value = size / factor
            return f"{sign}{value:.{1 if value >= 10 else 2}f} {unit}"
    return f"{sign}{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Print a time for a person: "12.3 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            value = seconds / factor
            return f"{value:.{1 if abs(value) >= 10 else 2}f} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.0f} ns"
