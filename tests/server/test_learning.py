"""Learning over HTTP: what requests and keys say of it reaches the engine, and what came of it is shown."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineStats
from adaserve_jax.server.auth import Keyring
from adaserve_jax.server.dashboard.live import LearningDraft, learning_drafts
from adaserve_jax.server.metrics import ServerMetrics
from adaserve_jax.server.settings import KeySettings, ServerSettings
from adaserve_jax.stats import LearningStats, StepStats, metrics_of
from tests.server.scripted import ByteTokenizer, ScriptedEngine

KEYS = (KeySettings("open", "a"), KeySettings("closed", "b", learn=False))
STATS = LearningStats(
    version={"default": 3, "code": 0},
    drafted_tokens={"default": 400, "code": 0},
    accepted_tokens={"default": 300},
    held_out_acceptance={"default": 0.625},
    loss={"default": 1.5},
    updates={"default": 4},
    refused={"default": 2},
    rolled_back={"default": 1},
    records={"default": 80, "code": 5},
    held_out={"default": 10},
    left_out={"opt_out": 7},
    micro_steps=12,
    train_s=0.75,
    delay_s=0.25,
    delay_max_s=0.03125,
    target_tokens=900,
    lost={"no_room": 30},
)


@pytest.fixture(scope="module")
def drafts(serve_engine):
    """A server of two drafts, with two keys, one of which nothing is learned from."""
    engine = ScriptedEngine(EngineConfig(target="models/scripted", draft="demo", drafts=("code=models/code",)))
    engine.start()
    with serve_engine(engine, ByteTokenizer(), ServerSettings(keys=KEYS)) as server:
        yield server
    engine.close()


def ask(server, key: str = "a", **body):
    return server.http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 1} | body, headers={"authorization": f"Bearer {key}"}
    )


@pytest.mark.parametrize(
    ("key", "asked", "learns"),
    [("a", None, True), ("a", True, True), ("a", False, False), ("b", None, False), ("b", True, False)],
)
def test_it_is_learned_from_only_where_neither_the_request_nor_its_key_says_no(drafts, key, asked, learns):
    assert ask(drafts, key, learn=asked).status_code == 200
    request = drafts.engine.submitted[-1]
    assert (request.learn, request.tenant) == (learns, {"a": "open", "b": "closed"}[key])


@pytest.mark.parametrize(("key", "learns"), [("a", True), ("b", False)])
def test_chats_are_kept_out_by_their_key_too(drafts, key, learns):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "learn": True}
    response = drafts.http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert (response.status_code, drafts.engine.submitted[-1].learn) == (200, learns)


def test_without_keys_all_are_one_tenant_and_chats_can_say_no_too(server):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "learn": False}
    assert server.post("/v1/chat/completions", **body).status_code == 200
    assert (server.engine.submitted[-1].learn, server.engine.submitted[-1].tenant) == (False, "")


def test_a_key_that_is_read_again_may_begin_to_say_no():
    keyring = Keyring(ServerSettings(keys=KEYS))
    account = keyring.find(b"a")
    assert account is not None and account.may_learn and keyring.anonymous.may_learn
    keyring.replace(ServerSettings(keys=(replace(KEYS[0], learn=False),)))
    assert keyring.find(b"a") is account and not account.may_learn


def test_a_tag_names_one_of_the_drafts_that_the_model_lists(drafts):
    (card,) = drafts.http.get("/v1/models", headers={"authorization": "Bearer a"}).json()["data"]
    assert card["drafts"] == ["default", "code"]
    for tag, reached in (("code", "code"), ("default", "default"), ("", ""), (None, "")):
        assert ask(drafts, draft_tag=tag).status_code == 200
        assert drafts.engine.submitted[-1].draft_tag == reached


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_tag_is_refused_with_the_names_there_are(drafts, stream):
    before = len(drafts.engine.submitted)
    response = ask(drafts, draft_tag="prose", stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "draft_tag", "invalid_value")
    assert error["message"] == "draft_tag must name one of the drafts: default, code; got 'prose'"
    for bad in ("x" * 65, 3):
        assert ask(drafts, draft_tag=bad).json()["error"]["param"] == "draft_tag"
    assert ask(drafts, learn="no").json()["error"]["param"] == "learn"
    assert len(drafts.engine.submitted) == before


def test_without_a_draft_no_tag_fits(serve_engine):
    engine = ScriptedEngine(EngineConfig(target="models/scripted", draft=None))
    engine.start()
    with serve_engine(engine, ByteTokenizer(), ServerSettings()) as server:
        error = server.post(prompt="x", draft_tag="default").json()["error"]
        assert error["message"] == "draft_tag must be absent: this engine has no draft; got 'default'"
        assert server.http.get("/v1/models").json()["data"][0]["drafts"] == []
    engine.close()


def exposed(stats: LearningStats) -> dict[tuple, float]:
    engine = ScriptedEngine(EngineConfig())
    engine.stats = lambda: EngineStats(StepStats(), learning=stats)
    families = text_string_to_metric_families(ServerMetrics(engine).text().decode())
    found = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    return {key: value for key, value in found.items() if key[0].startswith(("adaserve_draft_", "adaserve_learning_"))}


def test_all_that_learning_reports_is_exposed_and_counts_begin_at_zero():
    found = exposed(STATS)
    found.pop(("adaserve_draft_resident",))
    assert found == {
        ("adaserve_draft_version", "default"): 3,
        ("adaserve_draft_version", "code"): 0,
        ("adaserve_draft_drafted_tokens_total", "default"): 400,
        ("adaserve_draft_drafted_tokens_total", "code"): 0,
        ("adaserve_draft_accepted_tokens_total", "default"): 300,
        ("adaserve_draft_accepted_tokens_total", "code"): 0,
        ("adaserve_learning_held_out_acceptance", "default"): 0.625,
        ("adaserve_learning_loss", "default"): 1.5,
        ("adaserve_learning_updates_total", "default"): 4,
        ("adaserve_learning_updates_total", "code"): 0,
        ("adaserve_learning_refused_total", "default"): 2,
        ("adaserve_learning_refused_total", "code"): 0,
        ("adaserve_learning_rolled_back_total", "default"): 1,
        ("adaserve_learning_rolled_back_total", "code"): 0,
        ("adaserve_learning_records", "default"): 80,
        ("adaserve_learning_records", "code"): 5,
        ("adaserve_learning_held_out_records", "default"): 10,
        ("adaserve_learning_left_out_total", "opt_out"): 7,
        ("adaserve_learning_left_out_total", "abort"): 0,
        ("adaserve_learning_left_out_total", "error"): 0,
        ("adaserve_learning_left_out_total", "no_positions"): 0,
        ("adaserve_learning_left_out_total", "adapter"): 0,
        ("adaserve_learning_left_out_total", "failed"): 0,
        ("adaserve_learning_micro_steps_total",): 12,
        ("adaserve_learning_train_seconds_total",): 0.75,
        ("adaserve_learning_delay_seconds_total",): 0.25,
        ("adaserve_learning_delay_max_seconds",): 0.03125,
        ("adaserve_learning_target_tokens_total",): 900,
        ("adaserve_learning_lost_total", "no_room"): 30,
        ("adaserve_learning_lost_total", "not_finite"): 0,
    }


def test_every_field_has_a_metric():
    assert [spec.name for spec in metrics_of(LearningStats).values() if not spec.name] == []
    assert list(metrics_of(LearningStats)) == [field.name for field in fields(LearningStats)]


def test_where_nothing_learns_no_draft_is_listed():
    assert [key for key in exposed(LearningStats()) if len(key) > 1] == []
    assert learning_drafts(LearningStats()) == []


def test_the_dashboard_lists_the_drafts_and_what_is_not_known_is_null():
    assert learning_drafts(STATS) == [
        LearningDraft("default", 3, 0.75, 0.625, 1.5, 4, 2, 1, 80),
        LearningDraft("code", 0, None, None, None, 0, 0, 0, 5),
    ]


def test_the_dashboard_sends_them(start_server):
    with start_server(ServerSettings(dashboard=True)) as server:
        server.engine.stats = lambda: EngineStats(StepStats(), learning=STATS)
        first, second = server.http.get("/dashboard/data").json()["learning"]
        assert (first["name"], first["version"], second["held_out_acceptance"]) == ("default", 3, None)
