"""benchmarks/adaserve/fluctuating.py: every contender on the same traces of each rate, and their table by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.reshaping import with_requests
from adaserve_jax.workloads.traces import fluctuating_trace, save_trace
from scripts.results_policies import fluctuating_table
from tests.bench.scripts import imported


def row(policy: str, seed: int, attainment: float) -> dict[str, Any]:
    return {"policy": policy, "rate_rps": 3.0, "seed": seed, "attainment": attainment}


def test_each_contender_runs_on_each_seeds_trace_of_each_rate(tmp_path: Path) -> None:
    trace = with_requests(fluctuating_trace(seed=1, rate_rps=2.0), 100, 0)
    short = tuple(replace(request, output_tokens=8) for request in trace.requests)
    save_trace(replace(trace, requests=short), tmp_path / "rate_rps2.0_ol256.jsonl.gz")
    with imported("adaserve.fluctuating") as found:
        run = found["fluctuating"].fluctuating
        file = tmp_path / "out" / "fluctuating.json"
        run(tmp_path, file, seeds=2, policies="ar,spec:4", machine="qwen-32b", requests=3, jobs=1)
        with pytest.raises(ConfigError, match=r"--policies: no contender 'fast'; there are adaserve, "):
            run(tmp_path, file, policies="fast")
    told = json.loads(file.read_text())
    assert told["command"].endswith("--out fluctuating.json --machine qwen-32b --policies ar,spec:4 --requests 3")
    places = [(each["seed"], each["rate_rps"], each["policy"]) for each in told["rows"]]
    assert places == [(seed, rate, name) for seed in (0, 1) for rate in (2.4, 3.0, 3.6) for name in ("ar", "spec:4")]
    assert all(0 <= each["attainment"] <= 1 for each in told["rows"])


def test_the_table_compares_on_the_same_trace() -> None:
    rows = [row("adaserve", 0, 0.99), row("adaserve", 1, 0.97), row("spec:4", 0, 1.0), row("spec:4", 1, 0.9)]
    about = {"command": "run", "simulated": "machine", "seeds": 2, "commit": "c0ffee"}
    lines = fluctuating_table(about | {"rows": rows}).splitlines()
    assert lines[4:6] == [
        "| 3 | `adaserve` | 98.00% | 97.00% | - | - | - |",
        "| 3 | `spec:4` | 95.00% | 90.00% | +3.00 | -1.00 | +7.00 |",
    ]
