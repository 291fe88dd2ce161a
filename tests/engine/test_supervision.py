"""An engine that dies is replaced, so often and no more, and its counts go on: with fakes on a virtual clock, and with
real processes that are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineStats, GenerateRequest, OutputChunk, Sink
from adaserve_jax.engine.process_engine import ProcessEngine
from adaserve_jax.engine.supervisor import OnDeath, SupervisedEngine
from adaserve_jax.errors import CheckpointError, EngineDeadError, EngineRestartingError, RequestError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.stats import DrafterStats, LearningStats, ServiceState, StepStats, metrics_of
from adaserve_jax.types import FinishReason
from tests.engine.test_process import FACTORY, ROOT, Collected, request
from tests.waiting import PATIENCE_S, wait_until


class Fake:
    """An engine that does what the test tells it: `fails` to start, or starts when `may_start` is set."""

    def __init__(self, on_death: OnDeath, number: int, fails: bool, may_start: threading.Event):
        self.on_death, self.number, self.fails, self.may_start = on_death, number, fails, may_start
        self.counts = StepStats()
        self.learning = LearningStats()
        self.alive = self.closed = False
        self.submitted: list[tuple[GenerateRequest, Sink]] = []
        self.info = SimpleNamespace(target=f"engine {number}", adapters=("a",))
        self.adapters: list[tuple[str, str | None]] = []

    def start(self) -> None:
        while not (self.closed or self.may_start.wait(0.01)):
            pass
        if self.fails or self.closed:
            raise EngineDeadError(f"start {self.number} failed")
        self.alive = True

    def die(self) -> EngineDeadError:
        """The process is gone; what its requests are told."""
        self.alive = False
        return self.on_death(f"engine {self.number} died", [request for request, _ in self.submitted])

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        if not request.prompt_ids:
            raise RequestError("the prompt is empty")
        self.submitted.append((request, sink))

    def finish(self, reason: FinishReason = "stop") -> None:
        """End the requests that it has."""
        for ended, sink in self.submitted:
            sink(OutputChunk(ended.request_id, 0, "", [], reason, RequestMetrics(0.0)))
        self.counts.finished[reason] = self.counts.finished.get(reason, 0) + len(self.submitted)
        self.submitted = []

    def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> None:
        if folder == "moved" and self.number:
            raise CheckpointError("moved has no adapter_config.json")
        self.adapters.append((name, folder))

    def unload_adapter(self, name: str) -> None:
        self.adapters.append((name, None))

    def stats(self) -> EngineStats:
        return EngineStats(self.counts, compiles_after_ready=self.counts.steps, learning=self.learning)

    def is_alive(self) -> bool:
        return self.alive

    def close(self) -> None:
        self.closed = True


class World:
    """A supervised engine over fakes; the clock stands still unless `now` is set."""

    def __init__(self, failing: tuple[int, ...] = (), **limits):
        self.now = 100.0
        self.fakes: list[Fake] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failing = failing
        self.engine = SupervisedEngine(self.build, clock=lambda: self.now, **{"backoff_s": 0.0} | limits)

    def build(self, on_death: OnDeath) -> Fake:
        number = len(self.fakes)
        self.fakes.append(Fake(on_death, number, number in self.failing, self.gate))
        return self.fakes[-1]

    def start_within(self, seconds: float) -> None:
        """Start, which takes so long."""
        self.gate.clear()
        thread = threading.Thread(target=self.engine.start)
        thread.start()
        wait_until(lambda: bool(self.fakes))
        self.now += seconds
        self.gate.set()
        thread.join()

    def __enter__(self) -> World:
        self.engine.start()
        return self

    def __exit__(self, *_) -> None:
        self.engine.close()
        assert all(fake.closed for fake in self.fakes)


def refusal(engine: SupervisedEngine) -> EngineDeadError:
    with pytest.raises(EngineDeadError) as caught:
        engine.submit(GenerateRequest("r", [1]), lambda chunk: None)
    return caught.value


def test_counts_go_on_and_gauges_are_the_new_engines():
    with World() as world:
        world.fakes[0].counts = StepStats(
            steps=7,
            running=3,
            pages_total=9,
            finished={"stop": 2, "abort": 1},
            accepted_per_position=[4, 1],
            wait_s=0.5,
        )
        world.fakes[0].learning = LearningStats(
            version={"default": 4}, updates={"default": 3}, left_out={"opt_out": 1}, delay_max_s=0.5
        )
        assert world.engine.stats().restarts == 0 and world.engine.stats().back_in_s is None
        world.gate.clear()
        assert isinstance(world.fakes[0].die(), EngineRestartingError)
        wait_until(lambda: len(world.fakes) == 2)
        during = world.engine.stats()
        assert (during.scheduler.steps, during.scheduler.running, during.restarts) == (7, 0, 1)
        assert during.last_crash is not None and during.last_crash.why == "engine 0 died"
        assert during.back_in_s == 0.0 and not world.engine.is_alive()  # the first start took no time
        error = refusal(world.engine)
        assert error.code == "engine_restarting" and "engine 0 died; it is started again" in str(error)
        assert world.engine.info.target == "engine 0"
        world.fakes[1].counts = StepStats(steps=2, running=1, finished={"stop": 1}, accepted_per_position=[1, 1, 1])
        world.fakes[1].learning = LearningStats(version={"default": 5}, updates={"default": 2}, delay_max_s=0.25)
        world.gate.set()
        wait_until(world.engine.is_alive)
        after = world.engine.stats()
        assert (after.scheduler.steps, after.compiles_after_ready, after.restarts, after.back_in_s) == (9, 9, 1, None)
        assert after.scheduler.finished == {"stop": 3, "abort": 1}
        assert after.scheduler.accepted_per_position == [5, 2, 1]
        assert (after.scheduler.running, after.scheduler.pages_total, after.scheduler.wait_s) == (1, 0, 0.5)
        assert after.learning == LearningStats(
            version={"default": 5}, updates={"default": 5}, left_out={"opt_out": 1}, delay_max_s=0.5
        )
        assert world.engine.info.target == "engine 1" and world.fakes[0].closed


def gauges(stats: object) -> set[str]:
    return {name for name, spec in metrics_of(stats).items() if spec.kind == "gauge"}


def test_every_field_of_the_stats_is_a_gauge_or_a_count():
    full = StepStats(**{
        name: {"stop": 2} if isinstance(value, dict) else [3] if isinstance(value, list) else type(value)(5)
        for name, value in vars(StepStats()).items()
        if name not in ("calibration_error", "arms")
    })  # fmt: skip
    twice = full.after(full)
    for name, value in vars(full).items():
        doubled = {"stop": 4} if isinstance(value, dict) else [6] if isinstance(value, list) else 10
        assert getattr(twice, name) == (value if name in gauges(full) else doubled), name
    assert full.ended() == StepStats(**{k: v for k, v in vars(full).items() if k not in gauges(full)})


def test_every_field_of_the_drafter_stats_is_a_gauge_or_a_count():
    services = {"host:1": ServiceState(sessions=2)}
    full = DrafterStats(**{name: type(value)(5) for name, value in vars(DrafterStats()).items() if name != "services"})
    full.services = services
    twice = full.after(full)
    assert twice.services == services and full.ended() == replace(full, services={})
    assert gauges(full) == {"services"}
    assert all(getattr(twice, name) == 10 for name in vars(full) if name not in gauges(full))


def test_an_engine_s_counts_of_draft_services_outlive_it():
    one, other = EngineStats(StepStats(), drafter=DrafterStats(rounds=2)), EngineStats(StepStats())
    assert other.after(one).drafter == one.after(other).drafter == DrafterStats(rounds=2)
    assert one.after(one).drafter == DrafterStats(rounds=4)
    assert other.ended().drafter is None and other.after(other).drafter is None
    gone = replace(one, drafter=DrafterStats(rounds=2, services={"h:1": ServiceState()})).ended()
    assert gone.drafter == DrafterStats(rounds=2)


def test_every_field_of_the_learning_stats_is_a_gauge_or_a_count():
    full = LearningStats(**{
        name: {"default": 2} if isinstance(value, dict) else type(value)(5)
        for name, value in vars(LearningStats()).items()
    })  # fmt: skip
    twice = full.after(full)
    for name, value in vars(full).items():
        doubled = {"default": 4} if isinstance(value, dict) else 10
        once = name in gauges(full) or name == "delay_max_s"
        assert getattr(twice, name) == (value if once else doubled), name
    assert full.ended() == LearningStats(**{k: v for k, v in vars(full).items() if k not in gauges(full)})
    assert LearningStats(delay_max_s=3.0).after(full).delay_max_s == full.after(LearningStats()).delay_max_s == 5.0


def test_an_engine_that_ends_several_times_without_a_finished_request_stays_dead():
    with World(max_restarts=2) as world:
        for number in range(4):
            world.fakes[number].counts.finished = {"length": 1, "abort": 3}
            assert isinstance(world.fakes[number].die(), EngineRestartingError)
            wait_until(world.engine.is_alive)
        world.fakes[4].counts.finished = {"abort": 3, "error": 1}  # no progress: the second in a row
        assert isinstance(world.fakes[4].die(), EngineRestartingError)
        wait_until(world.engine.is_alive)
        last = world.fakes[5].die()
        assert type(last) is EngineDeadError
        assert str(last) == ("engine 5 died; it ended 3 times in a row without finishing a request; restart the server")
        after = world.engine.stats()
        assert refusal(world.engine) is last and after.back_in_s is None
        assert not world.engine.is_alive() and after.restarts == 5
        assert after.last_crash is not None and after.last_crash.why == "engine 5 died"
    assert len(world.fakes) == 6


def test_a_long_service_is_progress_without_requests():
    with World(max_restarts=1, window_s=60.0) as world:
        for number in range(3):
            world.now += 60.0
            assert isinstance(world.fakes[number].die(), EngineRestartingError)
            wait_until(world.engine.is_alive)
        world.now += 59.0
        assert type(world.fakes[3].die()) is EngineDeadError


def test_each_restart_waits_twice_as_long_as_the_one_before():
    with World(max_restarts=9, window_s=1000.0, backoff_s=0.001) as world:
        waits = []
        for number in range(5):
            world.gate.clear()
            world.fakes[number].die()
            waits.append(world.engine.stats().back_in_s)
            world.gate.set()
            wait_until(world.engine.is_alive)
        assert waits == [0.0, 0.001, 0.002, 0.004, 0.008]
        world.now += 1000.0  # all are forgotten
        world.gate.clear()
        world.fakes[5].die()
        assert world.engine.stats().back_in_s == 0.0
        world.gate.set()
        wait_until(world.engine.is_alive)
    with World(max_restarts=9, backoff_s=1e9) as world:
        world.fakes[0].die()
        wait_until(world.engine.is_alive)
        world.fakes[1].die()
        assert world.engine.stats().back_in_s == 60.0 and not world.engine.is_alive()
    assert len(world.fakes) == 2, "closed while it waited"


def asked(name: str, text: str) -> GenerateRequest:
    """A request of this text, under an id of its own."""
    return GenerateRequest(name, list(text.encode()))


def crash(world: World, *texts: str) -> list[str]:
    """Send these texts and let the engine die; return the codes of those that were refused."""
    engine, refused = world.fakes[-1], []
    for number, text in enumerate(texts):
        try:
            world.engine.submit(asked(f"{engine.number}/{number}", text), lambda chunk: None)
        except (RequestError, EngineRestartingError) as error:
            refused.append(error.code)
    engine.die()
    wait_until(world.engine.is_alive)
    return refused


def test_a_request_that_is_in_every_crash_is_set_aside_and_the_others_are_not():
    with World(max_restarts=9) as world:
        assert crash(world, "good", "bad", "idle") == []
        assert crash(world, "other", "bad", "good") == []
        assert crash(world, "bad", "good", "new") == ["engine_restarting"]  # suspects are tried one at a time
        with pytest.raises(RequestError, match="crashed 3 times in a row while this request was running") as caught:
            world.engine.submit(asked("again", "bad"), lambda chunk: None)
        assert caught.value.code == "crashes_engine"
        for text in ("good", "new", "other", "bad!"):
            world.engine.submit(asked(text, text), lambda chunk: None)
        world.now += 300.0
        assert crash(world, "innocent") == crash(world, "new") == []  # crashes without it, as it is refused
        with pytest.raises(RequestError, match="crashed 3 times in a row while this request was running"):
            world.engine.submit(asked("once more", "bad"), lambda chunk: None)
        world.now += 300.0  # long after its last crash it may try again
        world.engine.submit(asked("later", "bad"), lambda chunk: None)


def test_what_was_unloaded_makes_room_in_the_next_engine_before_others_are_loaded():
    """Each engine begins with adapter a."""
    with World() as world:
        for name, folder in (("b", "B"), ("b", None), ("c", "C"), ("a", None), ("b", "B")):
            if folder is None:
                world.engine.unload_adapter(name)
            else:
                world.engine.load_adapter(name, folder)
        world.fakes[0].die()
        wait_until(world.engine.is_alive)
        assert world.fakes[1].adapters == [("a", None), ("b", "B"), ("c", "C")]


def test_a_name_whose_adapter_cannot_be_loaded_again_gets_no_other_weights(caplog: pytest.LogCaptureFixture):
    """Each engine begins with adapter a of its configuration, in whose place another one was loaded."""
    with World() as world:
        world.engine.load_adapter("a", "moved", replace=True)
        world.fakes[0].die()
        wait_until(world.engine.is_alive)
        assert world.fakes[1].adapters == [("a", None)]
    assert "adapter 'a' is not as it was before the engine was started again: moved has no" in caplog.text


def test_a_restart_that_fails_clears_no_suspect():
    with World(failing=(2,), max_restarts=9) as world:
        crash(world, "good", "bad")
        crash(world, "other", "bad")
        assert len(world.fakes) == 4, "the third did not start"
        with pytest.raises(RequestError, match="crashed 2 times in a row while this request was running"):
            world.engine.submit(asked("again", "bad"), lambda chunk: None)


def test_a_suspect_whose_client_fails_lets_the_next_one_be_tried():
    with World(max_restarts=9) as world:
        crash(world, "a", "b")
        crash(world, "a", "b")

        def broken(chunk: OutputChunk) -> None:
            raise ValueError("no reader")

        world.engine.submit(asked("1", "a"), broken)
        ((request, sink),) = world.fakes[-1].submitted
        with pytest.raises(ValueError, match="no reader"):
            sink(OutputChunk(request.request_id, 0, "x", [1]))
        world.engine.submit(asked("2", "b"), lambda chunk: None)


def test_a_suspect_that_ends_while_another_request_comes_in_is_noted():
    """The engine's chunks come in another thread than the requests do."""
    with World(max_restarts=9) as world:
        crash(world, "x", "y")
        crash(world, "x", "z")  # x is set aside
        crash(world, "a", "b")
        crash(world, "a", "b")
        world.engine.submit(asked("1", "a"), lambda chunk: None)
        finishing = threading.Thread(target=world.fakes[-1].finish)

        class Interrupted(float):
            """A time at which the suspect ends as soon as somebody reckons with it."""

            def __sub__(self, other: float) -> float:
                if finishing.ident is None:
                    finishing.start()
                    finishing.join(0.5)  # it may have to wait for the end of this
                return float(self) - other

        world.now = Interrupted(world.now)
        world.engine.submit(asked("2", "c"), lambda chunk: None)
        finishing.join()
        with pytest.raises(RequestError, match="crashed 2 times in a row while this request was running"):
            world.engine.submit(asked("3", "b"), lambda chunk: None)


def test_suspects_are_tried_one_after_the_other_and_cleared():
    with World(max_restarts=9) as world:
        crash(world, "a", "b", "c")
        crash(world, "a", "b", "c")
        world.engine.submit(asked("1", "a"), lambda chunk: None)
        with pytest.raises(EngineRestartingError, match="crashed several times with this request and others"):
            world.engine.submit(asked("2", "b"), lambda chunk: None)
        world.fakes[-1].finish("abort")  # its client left: still a suspect
        world.engine.submit(asked("3", "b"), lambda chunk: None)
        with pytest.raises(RequestError, match="the prompt is empty"):  # what is refused meanwhile changes nothing
            world.engine.submit(asked("refused", ""), lambda chunk: None)
        with pytest.raises(EngineRestartingError, match="tried one at a time"):
            world.engine.submit(asked("too early", "a"), lambda chunk: None)
        world.fakes[-1].finish("stop")
        world.engine.submit(asked("4", "b"), lambda chunk: None)
        world.engine.submit(asked("5", "a"), lambda chunk: None)
        world.fakes[-1].finish("length")
        with pytest.raises(RequestError, match="set aside"):
            world.engine.submit(asked("6", "c"), lambda chunk: None)


def test_crashes_with_nothing_in_common_suspect_nobody():
    with World(max_restarts=9) as world:
        for texts in (("a", "b"), (), ("c",), ("d", "a"), ("b",), ("c",)):
            assert crash(world, *texts) == []
        world.now += 700.0
        assert crash(world, "c") == crash(world, "d") == []


def test_no_restart_where_none_is_allowed():
    with World(max_restarts=0) as world:
        assert world.fakes[0].die().code == "engine_dead"
        assert refusal(world.engine).code == "engine_dead" and len(world.fakes) == 1


def test_a_start_that_fails_is_tried_again_while_there_are_restarts_left():
    with World(failing=(1,), max_restarts=2) as world:
        world.fakes[0].die()
        wait_until(world.engine.is_alive)
        assert len(world.fakes) == 3 and world.fakes[1].closed and world.engine.stats().restarts == 2
    with World(failing=(1,), max_restarts=1) as world:
        world.fakes[0].die()
        wait_until(lambda: refusal(world.engine).code == "engine_dead")
        assert "start 1 failed; it ended 2 times in a row without finishing a request" in str(refusal(world.engine))
        assert world.engine.stats().back_in_s is None


def test_counts_stay_when_no_new_engine_could_be_started():
    with World(failing=(1,), max_restarts=1) as world:
        world.fakes[0].counts = StepStats(steps=7, finished={"stop": 2})
        world.fakes[0].die()
        wait_until(lambda: refusal(world.engine).code == "engine_dead")
        after = world.engine.stats()
        assert (after.scheduler.steps, after.scheduler.finished, after.compiles_after_ready) == (7, {"stop": 2}, 7)


def test_an_engine_that_dies_as_it_has_started_is_not_called_back(caplog: pytest.LogCaptureFixture):
    class Frail(World):
        def build(self, on_death: OnDeath) -> Fake:
            fake = super().build(on_death)
            if fake.number == 1:
                start = fake.start
                fake.start = lambda: (start(), fake.die())  # type: ignore[method-assign]
            return fake

    with Frail() as world:
        world.fakes[0].die()
        wait_until(world.engine.is_alive)
        assert len(world.fakes) == 3
    told = [message.partition(";")[0] for message in caplog.messages]
    assert told == ["engine 0 died", "engine 1 died", "the engine is back after 0.0 s"]


def test_a_start_that_hangs_is_given_up():
    with World(max_restarts=1, least_start_limit_s=0.05) as world:
        world.gate.clear()
        world.fakes[0].die()
        wait_until(lambda: refusal(world.engine).code == "engine_dead")
        assert "could not be started again: it was not ready within 0.05 s" in str(refusal(world.engine))
        assert world.fakes[1].closed and not world.engine.is_alive()


def test_a_start_may_take_as_long_as_the_first_one_and_more():
    world = World(least_start_limit_s=2.0)
    world.start_within(30.0)
    assert world.engine._start_limit_s == 150.0
    world.engine.close()


def test_the_first_start_is_not_tried_again():
    world = World(failing=(0,))
    with pytest.raises(EngineDeadError, match="start 0 failed"):
        world.engine.start()
    with pytest.raises(EngineDeadError, match="starts once"):
        world.engine.start()
    world.engine.close()
    assert len(world.fakes) == 1


def test_the_time_until_it_is_back_is_that_of_the_last_start():
    world = World()
    world.start_within(4.0)
    world.gate.clear()
    world.fakes[0].die()
    wait_until(lambda: len(world.fakes) == 2)
    world.now += 1.5
    assert world.engine.stats().back_in_s == 2.5
    world.now += 10.0
    assert world.engine.stats().back_in_s == 0.0
    world.engine.close()  # in the midst of the start


@pytest.fixture
def processes(monkeypatch, request: pytest.FixtureRequest):
    """A supervised scripted engine in a process of its own, and the engines that it was so far. Parameter: fields of
    the configuration."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = EngineConfig(policy="process", **getattr(request, "param", {}))
    built: list[ProcessEngine] = []

    def build(on_death: OnDeath) -> ProcessEngine:
        built.append(ProcessEngine(config, factory=FACTORY, on_death=on_death))
        return built[-1]

    engine = SupervisedEngine(build)
    engine.start()
    yield engine, built
    engine.close()
    assert all(one._child.returncode is not None for one in built)


@pytest.mark.parametrize("processes", [{"max_loras": 3}], indirect=True)
def test_adapters_are_as_they_were_after_a_crash(processes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that was unloaded stays away, and one whose folder is gone by then is logged and missed by no other."""
    engine, built = processes
    for name in ("kept", "gone", "unloaded"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        engine.load_adapter(name, str(tmp_path / name))
    engine.unload_adapter("unloaded")
    assert engine.info.adapters == ("kept", "gone")
    (tmp_path / "gone" / "adapter_config.json").unlink()
    os.kill(built[0].pid, signal.SIGKILL)
    wait_until(lambda: len(built) == 2 and engine.is_alive())
    assert engine.info.adapters == ("kept",)
    assert "adapter 'gone' is not as it was before the engine was started again" in caplog.text
    sink = Collected()
    engine.submit(replace(request("adapted", "abc", 5), adapter="kept"), sink)
    assert sink.ended.wait(PATIENCE_S) and sink.text() == "abcab"
    engine.load_adapter("unloaded", str(tmp_path / "unloaded"))
    assert engine.info.adapters == ("kept", "unloaded")


def test_many_requests_at_the_moment_of_death_all_end(processes):
    """None may hang, whichever side of the death it was sent on."""
    engine, built = processes
    sinks, refused = {}, 0
    for i in range(200):
        if i == 100:
            os.kill(built[0].pid, signal.SIGKILL)
        sink = Collected()
        try:
            engine.submit(request(f"r{i}", "slow x", max_tokens=400), sink)
            sinks[i] = sink
        except EngineRestartingError:
            refused += 1
        time.sleep(0.0005)
    assert all(sink.ended.wait(PATIENCE_S) for i, sink in sinks.items() if sink.chunks[0] or i < 100)
    wait_until(engine.is_alive)
    for i, sink in sinks.items():
        if not sink.ended.is_set():
            engine.abort(f"r{i}")
    assert all(sink.ended.wait(PATIENCE_S) for sink in sinks.values())


@pytest.mark.parametrize("how", ["Dying", "Refusing"])
def test_an_engine_thread_that_dies_takes_its_process_along(monkeypatch, how: str):
    """What its requests are told is decided by the supervisor, not by the engine's own last words."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    told = []
    engine = ProcessEngine(
        EngineConfig(), factory=f"tests.engine.test_supervision:{how}", on_death=lambda *died: verdict(told, *died)
    )
    engine.start()
    sink = Collected()
    engine.submit(request("last", "abc"), sink)
    assert sink.ended.wait(PATIENCE_S)
    assert told == [("the engine stopped: a bug", ["last"])] and sink.last().error_code == "engine_restarting"
    engine.close()


def verdict(told: list, why: str, requests: Sequence[GenerateRequest]) -> EngineDeadError:
    told.append((why, [each.request_id for each in requests]))
    return EngineRestartingError("comes back")


class Dying:
    """An engine whose thread fails on its first request, as `LocalEngine` tells it."""

    def __init__(self, config: EngineConfig, progress: object):
        from tests.server.scripted import ScriptedEngine

        self.scripted = ScriptedEngine(config)
        self.start, self.stats, self.close = self.scripted.start, self.scripted.stats, self.scripted.close
        self.is_alive, self.abort = self.scripted.is_alive, self.scripted.abort

    @property
    def info(self):
        return self.scripted.info

    def submit(self, request: GenerateRequest, sink) -> None:
        self.scripted.dead = True
        sink(OutputChunk(request.request_id, 0, "", [], "error", None, "the engine stopped: a bug", "engine_dead"))


class Refusing(Dying):
    """An engine whose thread has failed just before its first request."""

    def submit(self, request: GenerateRequest, sink) -> None:
        self.scripted.dead = True
        raise EngineDeadError("the engine stopped: a bug")
