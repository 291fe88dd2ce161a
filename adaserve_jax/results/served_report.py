"""What a server did in a time, from its records: the summaries of docs/metrics.md, and what only records tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adaserve_jax.results.aggregate import percentiles, summarize
from adaserve_jax.results.record_reader import Held, read_choices
from adaserve_jax.results.schema import ALL_CLASSES, Summary
from adaserve_jax.results.served import ServedChoice, ServerRun

Percentiles = tuple[float | None, float | None, float | None]


@dataclass(frozen=True)
class Targets:
    """Targets of one kind in one class, and how the choices kept them.

    least_s, most_s: targets in force, None without any. over: 50th, 90th and 99th percentile of measured / target, over
    the choices that have both.
    """

    least_s: float | None
    most_s: float | None
    over: Percentiles


@dataclass(frozen=True)
class ClassReport:
    """One SLO class, or all. aborted: those of summary.failed whose client, or whose server, stopped them. errors:
    codes and how many choices ended with them, the most frequent first."""

    summary: Summary
    tpot: Targets
    ttft: Targets
    cached_tokens: int
    aborted: int
    errors: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ServedReport:
    """The choices that ended from `since` until before `until`.

    first, last: the first arrival and the last end of them, None where there are none; wall_s: between the two, also
    where only one key or class is reported. runs: the engines that served them. classes: all of them first, then each;
    empty where nothing fits.
    """

    held: Held
    since_unix_s: float
    until_unix_s: float
    first_unix_s: float | None
    last_unix_s: float | None
    wall_s: float
    runs: tuple[ServerRun, ...]
    classes: tuple[ClassReport, ...]


def report_of(
    path: Path, *, since_unix_s: float, until_unix_s: float, slo_class: str | None = None, key: str | None = None
) -> ServedReport:
    """Report on a file of records; of one class or one key only, where they are given. Raises ConfigError."""
    choices, held = read_choices(path, since_unix_s=since_unix_s, until_unix_s=until_unix_s)
    first = min((choice.arrival_unix_s for choice in choices), default=None)
    last = max((choice.ended_unix_s for choice in choices), default=None)
    wall_s = 0.0 if first is None or last is None else last - first
    chosen = [choice for choice in choices if key is None or choice.key == key]
    classes = [each for each in _classes(chosen, wall_s) if slo_class is None or each.summary.slo_class == slo_class]
    runs = dict.fromkeys(choice.run for choice in chosen)
    return ServedReport(held, since_unix_s, until_unix_s, first, last, wall_s, tuple(runs), tuple(classes))


def _classes(choices: Sequence[ServedChoice], wall_s: float) -> list[ClassReport]:
    if not choices:
        return []
    summaries = summarize([choice.record for choice in choices], wall_s=wall_s)
    return [_class_report(each, [c for c in choices if _belongs(c, each.slo_class)]) for each in summaries]


def _belongs(choice: ServedChoice, slo_class: str) -> bool:
    return slo_class in (ALL_CLASSES, choice.record.slo_class)


def _class_report(summary: Summary, choices: Sequence[ServedChoice]) -> ClassReport:
    records = [choice.record for choice in choices]
    errors = Counter(record.error_code for record in records if record.error_code is not None)
    return ClassReport(
        summary=summary,
        tpot=_targets((record.tpot_slo_s, record.tpot_s) for record in records),
        ttft=_targets((record.ttft_slo_s, record.ttft_s) for record in records),
        cached_tokens=sum(choice.cached_tokens for choice in choices),
        aborted=sum(choice.ending == "abort" for choice in choices),
        errors=tuple(errors.most_common()),
    )


def _targets(pairs: Iterable[tuple[float | None, float | None]]) -> Targets:
    """pairs: target, measured."""
    carried = [(target_s, measured_s) for target_s, measured_s in pairs if target_s is not None]
    over = [measured_s / target_s for target_s, measured_s in carried if measured_s is not None]
    targets = [target_s for target_s, _ in carried]
    return Targets(min(targets, default=None), max(targets, default=None), percentiles(over))
