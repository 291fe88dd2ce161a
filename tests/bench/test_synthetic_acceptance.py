"""Synthetic acceptance in the simulator: LENGTH and FILE give the acceptance that they say, and every row says so."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.bench.console import result_table
from adaserve_jax.bench.simulate import simulate_all
from adaserve_jax.cli.app import app
from adaserve_jax.errors import ConfigError
from adaserve_jax.report.build import build
from adaserve_jax.report.document import Text
from adaserve_jax.report.markdown import render_markdown
from adaserve_jax.report.points import measured
from adaserve_jax.results.jsonl import read_rows
from adaserve_jax.results.run_folder import RunResults
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from adaserve_jax.synthetic_acceptance import acceptance_rates
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace

MACHINE = load_machine("llama-70b")
TRACE = Trace("t", "0" * 64, tuple(TraceRequest(0.3 * i, 40, 200, SLO(tpot_ms=50), "code") for i in range(16)), ())
"""Long outputs, so that few chains are cut off by the end of a request."""


SHORT = replace(TRACE, requests=tuple(replace(each, output_tokens=60) for each in TRACE.requests[:5]))


def mean_accepted(policy: str, rates: tuple[float, ...], seed: int = 0, trace: Trace = TRACE) -> float:
    plan = SimulationPlan((), seed=seed, synthetic=rates)
    records = simulate(policy, plan, MACHINE, trace).records
    return sum(each.accepted_tokens for each in records) / sum(each.verify_steps for each in records)


@pytest.mark.parametrize(
    ("length", "rates"),
    # vLLM's own examples, whose length counts the bonus token: 2.6, 1, 4, 2 and 3.5
    [("1.6", (1, 0.6)), ("0", ()), ("3", (1, 1, 1)), ("1", (1,)), ("2.5", (1, 1, 0.5))],
)
def test_a_length_is_the_schedule_of_vllm(length: str, rates: tuple[float, ...]) -> None:
    assert acceptance_rates(length, 4) == pytest.approx(rates)


@pytest.mark.parametrize(("chain", "mean"), [(6, 2.4), (4, 2.4), (2, 2.0)])
def test_chains_accept_the_length_on_average(chain: int, mean: float) -> None:
    assert mean_accepted(f"spec:{chain}", acceptance_rates("2.4", MACHINE.max_depth)) == pytest.approx(mean, rel=0.05)


def test_a_file_gives_the_chance_at_each_depth(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text("[0.9, 0.5, 0.25]")
    rates = acceptance_rates(str(path), MACHINE.max_depth)
    survives = np.cumprod([0.9, 0.5, 0.25])
    found = mean_accepted("spec:5", rates)
    assert found == pytest.approx(survives.sum(), rel=0.06)
    assert mean_accepted("spec:1", rates) == pytest.approx(0.9, rel=0.06)
    assert mean_accepted("spec:5", rates, seed=1) != found == mean_accepted("spec:5", rates)


def test_trees_of_any_policy_run_at_chances_of_0_and_1() -> None:
    for policy in ("adaserve", "adaserve-paper", "specinfer"):
        assert 0.5 < mean_accepted(policy, (1.0, 0.0), trace=SHORT) <= 1.0  # less than 1 where some steps draft nothing
        assert mean_accepted(policy, (), trace=SHORT) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("6.5", r"must be from 0 to 6, the deepest tree \(the bonus token is not counted\), or"),
        ("-1", "must be from 0 to 6"),
        ("nan", "must be from 0 to 6"),
        ("gone.json", "must be a number or the path of a JSON file, got"),
        ("words.json", "must hold a list of 1 to 64 chances from 0 to 1"),
        ("above.json", "must hold a list of 1 to 64 chances from 0 to 1"),
        ("empty.json", "must hold a list of 1 to 64 chances from 0 to 1"),
    ],
)
def test_what_is_no_acceptance_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "words.json").write_text('{"rates": [0.5]}')
    (tmp_path / "above.json").write_text("[0.5, 1.5]")
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(ConfigError, match=message):
        acceptance_rates(str(tmp_path / text) if text.endswith(".json") else text, 6)


def test_rows_report_and_table_say_that_it_is_synthetic(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"prompt_id": "code-1", "slo_ratio": 1.2, "output_length": 64, "input_length": 20}
    trace.write_text("".join(json.dumps({"t_ms": 200.0 * i, **line}) + "\n" for i in range(8)))
    out = tmp_path / "out"
    call = ["simulate", str(trace), "--policies", "spec:4", "--out", str(out), "--synthetic-acceptance", "1.5"]
    app(call, standalone_mode=False)
    rows = read_rows(out / "results.jsonl", ResultRow)
    assert {row.synthetic_acceptance for row in rows} == {"1,0.5"}
    assert "synthetic acceptance" in str(result_table(rows).title)
    document = build(measured([RunResults.load(out)]))
    warned = [each.text for section in document.sections for each in section.items if isinstance(each, Text)]
    assert any("Acceptance is synthetic" in text and "(1,0.5)" in text for text in warned)
    assert "acceptance synthetic (1,0.5)" in render_markdown(document)
    plain = [replace(row, synthetic_acceptance=None) for row in rows]
    assert "synthetic" not in str(result_table(plain).title)
    with pytest.raises(ConfigError, match="--acceptance and --synthetic-acceptance both say what is accepted"):
        app([*call, "--append", "--acceptance", str(trace)], standalone_mode=False)


def test_rows_of_a_plan_without_it_say_nothing() -> None:
    (row,) = (row for row in simulate_all(SimulationPlan(("ar",)), MACHINE, [TRACE]) if row.slo_class == ALL_CLASSES)
    assert row.synthetic_acceptance is None
