"""Trace events against the rules of their format, and against the times of the requests they are of."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.perfetto import trace, traced_point, write_trace
from adaserve_jax.report.points import measured
from tests.report.made import folder, point, random_requests, request, samples_over

METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def trace_of(*records, samples=()) -> dict:
    return trace(measured([folder(point(list(records), samples=samples))]).points[0])


def check_format(body: dict) -> None:
    """The Trace Event Format, as far as it is used: required keys by phase, times in order, slices that nest."""
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert body["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in body["otherData"].values())
    last_us = -1.0
    open_until: dict[tuple[int, int], float] = {}
    for event in body["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
            continue
        assert event["ts"] >= last_us >= -1.0
        last_us = event["ts"]
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert event["dur"] >= 0 and event["ts"] >= open_until.get(track, 0.0) - 1e-3
            open_until[track] = event["ts"] + event["dur"]
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        else:
            assert event["ph"] == "C"
            assert event["args"] and all(type(value) in (int, float) for value in event["args"].values())


def test_events_keep_to_the_format():
    check_format(trace_of(*random_requests(60, 1), samples=samples_over(5)))


def test_stages_of_a_request_by_hand():
    body = trace_of(request(2, queue=0.25, ttft=0.5, tpot=0.125, tokens=3))
    slices = [(e["name"], e["ts"], e["dur"]) for e in body["traceEvents"] if e["ph"] == "X"]
    assert slices == [("queued", 2e6, 0.25e6), ("prefill", 2.25e6, 0.25e6), ("decode", 2.5e6, 0.25e6)]
    instants = [(e["name"], e["ts"]) for e in body["traceEvents"] if e["ph"] == "i"]
    assert instants == [("arrival", 2e6), ("token", 2.5e6), ("token", 2.625e6), ("token", 2.75e6)]
    names = [e["args"]["name"] for e in body["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"]
    assert names == ["chat ar-2"]
    args = next(e["args"] for e in body["traceEvents"] if e["ph"] == "X")
    assert (args["tpot_ms"], args["tpot_slo_ms"], args["slo_met"]) == (125.0, 250.0, True)
    assert "missed_by" not in args


def test_tokens_of_one_step_are_one_mark():
    record = request(0, tokens=4)
    object.__setattr__(record, "token_offsets_s", (0.0, 0.0, 0.0, 0.5))
    marks = [(e["name"], e["args"]["tokens"]) for e in trace_of(record)["traceEvents"] if "token" in e["name"]]
    assert marks == [("3 tokens", 3), ("token", 1)]


def test_refused_and_cut_off_requests_end_where_they_were_seen_last():
    body = trace_of(request(1, status="rejected", tokens=0), request(2, status="unfinished", tokens=3, tpot=0.125))
    ends = [(e["name"], e["ts"]) for e in body["traceEvents"] if e["name"] in ("rejected", "unfinished")]
    assert ends == [("rejected", 1e6), ("unfinished", 2.75e6)]
    assert {e["args"]["missed_by"] for e in body["traceEvents"] if e["ph"] == "X"} == {"unfinished"}


def test_counters_are_the_samples():
    body = trace_of(request(0), samples=samples_over(3))
    counters = [(e["ts"], e["args"]) for e in body["traceEvents"] if e["name"] == "requests"]
    assert counters == [(s * 1e6, {"running": 3, "waiting": s}) for s in (1, 2, 3)]
    assert all(a[0] < b[0] for a, b in pairwise(counters))


def test_file_of_a_named_point_and_of_the_default_one(tmp_path: Path):
    held = folder(point([request(0)]), point([request(0)], policy="adaserve", samples=samples_over(2)))
    default, named = traced_point(measured([held]), None), traced_point(measured([held]), "ar@1/s")
    assert (default.name, named.name) == ("adaserve@1/s", "ar@1/s")
    (tmp_path / "t.json").write_text("old")
    with (tmp_path / "t.json").open() as old:
        write_trace(default, tmp_path / "t.json")
        assert old.read() == "old"  # the file is replaced, never half written
    write_trace(named, tmp_path / "t.json.gz")
    check_format(json.loads((tmp_path / "t.json").read_text()))
    check_format(json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes())))


def test_what_cannot_be_traced_is_refused(tmp_path: Path):
    held = folder((point([request(0)])[0], [], []))
    with pytest.raises(ConfigError, match=r"expected request records of 'ar@1/s' to trace"):
        write_trace(traced_point(measured([held]), None), tmp_path / "t.json")
    with pytest.raises(ConfigError, match=r"expected one of the points 'ar@1/s', got 'x'"):
        traced_point(measured([held]), "x")
    with pytest.raises(ConfigError, match=r"cannot write .*t\.json: No such file or directory; choose another place"):
        write_trace(measured([folder(point([request(0)]))]).points[0], tmp_path / "no" / "t.json")


def test_a_valid_point_is_traced_unless_another_is_asked_for():
    late = point([request(0)], valid=False, invalid_reason="client was late")
    found = measured([folder(late, point([request(0)], policy="b"), point([request(0)], policy="b", rate=2.0))])
    assert traced_point(found, None).name == "b@1/s"
    body = trace(traced_point(found, "ar@1/s"))
    assert body["otherData"]["valid"] == "no: client was late"
    assert trace(traced_point(found, None))["otherData"]["valid"] == "yes"


def test_the_rate_of_the_report_is_the_one_that_is_traced():
    points = [point([request(0)], rate=rate, samples=samples_over(2)) for rate in (1.0, 2.0, 4.0)]
    found = measured([folder(*points)])
    assert [traced_point(found, None, rate).name for rate in (None, 4.0)] == ["ar@2/s", "ar@4/s"]
