"""Every command that the documents show is one that the command line takes, with options that it has."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer

from adaserve_jax.cli import app as cli_app
from tests.conftest import ROOT
from tests.docs.blocks import DOCUMENTS, blocks, commands

CONFIGURATION = ROOT / "docs" / "configuration.md"

SHOWN = [(path.relative_to(ROOT).as_posix(), words) for path in DOCUMENTS for words in commands(path, "adaserve")]
SCRIPTS = [(path, words) for path in DOCUMENTS for words in commands(path, "python")]
PLACEHOLDER = re.compile(r"^(?:[A-Z]{3,}|\.\.\.|\[.*\]|[A-Z]{3,},.*)$")
"""As in usage lines: FILE, ..., [OPTIONS]."""


APP = typer.main.get_command(cli_app.app)


def refused(words: list[str]) -> str:
    """Why the command line does not take these words; "": it does. Nothing is run."""
    command: Any = APP
    words = list(words)
    while hasattr(command, "commands"):
        command = command.commands.get(words.pop(0)) if words else None
        if command is None:
            return "no such command"
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    options = [word.partition("=")[0] for word in (words[: words.index("--")] if "--" in words else words)]
    wrong = [word for word in options if re.match(r"--?[a-z]", word) and word not in known | {"--help"}]
    if wrong or any(PLACEHOLDER.match(word) for word in words):
        return f"no such option: {wrong[0]}" if wrong else ""
    try:
        command.parse_args(command.context_class(command), words)
    except Exception as error:  # of the click that typer brings
        return str(getattr(error, "message", error))
    return ""


def test_there_are_commands_of_many_kinds():
    assert {words[0] for _, words in SHOWN} >= {
        "serve", "bench", "report", "simulate", "profile", "grow", "distill", "draft", "cluster", "config", "follow",
    }  # fmt: skip
    assert len(SHOWN) > 50


@pytest.mark.parametrize("document", sorted({document for document, _ in SHOWN}))
def test_the_command_line_takes_what_the_documents_show(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adaserve.toml").write_text(blocks(CONFIGURATION, "toml")[0])
    wrong = {shlex.join(words): refused(words) for name, words in SHOWN if name == document}
    assert {command: why for command, why in wrong.items() if why} == {}


def test_what_is_not_taken_is_noticed():
    assert refused(["serve", "--speed", "9"]) == "no such option: --speed"
    assert refused(["fly"]) == "no such command"
    assert "valid integer" in refused(["serve", "--port", "8.5"])
    assert refused(["serve", "--port", "9000"]) == ""


def test_scripts_that_the_documents_run_exist():
    files = {(path.name, word) for path, words in SCRIPTS for word in words if word.endswith(".py")}
    modules = {(path.name, words[1]) for path, words in SCRIPTS if words[0] == "-m"}
    assert [each for each in files if not (ROOT / each[1]).exists()] == []
    ours = [each for each in modules if each[1].startswith(("scripts.", "benchmarks.", "adaserve_jax."))]
    assert [each for each in ours if not (ROOT / f"{each[1].replace('.', '/')}.py").exists()] == []
