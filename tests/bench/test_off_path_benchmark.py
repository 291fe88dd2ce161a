"""benchmarks/engine/off_path.py on the embedded pair, tiny; when it stops, and the table of what it writes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from scripts.results_table import off_path_table
from tests.bench.scripts import modules_of

CONFIG = EngineConfig(  # few and small programs
    max_requests=4, max_context=256, num_pages=16, max_depth=1, max_width=1, max_tree_tokens=32, token_edges=(32,),
    row_edges=(4,),
)  # fmt: skip


modules = modules_of("engine.off_path", "engine.throughput_systems")


@pytest.mark.slow
def test_pairs_of_the_same_tokens_with_and_without_a_draft(modules):
    off_path = modules["off_path"]
    plan = off_path.Plan((3,), new_tokens=4, precision=1e-9, seconds=0.0, least_pairs=2)
    points, where = off_path.run(CONFIG, plan)
    written = json.loads(json.dumps(off_path.report(points, where)))
    assert [(point["requests"], point["pairs"]) for point in written["points"]] == [(3, 2)]
    for point in written["points"]:
        assert min(point["with_draft_tps"] + point["without_tps"] + point["with_draft_decode_tps"]) > 0
        ratios = [a / b for a, b in zip(point["with_draft_tps"], point["without_tps"], strict=True)]
        assert point["ratio"]["median"] == pytest.approx(sum(ratios) / 2)
    assert written["config"]["policy"] == "off" and written["config"]["num_pages"] == 16
    assert (written["target"], written["draft"]) == ("target", "draft")
    table = off_path_table(written)
    assert "| 3 | 2 |" in table and "benchmarks.engine.off_path --out off_path.json --requests 3 " in table


def test_it_stops_when_both_intervals_are_narrow(modules):
    off_path = modules["off_path"]
    even = off_path.Point(1, [10.0] * 6, [10.0] * 6, [10.0] * 6, [10.0] * 6, None)
    assert off_path.narrow(even, 0.001)
    assert not off_path.narrow(replace(even, with_draft_decode_tps=[9.0, 10.0, 11.0] * 2), 0.001)


def test_a_draft_call_is_an_error(modules):
    systems = modules["throughput_systems"]
    step = systems.Step(1, 0, 2, 1, 3, 2, 1.0)
    with pytest.raises(SystemExit, match="the draft was called while speculation was off"):
        modules["off_path"].check_off(systems.Measured([[1]], 1.0, steps=(step,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft": None}, "--draft must name the draft that is loaded and not used"),
        ({"max_requests": 1, "row_edges": (1,)}, "--requests up to 3 need --max-requests of at least as many"),
    ],
)
def test_mistakes_are_refused_before_anything_is_loaded(modules, changes, message):
    plan = modules["off_path"].Plan((3,), new_tokens=4, precision=0.1, seconds=0.0)
    with pytest.raises(ConfigError, match=message):
        modules["off_path"].run(replace(CONFIG, **changes), plan)
