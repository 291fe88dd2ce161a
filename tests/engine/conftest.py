"""A `LocalEngine` whose executor is simulated, and one in deterministic mode."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from adaserve_jax import LLM
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine import assembly, llm
from adaserve_jax.engine.local import LocalEngine
from tests.conftest import optimised
from tests.engine.simulated import Machine, Spelling
from tests.engines import EXACT


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The executors that engines have loaded so far."""
    loaded: list[Machine] = []

    def load(config: EngineConfig, progress: object = None, **_options: object) -> Machine:
        loaded.append(Machine(config))
        return loaded[-1]

    monkeypatch.setattr(assembly, "load_executor", load)
    for module in (assembly, llm):
        monkeypatch.setattr(module, "Tokenizer", SimpleNamespace(from_folder=lambda folder: Spelling()))
    return loaded


@pytest.fixture
def engine(machines: list[Machine]) -> Iterator[LocalEngine]:
    engine = LocalEngine(EngineConfig(max_waiting=8))
    engine.start()
    yield engine
    engine.close()
    assert [machine.closed for machine in machines] == [1]


@pytest.fixture(scope="session")
def deterministic() -> Iterator[LLM]:
    """The embedded pair in deterministic mode; leave it idle, on any policy."""
    with optimised():
        made = LLM(eq8_eq9=True, **EXACT)
    with made as llm:
        yield llm
        assert llm.stats().compiles_after_ready == 0
