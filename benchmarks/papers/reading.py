"""Small helpers that readers of results share: JSON by name, ratios, and series of a figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.document import Figure, Kind, Panel, Series


def read_json(path: Path) -> Any:
    """Raises ConfigError: it cannot be read, or is no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"cannot read results from {path}: {error}; remove its folder and run the figure again"
        ) from error


def over(ours: float | None, theirs: float | None) -> float | None:
    """Their ratio; None where one is not known or theirs is 0."""
    return None if ours is None or not theirs else ours / theirs


def violation_times(theirs: float, ours: float, requests: int) -> float:
    """Violations of theirs over those of ours, from attainments. requests: of ours that have targets; where all of them
    are met, it is as if one were not: at least so many times."""
    return (1 - theirs) / max(1 - ours, 1 / max(requests, 1))


def largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def series(by_name: Mapping[str, Mapping[Any, float | None]]) -> tuple[Series, ...]:
    """One for each name, in order, from its values by x."""
    return tuple(
        Series(name, tuple(values), tuple(values.values()), colour=colour)
        for colour, (name, values) in enumerate(by_name.items())
    )


def figure(
    key: str, title: str, caption: str, x_label: str, panels: Iterable[tuple[str, str, tuple[Series, ...]]], *,
    kind: Kind = "line", percent: Iterable[str] = (),
) -> Figure:  # fmt: skip
    """panels: title, label of y and series of each. percent: titles of those whose values are shares."""
    shares = set(percent)
    drawn = tuple(
        Panel(name, found, label, (0.0, 1.0) if name in shares else None, name in shares)
        for name, label, found in panels
    )
    return Figure(key, title, caption, kind, x_label, drawn)
