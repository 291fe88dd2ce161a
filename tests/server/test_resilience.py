"""What clients see when the engine hangs, dies, comes back, or the server is told to stop in the midst of its work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineStats, GenerateRequest
from adaserve_jax.engine.process_engine import ProcessEngine
from adaserve_jax.engine.supervisor import SupervisedEngine, Suspects
from adaserve_jax.errors import EngineRestartingError, RequestError
from adaserve_jax.server.auth import Account
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.stats import StepStats
from adaserve_jax.types import SamplingParams
from tests.conftest import ROOT
from tests.server.conftest import Running, serving
from tests.server.scripted import GATE, ByteTokenizer
from tests.server.test_operations import code_of
from tests.server.test_serve import Program
from tests.waiting import PATIENCE_S, wait_until

FACTORY = "tests.server.scripted:ScriptedEngine"


class Held(ProcessEngine):
    """A process engine that starts once the test lets it."""

    may_start: threading.Event

    def start(self) -> None:
        assert self.may_start.wait(PATIENCE_S)
        super().start()


class Site:
    """A server over a supervised engine whose process the test kills, and lets come back."""

    def __init__(self, server: Running, built: list[Held], may_start: threading.Event):
        self.server, self.built, self.may_start = server, built, may_start

    def kill(self, sent: int = signal.SIGKILL) -> None:
        os.kill(self.built[-1].pid, sent)

    def status(self, path: str) -> tuple[int, str]:
        response = self.server.http.get(path)
        return response.status_code, response.json()["status"]

    def counters(self) -> dict[tuple, float]:
        families = text_string_to_metric_families(self.server.http.get("/metrics").text)
        return {
            (s.name, *sorted(s.labels.items())): s.value
            for family in families if family.type in ("counter", "histogram")
            for s in family.samples if s.name.endswith(("_total", "_count", "_bucket"))
        }  # fmt: skip

    def metric(self, name: str) -> float:
        families = text_string_to_metric_families(self.server.http.get("/metrics").text)
        return next(s.value for family in families for s in family.samples if s.name == name)


@contextlib.contextmanager
def site(**settings):
    built: list[Held] = []
    may_start = threading.Event()
    may_start.set()
    chosen = ServerSettings(**settings)

    def build(on_death) -> Held:
        built.append(Held(EngineConfig(target="models/scripted", policy="process"), factory=FACTORY, on_death=on_death))
        built[-1].may_start = may_start
        return built[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        engine = SupervisedEngine(
            build, max_restarts=chosen.max_restarts, window_s=chosen.restart_window, backoff_s=chosen.restart_backoff
        )
        engine.start()
        try:
            with serving(engine, ByteTokenizer(), chosen) as server:
                yield Site(server, built, may_start)
        finally:
            may_start.set()
            engine.close()


def in_flight(server: Running, pool: ThreadPoolExecutor, count: int = 4) -> list:
    """Slow requests, every other one a stream, that have begun."""
    answers = [
        pool.submit(server.post, prompt="slow", max_tokens=400, stream=i % 2 == 0, slo_tpot_ms=50) for i in range(count)
    ]
    wait_until(lambda: server.state.slots.used == count and server.state.client.stats().scheduler.running == count)
    return answers


def check_told(answers: list, code: str) -> None:
    """Every answer comes, and says what happened, in a body or in the midst of a stream."""
    for i, answer in enumerate(answers):
        response = answer.result(PATIENCE_S)
        if i % 2 == 0 and response.status_code == 200:
            events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
            assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == code
        else:
            assert (response.status_code, code_of(response)) == (503, code)
            assert int(response.headers["retry-after"]) >= 1


def test_a_killed_engine_is_told_at_once_replaced_and_forgotten():
    with site(max_restarts=1) as place, ThreadPoolExecutor(4) as pool:
        server = place.server
        assert server.post(prompt="before", max_tokens=9).status_code == 200
        wait_until(lambda: place.metric("adaserve_steps_total") > 0, every_s=0.02)
        answers = in_flight(server, pool)
        before = place.counters()
        place.may_start.clear()
        place.kill()
        check_told(answers, "engine_restarting")
        assert place.status("/health") == (200, "restarting") and place.status("/ready") == (503, "restarting")
        health = server.http.get("/health").json()
        assert (health["restarts"], health["last_crash"]) == (1, "the engine process ended with status -9")
        assert "(the engine process ended with status -9) and is started again" in health["detail"]
        assert place.metric("adaserve_engine_restarts_total") == 1, "it counts while the engine starts"
        refused = server.post(prompt="x")
        assert (refused.status_code, code_of(refused)) == (503, "engine_restarting")
        assert int(refused.headers["retry-after"]) >= 1
        assert server.http.get("/version").json()["engine"]["policy"] == "scripted"
        assert place.metric("adaserve_engine_up") == 0 and place.metric("adaserve_requests_running") == 0
        during = place.counters()
        place.may_start.set()
        wait_until(lambda: place.status("/ready") == (200, "ok"), every_s=0.02)
        assert server.post(prompt="after", max_tokens=9).json()["choices"][0]["text"] == "afterafte"
        assert place.metric("adaserve_engine_up") == 1 and place.metric("adaserve_engine_restarts_total") == 1
        after = place.counters()
        assert {k for k in before if not before[k] <= during[k] <= after[k]} == set()
        assert server.state.slots.used == 0 and not server.state.in_flight
        place.kill()  # after a finished request: it comes back
        wait_until(lambda: place.metric("adaserve_engine_restarts_total") == 2, every_s=0.02)
        wait_until(lambda: place.status("/ready") == (200, "ok"), every_s=0.02)
        health = server.http.get("/health").json()
        assert (health["restarts"], health["detail"]) == (2, "requests are served") and health["last_crash_unix_s"] > 0
        place.kill()
        wait_until(lambda: place.status("/health") == (503, "dead"), every_s=0.02)
        assert place.status("/ready") == (503, "dead") and code_of(server.post(prompt="x")) == "engine_dead"
        dead = place.counters()
        assert {k for k in after if not after[k] <= dead[k]} == set()


def test_a_hanging_engine_is_reported_and_recovers():
    with site(watchdog=0.4) as place, ThreadPoolExecutor(2) as pool:
        server = place.server
        answers = [pool.submit(server.post, prompt="slow", max_tokens=60, stream=i == 0) for i in range(2)]
        wait_until(lambda: server.state.slots.used == 2)
        place.kill(signal.SIGSTOP)
        wait_until(lambda: place.status("/health")[1] == "stalled", every_s=0.02)
        assert place.status("/health")[0] == place.status("/ready")[0] == 503
        refused = server.post(prompt="x")
        assert (refused.status_code, code_of(refused)) == (503, "engine_stalled")
        assert "retry-after" in refused.headers and place.metric("adaserve_step_age_seconds") > 0.4
        place.kill(signal.SIGCONT)
        wait_until(lambda: place.status("/health") == (200, "ok"), every_s=0.02)
        assert all(answer.result(PATIENCE_S).status_code == 200 for answer in answers)
        assert '"finish_reason":"length"' in answers[0].result().text
        assert place.status("/ready") == (200, "ok") and place.metric("adaserve_step_age_seconds") == 0


def test_an_idle_engine_does_not_stall():
    with site(watchdog=0.05) as place:
        assert place.server.post(prompt="x").status_code == 200
        threading.Event().wait(0.3)
        assert place.status("/health") == (200, "ok")


@pytest.mark.parametrize(("limit_s", "age_s", "status"), [(0.0, 1e6, "ok"), (2.0, 2.0, "ok"), (2.0, 2.5, "stalled")])
def test_a_step_stalls_beyond_the_watchdogs_limit_and_never_where_that_is_0(
    start_server, limit_s: float, age_s: float, status: str
):
    with start_server(ServerSettings(watchdog=limit_s)) as server:
        own = server.engine.stats()
        server.engine.stats = lambda: replace(own, step_age_s=age_s)
        assert server.http.get("/health").json()["status"] == status


def test_who_waited_too_long_may_come_again_once_the_queue_is_as_short_as_it_may_be(start_server):
    """64 choices have ten tokens left of a second each, so that the next one would wait 10 s, of which it may 2."""
    with start_server(ServerSettings(max_queue_wait=2.0)) as server:
        state = server.state
        assert state.retry_after_s() is None, "nothing is known"
        server.engine.stats = lambda: EngineStats(StepStats(running=64, waiting=9))
        state.admission.observe_tokens(1.0, 1)
        held = state.slots.reserve(Account(), 64 + 9, 0.0, 10)
        for tokens, wait_s in ((0, 10.0 - 2.0), (7, 3.0 - 2.0), (2, 0.0)):
            for choice in range(64):
                held.received(choice, tokens)
            assert state.retry_after_s() == pytest.approx(wait_s)
        held.release()


def test_a_server_drains_while_its_engine_starts_again():
    with site() as place:
        place.may_start.clear()
        place.kill()
        wait_until(lambda: place.status("/health") == (200, "restarting"), every_s=0.02)
        place.server.state.drain()
        assert (
            place.status("/health") == (200, "draining") and code_of(place.server.post(prompt="x")) == "shutting_down"
        )


@pytest.mark.slow
def test_a_stop_under_load_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every stream and body in flight at SIGTERM is whole. None can end before all run and the server drains."""
    gate = tmp_path / "open"
    monkeypatch.setenv(GATE, str(gate))
    with Program(timeout=PATIENCE_S) as program, ThreadPoolExecutor(24) as pool:
        wait_until(lambda: program.status("/ready") == 200, every_s=0.02)
        bodies = [
            {"prompt": f"held {i:02d} ", "max_tokens": 60 + i, "stream": i % 2 == 0, "n": 1 + i % 2} for i in range(24)
        ]
        with program.client(24) as http:
            answers = [pool.submit(http.post, "/v1/completions", json=body) for body in bodies]
            wait_until(
                lambda: f"adaserve_requests_running {sum(b['n'] for b in bodies)}.0" in http.get("/metrics").text
            )
            program.process.send_signal(signal.SIGTERM)
            wait_until(lambda: program.status("/ready") == 503, every_s=0.02)
            gate.touch()
            for body, answer in zip(bodies, answers, strict=True):
                assert texts(answer.result(PATIENCE_S), body["stream"]) == [expected(body)] * body["n"]
        code, _, err = program.end()
    assert code == 0, err


def expected(body: dict) -> str:
    return (body["prompt"] * 12)[: body["max_tokens"]]


def texts(response, stream: bool) -> list[str]:
    """The text of each choice, whole."""
    if not stream:
        return [choice["text"] for choice in response.json()["choices"]]
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    found: dict[int, str] = {}
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[index] for index in sorted(found)]


def test_an_engine_that_ends_or_comes_back_in_the_midst_of_a_look_is_not_called_dead(start_server):
    """It is asked whether it lives, and how it is, one after the other."""
    with start_server() as server:
        engine, own = server.engine, server.engine.stats()

        def ends() -> EngineStats:
            engine.is_alive, engine.stats = lambda: False, lambda: replace(own, back_in_s=3.0)
            return own

        def comes_back() -> EngineStats:
            engine.is_alive, engine.stats = lambda: True, lambda: own
            return own

        engine.stats = ends
        assert server.state.health().status == "ok"
        assert server.state.health().status == "restarting"
        engine.stats = comes_back
        assert server.state.health().status == "ok"
        engine.is_alive = lambda: False
        assert server.state.health().status == "dead"


def asked(name: str, **other: Any) -> GenerateRequest:
    return replace(GenerateRequest(name, [1, 2], draft_tag="code", adapter="sql"), **other)


@pytest.mark.parametrize(
    "other", [{"prompt_ids": [1, 3]}, {"sampling": SamplingParams(n=2)}, {"draft_tag": "chat"}, {"adapter": "law"}]
)
def test_a_retry_of_what_crashes_the_engine_is_known_by_all_that_it_asks_for(other: dict[str, Any]):
    suspects = Suspects(600.0, lambda: 0.0)
    for name in ("first", "second"):
        suspects.engine_died([asked(name)])
    with pytest.raises(RequestError, match="crashed 2 times in a row while this request was running") as caught:
        suspects.watch(asked("third"), print)
    assert caught.value.code == "crashes_engine"
    assert suspects.watch(asked("third", **other), print) is print


def test_suspects_run_side_by_side_again_long_after_their_last_crash():
    now = [0.0]
    suspects, pair = Suspects(600.0, lambda: now[0]), [asked("a"), asked("b", prompt_ids=[5])]
    for now[0] in (0.0, 100.0):
        suspects.engine_died(pair)
    suspects.watch(pair[0], print)
    now[0] = 699.0
    with pytest.raises(EngineRestartingError, match="they are tried one at a time"):
        suspects.watch(pair[1], print)
    now[0] = 700.0
    assert [suspects.watch(each, print) for each in pair] == [print, print] and not suspects
