"""Parameters of tests of which CI runs some, and `make night` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

import pytest

Value = TypeVar("Value")


def others_at_night(values: Iterable[Value], by_day: Collection[Value]) -> list[Value | object]:
    """Return all of these parameters, marked `night` but for those of the day.

    Raises ValueError if a parameter of the day is not there.
    """
    values = list(values)
    if missing := [value for value in by_day if value not in values]:
        raise ValueError(f"{missing} are not among {values}")
    return [value if value in by_day else _at_night(value) for value in values]


def _at_night(value: object) -> object:
    """Return a parameter, or the parameters of a tuple, with the mark."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.night)
