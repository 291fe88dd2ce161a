"""The best fixed setting of a point: the search finds what trying everything finds, and rows say what it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from adaserve_jax.bench.simulate import ChainSetting, Grid, as_run, simulate_all, tune, tune_fixed
from adaserve_jax.results.schema import ALL_CLASSES
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.sim.simulation import SimulationPlan
from tests.bench.test_cluster import short_trace

MACHINE = load_machine("llama-70b")


@pytest.mark.parametrize("peak", list(product((0, 1, 2, 6, 8), (64, 512), (28, 42, 64))))
def test_search_finds_the_peak_that_a_whole_grid_has(peak: tuple[int, int, int]) -> None:
    """Attainment falls with the distance from `peak` in every part, and is saturated near it, where goodput decides."""

    def evaluate(setting: ChainSetting) -> tuple[float, float]:
        far = abs(setting.draft_tokens - peak[0]) / 8 + abs(setting.max_requests - peak[2]) / 64
        far += abs(setting.prefill_tokens - peak[1]) / 512
        return min(1.0, 1.1 - far), 100 - far

    found, whole = tune(evaluate, Grid()), tune(evaluate, Grid(), exhaustive=True)
    assert whole.setting == ChainSetting(*peak)
    assert (found.setting, found.score) == (whole.setting, whole.score)
    assert whole.tried == 9 * 4 * 7
    assert found.tried <= 52


def test_a_hill_of_short_chunks_does_not_hide_a_higher_one_of_long_chunks() -> None:
    """Between them every step along one part goes down."""

    def height(setting: ChainSetting, peak: tuple[int, int, int]) -> float:
        parts = (
            setting.draft_tokens - peak[0],
            (setting.prefill_tokens - peak[1]) / 64,
            setting.max_requests - peak[2],
        )
        return sum(abs(part) for part in parts) / 50

    def evaluate(setting: ChainSetting) -> tuple[float, float]:
        return max(0.98 - height(setting, (1, 64, 48)), 0.99 - height(setting, (2, 512, 42))), 0.0

    assert tune(evaluate, Grid()).setting == ChainSetting(2, 512, 42)


def test_of_equal_settings_the_smallest_is_taken() -> None:
    assert tune(lambda setting: (1.0, 5.0), Grid()).setting == ChainSetting(0, 64, 28)


def test_search_equals_the_whole_grid_in_simulation() -> None:
    grid = Grid((1, 2, 3), (128,), (4, 12))
    trace, plan = short_trace(10, rate=8.0, output=10), SimulationPlan(())
    found = tune_fixed(plan, MACHINE, trace, grid=grid)
    assert found == tune_fixed(plan, MACHINE, trace, grid=grid, exhaustive=True)
    assert found.tried == 6  # so small a grid is searched whole


def test_a_tuned_row_names_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaserve_jax.bench.simulate.Grid", lambda: Grid((2, 9), (256,), (16,)))
    plan = SimulationPlan(("ar",), tune="search", max_requests=16, max_prefill_tokens=256)
    rows = [r for r in simulate_all(plan, MACHINE, [short_trace(12, output=8)]) if r.slo_class == ALL_CLASSES]
    assert [(r.policy, r.label, r.max_prefill_tokens, r.max_requests) for r in rows] == [
        ("ar", None, 256, 16), ("spec:2", "tuned", 256, 16)
    ]  # fmt: skip


def test_the_limits_of_machine_and_plan_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The computed machines run 128 requests, which the grid's 64 do not reach."""
    tried: list[Grid] = []
    monkeypatch.setattr(
        "adaserve_jax.bench.simulate.tune", lambda evaluate, grid, *, exhaustive: tried.append(grid) or grid
    )
    machine, trace = load_machine("h100-llama-8b"), short_trace(2)
    tune_fixed(SimulationPlan(()), machine, trace)
    tune_fixed(SimulationPlan((), max_requests=48, max_prefill_tokens=256), machine, trace)
    whole, held = tried
    assert whole.max_requests == (*Grid().max_requests, 128)
    assert whole.prefill_tokens == (*Grid().prefill_tokens, machine.limits().max_tokens)
    assert held.max_requests == (28, 32, 36, 42, 48) and held.prefill_tokens == (64, 128, 256)


def test_without_a_draft_chunk_and_requests_are_tuned() -> None:
    machine, grid = replace(MACHINE, max_depth=0), Grid((0, 1, 2), (64, 512), (4, 12))
    found = tune_fixed(SimulationPlan(()), machine, short_trace(12, rate=8.0, output=8), grid=grid)
    assert (found.setting.draft_tokens, found.tried) == (0, 4)
    assert as_run(found.setting, SimulationPlan(()))[0] == "ar"
