"""benchmarks/server/null_server.py, client_accuracy.py and cpu_time.py: a short run of each, and their arithmetic."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from tests.bench.scripts import modules_of

modules = modules_of("server.client_accuracy", "engine.cpu_time")


def test_the_paced_server_writes_its_clock_into_each_token(modules):
    accuracy = modules["client_accuracy"]
    with accuracy.url_engine(5.0) as (engine, _):
        loop = accuracy.driven(engine, [0.0, 0.01], 4, "timed")
        assert engine.token_source == "usage"
    stamps = [[float(text) for _, text in probe.texts] for probe in loop.probes]
    assert all(len(of) == 4 and of == sorted(of) for of in stamps)
    assert all(of[-1] - of[0] > 0.005 for of in stamps), "three gaps of 5 ms"
    errors = accuracy.url_errors(loop)
    assert len(errors) == 8 and min(errors) >= -2e-6, "a token is read after it was written"
    found = accuracy.summary("by URL", "paced", loop, errors, 0.5)
    assert (found["requests"], found["others_share"]) == (2, 0.5)
    assert found["error_max_ms"] == pytest.approx(1e3 * max(errors)) and found["late_p50_ms"] <= found["late_p99_ms"]


def test_the_null_server_answers_at_once_and_whole(modules):
    accuracy = modules["client_accuracy"]
    with accuracy.url_engine(0.0) as (engine, pid):
        loop = accuracy.driven(engine, accuracy.arrivals(200.0, 0.1), 7, "timed")
        assert len(loop.probes) == 20 and modules["cpu_time"].cpu_s(pid) > 0
        with pytest.raises(SystemExit, match="expected 1 requests of 3 tokens each, and not all came"):
            ask = engine.prepare
            engine.prepare = lambda each: ask(accuracy.Ask(each.request_id, each.item, 0, each.slo, "", 2))
            accuracy.driven(engine, [0.0], 3, "short")


def test_the_client_in_process_is_measured_likewise(modules):
    found = modules["client_accuracy"].in_process([0.0, 0.01, 0.02], 3, 5.0)
    assert found["requests"] == 3 and 0 <= found["error_p50_ms"] <= found["error_max_ms"]


def test_errors_are_matched_token_by_token(modules):
    loop = SimpleNamespace(probes=[SimpleNamespace(token_times_s=[1.5, 2.5]), SimpleNamespace(token_times_s=[3.0])])
    assert modules["client_accuracy"].local_errors(loop, [[1.0, 2.25], [2.0]]) == [0.5, 0.25, 1.0]


def test_arrivals_are_those_of_the_rate_and_always_the_same(modules):
    times = modules["client_accuracy"].arrivals(200.0, 50.0)
    assert times == modules["client_accuracy"].arrivals(200.0, 50.0) == sorted(times)
    assert len(times) / times[-1] == pytest.approx(200.0, rel=0.05)


def test_what_this_process_and_its_servers_take_is_not_of_others(modules, monkeypatch):
    cpu = modules["cpu_time"]
    busy, own, servers = iter([100.0, 103.0]), iter([10.0, 11.0]), iter([5.0, 5.5])
    monkeypatch.setattr(cpu, "busy_s", lambda: next(busy))
    monkeypatch.setattr(cpu.time, "process_time", lambda: next(own))
    monkeypatch.setattr(cpu.time, "perf_counter", iter([0.0, 2.0]).__next__)
    monkeypatch.setattr(cpu, "cpu_s", lambda pid: next(servers))
    wall_s, others = cpu.CpuTimer(os.getpid()).read()
    assert (wall_s, others) == (2.0, pytest.approx((3.0 - 1.0 - 0.5) / (2.0 * (os.cpu_count() or 1))))
