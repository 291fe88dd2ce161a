"""What was measured as one document: every section in its order, those with nothing to show left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.compare import comparison, versus
from adaserve_jax.report.document import Document, Section, Text
from adaserve_jax.report.estimates import listed
from adaserve_jax.report.headline import headline
from adaserve_jax.report.mlperf import mlperf
from adaserve_jax.report.points import Measured, find_point
from adaserve_jax.report.sections import acceptance, curves, latency, pareto, phases, violations
from adaserve_jax.report.timeline import over_time
from adaserve_jax.report.view import View, facts, invalid_points, warnings
from adaserve_jax.results.run_folder import RunFolder


def load_folders(paths: Sequence[Path], against: Path | None = None) -> tuple[tuple[RunFolder, ...], RunFolder | None]:
    """Read run folders, and the one that they are compared with. Raises ConfigError: none is given, one is given twice,
    it is compared with itself, or one cannot be read."""
    if not paths:
        raise ConfigError("expected one or more folders that `adaserve bench` or `adaserve simulate` wrote, got none")
    places = [path.resolve() for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"expected each folder once, got {path} twice: its requests would count twice")
    if against is not None and against.resolve() in places:
        raise ConfigError(
            f"expected the folder of another run for --against, got {against}, which is reported on: every difference "
            "would be 0"
        )
    return tuple(map(RunFolder.load, paths)), None if against is None else RunFolder.load(against)


def build(
    found: Measured, *, against: Measured | None = None, title: str | None = None, timeline: str | None = None,
    rate: float | None = None,
) -> Document:  # fmt: skip
    """The report of all points that were measured.

    against: an earlier run, compared point by point. timeline: name of the point that is shown over time. rate: of the
    figures that show one, requests per second. Raises ConfigError: no such point, no such rate.
    """
    if timeline is not None:
        find_point(found.points, timeline)
    sections = _sections(found, against, timeline, rate)
    return Document(title or f"Report of {listed(found.sources)}", facts(found), sections)


def _sections(
    found: Measured, against: Measured | None, point: str | None, rate: float | None
) -> tuple[Section, ...]:  # fmt: skip
    invalid, notices = invalid_points(found), warnings(found)
    if not found.valid:
        text = Text("No point is valid: there is nothing to compare and nothing to draw.", warns=True)
        return tuple(_filled(Section("headline", "Headline", (*invalid, text)), notices))
    view = View.of(found, rate)
    first = headline(view)
    sections = (
        Section(first.key, first.title, (*invalid, *first.items)),
        notices,
        versus(view),
        comparison(view, against) if against is not None else None,
        curves(view),
        latency(view),
        mlperf(view),
        pareto(view),
        acceptance(view),
        violations(view),
        phases(view),
        over_time(view, point),
    )
    return tuple(_filled(*sections))


def _filled(*sections: Section | None) -> list[Section]:
    return [section for section in sections if section is not None and section.items]
