"""`adaserve grow`: sizes by name or one by one, and the source's head for what has grown."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaserve_jax.models.config import ModelConfig
from tests.models.checkpoints import write_checkpoint, write_eagle3
from tests.program import run_program

SIZES = ["--layers", "4", "--hidden", "48", "--heads", "4", "--kv-heads", "2", "--mlp", "48"]


def test_a_head_grows_with_its_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=4)
    head = write_eagle3(tmp_path / "head", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 3]})
    out = tmp_path / "grown"
    assert run_program("grow", str(out), "--source", str(source), "--head", str(head), *SIZES) == 0
    assert "parameters, f32" in capsys.readouterr().err
    grown = ModelConfig.from_folder(out / "head", may_be_head=True)
    grown.check_target(ModelConfig.from_folder(out))
    assert grown.eagle3 is not None
    assert grown.eagle3.target_hidden_size == 48
    assert run_program("grow", str(tmp_path / "other"), "--source", str(source), "--head", str(source), *SIZES) == 2
    assert "expected an EAGLE-3 head or Medusa heads, got a model of its own" in capsys.readouterr().err
    assert not (tmp_path / "other").exists(), "a wrong head is told before anything is written"
    assert run_program("grow", str(tmp_path / "other"), *SIZES, "--experts-per-token", "2") == 2
    assert "--experts-per-token is about --experts; give both, or leave it out" in capsys.readouterr().err
    assert run_program("grow", str(tmp_path / "other"), "--source", str(source), "--params", "3B") == 2
    assert "--params must be one of 110M, 1B, 8B, got '3B'" in capsys.readouterr().err
    assert run_program("grow", str(tmp_path / "other"), "--source", str(source), *SIZES, "--seed", "-1") == 2
    assert not (tmp_path / "other").exists()
