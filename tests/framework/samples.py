"""Parameters of tests of which one tier runs some, and a longer one the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

import pytest

Value = TypeVar("Value")


def others_at_night(values: Iterable[Value], by_day: Collection[Value]) -> list[Value | object]:
    """Return all of these parameters, marked `night` but for those of the day. Raises as others_in does."""
    return others_in("night", values, by_day)


def others_in(tier: str, values: Iterable[Value], sample: Collection[Value]) -> list[Value | object]:
    """Return all of these parameters, with the mark of a tier but for those of the sample.

    Raises ValueError if a parameter of the sample is not there.
    """
    values = list(values)
    if missing := [value for value in sample if value not in values]:
        raise ValueError(f"{missing} are not among {values}")
    return [value if value in sample else _marked(tier, value) for value in values]


def _marked(tier: str, value: object) -> object:
    """Return a parameter, or the parameters of a tuple, with the mark."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=getattr(pytest.mark, tier))
