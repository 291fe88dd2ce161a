"""One point over time: what the scheduler chose, how many requests it had, and what memory they took; from samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from adaserve_jax.report.document import Figure, Panel, Section, Series, Text
from adaserve_jax.report.points import Point, find_point
from adaserve_jax.report.view import View, condition_line, invalid_point
from adaserve_jax.results.samples import Sample

RATE_S = 1.0
Read = Callable[[Sample], float]
PANELS: tuple[tuple[str, str, tuple[tuple[str, Read], ...]], ...] = (
    ("Draft", "levels, nodes", (("depth", lambda s: s.depth), ("width", lambda s: s.width))),
    ("Budget", "verified tree nodes", (("budget", lambda s: s.budget),)),
    ("Requests", "requests", (("running", lambda s: s.running), ("waiting", lambda s: s.waiting))),
    ("KV pages", "pages", (
        ("used", lambda s: s.pages_used), ("all", lambda s: s.pages_total),
        ("extension used", lambda s: s.extension_used), ("extension", lambda s: s.extension_total))),
    ("Draft in device memory", "1: there", (("draft", lambda s: float(s.draft_resident)),)),
    ("Tokens", "tokens per second", ()),
)  # fmt: skip
"""Title, y axis and series; the last one is a rate between samples."""


def over_time(view: View, name: str | None) -> Section | None:
    """name: the point, which may be an invalid one, as the section says then; None: `default_point`, and no section
    where that is none. Raises ConfigError: no such point."""
    point = default_point(view) if name is None else find_point(view.measured.points, name)
    if point is None:
        return None
    drawn = _figure(point) if point.samples else Text(f"{point.name} has no samples, and so no course over time.", True)
    items = (drawn,) if point.row.valid else (Text(invalid_point(point), warns=True), drawn)
    return Section("timeline", "One run over time", items)


def default_point(view: View) -> Point | None:
    """At the focus, of the first policy that drafted; of the first that has samples where none did. None: none has."""
    sampled = [point for group in view.focus_groups() for point in group.points if point.samples]
    drafted = [point for point in sampled if any(sample.spec_steps for sample in point.samples)]
    return next(iter(drafted or sampled), None)


def _figure(point: Point) -> Figure:
    samples = sorted(point.samples, key=lambda s: s.t_s)
    x = tuple(sample.t_s for sample in samples)
    panels = []
    for title, y_label, read in PANELS:
        series = [
            Series(name, x, values, colour=colour)
            for colour, (name, of) in enumerate(read)
            if not name.startswith("extension") or any(sample.extension_total for sample in samples)
            for values in (tuple(float(of(sample)) for sample in samples),)
        ] or [Series("generated", *generation_rates(samples))]
        panels.append(Panel(title, tuple(series), y_label))
    return Figure(
        key="timeline",
        title=f"{point.name} over time",
        caption=f"Every value holds until the next sample. {condition_line([point])}",
        kind="step",
        x_label="seconds since the start of the point",
        panels=tuple(panels),
    )


def generation_rates(samples: Sequence[Sample]) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    """Times, and tokens per second from each of them to the next; of the last one nothing is known. Samples that follow
    within `RATE_S` are passed over: between two samples there may be no step, or two."""
    kept = list(samples[:1])
    for sample in samples[1:]:
        if sample.t_s >= kept[-1].t_s + RATE_S:
            kept.append(sample)
    rates = [(b.generation_tokens - a.generation_tokens) / (b.t_s - a.t_s) for a, b in pairwise(kept)]
    return tuple(sample.t_s for sample in kept), (*rates, None)
