"""Sizes and times: what is read, what is refused, how they are printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.core.errors import InputError, UnitError
from legroom.core.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("500 MB", 500 * 10**6),
        ("1.5KiB", 1536),
        (".5 gib", 2**29),
        ("  7b ", 7),
        ("2TiB", 2 * 2**40),
        ("3TB", 3 * 10**12),
        ("+1KB", 1000),
        (123, 123),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    """An int is bytes; a text is a number and a unit, binary or decimal, in any case."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["16", "", "GiB", "1 2GiB", "1e9B", "16GiB please", "sixteen GiB"])
def test_a_text_without_number_and_unit_is_refused(text: str) -> None:
    """A bare number in a text could be bytes or gigabytes: it is not guessed."""
    with pytest.raises(UnitError, match="cannot read the size"):
        parse_bytes(text)


def test_an_unknown_unit_is_named() -> None:
    with pytest.raises(UnitError, match="unknown unit 'furlong'"):
        parse_bytes("16furlong")


@pytest.mark.parametrize("size", [0, -5, "0GiB", "-1GiB", "0.1B"])
def test_a_size_is_above_zero(size: str | int) -> None:
    with pytest.raises(UnitError, match="above zero"):
        parse_bytes(size)


@pytest.mark.parametrize("size", [0, "0", "0GiB", "0 B"])
def test_nothing_is_a_size_where_it_may_be(size: str | int) -> None:
    """Not for the device, but for tiers to be left alone."""
    assert parse_bytes(size, or_none=True) == 0
    with pytest.raises(UnitError, match="above zero"):
        parse_bytes(-1, or_none=True)


@pytest.mark.parametrize("size", [True, 1.5, None, b"1GiB"])
def test_other_types_are_refused(size: object) -> None:
    """True is no size, and neither is a float: it would round silently."""
    with pytest.raises(UnitError, match="an int of bytes or a text"):
        parse_bytes(size)  # type: ignore[arg-type]


def test_a_unit_error_is_an_input_and_a_value_error() -> None:
    assert issubclass(UnitError, InputError) and issubclass(UnitError, ValueError)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (16 * 2**30, "16.0 GiB"),
        (1.25 * 2**30, "1.25 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (-2 * 2**30, "-2.00 GiB"),
    ],
)
def test_sizes_are_printed(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (12.34, "12.3 s"),
        (1, "1.00 s"),
        (0.0123, "12.3 ms"),
        (4.5e-6, "4.50 us"),
        (3e-9, "3 ns"),
        (-0.5, "-500.0 ms"),
    ],
)
def test_times_are_printed(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(min_value=1, max_value=2**50))
def test_what_is_printed_can_be_read_again(size: int) -> None:
    """Printing keeps three digits: reading it back is within half of the last one."""
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.01)
