"""Which draft a request gets, and what the router learns of whom, by a router that is told and asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.distill.routing import MAX_PROMPT_CHARS
from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import RequestError


class OneRoute:
    """A router that notes what it is told."""

    def __init__(self, *, needs_text: bool):
        self.needs_text = needs_text
        self.told: list[object] = []

    def index(self, name: str) -> int:
        return 1

    def learn(self, name: str, prompt_ids: list[int], tenant: str) -> None:
        self.told.append((name, prompt_ids, tenant))

    def route(self, prompt_ids: list[int], text: str) -> int:
        self.told.append(text)
        return 1


def routing_engine(router: OneRoute, monkeypatch: pytest.MonkeyPatch) -> tuple[LocalEngine, list[list[object]]]:
    """An engine that was not started, and whose core refuses who is called so; and what the router knew then."""
    engine, known = LocalEngine(EngineConfig()), []

    def add(request: GenerateRequest, *_: object) -> None:
        known.append(list(router.told))
        if request.request_id == "refused":
            raise RequestError("no")

    made = SimpleNamespace(router=router, tokenizer=SimpleNamespace(decode=str))
    parts = {"_assembly": made, "_core": SimpleNamespace(add=add)}
    for name, part in parts.items():
        monkeypatch.setattr(engine, name, part, raising=False)
    return engine, known


def test_a_refused_request_or_one_that_opts_out_teaches_no_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    router = OneRoute(needs_text=False)
    engine, known = routing_engine(router, monkeypatch)
    for request_id, learn in (("refused", True), ("private", False), ("added", True)):
        engine._add(GenerateRequest(request_id, [5], draft_tag="other", tenant="t", learn=learn), 0.0, None)
    assert known == [[], [], []]
    assert router.told == [("other", [5], "t")]


def test_a_step_waits_for_the_end_of_a_long_prompt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    router = OneRoute(needs_text=True)
    prompt = list(range(50_000))
    routing_engine(router, monkeypatch)[0]._add(GenerateRequest("long", prompt), 0.0, None)
    assert router.told == [str(prompt[-MAX_PROMPT_CHARS:])]
