"""`adaserve distill`: a draft that loads, a run that is stopped and gone on with, what a server learned; mistakes are
one line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.distill.offline import Distillation
from adaserve_jax.distill.offline_config import OfflineConfig
from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.distill.trainer import Trainer
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.tokenizer import Tokenizer
from tests.models.checkpoints import write_checkpoint, write_medusa
from tests.program import run_program

PROMPTS = ["the thing", "a thing in", "é", "the a", "ing ing", "thin", "", "the thing"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a tiny pair and a file of prompts."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("target"), seed=1, num_hidden_layers=1)
    write_checkpoint(Path("draft"), seed=2, num_hidden_layers=1)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    return tmp_path


def _options(out: str, *more: str) -> list[str]:
    pair = ["--target", "target", "--draft", "draft", "--prompts", "prompts.txt", "--out", out]
    sizes = [
        "--max-tokens",
        "5",
        "--rate",
        "3e-3",
        "--epochs",
        "1",
        "--round-prompts",
        "2",
        "--rows",
        "2",
        "--top-k",
        "8",
    ]
    return [*pair, *sizes, *more]


def _load(folder: str) -> Params:
    return load_params(Path(folder), ModelConfig.from_folder(folder))


@pytest.mark.slow
def test_a_run_is_stopped_gone_on_with_and_serves(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program("distill", *_options("whole", "--json", "whole.json")) == 0
    out, err = capsys.readouterr()
    assert all(text in out for text in ("held-out acceptance", "held-out loss", "before", "epoch 1"))
    assert "left out: 1 of 7 prompts, repeated or empty" in err
    assert "serve it with: adaserve serve --target target --draft whole" in err
    before, after = json.loads(Path("whole.json").read_text())["evaluations"]
    assert f"{before['acceptance']:.4f}" in out and f"{after['acceptance']:.4f}" in out
    assert not Path("whole.training").exists()
    assert ModelConfig.from_folder("whole") == ModelConfig.from_folder("draft")
    assert Tokenizer.from_folder("whole").token_of() == Tokenizer.from_folder("target").token_of()
    assert not np.array_equal(_load("whole")["layers.0.qkv"], _load("draft")["layers.0.qkv"])

    finish_round = Distillation._round

    def interrupted(self: Distillation, number: int) -> None:
        finish_round(self, number)
        if number == 0:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "_round", interrupted)
        assert run_program("distill", *_options("parts")) == 130
    err = capsys.readouterr().err
    assert "stopping; a round that is being learned is finished first; Ctrl-C again: at once, without it" in err
    assert "stopped after 1 of 3 rounds, kept in parts.training; to go on: adaserve distill --target target" in err
    assert not Path("parts").exists()
    assert run_program("distill", *_options("parts")) == 2
    assert "parts.training holds a run that was stopped; give --resume to go on with it" in capsys.readouterr().err
    assert run_program("distill", *_options("parts", "--resume", "--seed", "1")) == 2
    assert "the run was begun with seed 0, not 1" in capsys.readouterr().err
    assert run_program("distill", *_options("parts", "--resume")) == 0
    assert not Path("parts.training").exists()
    whole, parts = _load("whole"), _load("parts")
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


@pytest.mark.slow
def test_what_a_server_learned_is_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The good version of a trainer's checkpoint, as the learner keeps it: a folder per draft."""
    config = OfflineConfig(lora_rank=2)
    programs = TrainPrograms(ModelConfig.from_folder("draft"), config.learn, 32, jnp.float32)
    programs.compile(only=("begin", "accumulate", "apply", "copy", "export"))
    trainer = Trainer(programs, _load("draft"))
    batch = programs._row_per_token()
    trainer._sums = programs.run("accumulate", trainer._state.trained, trainer._base, trainer._sums, batch)
    assert trainer.apply().finite
    trainer.mark_good()
    trainer.snapshot().save(Path("learned") / "default", 1, {"version": 3})
    options: list[Any] = ["--draft", "draft", "--from-checkpoint", "learned"]
    assert run_program("distill", *options, "--lora-rank", "2", "--out", "out") == 0
    err = capsys.readouterr().err
    assert "draft 'default' as it was learned, version 3; serve it with: adaserve serve --target TARGET --draft" in err
    assert run_program("distill", *options, "--lora-rank", "2", "--out", "again", "--target", "target") == 0
    assert "serve --target target --draft again" in capsys.readouterr().err
    expected, found = trainer.weights(), _load("out")
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert not np.array_equal(found["layers.0.qkv"], _load("draft")["layers.0.qkv"])
    assert run_program("distill", *options, "--out", "other") == 2
    assert "low-rank updates of rank 2 (0: none), and the rank given is 0" in capsys.readouterr().err
    assert run_program("distill", *options, "--draft-name", "zh", "--out", "other") == 2
    assert "expected checkpoints of draft 'zh', found drafts default" in capsys.readouterr().err
    Path("learned/zh").mkdir()
    assert run_program("distill", *options, "--draft-name", "zh", "--out", "other") == 2
    expected = "learned/zh: expected a checkpoint, found none; nothing was learned yet"
    assert expected in capsys.readouterr().err
    assert not Path("other").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x"], "give --prompts to train, or --from-checkpoint"),
        (["--out", "target", "--prompts", "prompts.txt"], "target must be an empty or a new folder"),
        (["--out", ".", "--prompts", "prompts.txt"], ". must be an empty or a new folder"),
        (["--out", "x", "--prompts", "prompts.txt", "--resume"], "--resume: expected the state of a run"),
        (["--out", "x", "--prompts", "prompts.txt", "--loss", "mse"], "loss must be one of kl, reverse_kl, jsd"),
        (
            ["--out", "x", "--prompts", "prompts.txt", "--head", "mtp"],
            "--head must be one of none, eagle3, medusa, got 'mtp'",
        ),
        (
            ["--out", "x", "--prompts", "prompts.txt", "--head", "eagle3"],
            "--head eagle3 begins with a new head, and --draft with that of a folder; give one of them",
        ),
        (["--out", "x", "--prompts", "prompts.txt", "--dtype", "f8"], "--dtype must be one of auto, f32, bf16"),
        (["--out", "x", "--prompts", "none.txt"], "cannot read prompts none.txt: No such file or directory"),
        (["--out", "x", "--prompts", "latin.txt"], "prompts latin.txt must be UTF-8, but byte 3 is not"),
        (["--out", "x", "--prompts", "azure.csv"], "azure.csv has lengths of prompts only"),
        (["--out", "x", "--prompts", "one.txt"], "expected at least 2 different prompts"),
        (["--out", "x", "--prompts", "prompts.txt", "--draft", "other"], "must have the same vocabulary"),
        (["--out", "x", "--prompts", "prompts.txt", "--draft", "nowhere"], "draft checkpoint 'nowhere'"),
        (
            ["--out", "x", "--prompts", "prompts.txt", "--draft-name", "default"],
            "--draft-name has no effect with --prom",
        ),
        (["--out", "x", "--from-checkpoint", "y", "--json", "z"], "--json has no effect with --from-checkpoint"),
        (
            ["--out", "x", "--from-checkpoint", "y", "--draft", "heads"],
            "--target is needed to write what a head learned",
        ),
        (["--out", "x", "--from-checkpoint", "y", "--resume"], "--resume has no effect with --from-checkpoint"),
        (["--out", "x", "--from-checkpoint", "y", "--epochs", "2"], "--epochs has no effect with --from-checkpoint"),
        (["--out", "x", "--from-checkpoint", "y", "--format", "auto"], "--format has no effect with --from-checkpoint"),
        (["--out", "x", "--from-checkpoint", "y", "--prompt-rows"], "--prompt-rows has no effect with --from-check"),
        (["--prompts", "prompts.txt"], "Missing option '--out'"),
    ],
)
def test_mistakes_are_one_line(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    Path("latin.txt").write_bytes(b"caf\xe9 and more")
    Path("one.txt").write_text("the thing\n")
    Path("azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,5\n")
    if "heads" in arguments:
        write_medusa(Path("heads"))
    if "other" in arguments:
        tokenizer = json.loads(Path("target/tokenizer.json").read_text())
        write_checkpoint(Path("other"))
        tokenizer["model"]["vocab"] |= {"Ā": 4, "ā": 3} if tokenizer["model"]["vocab"].get("Ā") == 3 else {"zz": 319}
        Path("other/tokenizer.json").write_text(json.dumps(tokenizer))
    pair = [] if "--draft" in arguments else ["--draft", "draft"]
    before = sorted(place.rglob("*"))
    target = [] if "heads" in arguments else ["--target", "target"]
    assert run_program("distill", *target, *pair, *arguments) == 2
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert out == "" and line.startswith("adaserve: error: ") and message in line
    assert sorted(place.rglob("*")) == before
