"""`adaserve perplexity`: a table of the demo target's weights, and mistakes in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from adaserve_jax.cli import perplexity as command
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.models.perplexity import Score, cut
from adaserve_jax.models.tokenizer import Tokenizer
from tests.program import run_program


@pytest.mark.slow
def test_quantised_weights_hardly_change_the_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert run_program("perplexity", "--window", "256", "--max-tokens", "768", "--json", str(out)) == 0
    table = capsys.readouterr().out
    assert all(text in table for text in ("perplexity", "change", "bits/", "KL", "same", "none", "int8", "int4"))
    result = json.loads(out.read_text())
    plain, int8, int4 = result["scores"]
    assert f"{plain['perplexity']:.4f}" in table and f"{int8['perplexity']:.4f}" in table
    assert (plain["quantize"], int8["quantize"], result["target_params"]) == ("none", "int8", 4_213_504)
    windows = cut(Tokenizer.from_folder(resolve_folder("demo", "target")), held_out_code(), 256, 768)
    assert plain["tokens"] == windows.lengths.sum()  # three windows of Python's own library, which a file may end in
    assert 5 < plain["perplexity"] < 30
    assert abs(int8["perplexity"] / plain["perplexity"] - 1) < 0.005
    assert 0 < int8["kl_mean"] < 1e-3 and int8["same_likeliest"] > 0.97
    assert 3.9 < plain["weight_bytes"] / int8["weight_bytes"] < 4
    assert 0.001 < int4["perplexity"] / plain["perplexity"] - 1 < 0.03
    assert 0.65 < int4["weight_bytes"] / int8["weight_bytes"] < 0.7


def test_no_figure_is_cut_in_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    scores = [
        Score(kind, weight_bytes=16_000_000_000, tokens=123_456, text_bytes=500_000, nats=297_000.0 + more,
              kl_mean=1.2e-4, kl_max=3.6e-3, same_likeliest=0.98765)
        for kind, more in (("none", 0.0), ("int8", 40.0), ("int4", 1400.0))
    ]  # fmt: skip
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    command._print(scores)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "\u2026" not in shown and all(f"{each.perplexity:.4f}" in shown for each in scores)
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantize", "none,int2"], "--quantize must be none, int8, int4, separated by commas, got 'int2'"),
        (["--quantize", ","], "--quantize must be none, int8, int4, separated by commas, got ','"),
        (
            ["--json", "nowhere/r.json"],
            "cannot write nowhere/r.json: expected a file in a folder that is there; choose",
        ),
        (["--dtype", "f8"], "--dtype must be f32 or bf16, got 'f8'"),
        (["--text", "nowhere.txt"], "cannot read text nowhere.txt: No such file or directory"),
        (["--text", "latin.txt"], "text latin.txt must be UTF-8, but byte 3 is not"),
        (["--text", "short.txt"], "a text must have at least 2 tokens"),
        (["--target", "nowhere"], "target checkpoint 'nowhere': expected a folder"),
    ],
)
def test_mistakes_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes(b"caf\xe9 and more")
    Path("short.txt").write_text("x")
    assert run_program("perplexity", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"adaserve: error: {message}")


def test_a_python_without_sources_needs_a_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("adaserve_jax.cli.perplexity.held_out_code", list)
    assert run_program("perplexity") == 2
    assert "no source files of its library to score; give --text FILE" in capsys.readouterr().err
