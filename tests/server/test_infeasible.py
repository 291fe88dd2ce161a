"""Targets out of reach over HTTP: refused by one engine, served by the embedded pair."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine import build as assembly
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.server.serve import load_tokenizer
from adaserve_jax.server.settings import ServerSettings
from tests.engine.simulated import Machine, Spelling
from tests.server.conftest import Running

WARNING = "a target is below what one request alone would get; served best-effort"


CONFIG = EngineConfig(policy="ar", infeasible_slo="refuse")
"""Configuration of the simulated engine, where a step takes 10 ms and 0.1 ms a token."""


@pytest.fixture(scope="module")
def refusing(serve_engine) -> Iterator:
    """Serve an engine in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "load_executor", lambda config, *_, **__: Machine(config))
        patch.setattr(assembly, "Tokenizer", SimpleNamespace(from_folder=lambda folder: Spelling()))
        engine = LocalEngine(CONFIG)
        engine.start()
    with serve_engine(engine, Spelling(), ServerSettings()) as server:
        yield server
    engine.close()


@pytest.fixture(scope="module")
def serving(demo_engine, serve_engine) -> Iterator:
    with serve_engine(demo_engine, load_tokenizer("demo"), ServerSettings()) as server:
        yield server


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "ab"},
        {"prompt": "ab", "n": 3},
        {"prompt": ["ab", "cd", "ef"]},
        {"prompt": "ab", "stream": True},
    ],
    ids=["one", "choices", "prompts", "stream"],
)
def test_refused_whole_with_the_least_feasible_target(refusing, body):
    check_refused(refusing, body)


def check_refused(refusing: Running, body: dict[str, Any]) -> None:
    answer = refusing.post(**body, slo_tpot_ms=5, max_tokens=4)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("slo_infeasible", "slo_tpot_ms", "invalid_request_error")
    least = re.match(r"slo_tpot_ms must be at least ([\d.]+) ms, which", error["message"])
    assert least is not None and float(least[1]) >= 10.1  # more where steps have taken longer than they should
    assert error["message"].endswith("got 5 ms; ask for a longer time, or for none")
    again = refusing.post(**{**body, "stream": False}, slo_tpot_ms=float(least[1]), max_tokens=4, ignore_eos=True)
    assert again.status_code == 200
    assert again.json()["metrics"]["slo"]["feasible"] is True
    assert "x-adaserve-warning" not in again.headers
    assert (refusing.state.slots.used, refusing.state.in_flight) == (0, set())


def test_best_effort_is_served_with_a_warning(serving):
    body = {"prompt": "x = 1\n" * 40, "max_tokens": 4, "slo_ttft_ms": 1.0, "ignore_eos": True}
    answer = serving.post(**body, colour=1)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert answer.json()["metrics"]["slo"]["feasible"] is False
    assert answer.json()["metrics"]["slo"]["ttft_target_ms"] == 1.0
    assert answer.headers["x-adaserve-warning"] == f"ignored fields: colour; {WARNING}"
    assert serving.post(**body).headers["x-adaserve-warning"] == WARNING
    with serving.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert "x-adaserve-warning" not in response.headers
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert events[-1]["metrics"]["slo"]["feasible"] is False
    free = serving.post(prompt="x", max_tokens=1).json()["metrics"]["slo"]
    assert (free["met"], free["feasible"]) == (None, None)
