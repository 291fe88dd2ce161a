"""A part of the server that fails is logged, costs no more than what it was for, and is used again."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from itertools import count
from pathlib import Path

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError, EngineDeadError
from adaserve_jax.results.record_store import RecordStore, read_records
from adaserve_jax.results.records import ServerRun
from adaserve_jax.server.dashboard.live import DashboardMonitor
from adaserve_jax.server.middleware import RequestBoundaryMiddleware
from adaserve_jax.server.observers import ChoiceText, EndedChoice, Origin, notify
from adaserve_jax.server.records import ChoiceStamper, Recorder, RecordMaker, Retention, StampedChoice
from adaserve_jax.server.serve import Observability
from adaserve_jax.server.settings import ServerSettings, SloClass
from adaserve_jax.server.state import ServerState
from tests.server.scripted import ScriptedEngine
from tests.waiting import wait_until

KEPT = Retention(86_400.0, 2**30)


def ended(text: ChoiceText | None = None) -> EndedChoice:
    return EndedChoice(Origin("mine"), 0, "rejected", "queue_full", "chat", None, None, text=text, ended_unix_s=2e9)


def test_an_observer_that_fails_costs_the_next_ones_nothing(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[EndedChoice] = []

    def fails(choice: EndedChoice) -> None:
        raise ValueError("no room")

    with caplog.at_level(logging.ERROR):
        notify([fails, seen.append], ended())
    assert [each.origin.request_id for each in seen] == ["mine"]
    assert "an observer failed on request mine" in caplog.text and "no room" in caplog.text


def test_a_response_that_began_is_cut_off_and_not_followed_by_another() -> None:
    sent: list[str] = []

    async def application(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("in the midst")

    async def send(message) -> None:
        sent.append(message["type"])

    async def receive():
        raise AssertionError("nobody listens")

    with pytest.raises(ValueError, match="in the midst"):
        asyncio.run(RequestBoundaryMiddleware(application)({"type": "http", "path": "/", "headers": []}, receive, send))
    assert sent == ["http.response.start"]


def test_a_sample_that_fails_is_logged_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(EngineConfig(target="models/scripted"))
    engine.dead = False
    monitor = DashboardMonitor(ServerState(engine, ServerSettings()), clock=count(0.0, 10.0).__next__)
    failures = iter([ValueError("half of the statistics"), asyncio.CancelledError()])

    def stats():
        raise next(failures)

    engine.stats = stats
    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        asyncio.run(monitor.run())
    assert next(failures, None) is None
    assert "the dashboard could not look at the engine" in caplog.text and "half of the statistics" in caplog.text


class BrokenStore:
    """Refuses what it is given, and cannot be pruned either, for as long as it is `broken`."""

    def __init__(self, store: RecordStore):
        self._store = store
        self.path = store.path
        self.broken = True

    def add(self, choices) -> None:
        if self.broken:
            raise sqlite3.DatabaseError("database disk image is malformed")
        self._store.add(choices)

    def prune(self, **limits) -> bool:
        if self.broken:
            raise sqlite3.DatabaseError("database disk image is malformed")
        return self._store.prune(**limits)

    def close(self) -> None:
        self._store.close()


def test_a_broken_file_drops_what_it_cannot_take_and_takes_what_it_can(
    tmp_path: Path, start_server, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "records.sqlite"
    store = BrokenStore(RecordStore.open(path))
    with start_server() as server, caplog.at_level(logging.WARNING):
        dropped = server.state.metrics.registry.get_sample_value
        recorder = Recorder(server.state, store, KEPT, every_s=0.01)  # type: ignore[arg-type]
        server.state.observers.append(recorder.observe)
        server.post(prompt="lost", max_tokens=2)
        wait_until(lambda: dropped("adaserve_records_dropped_total") == 1)
        store.broken = False
        server.post(prompt="kept", max_tokens=3)
        recorder.close()
    found = read_records(path)[0]
    assert [each.output_tokens for each in found] == [3]
    said = [each.getMessage() for each in caplog.records if each.name == "adaserve_jax.server.records"]
    assert len(said) == 2 and "malformed; the server goes on" in said[0]


def test_records_that_were_never_attached_close_their_file(tmp_path: Path) -> None:
    def is_open() -> bool:
        return any(os.path.realpath(each) == str(path) for each in Path("/proc/self/fd").iterdir())

    path = (tmp_path / "records.sqlite").resolve()
    with Observability(ServerSettings(records=str(path))):
        assert is_open()
    assert not is_open()


def test_a_prompt_that_cannot_be_decoded_leaves_its_record_without(caplog: pytest.LogCaptureFixture) -> None:
    def decode(token_ids) -> str:
        raise IndexError("token 999 is not there")

    run = ServerRun("run", 0.0, "0", "0", "cpu", "scripted", "m", "m", None, 0.01)
    choice = StampedChoice(ended(ChoiceText([999], "out\ud800")), run, 0.0)
    with caplog.at_level(logging.ERROR):
        made = RecordMaker(decode).make(choice)
    assert (made.prompt, made.output) == (None, "out?")
    assert "its record goes without" in caplog.text and "token 999" in caplog.text
    made = RecordMaker(None).make(choice)
    assert (made.prompt, made.output) == (None, None)


def test_without_an_engine_that_was_ever_ready_there_is_no_run_to_stamp() -> None:
    engine = ScriptedEngine(EngineConfig(target="models/scripted"))  # never started
    with pytest.raises(EngineDeadError):
        ChoiceStamper(ServerState(engine, ServerSettings())).stamp(ended())


def test_version_is_told_before_there_is_an_engine(serve_engine) -> None:
    engine = ScriptedEngine(EngineConfig(target="models/scripted"))
    with serve_engine(engine, None, ServerSettings()) as server:
        told = server.http.get("/version").json()
    assert told["engine"] is None and told["version"]


def test_a_class_has_the_name_of_a_metric_label() -> None:
    with pytest.raises(ConfigError, match="name must be letters, digits and _, not beginning with a digit, got '1a'"):
        SloClass("1a")
    with pytest.raises(ConfigError, match="name must not be 'all': reports call all classes together so"):
        SloClass("all")
