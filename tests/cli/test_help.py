"""`--help`: every command and option is there, under one heading, with a text, and fits a narrow terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from typing import Any

import pytest
import typer

from adaserve_jax.cli.app import app
from adaserve_jax.cli.bench_url import UrlOptions
from adaserve_jax.cli.options import COMMANDS, OWN, OWN_OF, PANELS, as_options, by_panel, help_of, option_name, usage_of
from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import DrafterOptions
from adaserve_jax.learn_config import LearnOptions
from adaserve_jax.server.settings import ServerSettings


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


GROUP: Any = typer.main.get_command(app)
ALL = dict(commands(GROUP))


def page(*path: str, columns: int) -> str:
    """What `adaserve PATH --help` prints in a terminal of so many columns."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        patch.setenv("COLUMNS", str(columns))
        GROUP.main([*path, "--help"], prog_name="adaserve", standalone_mode=False)
    return output.getvalue()


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_a_page_has_every_option_and_fits_the_terminal(path: tuple[str, ...], columns: int):
    text = page(*path, columns=columns)
    assert max(map(len, text.splitlines())) <= min(columns, 120) and "\N{HORIZONTAL ELLIPSIS}" not in text
    words = text.split()
    for option in ALL[path].params:
        if option.param_type_name == "option":
            assert option_name(option).split()[-1] in words, "names are whole, not cut in two"
            assert f"\n  {option_name(option)} " in text
    assert text.startswith(f"Usage: adaserve {' '.join(path)}")


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_option_and_argument_says_what_it_means(path: tuple[str, ...]):
    silent = [parameter.name for parameter in ALL[path].params if not (parameter.help or "").strip()]
    assert silent == []
    assert ALL[path].help.strip()


def test_every_command_stands_under_one_heading():
    listed = [name for names in COMMANDS.values() for name in names]
    assert sorted(listed) == sorted({path[0] for path in ALL})
    text = page(columns=80)
    for heading, names in COMMANDS.items():
        assert f"\n{heading}\n" in text
        assert all(f"\n  {name} " in text for name in names)


def test_what_engine_and_server_are_made_of_stands_under_one_heading_each():
    listed = [name for names in PANELS.values() for name in names]
    assert len(listed) == len(set(listed)) and OWN not in PANELS
    kinds = (EngineConfig, LearnOptions, DrafterOptions, ServerSettings, UrlOptions)
    settings = {f.name for kind in kinds for f in fields(kind) if not f.metadata.get("file_only")}
    assert set(listed) == settings, "a new option needs a heading in cli/options.py"
    assert all(set(names) <= set(listed) and (command,) in ALL for command, names in OWN_OF.items())


def test_own_options_come_first_and_the_others_in_the_order_of_the_headings():
    shown = by_panel("generate", ALL["generate",].params)
    assert list(shown)[:3] == [OWN, "Models", "Policy and speculation"]
    assert "seed" in [option.name for option in shown[OWN]], "of the text, not of the engine"
    assert [option.name for option in shown["Models"]][:2] == ["target", "draft"]


def test_names_defaults_and_usage_are_short():
    named = {option.name: option for name in ("bench", "serve", "report") for option in ALL[name,].params}
    assert option_name(named["out"]) == "-o, --out PATH"
    assert option_name(named["format"]) == "--format table|markdown|json"
    assert option_name(named["prefix_cache"]) == "--[no-]prefix-cache"
    assert option_name(named["port"]) == "--port N" and option_name(named["watchdog"]) == "--watchdog X"
    assert help_of(named["port"]).endswith("[default: 8000]")
    assert help_of(named["prefix_cache"]).endswith("[default: on]")
    assert "default" not in help_of(named["tls_cert"]) and "default" not in help_of(named["dashboard"])
    assert option_name(named["arrivals"]) == "--arrivals TEXT..."
    assert usage_of("adaserve generate", ALL["generate",].params) == "adaserve generate PROMPT [OPTIONS]"
    assert usage_of("adaserve report", ALL["report",].params) == "adaserve report [FOLDERS]... [OPTIONS]"
    simulate = usage_of("adaserve simulate", ALL["simulate",].params)
    assert simulate == "adaserve simulate [TRACES]... --policies TEXT --out PATH [OPTIONS]"


def test_a_text_spells_fields_as_the_options_that_they_are_here():
    assert as_options("needs tls_key; as slo_class says", {"tls_key", "port"}) == "needs --tls-key; as slo_class says"
    assert "certificate chain, PEM; with --tls-key" in " ".join(page("serve", columns=120).split())
