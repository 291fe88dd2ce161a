"""`adaserve config`, and `adaserve serve --config`: where a value comes from, and who wins."""

from __future__ import annotations

import pytest

from adaserve_jax.cli.terminal import open_llm
from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.server import serve as serve_module
from adaserve_jax.server.settings import ServerSettings
from tests.program import run_program

FILE = """
[engine]
policy = "ar"
max_depth = 3
draft = "none"
row_edges = [1, 2]
calibrate = false
[server]
port = 9001
host = "::1"
served_model_name = "from file"
use_generation_config = false
[[classes]]
name = "own"
tpot_ms = 7
[[keys]]
name = "a"
key = "first"
"""


@pytest.fixture
def path(tmp_path) -> str:
    (tmp_path / "adaserve.toml").write_text(FILE)
    return str(tmp_path / "adaserve.toml")


@pytest.fixture
def served(monkeypatch):
    """Runs `adaserve serve` with a server that notes what it gets."""
    got = []
    monkeypatch.setattr(serve_module, "run", lambda *arguments: got.append(arguments))

    def serve(*arguments: str):
        got.clear()
        assert run_program("serve", *arguments) == 0
        return got[0]

    return serve


def test_without_a_file_there_are_the_defaults(served):
    assert served() == (ServerSettings(), EngineConfig(), False, None)


def test_values_come_from_the_command_line_the_environment_the_file_the_default(served, path, monkeypatch):
    monkeypatch.setenv("ADASERVE_PORT", "9002")
    monkeypatch.setenv("ADASERVE_SERVED_MODEL_NAME", "from the environment")
    monkeypatch.setenv("ADASERVE_POLICY", "ar")
    settings, config, _, _ = served("--config", path, "--served-model-name", "from the command line", "--calibrate")
    assert settings.served_model_name == "from the command line"
    assert (settings.port, config.policy, config.calibrate) == (9002, "ar", True)
    assert (settings.host, config.max_depth, config.draft, config.row_edges) == ("::1", 3, None, (1, 2))
    assert settings.use_generation_config is False
    assert (settings.max_inflight, config.max_width) == (ServerSettings().max_inflight, EngineConfig().max_width)
    assert [key.name for key in settings.keys] == ["a"]
    assert set(settings.class_table()) == {"default", "own"}


def test_learning_is_switched_anywhere_and_its_options_come_from_everywhere(served, path, monkeypatch, capsys):
    assert served()[1].learning is None
    assert served("--learn")[1].learning == LearnConfig()
    monkeypatch.setenv("ADASERVE_LEARN_RATE", "0.01")
    assert served("--learn", "--learn-steps", "2")[1].learning == LearnConfig(learn_rate=0.01, learn_steps=2)
    with open(path, "w") as file:
        file.write("[learn]\nlearn = true\nlearn_every = 4\nlearn_rate = 0.5\n")
    assert served("--config", path)[1].learning == LearnConfig(learn_every=4, learn_rate=0.01)
    assert capsys.readouterr().err == ""
    assert served("--config", path, "--no-learn")[1].learning is None
    assert "--learn-every has no effect without --learn" in capsys.readouterr().err


def test_draft_services_are_named_anywhere(served, path, monkeypatch, capsys):
    assert served()[1].drafter is None
    config = served("--drafter", "grpc://a:1, grpc://b:2", "--drafter-deadline-ms", "50")[1]
    assert config.drafter == DrafterConfig(("grpc://a:1", "grpc://b:2"), drafter_deadline_ms=50.0)
    assert (config.draft, type(config.drafter)) == (None, DrafterConfig)
    with open(path, "w") as file:
        file.write("[drafter]\ndrafter = ['grpc://a:1']\ndrafter_token_file = 'token'\n")
    config = served("--config", path)[1]
    assert config.drafter == DrafterConfig(("grpc://a:1",), drafter_token_file="token")
    monkeypatch.setenv("ADASERVE_DRAFTER", "grpc://c:3")
    assert served("--config", path)[1].drafter.drafter == ("grpc://c:3",)
    assert capsys.readouterr().err == ""
    assert served("--config", path, "--drafter", "")[1].drafter is None
    assert "--drafter-token-file has no effect without --drafter" in capsys.readouterr().err


def test_a_wrong_draft_service_ends_the_program_with_one_line(capsys):
    for arguments in (["serve"], ["generate", "a prompt"], ["bench", "--policies", "ar"]):
        assert run_program(*arguments, "--drafter", "http://a:1") == 2
        assert "drafter must be one or more of grpc://host:port, got ('http://a:1',)" in capsys.readouterr().err
    assert run_program("bench", "--url", "http://h:1", "--drafter", "grpc://a:1") == 2
    assert "--drafter is of an engine in this process; leave it out with --url" in capsys.readouterr().err
    assert run_program("generate", "a prompt", "--drafter", "grpc://a:1", "--draft", "models/mine") == 2
    assert "draft must be left out with a drafter" in capsys.readouterr().err


def test_an_engine_of_a_command_gets_every_field_as_it_is(monkeypatch):
    given = {}
    monkeypatch.setattr("adaserve_jax.engine.llm.LLM", lambda progress, **options: given.update(options))
    config = EngineConfig(policy="ar", drafts=("code=a",), learning=LearnConfig(learn_every=3))
    open_llm(config)
    assert EngineConfig(**given) == config and given["learning"] is config.learning


def test_a_value_of_the_command_line_that_is_the_default_wins_too(served, path):
    settings, config, _, _ = served("--port", "8000", "--draft", "demo", "--row-edges", "", "--config", path)
    assert (settings.port, config.draft, config.row_edges) == (8000, "demo", ())


def test_classes_of_the_command_line_are_added_to_those_of_the_file(served, path):
    settings, *_ = served("--config", path, "--slo-classes", "own=9,fast=5")
    table = settings.class_table()
    assert (table["own"].tpot_ms, table["fast"].tpot_ms, set(table)) == (9.0, 5.0, {"default", "own", "fast"})


def test_the_file_can_be_named_in_the_environment(served, path, monkeypatch):
    monkeypatch.setenv("ADASERVE_CONFIG", path)
    assert served()[0].port == 9001


def test_new_keys_are_read_from_the_file_and_nothing_else_is(served, path):
    settings, _, _, reread = served("--config", path, "--port", "9003")
    with open(path, "w") as file:
        file.write(FILE.replace("first", "second").replace("own", "other") + "[[keys]]\nname = 'b'\nkey = 'x'\n")
    again = reread()
    assert [key.key for key in again.keys] == ["second", "x"]
    assert (again.port, again.classes) == (9003, settings.classes)


def test_the_plain_key_of_the_file_is_read_again_unless_another_was_given_beside_it(served, path):
    with open(path, "w") as file:
        file.write(FILE.replace("[server]", "[server]\napi_key = 'old'"))
    for arguments, expected in ((), "new"), (("--api-key", "own"), "own"):
        with open(path, "w") as file:
            file.write(FILE.replace("[server]", "[server]\napi_key = 'old'"))
        *_, reread = served("--config", path, *arguments)
        with open(path, "w") as file:
            file.write(FILE.replace("[server]", "[server]\napi_key = 'new'"))
        assert reread().api_key == expected


def test_an_empty_key_in_the_environment_opens_no_server(served, monkeypatch, capsys, path):
    monkeypatch.setenv("ADASERVE_API_KEY", "")
    for arguments in ((), ("--config", path)):
        assert run_program("serve", *arguments) == 2
        assert "ADASERVE_API_KEY must be a key, got an empty text; unset it" in capsys.readouterr().err
    assert served("--api-key", "x")[0].api_key == "x"
    monkeypatch.delenv("ADASERVE_API_KEY")
    assert served()[0].api_key is None


def test_the_status_of_a_server_that_ended_with_its_engine_is_the_programs(monkeypatch):
    monkeypatch.setattr(serve_module, "run", lambda *_: serve_module.DEAD_STATUS)
    assert run_program("serve") == 70


def test_a_wrong_file_is_one_line(capsys, path, tmp_path):
    (tmp_path / "wrong.toml").write_text("[server]\nprot = 1\n")
    assert run_program("serve", "--config", str(tmp_path / "wrong.toml")) == 2
    assert run_program("config", "--check", str(tmp_path / "wrong.toml")) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == second and first.endswith("wrong.toml: [server] has no key 'prot'; did you mean 'port'?")


def test_a_valid_file_is_said_to_be(capsys, path):
    assert run_program("config", "--check", path) == 0
    assert capsys.readouterr().out == f"{path} is valid: 9 settings, 1 class, 1 key\n"


def test_a_policy_that_does_not_exist_is_found(capsys, tmp_path):
    for policy, said in (
        ("adaserv", "unknown policy 'adaserv'; did you mean 'adaserve'?"), ("spec:9", "it is 6;"),
        ('spec:4"\ndraft = "none', "policy spec:4 needs a draft, but there is none"),
        ('adaserve@suffix"\ndraft_sources = "model', "but draft_sources is 'model'"),
    ):  # fmt: skip
        (tmp_path / "wrong.toml").write_text(f'[engine]\npolicy = "{policy}"\n')
        assert run_program("config", "--check", str(tmp_path / "wrong.toml")) == 2
        error = capsys.readouterr().err
        assert "wrong.toml: [engine] " in error and said in error


def test_the_example_is_printed_and_valid(capsys, tmp_path):
    assert run_program("config", "--example") == 0
    (tmp_path / "example.toml").write_text(capsys.readouterr().out)
    assert run_program("config", "--check", str(tmp_path / "example.toml")) == 0
    assert "is valid: 0 settings" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--check", "x", "--example"]])
def test_one_of_both_must_be_asked_for(capsys, arguments):
    assert run_program("config", *arguments) == 2
    assert "one of --check FILE and --example must be given" in capsys.readouterr().err
