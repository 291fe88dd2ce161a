"""A `LocalEngine` whose executor is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine import build as assembly
from adaserve_jax.engine.thread_engine import LocalEngine
from tests.engine.simulated import Machine, Spelling


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The executors that engines have loaded so far."""
    loaded: list[Machine] = []

    def load(config: EngineConfig, progress: object = None, **_options: object) -> Machine:
        loaded.append(Machine(config))
        return loaded[-1]

    monkeypatch.setattr(assembly, "load_executor", load)
    monkeypatch.setattr(assembly, "Tokenizer", SimpleNamespace(from_folder=lambda folder: Spelling()))
    return loaded


@pytest.fixture
def engine(machines: list[Machine]) -> Iterator[LocalEngine]:
    engine = LocalEngine(EngineConfig(max_waiting=8))
    engine.start()
    yield engine
    engine.close()
    assert [machine.closed for machine in machines] == [1]
