"""Parameters of which `make test` runs the first, and `make test-slow` all, or all but the first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(count: int, values: Iterable[Any], *, several: bool = False) -> list[Any]:
    """Return the values of a parametrised test, those after the first `count` marked as slow. several: each value is a
    tuple of several arguments."""
    values = list(values)
    rest = [value if several else (value,) for value in values[count:]]
    return [*values[:count], *(pytest.param(*each, marks=pytest.mark.slow) for each in rest)]


def longer_when_slow(values: Iterable[Any], *, several: bool = False) -> list[Any]:
    """Return the values of a parametrised test, of which the first one is for `make test` alone, since the second one
    does the same and more; the rest are as in `slow_after`."""
    short, *rest = slow_after(1, values, several=several)
    return [pytest.param(*(short if several else (short,)), marks=pytest.mark.short), *rest]
