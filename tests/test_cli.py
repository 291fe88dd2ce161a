"""The command line: options from one source, errors as one line, no jax before it is needed. No model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from adaserve_jax.cli import app as cli_app
from adaserve_jax.cli import generate as generate_module
from adaserve_jax.cli.options import comma_list, takes
from adaserve_jax.cli.terminal import progress_bar
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.config import EngineConfig
from adaserve_jax.distill.offline_config import OfflineConfig
from adaserve_jax.drafter_config import DrafterOptions
from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.errors import AdaServeError, CheckpointError, ConfigError, RequestError
from adaserve_jax.learn_config import LearnOptions
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.settings import Settings as SettingsBase
from adaserve_jax.settings import options_of, setting, settings, settings_of
from adaserve_jax.star.settings import DraftServiceSettings
from adaserve_jax.types import SLO, SamplingParams
from scripts import reference_docs
from tests.program import run_program

ROOT = Path(__file__).parents[1]


def options(command: str) -> set[str]:
    group = typer.main.get_command(cli_app.app)
    return {name for p in group.commands[command].params for name in p.opts}  # type: ignore[attr-defined]


def spellings(kind: type[SettingsBase]) -> set[str]:
    return {f"--{name.replace('_', '-')}" for name in options_of(kind)}


def test_every_engine_field_is_an_option():
    fields = spellings(EngineConfig)
    assert "--max-depth" in fields and "--learning" not in fields
    assert fields <= set(options("serve"))
    assert fields - {"--seed"} <= set(options("generate"))
    assert fields - {"--policy"} <= set(options("bench"))


def test_every_server_setting_is_an_option():
    assert spellings(ServerSettings) | {"--in-process"} <= options("serve")
    assert "--keys" not in options("serve")


def test_every_field_of_learning_is_an_option_of_what_serves_and_measures():
    fields = spellings(LearnOptions)
    assert "--learn" in fields and "--learn-every" in fields
    for command in ("serve", "bench"):
        assert fields <= options(command)
        assert "--learning" not in options(command)
    assert not fields & options("generate")


@pytest.mark.parametrize(
    "kind",
    [EngineConfig, ServerSettings, LearnOptions, DrafterOptions, DraftServiceSettings, RouterSettings, OfflineConfig],
)
def test_every_field_has_help(kind: type[SettingsBase]):
    assert [each.name for each in settings_of(kind) if not each.help.strip() or not each.expected] == []


def test_the_reference_is_what_the_commands_say():
    message = "docs/cli.md is out of date; run: python -m scripts.reference_docs"
    assert (ROOT / "docs" / "cli.md").read_text() == reference_docs.cli_page(), message


@settings
class Settings(SettingsBase):
    name: str | None = setting(None, "name")
    size: int = setting(3, "size")
    fast: bool = setting(False, "fast")
    edges: tuple[int, ...] = setting((1, 2), "edges")
    words: tuple[str, ...] = setting((), "words")
    share: float = setting(0.5, "share")


def settings_from(*arguments: str, env: dict[str, str] | None = None) -> tuple[Settings, str]:
    got: list[tuple[Settings, str]] = []
    app = typer.Typer()

    @app.command()
    @takes("settings", Settings)
    def command(settings: Settings, extra: str = "none given") -> None:
        got.append((settings, extra))

    result = CliRunner().invoke(app, list(arguments), env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return got[0]


def test_without_options_the_dataclass_has_its_defaults():
    assert settings_from() == (Settings(), "none given")


def test_options_reach_their_fields():
    given = [
        "--name",
        "x",
        "--size",
        "7",
        "--fast",
        "--edges",
        "4, 8",
        "--words",
        "a,b",
        "--share",
        "1",
        "--extra",
        "e",
    ]
    assert settings_from(*given) == (Settings("x", 7, True, (4, 8), ("a", "b"), 1.0), "e")
    assert settings_from("--name", "none", "--edges", "")[0] == Settings(None, edges=())


def test_options_are_read_from_the_environment_and_the_command_line_wins():
    env = {"ADASERVE_NAME": "secret", "ADASERVE_SIZE": "9"}
    assert settings_from("--size", "1", env=env)[0] == Settings("secret", 1)


def test_a_wrong_list_names_option_and_part():
    with pytest.raises(ConfigError, match="--token-edges must be a comma-separated list of int values, got 'x'"):
        comma_list("token_edges", "1,x", int)


@pytest.mark.parametrize("error", [CheckpointError("no\nsuch folder"), RequestError("bad prompt", param="prompt")])
def test_errors_are_one_line_on_stderr_and_status_2(monkeypatch, capsys, error: AdaServeError):
    def fail(config: EngineConfig):
        raise error

    monkeypatch.setattr(generate_module, "open_llm", fail)
    assert run_program("generate", "hello") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip() == "adaserve: error: " + " ".join(str(error).split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--slo-tpot-ms", "-1"], "slo_tpot_ms must be a finite number above 0, got -1\n"),
        (["generate", "x", "--temperature", "nan"], "temperature must be a number from 0 to 100, got nan"),
        (["generate", "x", "--page-size", "7"], "page_size must be one of 8, 16, 32, 64, 128, got 7"),
        (["bench", "--policies", "ar", "--rates", "0", "--duration", "1", "--out", "o"], "--rates must be numbers"),
        (["bench", "--policies", ",", "--rates", "1", "--duration", "1", "--out", "o"], "at least one policy"),
        (
            ["bench", "--policies", "ar", "--rates", "1", "--duration", "1", "--out", "o", "--workload", "nope.jsonl"],
            "cannot read workload nope.jsonl: No such file",
        ),
    ],
)
def test_wrong_values_are_one_line(capsys, arguments: list[str], message: str):
    assert run_program(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "abc"], "Invalid value for '--port': "),
        (["serve", "--class", "x=5"], "No such option: --class"),
        (["serve", "extra"], "(extra); see 'adaserve serve --help'"),
        (
            ["simulate", "--policies", "ar"],
            "Missing option '--out'; see 'adaserve simulate",
        ),
        (["generate"], "Missing argument 'prompt'"),
        (["bench", "--policies", "ar", "--policies", "spec:4"], "--policies was given 2 times; give it once, with"),
        (["serve", "--lora", "a=b", "--lora", "c=d"], "--lora was given 2 times; give it once, with commas between"),
        (["fly"], "No such command 'fly'; see 'adaserve --help'"),
    ],
)
def test_wrong_options_are_one_line(capsys, arguments: list[str], message: str):
    assert run_program(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("adaserve: error: ") and message in err and err.count("\n") == 1


def test_a_wrong_value_of_the_environment_is_told_by_its_variable(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ADASERVE_PORT", "abc")
    assert run_program("serve") == 2
    said = "adaserve: error: ADASERVE_PORT in the environment: Invalid value for '--port': "
    assert capsys.readouterr().err.startswith(said)
    assert run_program("serve", "--port", "abc") == 2
    assert capsys.readouterr().err.startswith("adaserve: error: Invalid value for '--port': ")


def test_without_arguments_it_helps(capsys):
    assert run_program() == 0
    assert "serve" in capsys.readouterr().out


def test_a_pipe_gets_no_progress_bar(capsys):
    with progress_bar() as progress:
        progress("loading", 0, 1)
    assert capsys.readouterr().err == ""


def test_serve_says_how_to_install_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "adaserve_jax.server.serve", None)

    class Missing:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "adaserve_jax.server.serve":
                raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")

    monkeypatch.delitem(sys.modules, "adaserve_jax.server.serve")
    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    assert run_program("serve") == 2
    expected = "serving needs the package 'fastapi', which is not installed; run: pip install 'adaserve-jax[server]'"
    assert expected in capsys.readouterr().err


class FakeLLM:
    """Streams a scripted answer; notes what was asked."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.asked: tuple[str, SamplingParams, SLO] | None = None
        self.closed = False

    def stream(self, prompt: str, sampling: SamplingParams, *, slo: SLO, adapter: str):
        assert adapter == ""
        self.asked = (prompt, sampling, slo)
        metrics = RequestMetrics(
            0.0, 0.1, 1.0, 2.0, output_tokens=11, verify_steps=4, accepted_tokens=6, tpot_slo_s=slo.tpot_s(0.0)
        )
        yield OutputChunk("g", 0, "a + ", [1, 2])
        yield OutputChunk("g", 0, "b", [3], "length", metrics)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


@pytest.fixture
def made(monkeypatch) -> list[FakeLLM]:
    """Every stand-in that `generate` has opened."""
    made: list[FakeLLM] = []
    monkeypatch.setattr(generate_module, "open_llm", lambda config: made.append(FakeLLM(config)) or made[-1])
    return made


def test_generate_streams_text_and_says_what_it_cost(made, capsys):
    arguments = ["--max-tokens", "11", "--temperature", "0", "--top-p", "0.9", "--top-k", "5", "--seed", "7"]
    targets = ["--slo-tpot-ms", "120", "--policy", "spec:2", "--draft", "none"]
    assert run_program("generate", "def f", *arguments, *targets) == 0
    out, err = capsys.readouterr()
    assert out == "a + b\n"
    line = " ".join(err.split())
    assert "11 tokens, 5.5 tokens/s, first token after 1000 ms, 100.0 ms per token, 1.50 accepted per step" in line
    assert "SLO met (TPOT 120 ms), seed 7" in line
    (llm,) = made
    sampling = SamplingParams(max_tokens=11, temperature=0, top_p=0.9, top_k=5, seed=7)
    assert llm.asked == ("def f", sampling, SLO(tpot_ms=120))
    assert (llm.config.policy, llm.config.draft, llm.closed) == ("spec:2", None, True)


def test_generate_asks_for_a_form(made, capsys, tmp_path):
    file = tmp_path / "form"
    file.write_text('root ::= "é"')
    for arguments, asked in (
        (["--regex", "a+"], {"regex": "a+"}),
        (["--choice", "a, b", "--choice", "c"], {"choice": ("a, b", "c")}),
        (["--grammar", str(file)], {"grammar": 'root ::= "é"'}),
        (["--json-schema", str(file)], {"json_schema": 'root ::= "é"'}),
    ):
        assert run_program("generate", "x", "--seed", "1", *arguments) == 0
        assert made[-1].asked is not None
        assert made[-1].asked[1] == SamplingParams(max_tokens=128, seed=1, **asked)
    capsys.readouterr()
    file.write_bytes(b"root ::= \xff")
    assert run_program("generate", "x", "--grammar", str(file)) == 2
    assert f"grammar {file} must be UTF-8, but byte 9 is not" in capsys.readouterr().err
    assert run_program("generate", "x", "--grammar", str(tmp_path / "none")) == 2
    assert f"cannot read grammar {tmp_path / 'none'}: No such file" in capsys.readouterr().err


def test_generate_draws_and_shows_a_seed(made, capsys):
    run_program("generate", "x", "--slo-tpot-ms", "50")
    assert made[0].asked is not None
    line = " ".join(capsys.readouterr().err.split())
    assert f"SLO missed (TPOT 50 ms), seed {made[0].asked[1].seed}" in line


@pytest.mark.parametrize(
    ("feasible", "said"),
    [
        (True, "SLO missed (TPOT 1 ms)"),
        (False, "SLO missed (TPOT 1 ms: below what this machine gives one request alone)"),
    ],
)
def test_generate_says_when_a_target_was_out_of_reach(feasible: bool, said: str):
    metrics = RequestMetrics(0.0, 0.0, 1.0, 2.0, output_tokens=5, tpot_slo_s=0.001, slo_feasible=feasible)
    assert generate_module.summary(metrics).endswith(f", {said}")


@pytest.mark.parametrize("spelled", ["version", "--version"])
def test_version_names_package_python_and_jax(capsys, spelled):
    assert run_program(spelled) == 0
    assert capsys.readouterr().out.startswith("adaserve-jax 0.1.0, Python 3.")
