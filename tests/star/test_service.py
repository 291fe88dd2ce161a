"""A whole draft service with a toy for its model: how it ends."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from adaserve_jax.star.messages import Hello, Refused, Tree, Welcome, cells_hash
from adaserve_jax.star.service import main as service
from adaserve_jax.star.service.dispatch import DraftBatch
from adaserve_jax.star.settings import DraftServiceSettings
from adaserve_jax.star.wire import SERVICE
from adaserve_jax.types import CandidateTrees
from tests.star.scripted import table
from tests.star.streams import HANG_S, Target, health, until
from tests.star.toys import VOCABULARY, ToyDevice, ToyPages, draft, limits, opened

SETTINGS = DraftServiceSettings(listen="127.0.0.1:0", http="")
HELLO = Hello("a", "voc", cells_hash(table()))


class ToyModel(ToyPages):
    """What a service asks of `star.model.DraftModel`. Batches wait for `go_on`; they fail if it is said so."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.limits = SimpleNamespace(max_depth=4, max_width=3, max_context=64, max_requests=4, max_tokens=16)
        self.samples = SimpleNamespace(draft_level_s={}, catchup_s={})
        self.version, self.vocabulary_hash, self.vocabulary, self.table = "v1", "voc", VOCABULARY, table()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.is_closed = False
        self._fails = fails
        self._device = ToyDevice(self, limits())

    def run(self, batch: DraftBatch) -> CandidateTrees | None:
        self.begun.set()
        assert self.go_on.wait(HANG_S)
        if self._fails:
            raise RuntimeError("no device")
        return self._device.run(batch)

    def close(self) -> None:
        self.is_closed = True


def welcomed(port: int) -> Target:
    target = Target(port)
    target.send(HELLO)
    assert isinstance(target.receive(), Welcome)
    return target


def ask(target: Target, session: int) -> None:
    target.send(opened(session, 1, [1, 2]), draft(session, 1, 1, 2, [], give_up_s=HANG_S))


def port_of(line: str) -> int:
    return int(line.split()[1].rpartition(":")[2])


@pytest.fixture(autouse=True)
def nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.gc, "freeze", lambda: None)


@pytest.mark.slow
def test_a_device_that_fails_on_and_on_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel(fails=True)
    model.go_on.set()
    monkeypatch.setattr(service, "load", lambda *_: model)
    said: list[str] = []

    def ready(line: str) -> None:
        target = welcomed(port_of(line))
        for session in (1, 2, 3):
            ask(target, session)
            tree = target.receive()
            assert isinstance(tree, Tree) and not len(tree.index)
        said.extend(each.code for each in target.rest() if isinstance(each, Refused))
        target.close()

    died = service.Worker._refuse_all

    def late(worker: service.Worker) -> None:
        """The thread goes on for a while after it has told that it died."""
        threading.Event().wait(0.05)
        died(worker)

    monkeypatch.setattr(service.Worker, "_refuse_all", late)
    assert service.run(SETTINGS, None, ready) == service.DEAD_STATUS == 70
    assert said == ["shutting_down"] and model.is_closed


def test_a_model_that_is_in_use_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel()
    monkeypatch.setattr(service, "load", lambda *_: model)
    monkeypatch.setattr(service, "BATCH_WAIT_S", 0.05)
    targets: list[Target] = []

    def ready(line: str) -> None:
        targets.append(welcomed(port_of(line)))
        ask(targets[0], 1)
        assert model.begun.wait(HANG_S)
        signal.raise_signal(signal.SIGTERM)

    assert service.run(SETTINGS, None, ready) == 0 and not model.is_closed
    model.go_on.set()
    targets[0].close()


def test_who_is_there_is_told_the_end_after_the_last_batch_and_nobody_comes_in_meanwhile() -> None:
    model = ToyModel()
    serving = service.DraftService(SETTINGS, model)  # type: ignore[arg-type]
    assert health(serving.port) == health(serving.port, service=SERVICE) == HealthCheckResponse.SERVING
    target = welcomed(serving.port)
    ask(target, 1)
    assert model.begun.wait(HANG_S)
    ending = threading.Thread(target=serving.close)
    ending.start()
    until(lambda: health(serving.port) == HealthCheckResponse.NOT_SERVING)
    late = Target(serving.port)
    late.send(HELLO)
    assert late.rest() == [] and late.call.code() is grpc.StatusCode.UNAVAILABLE
    late.close()
    assert target.call.is_active()
    model.go_on.set()
    assert [each.code for each in target.rest() if isinstance(each, Refused)] == ["shutting_down"]
    ending.join(HANG_S)
    assert not serving.worker.alive and not serving.worker.died
    target.close()
