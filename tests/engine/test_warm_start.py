"""A restart takes the times that the first start measured, and those of no other engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.build import StartTimes, WarmFolder
from adaserve_jax.engine.thread_engine import LocalEngine
from tests.conftest import compiling
from tests.engine.simulated import costs_of, limits_of
from tests.engines import PLAIN

CONFIG, LIMITS = EngineConfig(seed=9), limits_of()
TIMES = StartTimes(replace(costs_of(LIMITS), context=7), 0.05)


def test_times_come_back_for_the_same_engine_only(tmp_path: Path) -> None:
    folder = WarmFolder(tmp_path)
    assert folder.load(CONFIG, LIMITS) is None
    folder.save(CONFIG, LIMITS, TIMES)
    assert WarmFolder(tmp_path).load(EngineConfig(seed=9), limits_of()) == TIMES
    assert folder.load(replace(CONFIG, seed=8), LIMITS) is None
    assert folder.load(CONFIG, replace(LIMITS, num_pages=19)) is None


def test_a_folder_that_cannot_be_written_only_costs_the_restart_its_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = WarmFolder(tmp_path / "missing")
    folder.save(CONFIG, LIMITS, TIMES)
    assert folder.load(CONFIG, LIMITS) is None
    assert "could not be kept for a restart" in caplog.text


def test_a_restart_runs_each_program_but_measures_nothing(tmp_path: Path) -> None:
    stages: list[set[str]] = []
    baselines = []
    for _ in range(2):
        seen = set[str]()
        stages.append(seen)
        engine = LocalEngine(
            EngineConfig(**PLAIN), lambda stage, done, total, seen=seen: seen.add(stage), warm_folder=str(tmp_path)
        )
        try:
            with compiling("demo"):
                engine.start()
            baselines.append(engine.info.baseline_s)
        finally:
            engine.close()
    assert [{"timing", "running"} & seen for seen in stages] == [{"timing"}, {"running"}]
    assert baselines[0] == baselines[1]
