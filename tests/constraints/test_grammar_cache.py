"""What is kept of schemas, and who may ask for it, when and from which thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from adaserve_jax.constraints.grammar import LIMITS, MAX_PREPARING, Grammars, Vocabulary
from adaserve_jax.errors import AdaServeError, QueueFullError, RequestError
from adaserve_jax.models.tokenizer import Tokenizer
from tests.constraints.grammar_texts import EOS, FINITE, OBJECT, PERSON, V, Writer, assert_person, ids_of, write
from tests.constraints.hostile_schemas import HOSTILE
from tests.waiting import wait_until

pytest.importorskip("llguidance", reason="llguidance is not installed; `make test` installs it")


def constant(value: int) -> str:
    return json.dumps({"const": value})


def test_compiled_schemas_are_kept_up_to_a_bound(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    compiled: list[str] = []
    compile_schema = Vocabulary.compile
    monkeypatch.setattr(
        Vocabulary, "compile", lambda self, s, keep: (compiled.append(s[1]), compile_schema(self, s, keep))[1]
    )
    grammars = Grammars(tokenizer.backend_json(), V, (EOS,), max_grammars=2)
    for value in (1, 2, 1, 3, 1, 2):
        grammars.prepare(constant(value)).result()
    assert compiled == [constant(value) for value in (1, 2, 3, 2)]
    grammars.add("old", grammars.prepare(constant(1)).result())
    for value in (4, 5):
        grammars.prepare(constant(value)).result()
    masks = np.zeros((1, V // 32), np.uint32)
    grammars.fill("old", np.zeros(1, np.int32), np.full(1, -1, np.int32), masks)  # its schema is no longer kept
    assert ids_of(masks[0]) == set(tokenizer.encode("1"))


def test_a_schema_whose_states_are_used_up_is_prepared_anew(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LIMITS, "max_lexer_states", 300)
    grammars, rng = Grammars(tokenizer.backend_json(), V, (EOS,)), np.random.default_rng(0)
    for _ in range(3):
        writer = Writer(grammars, HOSTILE["pattern that looks back"])
        assert writer.why is None
        written = 0
        while allowed := writer.allowed():
            grammars.advance(writer.name, [int(rng.choice(sorted(allowed)))])
            written += 1
        assert 3 < written < 200
        assert writer.why is not None and "states" in writer.why


@pytest.fixture
def gated(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


class Gate:
    """Holds every preparation until it is opened, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open = threading.Event()
        self.count = 0
        compile_schema = Vocabulary._compile

        def wait(vocabulary: Vocabulary, *source: Any) -> Any:
            self.count += 1
            assert self.open.wait(30)
            return compile_schema(vocabulary, *source)

        monkeypatch.setattr(Vocabulary, "_compile", wait)


def test_a_schema_is_prepared_once_for_all_who_ask_meanwhile(tokenizer: Tokenizer, gated: Gate):
    grammars = Grammars(tokenizer.backend_json(), V, (EOS,))
    futures = [grammars.prepare(constant(1)) for _ in range(5)]
    assert not any(future.done() for future in futures)
    gated.open.set()
    assert len({id(future.result(30)) for future in futures}) == 1 and gated.count == 1
    assert grammars.prepare(constant(1)).done()


def test_what_comes_too_late_is_refused_once_and_then_there(
    tokenizer: Tokenizer, gated: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("adaserve_jax.constraints.grammar.COMPILE_LIMIT_S", 0.05)
    grammars = Grammars(tokenizer.backend_json(), V, (EOS,))
    for _ in range(2):
        with pytest.raises(RequestError, match=r"more than 0.05 s to prepare"):
            grammars.prepare(constant(1)).result(30)
    assert gated.count == 1
    gated.open.set()
    wait_until(lambda: grammars.prepare(constant(1)).exception(30) is None)
    assert grammars.prepare(constant(1)).result(0).key[1] == constant(1) and gated.count == 1


def test_so_many_may_wait_and_refusals_are_remembered_up_to_a_bound(tokenizer: Tokenizer, gated: Gate):
    grammars = Grammars(tokenizer.backend_json(), V, (EOS,), max_grammars=2)
    waiting = [grammars.prepare(f'{{"type": "kind {index}"}}') for index in range(MAX_PREPARING)]
    with pytest.raises(QueueFullError, match="retry later"):
        grammars.prepare(constant(1)).result(0)
    gated.open.set()
    assert {type(future.exception(30)) for future in waiting} <= {RequestError, QueueFullError}
    for kind, fresh in (("a", 1), ("b", 1), ("a", 0), ("c", 1), ("a", 0), ("b", 1)):
        before = gated.count
        with pytest.raises(RequestError, match=f"kind {kind}"):
            grammars.prepare(f'{{"type": "kind {kind}"}}').result(30)
        assert gated.count - before == fresh, kind


def test_a_panic_of_the_library_is_an_error_of_the_request(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    class PanicException(BaseException):
        pass

    def panic(*_: Any) -> None:
        raise PanicException("index out of bounds")

    grammars = Grammars(tokenizer.backend_json(), V, (EOS,))
    writer = Writer(grammars, OBJECT)
    monkeypatch.setattr(Vocabulary, "mask", panic)
    with pytest.raises(PanicException):
        writer.allowed()
    # Texts of a schema share what may be broken now, so it is prepared anew.
    with pytest.raises(AdaServeError, match="failed on this request's response_format") as caught:
        grammars.prepare(json.dumps(OBJECT)).result(30)
    assert caught.value.code == "engine_error"


def test_schemas_are_checked_in_many_threads_while_one_writes(grammars: Grammars, tokenizer: Tokenizer):
    good = [json.dumps(FINITE[name] | {"title": f"{name} {i}"}) for name in FINITE for i in range(4)]
    bad = [json.dumps({"type": f"kind {i}"}) for i in range(12)]
    rng = np.random.default_rng(5)

    def verdict(schema: str) -> bool:
        try:
            grammars.prepare(schema).result()
        except RequestError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        verdicts = pool.map(verdict, [*good, *bad, *good])
        for _ in range(4):
            assert_person(json.loads(write(Writer(grammars, PERSON), tokenizer, rng)))
        assert list(verdicts) == [True] * len(good) + [False] * len(bad) + [True] * len(good)
