"""benchmarks/adaserve/second_choices.py: every contender at every decay, and the table by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.reshaping import with_requests
from adaserve_jax.workloads.traces import fluctuating_trace, save_trace
from scripts.results_policies import second_choices_table
from tests.bench.scripts import imported


def test_trees_lose_by_the_decay_and_chains_do_not(tmp_path: Path) -> None:
    trace = with_requests(fluctuating_trace(seed=1, rate_rps=2.0), 40, 0)
    short = tuple(replace(request, output_tokens=16) for request in trace.requests)
    for name in ("rate_rps2.0_ol256", "urgent_prop0.6"):
        save_trace(replace(trace, requests=short), tmp_path / f"{name}.jsonl.gz")
    with imported("adaserve.second_choices") as found:
        run = found["second_choices"].second_choices
        file = tmp_path / "out" / "second-choices.json"
        run(tmp_path, file, decays="1,0.1", policies="adaserve-paper,spec:4", requests=40, jobs=1)
        with pytest.raises(ConfigError, match=r"--decays: expected numbers above 0 and at most 1, got '0\.5,2'"):
            run(tmp_path, file, decays="0.5,2")
    told = json.loads(file.read_text())
    assert told["command"].endswith(
        "--out second-choices.json --decays 1,0.1 --policies adaserve-paper,spec:4 --requests 40"
    )
    met = {(row["policy"], row["decay"]): row["attainment"] for row in told["rows"]}
    assert set(met) == {(policy, decay) for policy in ("adaserve-paper", "spec:4") for decay in (1.0, 0.1)}
    assert all({place.partition("/")[0] for place in points} == {"rate", "urgent", "scale"} for points in met.values())
    assert met["spec:4", 1.0] == met["spec:4", 0.1]
    assert sum(met["adaserve-paper", 1.0].values()) > sum(met["adaserve-paper", 0.1].values())


def test_the_table_has_the_mean_and_the_worst_point() -> None:
    def row(policy: str, decay: float, rate: float, scale: float) -> dict[str, Any]:
        return {"policy": policy, "decay": decay, "attainment": {"rate/3": rate, "scale/0.6": scale}}

    rows = [row("adaserve", 1.0, 1.0, 0.9), row("ar", 1.0, 0.2, 0.4)]
    rows += [row("adaserve", 0.5, 0.8, 0.7), row("ar", 0.5, 0.2, 0.4)]
    about = {"command": "run", "simulated": "machine", "commit": "c0ffee"}
    lines = second_choices_table(about | {"rows": rows}).splitlines()
    assert lines[2:6] == [
        "| policy | decay 1 | decay 0.5 |",
        "|---|---|---|",
        "| `adaserve` | 95.0%; 90.0% at scale/0.6 | 75.0%; 70.0% at scale/0.6 |",
        "| `ar` | 30.0%; 20.0% at rate/3 | 30.0%; 20.0% at rate/3 |",
    ]
    assert lines[-1] == "machine, 2 points. Commit c0ffee."
