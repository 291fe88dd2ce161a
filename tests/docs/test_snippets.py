"""What the how-tos tell to type does what they say: a policy in a file, Python, configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import adaserve_jax
from adaserve_jax.cli import app as cli_app
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.llm import LLM
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.lora import read_adapter
from adaserve_jax.server.config_file import read_config
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.types import SLO, SamplingParams
from tests.conftest import ROOT
from tests.docs.blocks import blocks, commands

HOWTO = ROOT / "docs" / "howto"
POLICY = HOWTO / "write-a-policy.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"


def run(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command of the documents prints; it must succeed."""
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(cli_app.app, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_policy_is_a_file_of_at_most_40_lines_that_one_command_compares(tmp_path, monkeypatch):
    """Its reader may have added the selector of the page's second part."""
    code, selector = blocks(POLICY, "python")
    assert len(code.splitlines()) <= 40
    (tmp_path / "shortest_enough.py").write_text(f"{code}\n{selector}")
    name = "shortest_enough.py:shortest_enough"
    simulate, report = [words for words in commands(POLICY, "adaserve") if words[0] in ("simulate", "report")]
    run([*simulate, "--requests", "40"], tmp_path, monkeypatch)
    rows = [
        json.loads(line)
        for line in (tmp_path / "results" / "shortest-enough" / "results.jsonl").read_text().splitlines()
    ]
    everybody = {row["policy"]: row for row in rows if row["slo_class"] == "all"}
    assert set(everybody) == {"ar", "adaserve", name}
    assert {row["requests"] for row in everybody.values()} == {40}
    drafted = {policy: row["drafted_tokens"] for policy, row in everybody.items()}
    assert drafted["ar"] == 0 < drafted[name] < drafted["adaserve"]
    assert name in run(report, tmp_path, monkeypatch)


class Kept(LLM):
    """Over an engine that others use too."""

    def close(self) -> None:
        pass


@pytest.mark.parametrize("document", ["README.md", "docs/quickstart.md"])
def test_the_python_of_the_first_pages(document, demo_engine, monkeypatch, capsys):
    """As it stands, on the shared engine in the place of the one that it makes."""

    def make(target: str = "demo", draft: str | None = "demo", policy: str = "adaserve") -> LLM:
        assert EngineConfig(target, draft, policy) == EngineConfig()
        return Kept.over(demo_engine)

    monkeypatch.setattr(adaserve_jax, "LLM", make)
    (code,) = blocks(ROOT / document, "python")
    names: dict = {}
    exec(compile(code, document, "exec"), names)
    outs = names["outs"]
    assert all(out.text and out.finish_reason in ("length", "stop") and out.metrics.tpot_s > 0 for out in outs)
    assert outs[0].metrics.slo_met is not None
    if document != "README.md":
        assert capsys.readouterr().out.count("\n") >= len(outs) == 2


def test_an_engine_that_runs_changes_to_the_policy_of_the_file(demo_engine, tmp_path):
    """And to the one with a selector, which stands in the same file."""
    file = tmp_path / "shortest_enough.py"
    file.write_text("\n".join(blocks(POLICY, "python")))
    llm = Kept.over(demo_engine)
    for name in ("shortest_enough", "needed_and_half_of_the_rest"):
        llm.set_policy(f"{file}:{name}")
        try:
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            (out,) = llm.generate(["def add(a, b):"], params, slo=SLO(tpot_ms=40))
        finally:
            llm.set_policy("adaserve")
        assert len(out.token_ids) == 12


def test_the_adapter_of_the_howto_is_one_of_the_embedded_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(HOWTO / "serve-lora-adapters.md", "python")
    exec(compile(code, "howto", "exec"), {})
    (serve,) = [words for words in commands(HOWTO / "serve-lora-adapters.md", "adaserve") if words[0] == "serve"]
    name, _, folder = serve[serve.index("--lora") + 1].partition("=")
    config = EngineConfig(lora=(f"{name}={folder}",))
    target = ModelConfig.from_folder(resolve_folder(config.target, "target"))
    matrices = read_adapter(config.lora_folders["sql"], target, config.max_lora_rank)
    assert matrices["layers.0.qkv.lora_b"].any() and not matrices["layers.0.down.lora_b"].any()


def test_the_classes_of_the_howto_are_a_configuration(tmp_path):
    text, deadlines = blocks(HOWTO / "choose-slo-classes.md", "toml")
    (tmp_path / "adaserve.toml").write_text(deadlines)
    summary = read_config(str(tmp_path / "adaserve.toml")).server.class_table()["summary"]
    assert (summary.e2e_ms, summary.max_queue_ms) == (8000, 3000)
    (tmp_path / "adaserve.toml").write_text(text)
    classes = read_config(str(tmp_path / "adaserve.toml")).server.class_table()
    assert {name: each.tpot_ms for name, each in classes.items()} == {
        "interactive": 40, "chat": 80, "batch": None, "default": 200,
    }  # fmt: skip
    (option,) = re.findall(r"`--slo-classes (\S+)`", (HOWTO / "choose-slo-classes.md").read_text())
    same = ServerSettings(slo_classes=tuple(option.split(","))).class_table()
    assert {name: (each.tpot_ms, each.ttft_ms) for name, each in same.items()} == {
        name: (each.tpot_ms, each.ttft_ms) for name, each in classes.items()
    }


def test_make_serve_installs_what_the_quick_start_does():
    """The rest of that page, reports with figures among it, is for both."""
    (said,) = re.findall(r"pip install '\.\[([a-z,]+)\]'", QUICKSTART.read_text())
    recipe = (ROOT / "Makefile").read_text().partition("\n$(STAMP).serve: ")[2].partition("\n\n")[0]
    assert f"'.[{said}]'" in recipe


@pytest.mark.slow
def test_the_comparison_of_the_quick_start(tmp_path, monkeypatch):
    """Its bench as it stands, and both reports."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; `make test` installs it")
    for words in commands(QUICKSTART, "adaserve"):
        if words[0] in ("bench", "report"):
            run(words, tmp_path, monkeypatch)
    assert (tmp_path / "first.html").stat().st_size > 10_000


def test_examples_that_the_documents_name_are_there():
    named = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    text = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert {name for name in named if f"examples/{name}" in text} == named
