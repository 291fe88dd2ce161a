"""Records of a server: what requests leave in the file, what never does, and that nobody waits for the disk."""

from __future__ import annotations

import http.client
import io
import json
import logging
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import adaserve_jax
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.adapters import AdapterTable
from adaserve_jax.errors import ConfigError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.record_store import PRUNE_ROWS, RecordStore, read_records
from adaserve_jax.results.records import ServedRecord, served_record, unstarted_metrics
from adaserve_jax.server import serve as serve_module
from adaserve_jax.server.dashboard.requests import record_of
from adaserve_jax.server.observers import EndedChoice, Origin
from adaserve_jax.server.records import BatchThread, Recorder, RecordMaker, Retention, StampedChoice
from adaserve_jax.server.serve import Observability, WarmUpBar
from adaserve_jax.server.settings import ServerSettings
from tests.conftest import ROOT
from tests.results.made import RUN, made
from tests.server.scripted import ByteTokenizer, ScriptedEngine
from tests.waiting import PATIENCE_S, wait_until

KEPT = Retention(86_400.0, 2**30)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.sqlite"


@pytest.fixture
def watched(start_server, path):
    """A server that keeps records, and its settings' others."""

    @contextmanager
    def start(**settings) -> Iterator:
        chosen = ServerSettings(records=str(path), **settings)
        with Observability(chosen) as watchers, start_server(chosen) as server:
            watchers.attach(server.state)
            yield server

    return start


def read(path: Path) -> list[ServedRecord]:
    return read_records(path)[0]


def dropped(server) -> float:
    return server.state.metrics.registry.get_sample_value("adaserve_records_dropped_total")


def test_every_choice_leaves_a_record(watched, path):
    begin, targeted = time.time(), {"prompt": "slow", "max_tokens": 400, "slo_class": "chat"}
    with watched() as server:
        answered = server.http.post(
            "/v1/completions",
            json={"prompt": "count me", "max_tokens": 7, "n": 2, "slo_class": "chat", "slo_ttft_ms": 5000},
            headers={"x-request-id": "mine"},
        ).json()
        server.post(prompt="fail now", max_tokens=50)
        server.post(prompt="late-full", slo_tpot_ms=40)
        server.post(prompt="full", slo_tpot_ms=40)
        goes_away = http.client.HTTPConnection(server.http.base_url.host, server.http.base_url.port)
        goes_away.request("POST", "/v1/completions", json.dumps({"prompt": "slow", "max_tokens": 400}),
                          {"content-type": "application/json"})  # fmt: skip
        wait_until(lambda: server.state.slots.used == 1)
        goes_away.close()
        wait_until(lambda: server.state.slots.used == 0)
        with server.http.stream("POST", "/v1/completions", json=targeted | {"stream": True}) as streaming:
            next(streaming.iter_lines())
        wait_until(lambda: server.state.slots.used == 0)
        with ThreadPoolExecutor() as pool:
            stopped = pool.submit(server.post, **targeted)
            wait_until(lambda: server.state.in_flight)
            server.state.abort_all()
        assert stopped.result().status_code == 503
        text = server.http.get("/metrics").text
    end = time.time()
    found = read(path)
    mine = found[:2]
    assert [(each.request_id, each.choice, each.ending) for each in mine] == [
        ("mine", 0, "length"), ("mine", 1, "length"),
    ]  # fmt: skip
    assert [each.ending for each in found[2:]] == ["error", "rejected", "rejected", "cancelled", "cancelled", "abort"]
    assert [each.status for each in found] == ["finished"] * 2 + [
        "failed", "rejected", "rejected", "cancelled", "cancelled", "failed",
    ]  # fmt: skip
    assert [each.error_code for each in found[3:]] == ["queue_full", "queue_full", None, None, None]
    assert [each.cause for each in found] == [None, None, None, "rejected", "rejected", None, None, "failed"]
    gone, stopped_by_server = found[-2:]
    assert (gone.tpot_slo_s, gone.tpot_met, gone.slo_met, gone.tpot_paper_met) == (0.1, None, None, None)
    assert gone.output_tokens >= 3 and (stopped_by_server.tpot_met, stopped_by_server.slo_met) == (False, False)
    for outcome in ("cancelled", "missed"):
        assert f'adaserve_slo_requests_total{{class="chat",metric="tpot",outcome="{outcome}"}} 1.0' in text
    first = mine[0]
    record, metrics = first, answered["metrics"]
    assert (record.output_tokens, record.prompt_tokens, record.slo_class) == (7, len("count me"), "chat")
    assert (record.tpot_slo_s, record.ttft_slo_s, record.tpot_met, record.slo_met) == (0.1, 5.0, True, True)
    assert (record.verify_steps, record.drafted_tokens, record.accepted_tokens, first.cached_tokens) == (3, 12, 4, 2)
    slowest_ms = max(each.ttft_s for each in mine) * 1e3
    assert slowest_ms == pytest.approx(metrics["time_to_first_token_ms"], abs=1e-3)
    assert begin <= first.arrival_unix_s <= first.ended_unix_s <= end
    assert first.arrival_unix_s + record.e2e_s <= first.ended_unix_s + 1e-3
    run = first.run
    assert (run.policy, run.model, run.target, run.device) == ("scripted", "scripted", "models/scripted", "cpu")
    assert run.package_version == adaserve_jax.__version__
    assert {each.run for each in found} == {run}


def content(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.parent.iterdir())


def test_texts_stay_out_unless_they_are_asked_for(watched, path):
    with watched() as server:
        server.post(prompt="a secret prompt", max_tokens=30)
    assert len(read(path)) == 1 and b"secret" not in content(path)
    with watched(record_text=True) as server:
        server.post(prompt="another secret", max_tokens=14)
        server.post(prompt="late-full")
    with sqlite3.connect(path) as plain:
        texts = plain.execute("SELECT prompt, output FROM requests ORDER BY id").fetchall()
    plain.close()
    assert texts == [(None, None), ("another secret", "another secret"), ("late-full", "")]


def test_a_locked_file_is_written_later_and_said_once(start_server, path, caplog):
    holder = sqlite3.connect(path, isolation_level=None)
    store = RecordStore.open(path)
    store._connection.execute("PRAGMA busy_timeout = 100")
    with start_server() as server, caplog.at_level(logging.WARNING):
        recorder = Recorder(server.state, store, KEPT, every_s=0.01, limit=4)
        server.state.observers.append(recorder.observe)
        holder.execute("BEGIN IMMEDIATE")
        for number in range(6):
            assert server.post(prompt=f"request {number}", max_tokens=2).status_code == 200
        wait_until(lambda: dropped(server) == 2 and "database is locked" in caplog.text)
        assert read(path) == []
        holder.execute("ROLLBACK")
        wait_until(lambda: len(read(path)) == 4)
        server.post(prompt="again", max_tokens=2)
        wait_until(lambda: len(read(path)) == 5)
        recorder.close()
    holder.close()
    said = [each.getMessage() for each in caplog.records if each.name == "adaserve_jax.server.records"]
    assert len(said) == 2, said
    assert "database is locked; the server goes on" in said[0] and "again" in said[1]


def test_a_full_disk_costs_records_and_nothing_else(start_server, path, caplog):
    store = RecordStore.open(path)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with start_server() as server, caplog.at_level(logging.WARNING):
        recorder = Recorder(server.state, store, KEPT, every_s=0.01, limit=100)
        server.state.observers.append(recorder.observe)
        for _ in range(12):
            assert server.post(prompt="x", n=10, max_tokens=1).status_code == 200
        recorder.close()
        left = len(read(path))
        assert dropped(server) == 120 - left and left < 120
        assert "database or disk is full" in caplog.text
        assert server.post(prompt="x").status_code == 200


def test_old_records_are_removed_while_serving(start_server, path):
    store = RecordStore.open(path)
    store.add(made())  # of 1970
    with start_server() as server:
        recorder = Recorder(server.state, store, KEPT, every_s=0.01)
        server.state.observers.append(recorder.observe)
        wait_until(lambda: read(path) == [])
        server.post(prompt="new", max_tokens=1)
        recorder.close()
    assert [each.prompt_tokens for each in read(path)] == [3]


def test_more_old_records_than_one_round_removes_are_gone_after_the_next(start_server, path):
    def held() -> int:
        return read_records(path, since_unix_s=math.inf)[1].choices

    store = RecordStore.open(path)
    store.add(made()[:1] * (2 * PRUNE_ROWS + 1))  # of 1970
    with start_server() as server:
        recorder = Recorder(server.state, store, KEPT, every_s=0.01)
        wait_until(lambda: held() <= PRUNE_ROWS + 1)
        recorder.close()  # a round more
    assert held() <= 1


def test_items_that_are_worked_on_take_room_as_those_that_wait_do():
    begun, may_end = threading.Event(), threading.Event()
    done: list[int] = []
    dropped: list[int] = []

    def work(items: list[int]) -> list[int]:
        if items:
            begun.set()
            may_end.wait(PATIENCE_S)
        done.extend(items)
        return []

    batches = BatchThread("worked", work, dropped.append, every_s=0.001, limit=3)
    batches.put(1)
    begun.wait(PATIENCE_S)
    for item in (2, 3, 4):
        batches.put(item)
    assert dropped == [1]
    may_end.set()
    assert batches.close(PATIENCE_S) and done == [1, 2, 3]


def test_a_missed_target_is_judged_by_the_acceptance_of_all_choices_so_far():
    """A step took 0.15 s and drafted 3: of 0.065 s a token it takes 44% to have been enough. Its own are 17%."""
    missed = RequestMetrics(
        arrival_s=0.0, first_scheduled_s=0.0, first_token_s=0.5, last_token_s=0.8, output_tokens=4, verify_steps=2,
        drafted_tokens=6, accepted_tokens=1, tpot_slo_s=0.065,
    )  # fmt: skip
    undrafted = replace(missed, drafted_tokens=0, accepted_tokens=0)
    accepted, wasted = (
        replace(missed, drafted_tokens=drafted, accepted_tokens=10, tpot_slo_s=None) for drafted in (10, 90)
    )

    def causes(*choices: RequestMetrics) -> list[str | None]:
        maker = RecordMaker()
        ended = (EndedChoice(Origin("r"), 0, "stop", None, "chat", None, None, metrics) for metrics in choices)
        return [maker.make(StampedChoice(each, RUN, 0.0)).cause for each in ended]

    assert causes(undrafted, missed) == ["budget", "budget"]
    assert causes(undrafted, accepted, missed, undrafted) == ["budget", None, "low_acceptance", "budget"]
    assert causes(wasted, accepted, missed) == [None, None, "budget"], "21 of 106"


WATCHED = """
import sys, time
from pathlib import Path
from adaserve_jax.config import EngineConfig
from adaserve_jax.server.observers import EndedChoice, Origin
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.state import ServerState
from adaserve_jax.server.serve import Observability
from tests.server.scripted import ScriptedEngine
engine = ScriptedEngine(EngineConfig())
engine.start()
state = ServerState(engine, ServerSettings())
Observability(ServerSettings(records=sys.argv[1])).attach(state)
for number in range(1_000_000):
    now = time.time()
    state.ended(EndedChoice(Origin(f"{number}"), 0, "stop", None, "chat", None, None, ended_unix_s=now))
    print(f"{number} {now}", flush=True)
    time.sleep(0.002)
"""


def test_a_killed_server_loses_its_last_second_at_most(path):
    command = [sys.executable, "-c", WATCHED, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    lines, killed_s = [], 0.0
    for line in process.stdout:
        lines.append(line.split())
        if float(lines[-1][1]) - float(lines[0][1]) > 1.5:
            killed_s = time.time()
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    found = {each.request_id for each in read(path)}
    missing = [number for number, told_s in lines if float(told_s) < killed_s - 1.0 and number not in found]
    assert found and missing == []
    with sqlite3.connect(path) as plain:
        assert plain.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    plain.close()


def test_a_wrong_file_is_refused_before_the_port_opens(path, monkeypatch):
    path.write_text("this is a long enough text that nobody would take for a database of any kind at all\n" * 4)

    def never(_):
        raise AssertionError("the port was opened")

    monkeypatch.setattr(serve_module, "listen", never)
    with pytest.raises(ConfigError, match=r"cannot keep records in .*: file is not a database"):
        serve_module.serve(ServerSettings(records=str(path)), None, None, None)


def test_a_server_records_until_its_end(path, monkeypatch):
    async def ends_one(server, *_) -> None:
        server.state.ended(EndedChoice(Origin("last"), 0, "stop", None, "chat", None, None))

    engine = ScriptedEngine(EngineConfig())
    engine.start()
    monkeypatch.setattr(serve_module, "_serve", ends_one)
    bar = WarmUpBar(Console(file=io.StringIO()))
    serve_module.serve(ServerSettings(records=str(path), port=0), engine, ByteTokenizer, bar)
    assert [file.name for file in path.parent.iterdir()] == ["records.sqlite"]
    assert [each.request_id for each in read(path)] == ["last"]


def test_a_port_that_is_taken_leaves_the_file_closed(path):
    with serve_module.listen(ServerSettings(port=0)) as taken:
        settings = ServerSettings(records=str(path), port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen"):
            serve_module.serve(settings, None, None, None)
    assert [file.name for file in path.parent.iterdir()] == ["records.sqlite"]


def test_an_engine_that_comes_back_is_another_run_and_one_with_another_adapter_is_not(start_server, path, tmp_path):
    adapter = tmp_path / "sql"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with start_server() as server:
        server.engine.adapters = AdapterTable(1)
        recorder = Recorder(server.state, RecordStore.open(path), KEPT, every_s=0.01)
        arrival_unix_s, metrics = time.time() - 1.0, RequestMetrics(arrival_s=time.monotonic() - 1.0, output_tokens=0)
        ended = EndedChoice(Origin("r", "team"), 0, "stop", None, "chat", None, None, metrics)
        recorder.observe(ended)
        server.engine.load_adapter("sql", str(adapter))
        recorder.observe(ended)
        server.engine.config = replace(server.engine.config, draft="other/draft")
        recorder.observe(ended)
        stats = server.engine.stats()
        server.engine.stats = lambda: replace(stats, restarts=1)  # the same engine once more
        recorder.observe(ended)
        server.engine.dead = True
        recorder.observe(ended)
        recorder.close()
    found = read(path)
    assert [each.run.draft for each in found] == [*[found[0].run.draft] * 2, *["other/draft"] * 3]
    runs = [each.run.run_id for each in found]
    assert len(set(runs)) == 3 and runs[0] == runs[1] and runs[3] == runs[4]
    assert found[0].key == "team" and found[0].arrival_unix_s == pytest.approx(arrival_unix_s, abs=0.5)


@pytest.mark.parametrize(
    ("ending", "error_code", "status"),
    [
        ("rejected", "engine_dead", "failed"),
        ("rejected", "engine_restarting", "failed"),
        ("rejected", "engine_error", "failed"),
        ("rejected", "overloaded", "rejected"),
        ("rejected", "slo_infeasible", "rejected"),
        ("error", None, "failed"),
        ("abort", None, "failed"),
        ("cancelled", None, "cancelled"),
        ("stop", None, "finished"),
    ],
)
def test_records_and_dashboard_say_the_same_of_an_ending(ending, error_code, status):
    """An engine's loss is no refusal, and a client that goes away is no failure."""
    ended = EndedChoice(Origin("r"), 0, ending, error_code, "chat", 0.1, None, ended_unix_s=0.0)
    metrics = unstarted_metrics(0.1, None, "chat", error_code)
    kept = served_record(
        metrics, run=made()[0].run, request_id="r", choice=0, key="", ending=ending, error_code=error_code,
        arrival_unix_s=0.0, ended_unix_s=0.0, acceptance_rate=0.0,
    )  # fmt: skip
    assert kept.status == record_of(ended).status == status
