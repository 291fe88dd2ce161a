"""The numbers of a figure: as tables for people who read or copy them, and thinned for drawing."""

from __future__ import annotations

from itertools import pairwise
from math import floor, isfinite, log10

from adaserve_jax.report.document import Figure, Panel, Series, Table

Point = tuple[float | str, float | None, float | None, float | None]
"""x, y, low, high."""
FULL_ENOUGH = 0.5
"""Share of cells that must be filled for series to stand side by side over a common x."""


def number(value: float | str | None) -> str:
    """Four significant digits, never an exponent, no separators: for reading and for copying. A text stays as it is."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isfinite(value) or value == int(value):
        return f"{value:.0f}"
    return f"{value:.{max(0, 3 - floor(log10(abs(value))))}f}".rstrip("0").rstrip(".")


def written(panel: Panel, value: float) -> str:
    """A value of the panel: a share in percent with one decimal, else a number."""
    return f"{100 * value:.1f}%" if panel.y_percent else number(value)


def tables_of(figure: Figure, *, most_rows: int) -> tuple[Table, ...]:
    """A table per panel that has points: over a common x where the series have one, else a row per point.

    Of more than `most_rows` rows, so many at even distances are kept, and the caption says so.
    """
    made = []
    for index, panel in enumerate(figure.panels):
        if any(series.y for series in panel.series):
            made.append(_table(figure, panel, f"{figure.key}-{index}", most_rows))
    return tuple(made)


def _table(figure: Figure, panel: Panel, key: str, most_rows: int) -> Table:
    shown = [series for series in panel.series if series.y]
    by_x = [{point[0]: point for point in points_of(series)} for series in shown]
    xs = list(dict.fromkeys(x for points in by_x for x in points))
    if all(isinstance(x, float | int) for x in xs):
        xs.sort()  # pyright: ignore[reportCallIssue]
    doubled = any(len(points) < len(series.y) for points, series in zip(by_x, shown, strict=True))
    labelled = any(series.labels for series in shown)
    filled = sum(map(len, by_x)) / (len(xs) * len(by_x))
    if doubled or labelled or filled < FULL_ENOUGH:
        columns = ("series", figure.x_label, panel.y_label, *(("label",) if labelled else ()))
        rows = [
            (series.name, number(point[0]), _cell(panel, point), *((_label(series, i),) if labelled else ()))
            for series in shown
            for i, point in enumerate(points_of(series))
        ]
        numeric = frozenset({1, 2})
    else:
        columns = (figure.x_label, *(series.name or panel.y_label for series in shown))
        rows = [(number(x), *(_cell(panel, points.get(x)) for points in by_x)) for x in xs]
        numeric = frozenset(range(1, len(columns))) | ({0} if isinstance(xs[0], float | int) else frozenset())
    title = panel.title or figure.title
    caption = panel.y_label
    if len(rows) > most_rows:
        caption = f"{caption}; {most_rows} of {len(rows)} points, at even distances"
        rows = [rows[i] for i in _even(len(rows), most_rows)]
    return Table(key, title, caption, columns, tuple(rows), numeric)


def points_of(series: Series) -> list[Point]:
    """Points of a series, with None for bounds that it has not."""
    none = (None,) * len(series.y)
    return list(zip(series.x, series.y, series.low or none, series.high or none, strict=True))


def _cell(panel: Panel, point: Point | None) -> str:
    if point is None:
        return ""
    _, y, low, high = point
    if y is None:
        return ""
    if low is None or high is None:
        return written(panel, y)
    return f"{written(panel, y)} ({written(panel, low)} to {written(panel, high)})"


def _label(series: Series, index: int) -> str:
    return series.labels[index] if series.labels else ""


def thinned(points: list[Point], most: int) -> list[Point]:
    """At most about `most` points that draw the same line: of each of `most` / 4 stretches of the list, the first, the
    lowest, the highest, a gap, and the last."""
    if len(points) <= most:
        return points
    kept: list[Point] = []
    for start, end in _stretches(len(points), max(1, most // 4)):
        stretch = range(start, end)
        known = [i for i in stretch if points[i][1] is not None]
        gap = next((i for i in stretch if points[i][1] is None), None)
        wanted = {start, end - 1} | ({gap} if gap is not None else set())
        if known:
            wanted |= {min(known, key=lambda i: points[i][1] or 0.0), max(known, key=lambda i: points[i][1] or 0.0)}
        kept += [points[i] for i in sorted(wanted)]
    return kept


def averaged(xs: list[float], columns: list[list[float]], most: int) -> tuple[list[float], list[list[float]]]:
    """At most `most` points: the first x of each stretch, the mean of each column over it; sums stay sums."""
    if len(xs) <= most:
        return xs, columns
    stretches = _stretches(len(xs), most)
    means = [[sum(column[a:b]) / (b - a) for a, b in stretches] for column in columns]
    return [xs[a] for a, _ in stretches], means


def _stretches(length: int, count: int) -> list[tuple[int, int]]:
    bounds = [length * i // count for i in range(count + 1)]
    return list(pairwise(bounds))


def _even(length: int, count: int) -> list[int]:
    """`count` indices from the first to the last."""
    return [round(i * (length - 1) / max(1, count - 1)) for i in range(count)]
