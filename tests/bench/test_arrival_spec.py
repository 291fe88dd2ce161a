"""Arrival processes as they are written, and what is said of those that are not."""

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.arrivals import EXAMPLES, ArrivalSpec, parse_arrivals


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_are_read_and_written_alike(text: str):
    spec = parse_arrivals(text)
    assert spec.text == text
    assert spec.process == text.partition(":")[0]
    assert parse_arrivals(f" {text.replace(',', ' , ').replace('=', ' = ')} ") == spec


def test_settings_go_where_they_belong():
    assert parse_arrivals("poisson") == ArrivalSpec("poisson", "poisson")
    assert parse_arrivals("gamma:cv=2").cv == 2
    assert parse_arrivals("trace:scale=0.5").scale == 0.5
    assert parse_arrivals("step:at=30,rate=4,at=60,rate=0").steps == ((30, 4), (60, 0))
    sine = parse_arrivals("sine:period=60,swing=0.8,cv=3")
    assert (sine.period_s, sine.swing, sine.cv) == (60, 0.8, 3)
    peaks = parse_arrivals("peaks:chat=75,code=195,width=10,flat=0.1")
    assert (peaks.peaks, peaks.width_s, peaks.flat) == ((("chat", 75), ("code", 195)), 10, 0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rain", "arrivals: expected one such as poisson, gamma:cv=2, trace"),
        ("", "arrivals: expected one such as poisson"),
        ("gamma:", "arrivals: expected one such as poisson"),
        ("gamma", "arrivals: gamma needs cv, such as gamma:cv=2"),
        ("step:at=3", "arrivals: step needs rate, such as step:at=10,rate=4"),
        ("sine:swing=1", "arrivals: sine needs period, such as sine:period=60,swing=0.8"),
        ("peaks:width=3", "arrivals: peaks needs a class and when it peaks"),
        ("poisson:cv=2", "arrivals: poisson: it has no settings, got 'cv=2'"),
        ("gamma:shape=2", "arrivals: gamma: its settings are cv, got 'shape=2'"),
        ("gamma:2", "arrivals: gamma: its settings are cv, got '2'"),
        ("gamma:cv=two", "arrivals: gamma: cv: expected a finite number, got 'two'"),
        ("gamma:cv=inf", "arrivals: gamma: cv: expected a finite number, got 'inf'"),
        ("gamma:cv=0", "arrivals: gamma: cv: expected a number from 0.05 to 20, got 0"),
        ("gamma:cv=1,cv=2", "arrivals: gamma: cv is given twice"),
        ("peaks:chat=1,chat=2", "arrivals: peaks: chat is given twice"),
        ("peaks:chat=1,width=0", "arrivals: peaks: width: expected a number above 0, got 0"),
        ("peaks:chat=1,width=1e200", "arrivals: peaks: width: expected a number from 0 to 1e+09, got 1e+200"),
        ("peaks:chat=-1", "arrivals: peaks: chat: expected a number from 0 to inf, got -1"),
        ("trace:scale=0", "arrivals: trace: scale: expected a number above 0, got 0"),
        ("sine:period=0,swing=1", "arrivals: sine: period: expected a number above 0, got 0"),
        ("sine:period=9,swing=1.1", "arrivals: sine: swing: expected a number from 0 to 1, got 1.1"),
        ("step:at=5,rate=1,at=5,rate=2", "arrivals: step: expected for each time above 0, in rising order, a rate"),
        ("step:at=0,rate=1", "arrivals: step: expected for each time above 0"),
        ("step:at=1,at=2,rate=1", "arrivals: step: expected for each time above 0"),
        ("step:at=1,rate=-1", "arrivals: step: expected for each time above 0"),
    ],
)
def test_what_is_no_process_is_said(text: str, message: str):
    with pytest.raises(ConfigError) as told:
        parse_arrivals(text)
    assert message in str(told.value)
