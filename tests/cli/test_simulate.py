"""`adaserve simulate --lengths`: the shortened trace is what is simulated."""

from __future__ import annotations

from pathlib import Path

from adaserve_jax.results.run_folder import RunResults
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
