"""Build a report: read the measured runs, and put all sections into one document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.compare import comparison, headline, versus
from adaserve_jax.report.document import Document, Section, Text
from adaserve_jax.report.estimates import listed
from adaserve_jax.report.mlperf import mlperf
from adaserve_jax.report.points import Measured, find_point
from adaserve_jax.report.sections import acceptance, curves, latency, over_time, pareto, phases, violations
from adaserve_jax.report.view import View, facts, invalid_points, warnings
from adaserve_jax.results.run_folder import RunResults

FOLDED = ("mlperf", "pareto", "acceptance", "violations", "phases", "timeline")
"""Sections that explain the others."""


def load_folders(
    paths: Sequence[Path], against: Path | None = None
) -> tuple[tuple[RunResults, ...], RunResults | None]:
    """Read the runs to report on, and the run that they are compared with; see `RunResults.load`. Raises ConfigError:
    no path is given, one is given twice or compared with itself, or one cannot be read."""
    if not paths:
        raise ConfigError(
            "expected one or more folders that `adaserve bench` or `adaserve simulate` wrote, or the file of "
            "`adaserve serve --records`, got none"
        )
    places = [path.resolve() for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"expected each folder once, got {path} twice: its requests would count twice")
    if against is not None and against.resolve() in places:
        raise ConfigError(
            f"expected the folder of another run for --against, got {against}, which is reported on: every difference "
            "would be 0"
        )
    return tuple(map(RunResults.load, paths)), None if against is None else RunResults.load(against)


def build(
    found: Measured, *, against: Measured | None = None, title: str | None = None, timeline: str | None = None,
    rate: float | None = None, subject: str | None = None,
) -> Document:  # fmt: skip
    """Build the report of all measured points; sections with nothing to show are left out.

    timeline: name of the point that is shown over time; None chooses one. rate: requests per second of the figures that
    show one rate; None chooses the middle one. subject: policy that is compared with each other one; None chooses
    `adaserve`, or the first.

    Raises:
        ConfigError: there is no such point, rate or policy.
    """
    if timeline is not None:
        find_point(found.points, timeline)
    sections = _sections(found, against, timeline, rate, subject)
    shown = tuple(
        replace(section, folded=section.key in FOLDED) for section in sections if section is not None and section.items
    )
    return Document(title or f"Report of {listed(found.sources)}", facts(found), shown)


def _sections(
    found: Measured, against: Measured | None, timeline: str | None, rate: float | None, subject: str | None
) -> list[Section | None]:
    invalid, notices = invalid_points(found), warnings(found)
    if not found.valid:
        text = Text("No point is valid: there is nothing to compare and nothing to draw.", warns=True)
        return [Section("headline", "Headline", (*invalid, text)), notices]
    view = View.of(found, rate)
    first = headline(view)
    return [
        Section(first.key, first.title, (*invalid, *first.items)),
        notices,
        versus(view, subject),
        comparison(view, against) if against is not None else None,
        curves(view),
        latency(view),
        mlperf(view),
        pareto(view),
        acceptance(view),
        violations(view),
        phases(view),
        over_time(view, timeline),
    ]
