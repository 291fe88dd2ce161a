"""`--help`: every command and option is there, under its panel, with a text, and fits a narrow terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import pytest
import typer

from adaserve_jax.cli.app import COMMANDS, app
from adaserve_jax.cli.options import FROM_ENVIRONMENT, as_options, by_panel
from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import DrafterOptions
from adaserve_jax.learn_config import LearnOptions
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.settings import Panel, options_of


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


GROUP: Any = typer.main.get_command(app)
ALL = dict(commands(GROUP))


def page(*path: str, columns: int) -> str:
    """Return the output of `adaserve PATH --help` in a terminal of so many columns."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        patch.setenv("COLUMNS", str(columns))
        GROUP.main([*path, "--help"], prog_name="adaserve", standalone_mode=False)
    return output.getvalue()


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_a_page_has_every_option_whole_and_fits_the_terminal(path: tuple[str, ...], columns: int):
    text = page(*path, columns=columns)
    assert max(map(len, text.splitlines())) <= min(columns, 120)
    for option in ALL[path].params:
        for spelling in option.opts if option.param_type_name == "option" else ():
            assert re.search(rf"^  (-\w, )?{spelling}\b", text, re.MULTILINE), spelling
    assert text.startswith(f"Usage: adaserve {' '.join(path)}")


def test_every_option_and_argument_says_what_it_means():
    parameters = [(path, each) for path, command in ALL.items() for each in command.params]
    assert [(path, each.name) for path, each in parameters if not (each.help or "").strip()] == []
    assert [path for path, command in ALL.items() if not command.help.strip()] == []


def test_every_command_stands_under_one_heading():
    text = page(columns=80)
    for heading, listed in COMMANDS.items():
        shown = text.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\w+) ", shown, re.MULTILINE)[: len(listed)] == [each.__name__ for each in listed]
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in GROUP.commands)


def test_settings_stand_under_a_heading_and_options_of_a_command_come_first():
    for kind in (EngineConfig, LearnOptions, DrafterOptions, ServerSettings):
        assert [name for name, each in options_of(kind).items() if each.panel == Panel.OWN] == []
    shown = by_panel(ALL["generate",].params)
    assert list(shown)[:3] == [Panel.OWN, Panel.MODELS, Panel.POLICY]
    assert "seed" in [option.name for option in shown[Panel.OWN]], "of the text, not of the engine"
    assert [option.name for option in shown[Panel.MODELS]][:2] == ["target", "draft"]
    assert Panel.URL in by_panel(ALL["bench",].params)


def test_a_page_shows_choices_defaults_and_the_environment():
    text = " ".join(page("serve", columns=80).split())
    assert "--dtype auto|f32|bf16 weights and KV" in text and "--page-size 8|16|32|64|128" in text
    assert "which is printed [default: 8000]" in text
    assert FROM_ENVIRONMENT in text and FROM_ENVIRONMENT not in " ".join(page("report", columns=80).split())


def test_a_text_spells_fields_as_the_options_that_they_are_here():
    assert as_options("needs tls_key; as slo_class says", {"tls_key", "port"}) == "needs --tls-key; as slo_class says"
    assert "certificate chain, PEM; with --tls-key" in " ".join(page("serve", columns=120).split())
