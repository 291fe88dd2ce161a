"""The process mode against a scripted engine in a real child process: order, bounds, errors, death, cleaning up."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq

from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.engine import ipc
from adaserve_jax.engine import process_engine as process
from adaserve_jax.engine.client import EngineInfo, EngineStats, GenerateRequest, OutputChunk
from adaserve_jax.engine.process_engine import ProcessEngine
from adaserve_jax.errors import (
    AdaServeError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    QueueFullError,
    RequestError,
)
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.stats import DrafterStats, LearningStats, ServiceState, StepStats
from adaserve_jax.types import SLO, SamplingParams, TokenLogprob
from tests.server.scripted import ScriptedEngine
from tests.slow import slow_after
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
FACTORY = "tests.server.scripted:ScriptedEngine"


class Collected:
    """A sink that keeps every chunk by choice and knows when all choices ended."""

    def __init__(self, choices: int = 1):
        self.chunks: dict[int, list[OutputChunk]] = defaultdict(list)
        self.open = choices
        self.ended = threading.Event()

    def __call__(self, chunk: OutputChunk) -> None:
        self.chunks[chunk.choice].append(chunk)
        self.open -= chunk.finish_reason is not None
        if self.open == 0:
            self.ended.set()

    def text(self, choice: int = 0) -> str:
        return "".join(c.text for c in self.chunks[choice])

    def ids(self, choice: int = 0) -> list[int]:
        return [t for c in self.chunks[choice] for t in c.token_ids]

    def last(self, choice: int = 0) -> OutputChunk:
        return self.chunks[choice][-1]


def request(request_id: str, prompt: str, max_tokens: int = 20, n: int = 1, slo: SLO | None = None) -> GenerateRequest:
    return GenerateRequest(request_id, list(prompt.encode()), SamplingParams(max_tokens, n=n), slo or SLO())


@pytest.fixture(autouse=True)
def scripted_is_importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def new_engine(progress=None, **config) -> ProcessEngine:
    return ProcessEngine(EngineConfig(policy="process", **config), progress, factory=FACTORY)


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with new_engine(target="process-test", max_waiting=400) as running:
            yield running


def test_many_requests_keep_order_and_lose_nothing(engine):
    prompts = {f"r{i}": f"prompt {i} " * (1 + i % 3) for i in range(64)}
    sinks = {name: Collected() for name in prompts}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=40 + len(name)), sinks[name])
    for name, prompt in prompts.items():
        assert sinks[name].ended.wait(PATIENCE_S)
        data = prompt.encode()
        expected = [data[i % len(data)] for i in range(40 + len(name))]
        assert sinks[name].ids() == expected
        assert sinks[name].text().encode() == bytes(expected)
        assert [c.finish_reason for c in sinks[name].chunks[0][:-1]] == [None] * (len(sinks[name].chunks[0]) - 1)
        assert sinks[name].last().finish_reason == "length"
        assert sinks[name].last().metrics.output_tokens == len(expected)


def test_adapters_are_loaded_and_unloaded_in_the_child(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with new_engine(max_loras=2) as engine:
        assert (engine.info.adapters, engine.info.lora_slots) == ((), 2)
        engine.load_adapter("one", str(tmp_path))
        engine.load_adapter("two", str(tmp_path))
        with pytest.raises(RequestError, match="all 2 adapters that have room are loaded") as full:
            engine.load_adapter("three", str(tmp_path))
        assert (full.value.code, full.value.param) == ("no_adapter_slot", "lora_name")
        engine.load_adapter("one", str(tmp_path), replace=True)
        assert set(engine.info.adapters) == {"one", "two"}
        sink = Collected()
        engine.submit(replace(request("adapted", "abc", 4), adapter="two"), sink)
        assert sink.ended.wait(PATIENCE_S) and sink.ids() == list(b"abca")
        engine.unload_adapter("two")
        assert engine.info.adapters == ("one",)
        with pytest.raises(RequestError, match="adapter 'two' must be one that is loaded: one"):
            engine.submit(replace(request("gone", "abc", 4), adapter="two"), sink)
        with pytest.raises(RequestError, match="adapter 'two' must be one that is loaded: one"):
            engine.unload_adapter("two")
        with pytest.raises(CheckpointError, match="is missing"):
            engine.load_adapter("two", str(tmp_path / "none"))
        assert engine.is_alive()


def test_the_request_crosses_unchanged(engine):
    sink = Collected(3)
    engine.submit(request("whole", "häß ", 30, n=3, slo=SLO(relative=1.5, ttft_ms=70.5)), sink)
    assert sink.ended.wait(PATIENCE_S)
    assert sorted(sink.chunks) == [0, 1, 2]
    for choice in range(3):
        assert sink.text(choice) == ("häß " * 6)[: len(sink.text(choice))]
        metrics = sink.last(choice).metrics
        assert (metrics.tpot_slo_s, metrics.ttft_slo_s) == (pytest.approx(0.015), pytest.approx(0.0705))
    stats = engine.stats()
    assert stats.scheduler.draft_resident and stats.scheduler.pages_total == 12
    assert stats.scheduler.accepted_per_position == [5, 2]


def test_abort_ends_the_request_and_unknown_ids_are_ignored(engine):
    sink = Collected()
    engine.submit(request("stop-me", "slow " * 3, max_tokens=400), sink)
    wait_until(lambda: sink.chunks[0])
    engine.abort("nobody")
    engine.abort("stop-me")
    assert sink.ended.wait(PATIENCE_S)
    assert sink.last().finish_reason == "abort"
    engine.abort("stop-me")


def test_what_is_knowable_is_refused_at_once(engine):
    with pytest.raises(RequestError, match=r"context length is 512 tokens, .*, got a prompt of 600") as caught:
        engine.submit(request("long", "x" * 600), Collected())
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(RequestError, match="prompt must have at least one token, got none"):
        engine.submit(request("empty", ""), Collected())
    sink = Collected()
    engine.submit(request("twice", "slow x", max_tokens=6), sink)
    with pytest.raises(RequestError, match="'twice' is in flight already"):
        engine.submit(request("twice", "x"), Collected())
    assert sink.ended.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("prompt", "message", "code", "param"),
    [
        ("refuse x", "cannot serve this", "invalid_value", "prompt"),
        ("late-refuse x", "cannot serve this", "invalid_value", "prompt"),
        ("full x", "queue is full", "queue_full", None),
        ("late-full x", "queue is full", "queue_full", None),
        ("bug x", "a bug in submit", None, None),
    ],
)
def test_a_refusal_of_the_engine_ends_every_choice_and_the_engine_goes_on(engine, prompt, message, code, param):
    sink = Collected(2)
    engine.submit(request(prompt, prompt, n=2), sink)
    assert sink.ended.wait(PATIENCE_S)
    for choice in (0, 1):
        assert sink.last(choice).finish_reason == "error"
        assert message in sink.last(choice).error
        assert (sink.last(choice).error_code, sink.last(choice).error_param) == (code, param)
    after = Collected()
    engine.submit(request("after", "fine"), after)
    assert after.ended.wait(PATIENCE_S)
    assert after.last().finish_reason == "length"


def test_a_sink_that_raises_stops_its_request_only_and_gets_nothing_more(engine):
    given: list[OutputChunk] = []

    def broken(chunk: OutputChunk) -> None:
        given.append(chunk)
        raise KeyError("broken sink")

    other, again = Collected(), Collected()

    def is_ended() -> bool:
        try:
            engine.submit(request("broken", "fine"), again)
        except RequestError:  # in flight still
            return False
        return True

    engine.submit(request("broken", "slow " * 3, max_tokens=400, n=2), broken)
    engine.submit(request("other", "slow x", max_tokens=30), other)
    assert other.ended.wait(PATIENCE_S)
    assert other.last().finish_reason == "length"
    wait_until(is_ended)
    assert again.ended.wait(PATIENCE_S) and again.last().finish_reason == "length"
    assert len(given) == 1


def test_more_choices_than_may_wait_are_refused():
    with new_engine(max_waiting=3) as engine:
        os.kill(engine.pid, signal.SIGSTOP)
        first, second = Collected(2), Collected()
        engine.submit(request("first", "abc", n=2), first)
        with pytest.raises(QueueFullError, match="2 requests wait and at most 3 may"):
            engine.submit(request("over", "abc", n=2), Collected(2))
        engine.submit(request("second", "abc"), second)
        os.kill(engine.pid, signal.SIGCONT)
        assert first.ended.wait(PATIENCE_S) and second.ended.wait(PATIENCE_S)
        wait_until(lambda: engine.stats().scheduler.running == 0)
        engine.submit(request("over", "abc", n=3), Collected(3))
        with pytest.raises(RequestError, match="n must be at most 3, the requests that may wait, got 4"):
            engine.submit(request("never", "abc", n=4), Collected(4))


def test_progress_is_told_and_close_leaves_nothing_behind(monkeypatch):
    """An engine with open requests ends by itself: it may have much to save after it told what it ended, for longer
    than a dying engine is waited for."""
    monkeypatch.setattr(process, "DYING_LIMIT_S", -1.0)
    parts = []
    engine = new_engine(lambda *part: parts.append(part))
    with pytest.raises(EngineDeadError, match="not ready"):
        _ = engine.info
    engine.start()
    assert parts == [("programs", 1, 3), ("programs", 2, 3), ("programs", 3, 3)]
    folder = Path(engine.socket_folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    sink = Collected()
    engine.submit(request("late", "slow " * 3, max_tokens=400), sink)
    engine.close()
    assert sink.ended.is_set()
    assert sink.last().finish_reason == "error"
    assert engine._child.returncode == 0
    assert not folder.exists()
    assert not engine.is_alive()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.submit(request("never", "x"), Collected())
    engine.close()


def test_a_failure_of_the_receiving_thread_ends_start():
    def fails(*_: object) -> None:
        raise OSError("no more output")

    engine = new_engine(fails)
    with pytest.raises(EngineDeadError, match=r"could not be read .*no more output"):
        engine.start()
    assert not Path(engine.socket_folder).exists()
    engine.close()


def test_a_request_that_cannot_be_sent_is_not_open(engine):
    ids = list(np.arange(3))
    with pytest.raises(TypeError):
        engine.submit(GenerateRequest("numbers", ids, SamplingParams(2)), Collected())
    sink = Collected()
    engine.submit(request("numbers", "same id"), sink)
    assert sink.ended.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("target", "factory", "kind", "text"),
    [
        ("missing", FACTORY, CheckpointError, "expected model.safetensors in missing, found nothing"),
        ("demo", "tests.server.scripted", ConfigError, "must be 'module:callable', got 'tests.server.scripted'"),
    ],
)
def test_an_error_while_loading_comes_back_as_itself(target, factory, kind, text):
    engine = ProcessEngine(EngineConfig(target=target), factory=factory)
    with pytest.raises(kind) as caught:
        engine.start()
    assert text in str(caught.value)
    assert type(caught.value) is kind
    assert not Path(engine.socket_folder).exists()


def test_the_death_of_the_process_is_noticed():
    engine = new_engine()
    engine.start()
    folder = Path(engine.socket_folder)
    other, dying = Collected(2), Collected()
    engine.submit(request("other", "slow " * 3, max_tokens=400, n=2), other)
    engine.submit(request("dying", "die now"), dying)
    assert dying.ended.wait(PATIENCE_S) and other.ended.wait(PATIENCE_S)
    for chunk in (dying.last(), other.last(0), other.last(1)):
        assert chunk.finish_reason == "error"
        assert "ended with status 9" in chunk.error
        assert chunk.error_code == "engine_dead"
    assert not engine.is_alive()
    with pytest.raises(EngineDeadError, match="status 9"):
        engine.submit(request("after", "x"), Collected())
    engine.abort("other")
    engine.close()
    assert not folder.exists()


class DyingIdle(ScriptedEngine):
    """Dies between requests, and has so much to save that it does not end by itself."""

    def unload_adapter(self, name: str) -> None:
        self.dead = True

    def close(self) -> None:
        threading.Event().wait()


def test_a_death_between_requests_is_noticed(monkeypatch):
    monkeypatch.setattr(process, "DYING_LIMIT_S", 0.0)
    config = EngineConfig(policy="process")
    with ProcessEngine(config, factory="tests.engine.test_process:DyingIdle") as engine:
        with pytest.raises(EngineDeadError, match="the engine died; its log says why"):
            engine.unload_adapter("any")
        assert not engine.is_alive()


def test_a_frozen_process_is_ended(monkeypatch):
    monkeypatch.setattr(process, "HEARTBEAT_LIMIT_S", 0.6)
    with new_engine() as engine:
        os.kill(engine.pid, signal.SIGSTOP)
        sink = Collected()
        engine.submit(request("waits", "abc"), sink)
        assert sink.ended.wait(PATIENCE_S)
        assert "no sign of life for 0.6 s" in sink.last().error and sink.last().error_code == "engine_dead"
        assert not engine.is_alive()


def test_a_suspension_of_the_whole_machine_is_no_silence(monkeypatch):
    """After it the clock has leapt by an hour, and the engine has had no time to say anything."""
    leap_s = 0.0
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + leap_s))
    with new_engine() as engine:
        leap_s = 3600.0
        sink = Collected()
        engine.submit(request("goes-on", "abc"), sink)
        assert sink.ended.wait(PATIENCE_S)
        assert sink.last().error is None and engine.is_alive()


def test_close_while_loading_ends_start():
    engine = new_engine(target="hang")
    errors = []

    def start() -> None:
        try:
            engine.start()
        except EngineDeadError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: engine.pid is not None)
    engine.close()
    thread.join(50)  # the process sleeps for longer
    assert errors


def test_a_close_at_any_moment_of_start_leaves_nothing_behind(monkeypatch):
    """Held at each call that start makes; what comes after it must not miss the close."""
    for name in ("mkdtemp", "Popen", "Thread"):
        engine, reached, ended = new_engine(target="hang"), threading.Event(), []
        owner = {"mkdtemp": ipc.tempfile, "Popen": process.subprocess, "Thread": process.threading}[name]
        original = getattr(owner, name)

        def slowly(*args, original=original, reached=reached, **kwargs):
            made = original(*args, **kwargs)
            reached.set()
            time.sleep(0.05)
            return made

        def start(engine=engine, ended=ended) -> None:
            with pytest.raises(EngineDeadError, match="closed"):
                engine.start()
            ended.append(True)

        thread = threading.Thread(target=start)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, slowly)
            thread.start()
            assert reached.wait(PATIENCE_S)
            engine.close()
        thread.join(50)
        assert ended and engine._child.returncode is not None and not Path(engine.socket_folder).exists()


def test_a_closed_engine_does_not_start():
    engine = new_engine()
    engine.close()
    with pytest.raises(EngineDeadError, match="starts once"):
        engine.start()


PARENT = """
import sys, time
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.process_engine import ProcessEngine
engine = ProcessEngine(EngineConfig(), factory="tests.server.scripted:ScriptedEngine")
engine.start()
assert "jax" not in sys.modules, "the front end imported jax"
print(engine.pid, engine.socket_folder, flush=True)
time.sleep(60)
"""


def test_the_child_follows_a_killed_parent_and_the_parent_never_imports_jax():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    pid, folder = parent.stdout.readline().split()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not Path(folder).exists())
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


def test_the_wire_is_typed():
    stats = StepStats(finished={"stop": 3}, calibration_error={"greedy": {"raw": 0.5}})
    learning = LearningStats(version={"default": 2}, loss={"default": 0.5}, left_out={"opt_out": 1}, delay_max_s=0.25)
    drafter = DrafterStats(rounds=3, wait_s=0.5, services={"h:1": ServiceState("half_open", "v1", 2, 0.5, 0.1, "why")})
    logprobs = [TokenLogprob(3, -0.5, ((3, -0.5), (9, -2.0))), TokenLogprob(4, -1.0)]
    chunk = OutputChunk("r", 0, "ä", [1, 2], logprobs=logprobs, prompt_logprobs=logprobs[::-1])
    step = ipc.Step([chunk], EngineStats(stats, learning=learning, drafter=drafter), 5)
    assert ipc.decode_from_engine(ipc.encode(step)) == step
    start = ipc.Start(EngineConfig(drafter=DrafterConfig(("grpc://h:1", "grpc://h:2"), 50.0)), "module:factory")
    assert ipc.decode_start(ipc.encode(start)) == start
    sampling = SamplingParams(
        seed=2**64 - 1, stop=("a",), logit_bias={3: 1.5}, bad_words=("a",), min_tokens=2, logprobs=5, prompt_logprobs=3,
        presence_penalty=1.0, json_schema="{}",
    )  # fmt: skip
    submit = ipc.Submit(
        GenerateRequest(
            "r", [1], sampling, SLO(tpot_ms=4), cache_salt="a", learn=False, tenant="team-a", draft_tag="code"
        )
    )
    assert ipc.decode_to_engine(ipc.encode(submit)) == submit
    learns = LearnConfig(learn_loss="jsd", learn_rate=1e-3, learn_folder="learned", learn_keep_records=True)
    for config in (
        EngineConfig(draft=None, token_edges=(16, 64), seed=3),
        EngineConfig(drafts=("code=models/code",), route="topic", learning=learns),
    ):
        start = ipc.Start(config, FACTORY)
        assert ipc.decode_start(ipc.encode(start)) == start
    info = EngineInfo("t", "d", "adaserve", "cpu", "0", 8, 1, 9, 0.5, drafts=("default", "code"))
    assert ipc.decode_from_engine(ipc.encode(ipc.Ready(info))) == ipc.Ready(info)
    for bad in (b"\x80", ipc.encode({"type": "Submit", "request": 3}), ipc.encode({"type": "Exec"}), b""):
        with pytest.raises(msgspec.DecodeError):
            ipc.decode_to_engine(bad)


@pytest.mark.parametrize(
    ("learning", "seconds"),
    slow_after(
        2, [(LearnConfig(), 0), (LearnConfig(learn_folder="learned"), ipc.SAVE_LIMIT_S), (None, 0)], several=True
    ),
)
def test_an_engine_that_has_something_to_write_may_take_longer_to_end(monkeypatch, learning, seconds):
    waits = []
    wait = subprocess.Popen.wait
    monkeypatch.setattr(
        subprocess.Popen, "wait", lambda self, timeout=None: waits.append(timeout) or wait(self, timeout)
    )
    engine = ProcessEngine(EngineConfig(learning=learning), factory=FACTORY)
    engine.start()
    engine.close()
    assert ipc.CLOSE_LIMIT_S + seconds in waits


def test_a_child_that_cannot_be_spawned_leaves_nothing(monkeypatch, tmp_path):
    engine = ProcessEngine(EngineConfig(), factory=FACTORY)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "absent"))
        with pytest.raises(FileNotFoundError):
            engine.start()
    assert engine.pid is None and engine.socket_folder and not Path(engine.socket_folder).exists()
    with engine:  # nothing of the first attempt is in its way
        assert engine.is_alive()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("r", param="prompt", code="c"), RequestError),
        (FileNotFoundError("f"), FileNotFoundError),
        (ValueError("v"), ValueError),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), AdaServeError),
        (KeyboardInterrupt("k"), AdaServeError),
        (msgspec.DecodeError("m"), AdaServeError),
        (EngineDeadError("d"), EngineDeadError),
    ],
)
def test_errors_cross_with_class_and_text(error, kind):
    again = ipc.to_error(ipc.to_fault(error))
    assert type(again) is kind
    assert str(error) in str(again)
    if isinstance(again, RequestError):
        assert (again.param, again.code) == ("prompt", "c")


def test_what_is_sent_before_the_child_listens_reaches_it(tmp_path):
    with zmq.Context() as context, ipc.sender(context, str(tmp_path), ipc.TO_ENGINE, 0) as ours:
        ours.send(b"early", zmq.DONTWAIT)
        with context.socket(zmq.PULL) as theirs:
            theirs.bind(f"ipc://{tmp_path}/to_engine")
            assert theirs.poll(PATIENCE_S * 1e3) and theirs.recv() == b"early"
