"""Routing: the tag first, then language or topic, then the default."""

# ruff: noqa: RUF001

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from adaserve_jax.distill.routing import LEAST_CHANCE, MIN_PROMPTS, DraftRouter, LanguageDetector, make_router
from adaserve_jax.errors import ConfigError, RequestError
from tests.distill import topic_prompts

EMBEDDING = np.array([[1, 0], [0, 0], [-1, 0]], np.float32)
TEXTS = {
    "de": (
        "Bitte schreibe mir eine kurze Zusammenfassung der Geschichte dieser Stadt.",
        "Wie viele Äpfel bleiben übrig, wenn ich von zwanzig Äpfeln sieben verschenke?",
        "Kannst du mir erklären, warum der Himmel am Abend rot wird?",
    ),
    "fr": (
        "Peux-tu m'expliquer comment fonctionne un moteur à combustion interne ?",
        "Écris une lettre à mon propriétaire pour lui demander de réparer le chauffage.",
        "Quels sont les avantages et les inconvénients du travail à distance ?",
    ),
    "ja": (
        "日本の首都はどこですか。簡単に説明してください。",
        "この文章を英語に翻訳してください。",
        "おすすめの本を三冊教えてください。",
    ),
    "zh": (
        "请用中文写一篇关于人工智能的短文。",
        "请告诉我怎样才能学好数学。",
        "天空是蓝色的,请解释这是为什么。",
    ),
    "ru": (
        "Расскажи мне о теории относительности простыми словами.",
        "Сколько яблок останется, если из двадцати отдать семь?",
        "Напиши короткое письмо моему начальнику об отпуске.",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """The library's model takes a second to read."""
    model = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=LEAST_CHANCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageIdentifier, "from_model_file", lambda *_, **__: model)
        yield


@pytest.fixture(scope="module")
def languages() -> LanguageDetector:
    return LanguageDetector(("default", *TEXTS))


@pytest.mark.parametrize("language", TEXTS)
def test_a_language_finds_its_draft(languages: LanguageDetector, language: str):
    index = 1 + list(TEXTS).index(language)
    assert [languages.route(text) for text in TEXTS[language]] == [index] * 3
    turns = "user: " + topic_prompts.prose()[0] * 9 + "\nuser: " + " ".join(TEXTS[language]) * 12
    assert languages.route(turns) == index  # what was asked last


def test_everything_else_is_the_defaults(languages: LanguageDetector):
    english = [*topic_prompts.maths(50), *topic_prompts.prose()[:50], *topic_prompts.code()[:50]]
    routed = np.array([languages.route(text) for text in english])
    assert (routed == 0).mean() >= 0.98
    assert [languages.route(text) for text in ("", "hi", "12 + 45 = ?", "\ud800", "{}[]();")] == [0] * 5


def test_names_of_drafts_are_languages(caplog: pytest.LogCaptureFixture):
    with pytest.raises(ConfigError, match="ISO 639 code of a language, such as de=FOLDER; got code, maths"):
        LanguageDetector(("default", "code", "maths"))
    with caplog.at_level(logging.WARNING):
        detector = LanguageDetector(("default", "code", "pt-BR"))
    assert "only a tag leads to them: code" in caplog.text
    assert detector.route("Explique como funciona a fotossíntese nas plantas e por que ela é importante.") == 2


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(ConfigError, match=r"pip install 'adaserve-jax\[routing\]'"):
        DraftRouter(["default", "de"], "language")
    assert DraftRouter(["default"], "language").route([1], "Wie geht es dir heute?") == 0  # nothing to choose


@pytest.mark.parametrize("how", ["tag", "language", "topic"])
def test_a_tag_names_a_draft(how: str):
    router = DraftRouter(["default", "de", "code"], how, embedding=EMBEDDING)
    assert router.needs_text == (how == "language")
    assert [router.index(tag) for tag in ("code", "de", "default")] == [2, 1, 0]
    with pytest.raises(RequestError, match="one of the drafts: default, de, code; got 'fr'") as error:
        router.index("fr")
    assert error.value.param == "draft_tag"


def test_by_tag_alone_the_rest_is_the_defaults():
    router = DraftRouter(["default", "de"])
    assert router.route([0], TEXTS["de"][0]) == 0 and router.to_state() == {}
    router.from_state({})


def test_topics_are_learned_from_tags():
    router = DraftRouter(["default", "code"], "topic", embedding=EMBEDDING)
    assert router.route([0]) == 0
    for _ in range(MIN_PROMPTS):
        router.learn("code", [0], "")
        router.learn("default", [2], "")
    assert router.route([0]) == 1 and router.route([2]) == 0
    again = DraftRouter(["default", "code"], "topic", embedding=EMBEDDING)
    again.from_state(router.to_state())
    assert again.route([0]) == 1 and again.route([2]) == 0


def test_a_draft_with_other_examples_begins_its_topic_anew(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)

    def started(code: int | None, state: dict) -> DraftRouter:
        examples = {} if code is None else {"code": [[code]] * MIN_PROMPTS}
        router = DraftRouter(["default", "code"], "topic", embedding=EMBEDDING, examples=examples)
        router.from_state(state)
        return router

    without = started(None, {})
    assert without.route([0]) == 0
    first = started(0, json.loads(json.dumps(without.to_state())))
    assert first.route([0]) == 1 and "learned anew: code" in caplog.text
    first.learn("code", [0], "")
    caplog.clear()
    again = started(0, first.to_state())
    assert again.to_state() == first.to_state() and not caplog.text
    corrected = started(2, first.to_state())
    assert corrected.route([2]) == 1 and corrected.route([0]) == 0


def test_one_client_has_half_of_a_topic_and_no_more_while_others_have_any():
    router = DraftRouter(["default", "code"], "topic", embedding=EMBEDDING)
    for number in range(MIN_PROMPTS):
        router.learn("code", [0], f"client {number % 2}")
        router.learn("default", [2], f"client {number % 2}")
    for _ in range(50):
        router.learn("code", [2], "flood")
    assert router.route([0]) == 1 and router.route([2]) == 0
    again = DraftRouter(["default", "code"], "topic", embedding=EMBEDDING)
    again.from_state(router.to_state())  # nor by way of a restart
    again.learn("code", [2], "flood")
    assert again.to_state() == router.to_state()


def test_what_a_router_cannot_work_with_is_told():
    with pytest.raises(ConfigError, match="one of tag, language, topic, got 'colour'"):
        DraftRouter(["default", "de"], "colour")
    with pytest.raises(ConfigError, match="needs the embedding of the default draft"):
        DraftRouter(["default", "de"], "topic")


def test_examples_in_the_drafts_folders_are_topics_from_the_start(tmp_path: Path):
    folders = {name: tmp_path / name for name in ("default", "code")}
    for index, folder in enumerate(folders.values()):
        folder.mkdir()
        (folder / "topic_examples.txt").write_text(f"{index * 2}\n" * MIN_PROMPTS)
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [int(text)]

    router = make_router("topic", folders, embedding=lambda: EMBEDDING, encode=encode)
    assert router.names == ("default", "code") and len(asked) == 2 * MIN_PROMPTS
    assert router.route([0]) == 0 and router.route([2]) == 1


def test_nothing_is_read_where_topics_do_not_matter(tmp_path: Path):
    def no_embedding() -> np.ndarray:
        raise AssertionError

    for how, names in (("tag", ("default", "code")), ("topic", ("default",))):
        router = make_router(how, dict.fromkeys(names, tmp_path), embedding=no_embedding, encode=lambda _: [])
        assert router.route([0]) == 0
