"""The reader of Azure's traces, and the parts taken of a trace, by hand."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from adaserve_jax.bench import azure
from adaserve_jax.bench.azure import load_azure
from adaserve_jax.bench.segments import (
    at_once,
    busiest_swing,
    minute_counts,
    poisson_arrivals,
    shortened,
    thinned,
    with_lengths,
)
from adaserve_jax.bench.traces import Trace, TraceRequest
from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
LINES = ["2023-11-16 18:15:47.1805900,374,44", "2023-11-16 18:15:46.6805900,396,109", "2023-11-16 18:16:46.6805900,9,7"]


def written(tmp_path: Path, *lines: str, header: str = HEADER) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\r\n".join((header, *lines)) + "\r\n")
    return path


def test_requests_in_order_of_arrival_from_the_earliest(tmp_path: Path) -> None:
    trace = load_azure(written(tmp_path, *LINES), "chat")
    assert [(r.due_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 396, 109), (0.5, 374, 44), (60.0, 9, 7),
    ]  # fmt: skip
    assert {(r.slo, r.slo_class) for r in trace.requests} == {(SLO(), "chat")}
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress((tmp_path / "trace.csv").read_bytes()))
    assert load_azure(packed, "chat").requests == trace.requests
    assert load_azure(packed).sha256 == trace.sha256, "of what the file holds, however it is packed"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "holds no request"),
        (("2023-11-16 18:15:46.6805900,374",), r":2: expected 3 fields, got 2"),
        ((LINES[0], "yesterday,374,44"), r":3: TIMESTAMP: expected a time as .*, got 'yesterday'"),
        (("2023-11-16 18:15:46.680590x,374,44",), "TIMESTAMP: expected a time"),
        (("2023-11-16 18:15:46.6805900,0,44",), r"ContextTokens: expected an integer from 1 to 1048576, got '0'"),
        (("2023-11-16 18:15:46.6805900,374,-4",), "GeneratedTokens: expected an integer .* got '-4'"),
        (("2023-11-16 18:15:46.6805900,374,1e3",), "GeneratedTokens: expected an integer"),
        (("2023-11-16 18:15:46.6805900,374,1048577",), "GeneratedTokens: expected an integer"),
        (("2023-11-16 18:15:46.6805900,374," + "9" * 5000,), "GeneratedTokens: expected an integer"),
    ],
)
def test_malformed_rows_name_line_and_field(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_azure(written(tmp_path, *lines))


def test_files_that_are_no_trace_or_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r":1: expected the header TIMESTAMP,.*, got 'time,tokens'"):
        load_azure(written(tmp_path, header="time,tokens"))
    with pytest.raises(ConfigError, match="cannot read trace"):
        load_azure(tmp_path / "none.csv")
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(gzip.compress(b"x" * 100)[:-9])
    with pytest.raises(ConfigError, match="cannot read trace"):
        load_azure(broken)
    path = written(tmp_path, *LINES)
    monkeypatch.setattr(azure, "MOST_ROWS", 2)
    with pytest.raises(ConfigError, match=":4: expected at most 2 requests"):
        load_azure(path)
    monkeypatch.setattr(azure, "MOST_BYTES", 20)
    with pytest.raises(ConfigError, match="more than 20 bytes"):
        load_azure(path)


def trace_of(*times_s: float, prompt: int = 100, output: int = 50) -> Trace:
    return Trace("t", "h", tuple(TraceRequest(at, prompt, output, SLO(), "default") for at in sorted(times_s)))


def by_minute(*counts: int) -> Trace:
    """So many requests in each minute, evenly, and one in the minute after."""
    times = [60.0 * minute + 60.0 * i / count for minute, count in enumerate(counts) for i in range(count)]
    return trace_of(*times, 60.0 * len(counts))


def test_the_segment_is_the_one_whose_rate_swings_most() -> None:
    trace = by_minute(5, 9, 4, 2, 9, 6)
    assert minute_counts(trace).tolist() == [5, 9, 4, 2, 9, 6]
    found = busiest_swing(trace, 2)  # swings of two minutes: 4, 5, 2, 7, 3
    assert (found.name, len(found.requests)) == ("t minutes 3 to 5", 11)
    assert found.requests[0].due_s == 0.0 and found.requests[-1].due_s == pytest.approx(60 + 60 * 8 / 9)
    assert busiest_swing(trace, 3).name == "t minutes 1 to 4", "of equals the first"
    with pytest.raises(ConfigError, match="has 6 whole minutes, fewer than the 7 wanted"):
        busiest_swing(trace, 7)


def test_thinning_keeps_times_and_shortening_keeps_requests() -> None:
    trace = trace_of(*(float(i) for i in range(1, 11)))  # 10 requests in 10 s
    thin = thinned(trace, 0.4)
    assert [r.due_s for r in thin.requests] == [3.0, 5.0, 8.0, 10.0]  # where 0.4 i passes 1, 2, 3 and 4
    assert [r.due_s for r in shortened(trace, 20).requests] == [i / 20 for i in range(1, 11)]
    with pytest.raises(ConfigError, match="cannot thin it to 2"):
        thinned(trace, 2.0)
    with pytest.raises(ConfigError, match="factor above 0"):
        shortened(trace, 0.0)


def test_lengths_fit_the_machine() -> None:
    long = Trace("t", "h", (*trace_of(0.0, prompt=14050, output=1000).requests, *trace_of(1.0, prompt=5).requests))
    fit = with_lengths(long, prompt_parts=10, most_output=256, max_context=1024)
    assert [(r.prompt_tokens, r.output_tokens) for r in fit.requests] == [(1024 - 256, 256), (1, 50)]
    with pytest.raises(ConfigError, match="most_output below max_context"):
        with_lengths(long, most_output=64, max_context=64)


def test_drawn_requests_come_once_each_at_the_rate() -> None:
    trace = Trace("t", "h", tuple(TraceRequest(0.0, 1 + i, 9, SLO(), "default") for i in range(2000)))
    drawn = poisson_arrivals(trace, rate_rps=4.0, count=2000, seed=3)
    assert sorted(r.prompt_tokens for r in drawn.requests) == list(range(1, 2001))
    assert drawn.rate_rps == pytest.approx(4.0, rel=0.1)
    assert drawn == poisson_arrivals(trace, rate_rps=4.0, count=2000, seed=3)
    other = poisson_arrivals(trace, rate_rps=4.0, count=2000, seed=4)
    assert other.sha256 != drawn.sha256 and other.requests != drawn.requests
    assert [r.prompt_tokens for r in at_once(trace, count=5, seed=3).requests] != [1, 2, 3, 4, 5]
    assert {r.due_s for r in at_once(trace, count=5, seed=3).requests} == {0.0}
    with pytest.raises(ConfigError, match="fewer than the 2001 wanted"):
        poisson_arrivals(trace, rate_rps=4.0, count=2001, seed=0)
