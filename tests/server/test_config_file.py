"""The configuration file: every key is read and checked, what is wrong is named, and the example is complete."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.server.config_file import SECTIONS, TABLES, example, read_config
from adaserve_jax.server.settings import KeySettings, ServerSettings, SloClass
from adaserve_jax.settings import options_of
from scripts.reference_docs import configuration_page

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def read(tmp_path):
    def read(text: str):
        path = tmp_path / "adaserve.toml"
        path.write_text(text)
        return read_config(str(path))

    return read


def test_a_file_gives_every_kind_of_value(read):
    file = read("""
        [engine]
        target = "models/a"
        draft = "none"
        token_edges = [16, 64]
        deterministic = true
        [server]
        port = 9000
        min_slo_tpot_ms = 2
        slo_classes = ["fast=5:100"]
        cors_origins = []
        api_key = "none"
        [[classes]]
        name = "bulk"
        priority = 10
        service_tiers = ["flex"]
        [[classes]]
        name = "default"
        tpot_ms = 80
        [[keys]]
        name = "a"
        key = "secret"
        min_priority = -1
        [[keys]]
        name = "b"
        key_env = "B"
        tokens_per_minute = 1e6
        slo_classes = ["bulk", "fast"]
        min_priority = "none"
    """)
    assert file.engine == EngineConfig("models/a", None, token_edges=(16, 64), deterministic=True)
    server = file.server
    assert (server.port, server.min_slo_tpot_ms, server.cors_origins, server.api_key) == (9000, 2.0, (), None)
    assert isinstance(server.min_slo_tpot_ms, float)
    assert server.class_table() == {
        "default": SloClass("default", 80.0),
        "bulk": SloClass("bulk", priority=10, service_tiers=("flex",)),
        "fast": SloClass("fast", 5.0, 100.0),
    }
    assert server.tiers()["flex"] == "bulk"
    assert server.keys == (
        KeySettings("a", "secret", min_priority=-1),
        KeySettings("b", key_env="B", tokens_per_minute=1e6, slo_classes=("bulk", "fast")),
    )
    assert file.values.keys() == {
        "target", "draft", "token_edges", "deterministic", "port", "min_slo_tpot_ms", "slo_classes", "cors_origins",
        "api_key",
    }  # fmt: skip


def test_an_empty_file_gives_nothing(read):
    file = read("")
    assert (file.engine, file.server, file.values) == (EngineConfig(), ServerSettings(), {})


def test_classes_of_a_file_take_the_place_of_those_that_are_there_by_default(read):
    file = read('[[classes]]\nname = "own"\n')
    assert set(file.server.class_table()) == {"default", "own"}
    assert file.values == {"slo_classes": ()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nlora = ['sql=/models/a,b']", "[engine] lora: no value may have a comma, got ["),
        ("[server]\nprot = 9000", "[server] has no key 'prot'; did you mean 'port'?"),
        ("[engine]\nport = 9000", "[engine] has no key 'port'; it belongs to [server]"),
        ("[server]\ntarget = 'x'", "[server] has no key 'target'; it belongs to [engine]"),
        ("[server]\nkeys = []", "[server] has no key 'keys'; write [[keys]]"),
        ("[engine]\nzzz = 1", "[engine] has no key 'zzz'; there are target, draft, policy"),
        ("[sever]\nport = 1", "[drafter], [server], [[classes]] and [[keys]], got 'sever'; did you mean 'server'?"),
        ("[learn]\nevery = 1", "[learn] has no key 'every'; did you mean 'learn_every'?"),
        ("[engine]\nlearn_every = 1", "[engine] has no key 'learn_every'; it belongs to [learn]"),
        ("[learn]\nlearn_rate = 0", "[learn] learn_rate must be a finite number above 0, got 0"),
        ("[learn]\nlearn = true\n[engine]\ndraft = 'none'", "[engine] learning needs a draft that learns, and"),
        ("[engine]\ndrafts = ['a=b', 'a=c']", "[engine] drafts must be of different names, none of them default"),
        (
            "port = 9000",
            "expected the sections [engine], [learn], [drafter], [server], [[classes]] and [[keys]], got 'port'",
        ),
        ("server = 3", "expected a section [server], got server = 3"),
        ("[[server]]\nport = 1", "expected a section [server], got"),
        ("[classes]\nname = 'a'", "expected [[classes]], once for each of them"),
        ("[server]\nport = '9000'", "[server] port must be an integer from 0 to 65535, got '9000'"),
        ("[server]\nport = 9000.0", "[server] port must be an integer from 0 to 65535, got 9000.0"),
        ("[server]\nport = true", "[server] port must be an integer from 0 to 65535, got True"),
        ("[server]\nport = 90000", "[server] port must be an integer from 0 to 65535, got 90000"),
        ("[engine]\nmax_waiting = 0", "[engine] max_waiting must be an integer >= 1, got 0"),
        ("[engine]\ndeterministic = 1", "[engine] deterministic must be true or false, got 1"),
        ("[engine]\ntoken_edges = 16", "[engine] token_edges must be increasing integers >= 1, got 16"),
        ("[engine]\ntoken_edges = [16, 'a']", "[engine] token_edges must be increasing integers >= 1, got [16, 'a']"),
        ("[engine]\ndraft = false", "[engine] draft must be a name or a path, got False"),
        ("[server]\nmin_slo_tpot_ms = nan", "[server] min_slo_tpot_ms must be a finite number above 0, got nan"),
        ("[server]\nshutdown_timeout = 1979-05-27", "must be a finite number of seconds >= 0, got datetime.date("),
        ("[server]\ntls_cert = 'c'", "[server] tls_cert and tls_key must be given together"),
        ("[[classes]]\ntpot_ms = 4", "[[classes]] number 1 name must be given"),
        ("[[classes]]\nname = 'a'\n[[classes]]\nname = 'b'\ntpot_ms = -1",
         "[[classes]] number 2 tpot_ms must be a finite number above 0, got -1"),
        ("[[classes]]\nname = 'a b'", "[[classes]] number 1 name must be letters, digits and _"),
        ("[[keys]]\nname = 'a'", "[[keys]] number 1 one of key, key_env, key_sha256 must be given, got none"),
        ("[[keys]]\nname = 'a'\nkey = 'x'\nmax_inflght = 3", "has no key 'max_inflght'; did you mean 'max_inflight'?"),
        ("[[keys]]\nname = 'a'\nkey = 'x'\n[[keys]]\nname = 'a'\nkey = 'y'", "keys must have different names, got two"),
        ("[server\nport = 1", "expected TOML, got: Expected ']'"),
        ("[server]\nport = 1\nport = 2", "expected TOML, got: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_file(read, text, message):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert "adaserve.toml: " in str(caught.value)
    assert message in str(caught.value)


def test_learning_is_switched_by_its_section_which_may_be_kept_while_it_is_off(read):
    section = "[learn]\nlearn = {}\nlearn_every = 4\nlearn_rate = 1\nlearn_folder = 'learned'"
    on = read(section.format("true"))
    assert on.engine.learning == LearnConfig(learn_every=4, learn_rate=1.0, learn_folder="learned")
    assert type(on.engine.learning) is LearnConfig
    off = read(section.format("false"))
    assert off.engine.learning is None and off.values["learn_every"] == 4


def test_secrets_are_in_no_message(read):
    for text in (
        "[server]\napi_key = 48151623",
        "[[keys]]\nname = 'a'\nkey = 48151623",
        "[[keys]]\nname = 'a'\nkey = ['48151623']",
    ):
        with pytest.raises(ConfigError) as caught:
            read(text)
        assert "48151623" not in str(caught.value) and " must be a text" in str(caught.value)


def test_files_that_cannot_be_read_are_told(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*nowhere.toml: No such file"):
        read_config(str(tmp_path / "nowhere.toml"))
    (tmp_path / "latin.toml").write_bytes(b"[server]\nhost = '\xe4'")
    with pytest.raises(ConfigError, match=r"latin.toml: expected TOML in UTF-8, got other bytes at 17"):
        read_config(str(tmp_path / "latin.toml"))


def test_the_example_says_nothing_and_without_its_marks_the_defaults(read):
    text = example()
    assert tomllib.loads(text) == {"engine": {}, "learn": {}, "drafter": {}, "server": {}}
    uncommented = re.sub(r"(?m)^#(?=\[|\w+ = )", "", text)
    file = read(uncommented)
    server = dataclasses.replace(file.server, classes=(), keys=())
    assert (file.engine, server) == (EngineConfig(), ServerSettings())
    assert file.server.classes == (SloClass("interactive", 50.0),)
    assert file.server.keys == (KeySettings("team-a", key_env="TEAM_A_KEY"),)
    document = tomllib.loads(uncommented)
    for name, kind in SECTIONS.items():
        assert list(document[name]) == list(options_of(kind))
    for name, kind in TABLES.items():
        assert set(document[name][0]) | {"key", "key_sha256"} >= set(options_of(kind))


def test_the_page_is_what_the_code_says_and_its_example_is_valid(read):
    page = (ROOT / "docs" / "configuration.md").read_text()
    message = "run: python -m scripts.reference_docs"
    assert page == configuration_page(), message
    shown = re.search(r"```toml\n(.*?)```", page, re.DOTALL).group(1)
    file = read(shown)
    assert set(file.server.class_table()) == {"default", "interactive", "batch"}
    assert [key.name for key in file.server.keys] == ["team-a", "batch-jobs"]
