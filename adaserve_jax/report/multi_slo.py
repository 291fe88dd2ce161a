"""The page of the multi-SLO benchmark: systems side by side, from their submissions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.document import Document, Figure, Panel, Section, Series, Table, Text, number
from adaserve_jax.report.estimates import listed, percent
from adaserve_jax.results.submission import LEVELS, AtLevel, ClassTarget, Submission, SuitePoint

EVERY = "worst class"
METHOD = (
    "A rate counts at a level if every class has at least that share of its requests meet all of their targets, there "
    "and at every lower rate that was measured. Beside it in parentheses stands the lowest rate that missed the level: "
    "the limit lies between the two; `at least` says that no rate missed it. `sure` is the highest rate at which the "
    "lower ends of the 95% intervals (Wilson) keep the level. Fairness is Jain's index of the attainments of the "
    "classes: 1 if all are alike. Overload is twice the highest rate at {first}; a burst is the same rate for a sixth "
    "of the time, and recovery is the time from its end until 90% of the requests that follow meet their targets."
)


_ASKED = {"classes": "targets", "least_requests": "requests of each class"}
"""Words for fields of a definition whose names do not say it."""


def multi_slo_page(submissions: Sequence[Submission], title: str | None = None) -> Document:
    """Build the page. Raises ConfigError: there is no submission, or two cannot be told apart."""
    if not submissions:
        raise ConfigError("expected one or more submissions to the multi-SLO benchmark, got none")
    names = system_names(submissions)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two submissions are of {twice}; give each system, policy and draft once")
    first = submissions[0].definition
    facts = (
        ("targets", f"preset {first.preset}; {targets_text(first.classes)}"),
        ("baseline", f"{number(first.baseline_ms)} ms for one token, alone and without speculation"),
        ("workload", f"{first.workload}, seed {first.seed}, {first.repeats} repeats, {number(first.duration_s)} s or "
                     f"more for each load, Poisson arrivals"),
        ("machine", listed(list(dict.fromkeys(each.system.machine for each in submissions)))),
        ("client", listed(list(dict.fromkeys(each.system.client for each in submissions)))),
        ("commit", listed(list(dict.fromkeys(each.system.commit for each in submissions)))),
    )  # fmt: skip
    headline = Section("headline", "Highest rates", (*_warnings(submissions), *_headline(submissions, names)))
    curves = Section("curves", "Attainment and goodput by rate", _curves(submissions, names))
    classes = Section("classes", "Classes at the highest rate", (_class_table(submissions, names),))
    return Document(title or "Multi-SLO benchmark", facts, (headline, curves, classes))


def system_names(submissions: Sequence[Submission]) -> list[str]:
    """Return a name for each: the system with its policy, and its draft where others would be named the same."""
    systems = [each.system for each in submissions]
    names = [f"{each.name}, {each.policy}" for each in systems]
    return [
        f"{name}, {each.draft or 'no draft'}" if names.count(name) > 1 else name
        for name, each in zip(names, systems, strict=True)
    ]


def targets_text(classes: Sequence[ClassTarget]) -> str:
    """Return the targets of all classes in one line."""
    return "; ".join(
        f"{each.name} ({each.share:.0%}): "
        + ", ".join(
            f"{what} {number(value)} ms"
            for what, value in (("TPOT", each.tpot_ms), ("TTFT", each.ttft_ms), ("last token", each.e2e_ms))
            if value is not None
        )
        for each in classes
    )


def _warnings(submissions: Sequence[Submission]) -> list[Text]:
    """Return a sentence for everything in which the systems were not asked the same."""
    first = submissions[0].definition
    found = []
    for name in ("preset", "classes", "workload_hash", "seed", "repeats", "duration_s", "least_requests"):
        if any(getattr(each.definition, name) != getattr(first, name) for each in submissions):
            what = _ASKED.get(name, name.replace("_", " "))
            found.append(Text(f"The systems differ in {what}, so that their rates cannot be compared.", warns=True))
    found += [Text(f"{each.system.name}: {note}", warns=True) for each in submissions for note in each.system.notes]
    return found


def _headline(submissions: Sequence[Submission], names: Sequence[str]) -> tuple[Text | Table, ...]:
    searched = [at for at, level in enumerate(LEVELS)
                if all(level in each.definition.searched_levels for each in submissions)]  # fmt: skip
    columns = ["system", *(f"requests/s at {LEVELS[at]:.0%}" for at in searched), f"sure at {LEVELS[0]:.0%}",
               f"goodput at {LEVELS[0]:.0%}, tokens/s", "fairness there", "met at overload", "worst class at overload",
               "goodput at overload, tokens/s", "recovery, s"]  # fmt: skip
    cells: list[tuple[str, ...]] = []
    for name, each in zip(names, submissions, strict=True):
        verdict = each.verdict
        first = verdict.levels[0]
        unknown = "not recovered" if any(point.stage == "burst" for point in each.points) else "-"
        cells.append((
            name, *(_rate(verdict.levels[at]) for at in searched), _known(first.sure_rps), _known(first.goodput_tps),
            _known(first.fairness), percent(verdict.overload_attainment), percent(verdict.overload_worst),
            _known(verdict.overload_goodput_tps), _known(verdict.recovery_s, unknown),
        ))  # fmt: skip
    strong = frozenset(
        (row, column)
        for column, values in (
            *(
                (column, [each.verdict.levels[at].rate_rps for each in submissions])
                for column, at in enumerate(searched, 1)
            ),
            (len(searched) + 2, [each.verdict.levels[0].goodput_tps for each in submissions]),
        )
        for row, value in enumerate(values)
        if value is not None and value == max(each for each in values if each is not None)
    )
    table = Table("rates", "Highest rates at which every class keeps its targets", "", tuple(columns), tuple(cells),
                  frozenset(range(1, len(columns))), strong)  # fmt: skip
    return Text(METHOD.format(first=f"{LEVELS[0]:.0%}")), table


def _rate(level: AtLevel) -> str:
    if level.rate_rps is not None and level.missed_rps is None:
        return f"at least {number(level.rate_rps)}"
    missed = "" if level.missed_rps is None else f" ({number(level.missed_rps)})"
    return ("none" if level.rate_rps is None else number(level.rate_rps)) + missed


def _known(value: float | None, unknown: str = "-") -> str:
    return unknown if value is None else number(value)


def _steady(submission: Submission) -> list[SuitePoint]:
    return sorted((each for each in submission.points if each.stage == "rate"), key=lambda each: each.rate_rps)


def _curves(submissions: Sequence[Submission], names: Sequence[str]) -> tuple[Figure, ...]:
    classes = [each.name for each in submissions[0].definition.classes]

    def line(which: str) -> Callable[[int], Series]:
        def of(at: int) -> Series:
            points = _steady(submissions[at])
            counts = [
                point.worst if which == EVERY else next((c for c in point.classes if c.name == which), None)
                for point in points
            ]
            return Series(
                names[at],
                tuple(point.rate_rps for point in points),
                tuple(count and count.attainment for count in counts),
                tuple(count and count.interval[0] for count in counts),
                tuple(count and count.interval[1] for count in counts),
                colour=at,
            )

        return of

    def goodput(at: int) -> Series:
        points = _steady(submissions[at])
        return Series(
            names[at], tuple(point.rate_rps for point in points), tuple(point.goodput_tps for point in points),
            colour=at,
        )  # fmt: skip

    rows = range(len(submissions))
    attained = Figure(
        "attainment", "Share of requests that meet all of their targets",
        "Steady loads, with 95% intervals. The first panel has the class that is worst at each rate.", "line",
        "requests per second",
        tuple(
            Panel(which, tuple(map(line(which), rows)), "share of requests", (0.0, 1.0), True)
            for which in (EVERY, *classes)
        ),
        log_x=True,
    )  # fmt: skip
    earned = Figure(
        "goodput", "Goodput", "Output tokens per second of requests that met all of their targets.", "line",
        "requests per second", (Panel("", tuple(map(goodput, rows)), "tokens per second"),), log_x=True,
    )  # fmt: skip
    return attained, earned


def _class_table(submissions: Sequence[Submission], names: Sequence[str]) -> Table:
    """Return a line per system and class, at the highest rate of the first level, else at the lowest measured."""
    columns = ("system", "class", "requests/s", "requests", "met", "interval", "lost", "TTFT p50, ms", "TTFT p99, ms",
               "TPOT p50, ms", "TPOT p99, ms")  # fmt: skip
    cells: list[tuple[str, ...]] = []
    for name, each in zip(names, submissions, strict=True):
        steady = _steady(each)
        kept = each.verdict.levels[0].rate_rps
        point = next((at for at in steady if at.rate_rps == kept), steady[0])
        for count in point.classes:
            low, high = count.interval
            times = (count.ttft_p50_ms, count.ttft_p99_ms, count.tpot_p50_ms, count.tpot_p99_ms)
            cells.append((
                name, count.name, number(point.rate_rps), f"{count.requests}", f"{count.attainment:.1%}",
                f"{low:.1%} to {high:.1%}", f"{count.lost}", *map(_known, times),
            ))  # fmt: skip
    caption = "Lost: rejected, failed or cut off. A system that keeps no rate is shown at the lowest that was measured."
    return Table("classes", "By class", caption, columns, tuple(cells), frozenset(range(2, len(columns))))
