"""Errors that are dealt with hold nothing, and those of others are left alone."""

import gc
import weakref
from collections.abc import Callable

import pytest

from legroom.core.errors import forget_frames, in_short


class Large:
    """Something that a frame holds."""


def fails(marks: list[weakref.ref[Large]], wrap: Callable[[Exception], Exception]) -> None:
    large = Large()
    marks.append(weakref.ref(large))
    try:
        raise KeyError("first")
    except KeyError as error:
        raise wrap(error) from error


@pytest.mark.parametrize("wrap", [lambda error: ValueError("second"), lambda error: error])
def test_an_error_that_is_kept_holds_no_frames(wrap: Callable[[Exception], Exception]) -> None:
    """Nor does what led to it, be that itself."""
    kept: list[Exception] = []
    marks: list[weakref.ref[Large]] = []
    try:
        fails(marks, wrap)
    except Exception as error:
        forget_frames(error)
        kept.append(error)
    gc.collect()
    assert marks[0]() is None and kept[0].__traceback__ is None


def test_an_error_that_a_caller_deals_with_keeps_its_traceback() -> None:
    """Someone tries again within an except clause."""

    def again() -> None:
        try:
            fails([], lambda error: ValueError("second"))
        except ValueError as error:
            forget_frames(error)

    try:
        raise RuntimeError("too large")
    except RuntimeError as error:
        again()
        assert error.__traceback__ is not None


def test_an_error_in_short() -> None:
    """Its kind and its first two lines, cut."""
    assert in_short(ValueError("one\n\n two \nthree")) == "ValueError: one two"
    assert in_short(ValueError()) == "ValueError: "
    assert len(in_short(ValueError("x" * 999))) == 200
