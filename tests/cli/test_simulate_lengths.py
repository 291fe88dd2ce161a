"""`adaserve simulate --lengths`: the shortened trace is what is simulated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from adaserve_jax.cli import app as cli_app
from adaserve_jax.results.run_folder import RunResults


def test_a_trace_is_shortened_before_it_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,4000,40\n2023-11-16 18:15:47.73,90,9\n"
    )
    arguments = [str(path), "--policies", "ar", "--lengths", "scale=0.5,output=20,context=1000", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["adaserve", "simulate", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli_app.main()
    assert not ended.value.code
    folder = RunResults.load(tmp_path)
    (records,) = folder.records.values()
    assert [(each.prompt_tokens, each.output_tokens) for each in records] == [(980, 20), (45, 9)]
    assert {row.workload for row in folder.rows} == {"azure.csv lengths scale=0.5,output=20,context=1000"}
