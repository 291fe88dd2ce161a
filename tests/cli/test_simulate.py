"""`adaserve simulate`: the trace with the lengths and targets that were asked for is what is simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaserve_jax.cli.terminal import say_next_step
from adaserve_jax.results.run_folder import SAMPLES, RunResults
from tests.program import run_program


def test_a_trace_is_shortened_before_it_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,4000,40\n2023-11-16 18:15:47.73,90,9\n"
    )
    arguments = [str(path), "--policies", "ar", "--lengths", "scale=0.5,output=20,context=1000", "--out", str(tmp_path)]
    assert run_program("simulate", *arguments) == 0
    folder = RunResults.load(tmp_path)
    (records,) = folder.records.values()
    assert [(each.prompt_tokens, each.output_tokens) for each in records] == [(980, 20), (45, 9)]
    assert {row.workload for row in folder.rows} == {"azure.csv lengths scale=0.5,output=20,context=1000"}


def test_a_trace_whose_requests_have_texts_too_is_shortened_by_its_lengths(tmp_path: Path) -> None:
    path = tmp_path / "emission.json"
    line = {"emission_time_ms": 0, "input_length": 9000, "output_length": 10, "prompt": "long", "slo_ratio": -50}
    path.write_text(json.dumps([line, {**line, "emission_time_ms": 500, "input_length": 30}]))
    arguments = [str(path), "--policies", "ar", "--lengths", "context=4096", "--out", str(tmp_path)]
    assert run_program("simulate", *arguments) == 0
    (records,) = RunResults.load(tmp_path).records.values()
    assert [(each.prompt_tokens, each.output_tokens) for each in records] == [(4086, 10), (30, 10)]


def test_a_default_ttft_target_leaves_a_traces_own(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,40,4\n")

    def target_s(*options: str) -> float | None:
        out = tmp_path / "-".join(["run", *options]).replace(":", "")
        assert run_program("simulate", str(path), "--policies", "ar", "--out", str(out), *options) == 0
        ((record,),) = RunResults.load(out).records.values()
        return record.ttft_slo_s

    own = ("--slos", "default:tpot=50,ttft=500")
    assert [target_s(), target_s("--ttft-slo", "0"), target_s("--ttft-slo", "2")] == [4.0, None, 2.0]
    assert [target_s(*own), target_s(*own, "--ttft-slo", "0"), target_s(*own, "--ttft-slo", "2")] == [0.5, 0.5, 2.0]


def test_the_last_line_names_samples_only_where_there_are_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    say_next_step(tmp_path)  # as after `adaserve bench --url`
    assert capsys.readouterr().err.startswith(f"rows and requests in {tmp_path}; for a report: ")
    (tmp_path / SAMPLES).touch()
    say_next_step(tmp_path)
    assert capsys.readouterr().err.startswith(f"rows, requests and samples in {tmp_path}; for a report: ")
