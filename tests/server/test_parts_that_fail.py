"""A part of the server that fails is logged, costs no more than what it was for, and is used again."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError, EngineDeadError
from adaserve_jax.results.record_store import RecordStore, read_records
from adaserve_jax.server.dashboard import live as live_module
from adaserve_jax.server.dashboard.live import Live
from adaserve_jax.server.metrics import drafter_metrics
from adaserve_jax.server.middleware import Boundary
from adaserve_jax.server.observers import ChoiceText, EndedChoice, tell
from adaserve_jax.server.records import Notes, Recorder, Retention, Served
from adaserve_jax.server.serve import Watchers
from adaserve_jax.server.settings import ServerSettings, SloClass
from adaserve_jax.server.state import ServerState
from adaserve_jax.stats import DrafterStats, ServiceState
from tests.server.scripted import ScriptedEngine
from tests.waiting import wait_until

KEPT = Retention(86_400.0, 2**30)


def ended(text: ChoiceText | None = None) -> EndedChoice:
    return EndedChoice("mine", 0, "rejected", "queue_full", "", "chat", 2e9, None, None, None, text=text)


def test_an_observer_that_fails_costs_the_next_ones_nothing(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[EndedChoice] = []

    def fails(choice: EndedChoice) -> None:
        raise ValueError("no room")

    with caplog.at_level(logging.ERROR):
        tell([fails, seen.append], ended())
    assert [each.request_id for each in seen] == ["mine"]
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
        asyncio.run(Boundary(application)({"type": "http", "headers": []}, receive, send))
    assert sent == ["http.response.start"]


def test_a_look_that_fails_is_logged_and_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(EngineConfig(target="models/scripted"))
    live = Live(ServerState(engine, ServerSettings()))
    looks: list[int] = []

    def look() -> None:
        looks.append(len(looks))
        if len(looks) == 1:
            raise ValueError("half of the statistics")
        raise asyncio.CancelledError  # enough

    monkeypatch.setattr(live, "look", look)
    monkeypatch.setattr(live_module, "INTERVAL_S", 0.0)
    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        asyncio.run(live.run())
    assert looks == [0, 1]
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


def test_watchers_that_were_never_attached_close_their_file(tmp_path: Path) -> None:
    with Watchers(ServerSettings(records=str(tmp_path / "records.sqlite"))) as watchers:
        store = watchers._store
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        store._connection.execute("SELECT 1")


def test_a_prompt_that_cannot_be_decoded_leaves_its_record_without(caplog: pytest.LogCaptureFixture) -> None:
    def decode(token_ids) -> str:
        raise IndexError("token 999 is not there")

    with caplog.at_level(logging.ERROR):
        assert Served(decode)._texts(ChoiceText([999], "out\ud800")) == (None, "out?")
    assert "its record goes without" in caplog.text and "token 999" in caplog.text
    assert Served(None)._texts(ChoiceText([1], "out")) == (None, None)


def test_without_an_engine_that_was_ever_ready_there_is_no_run_to_note() -> None:
    engine = ScriptedEngine(EngineConfig(target="models/scripted"))  # never started
    with pytest.raises(EngineDeadError):
        Notes(ServerState(engine, ServerSettings())).of(ended())


def test_version_is_told_before_there_is_an_engine(serve_engine) -> None:
    engine = ScriptedEngine(EngineConfig(target="models/scripted"))
    with serve_engine(engine, None, ServerSettings()) as server:
        told = server.http.get("/version").json()
    assert told["engine"] is None and told["version"]


def test_a_class_has_the_name_of_a_metric_label() -> None:
    with pytest.raises(ConfigError, match="name must be letters, digits and _, not beginning with a digit, got '1a'"):
        SloClass("1a")


def test_a_least_length_that_does_not_fit_is_refused_by_its_name(server) -> None:
    messages = [{"role": "user", "content": "x" * 400}]
    answer = server.post("/v1/chat/completions", messages=messages, min_tokens=200)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded" and "min_tokens" in error["message"]


def test_a_schema_of_half_a_character_is_refused(server) -> None:
    body = '{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": %s}}}'
    headers = {"content-type": "application/json"}
    answer = server.http.post("/v1/completions", content=body % '{"const": "\\ud800"}', headers=headers)
    assert answer.status_code == 400
    assert "half of a surrogate pair" in answer.json()["error"]["message"]


def test_each_draft_service_has_its_gauges_and_one_state() -> None:
    services = {"a:1": ServiceState("open"), "b:1": ServiceState("closed")}
    families = {family.name: family for family in drafter_metrics(DrafterStats(services=services))}
    samples = families["adaserve_drafter_breaker"].samples
    on = {(s.labels["service"], s.labels["state"]) for s in samples if s.value}
    assert on == {("a:1", "open"), ("b:1", "closed")} and len(samples) == 6
    gauges = [family for family in families.values() if {"service"} == set(family.samples[0].labels)]
    assert gauges and all([s.labels["service"] for s in each.samples] == ["a:1", "b:1"] for each in gauges)
