"""Numbers as a report writes them: shares in percent, times in milliseconds, "-" for what is not known."""

from __future__ import annotations

from collections.abc import Sequence

from adaserve_jax.report.estimates import Estimate
from adaserve_jax.report.measures import Measure, Unit

UNIT_NAMES: dict[Unit, str] = {"share": "", "tokens/s": ", tokens/s", "s": ", ms", "tokens": ""}
_SCALES: dict[Unit, float] = {"share": 100.0, "tokens/s": 1.0, "s": 1e3, "tokens": 1.0}
_FORMATS: dict[Unit, str] = {"share": ",.1f", "tokens/s": ",.1f", "s": ",.1f", "tokens": ",.2f"}


def heading(measure: Measure) -> str:
    """The title of a column of the measure, with its unit."""
    return measure.title + UNIT_NAMES[measure.unit]


def cell(measure: Measure, estimate: Estimate) -> str:
    """E.g. "93.1% (90.2 to 95.5)"."""
    return _with_interval(estimate, measure, sign="", suffix="%" if measure.unit == "share" else "")


def difference_cell(measure: Measure, estimate: Estimate) -> str:
    """E.g. "+2.9 better (+1.0 to +4.8)"; shares in percentage points. Without the word: chance may be all it is."""
    judged = ""
    if estimate.value is not None and estimate.is_not_zero:
        judged = " better" if measure.better(estimate.value, 0.0) else " worse"
    return _with_interval(estimate, measure, sign="+", suffix=judged)


def titled(measure: Measure) -> str:
    """The title at the beginning of a sentence."""
    return measure.title[0].upper() + measure.title[1:]


def amount(measure: Measure, value: float) -> str:
    """A difference without its sign, in words: "4.2 percentage points", "12.0 tokens/s", "3.1 ms"."""
    names: dict[Unit, str] = {"share": " percentage points", "tokens/s": " tokens/s", "s": " ms", "tokens": " tokens"}
    return number(measure.unit, abs(value)) + names[measure.unit]


def number(unit: Unit, value: float | None, sign: str = "") -> str:
    return "-" if value is None else format(value * _SCALES[unit], sign + _FORMATS[unit])


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def ms(seconds: float | None) -> str:
    return number("s", seconds)


def size(parameters: int) -> str:
    """E.g. "110.2M" or "8.03B"."""
    for unit, scale, digits in (("B", 1e9, 2), ("M", 1e6, 1), ("k", 1e3, 1)):
        if parameters >= scale:
            return f"{parameters / scale:.{digits}f}{unit}"
    return str(parameters)


def listed(names: Sequence[str]) -> str:
    """E.g. "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _with_interval(estimate: Estimate, measure: Measure, *, sign: str, suffix: str) -> str:
    text = number(measure.unit, estimate.value, sign)
    if estimate.value is None:
        return text
    text += suffix
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({number(measure.unit, estimate.low, sign)} to {number(measure.unit, estimate.high, sign)})"
