"""Masks are the true sets of next tokens, in trees as in texts; schemas that cannot be enforced are refused in time."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from adaserve_jax.constraints.grammar import Grammars
from adaserve_jax.constraints.grammar_cache import MAX_PREPARING, MAX_SCHEMAS
from adaserve_jax.constraints.grammar_schema import MAX_LEVELS, MAX_NESTING
from adaserve_jax.constraints.grammar_vocabulary import COMPILE_AT_ONCE, COMPILE_LIMIT_S, LIMITS, Vocabulary
from adaserve_jax.errors import AdaServeError, CheckpointError, ConfigError, QueueFullError, RequestError
from adaserve_jax.models.folders import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.sampling import MAX_SCHEMA_CHARS
from tests.conftest import ROOT
from tests.oracles.json_texts import all_texts
from tests.waiting import wait_until

pytest.importorskip("llguidance", reason="llguidance is not installed; `make test` installs it")

V, EOS, USER = 2048, 0, 1
OBJECT = {"type": "object"}
FINITE: dict[str, dict[str, Any]] = {
    "constant": {"const": {"name": ["Ada", 1.5, None, True], "über": "€😀 \\"}},
    "words": {"enum": ["yes", "no", "not yet", "nothing", ""]},
    "range": {"type": "integer", "minimum": -12, "maximum": 123},
    "object": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Romeo", "Oslo"]},
            "ok": {"type": "boolean"},
            "level": {"type": "integer", "minimum": 8, "maximum": 11},
        },
        "required": ["city", "ok"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"enum": [0, 10, "a", None]}, "minItems": 1, "maxItems": 3},
    "either": {
        "anyOf": [
            {"type": "null"},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            {"type": "object", "properties": {"x": {"const": 1}}, "additionalProperties": False},
        ]
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]},
    },
    "required": ["name", "age", "score", "code", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "tag": {"enum": ["red", "green"]},
        "link": {
            "type": "object",
            "properties": {"deep": {"anyOf": [{"$ref": "#/$defs/link"}, {"const": 7}]}},
            "required": ["deep"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_folder("demo", "target"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, V, (EOS,))


@pytest.fixture(scope="module")
def others(tokenizer: Tokenizer) -> Grammars:
    """Shares nothing with `grammars`."""
    return Grammars(tokenizer, V, (EOS,))


@pytest.fixture(scope="module")
def token_bytes() -> dict[int, bytes]:
    """The bytes of every ordinary token of the embedded pair, by the byte alphabet of GPT-2."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    data = json.loads((resolve_folder("demo", "target") / "tokenizer.json").read_text())
    special = {token["id"] for token in data["added_tokens"]}
    vocabulary = data["model"]["vocab"]
    return {i: bytes(byte_of[char] for char in token) for token, i in vocabulary.items() if i not in special}


class Writer:
    """One text under a grammar, its masks as sets of ids."""

    def __init__(self, grammars: Grammars, schema: dict[str, Any], *, name: str = "writer", vocab_size: int = V):
        self.grammars, self.name = grammars, name
        self.vocab_size = vocab_size
        self.why: str | None = None
        grammars.add(name, grammars.prepare(json.dumps(schema)).result())

    def masks(self, tokens: list[int], parents: list[int]) -> np.ndarray:
        masks = np.full((len(tokens), -(-self.vocab_size // 32)), 0xAAAAAAAA, np.uint32)
        self.why = self.grammars.fill(self.name, np.asarray(tokens, np.int32), np.asarray(parents, np.int32), masks)
        return masks

    def allowed(self) -> set[int]:
        return ids_of(self.masks([5], [-1])[0])


def ids_of(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


# ---- the true sets of next tokens ----


@pytest.mark.parametrize("name", FINITE)
def test_masks_are_the_true_sets_of_next_tokens(
    grammars: Grammars, token_bytes: dict[int, bytes], tokenizer: Tokenizer, name: str
):
    texts = {text.encode() for text in all_texts(FINITE[name])}
    prefixes = {text[:end] for text in texts for end in range(len(text) + 1)}
    rng = np.random.default_rng(7)
    for walk in range(12):
        writer = Writer(grammars, FINITE[name])
        text, ids, complete = b"", [], False
        while True:
            true = {i for i, piece in token_bytes.items() if text + piece in prefixes}
            true |= {EOS} if text in texts else set()
            allowed = writer.allowed()
            next_bytes = {
                prefix[len(text)] for prefix in prefixes if prefix.startswith(text) and len(prefix) > len(text)
            }
            if len(next_bytes) == 1 and text not in texts and allowed != true:
                assert allowed < true and len(allowed) == 1, text  # the next test says which
            else:
                assert allowed == true, (text, tokenizer.decode(sorted(allowed ^ true)))
            assert complete <= (true == {EOS})
            token = int(rng.choice(sorted(allowed)))
            ids.append(token)
            complete = writer.grammars.advance(writer.name, [token])
            if token == EOS:
                break
            text += token_bytes[token]
        assert complete and text in texts and tokenizer.decode(ids) == text.decode(), walk
        assert writer.allowed() == {EOS}


def test_what_must_follow_is_spelled_as_the_tokenizer_spells_it(grammars: Grammars, tokenizer: Tokenizer):
    value = {"temperature": "the next morning"}
    writer, ids = Writer(grammars, {"const": value}), []
    for _ in range(40):
        allowed = writer.allowed()
        token = max(allowed, key=lambda i: len(tokenizer.decode([i])))
        ids.append(token)
        if grammars.advance(writer.name, [token]):
            break
    assert json.loads(tokenizer.decode(ids)) == value
    assert ids[2:-2] == tokenizer.encode(tokenizer.decode(ids))[2:-2]


# ---- trees ----


def random_tree(rng: np.random.Generator, writer: Writer, size: int) -> tuple[list[int], list[int]]:
    """Nodes in any order behind the root; two of three tokens are allowed where they stand."""
    tokens, parents = [5], [-1]
    while len(tokens) < size:
        parent = int(rng.integers(len(tokens)))
        mask = writer.masks(tokens, parents)[parent]
        allowed = sorted(ids_of(mask))
        token = int(rng.choice(allowed)) if rng.random() < 0.67 else int(rng.integers(V))
        tokens.append(token)
        parents.append(parent)
    order = [0, *(1 + rng.permutation(size - 1)).tolist()]
    place = {old: new for new, old in enumerate(order)}
    return [tokens[old] for old in order], [-1 if old == 0 else place[parents[old]] for old in order]


@pytest.mark.parametrize(
    "schema", [FINITE["object"], FINITE["range"], PERSON, OBJECT], ids=["object", "range", "person", "any"]
)
def test_trees_get_the_masks_of_texts(grammars: Grammars, others: Grammars, schema: dict[str, Any]):
    rng = np.random.default_rng(3)
    writer, written = Writer(grammars, schema), []
    every = set(range(V))
    for _ in range(6):
        tokens, parents = random_tree(rng, writer, size=24)
        masks = writer.masks(tokens, parents)
        for node in range(len(tokens)):
            path, at = [], node
            while at != 0:
                path.insert(0, tokens[at])
                at = parents[at]
            fresh = Writer(others, schema)
            others.advance(fresh.name, written)
            reached = True
            for token in path:
                reached = reached and token in fresh.allowed()
                if reached:
                    others.advance(fresh.name, [token])
            assert ids_of(masks[node]) == (fresh.allowed() if reached else every), (written, path)
        before = writer.allowed()
        assert ids_of(masks[0]) == before
        steps = [int(rng.choice(sorted(before)))]
        written += steps
        grammars.advance(writer.name, steps)
        if EOS in written:
            break


# ---- whole texts ----


def write(writer: Writer, tokenizer: Tokenizer, rng: np.random.Generator, most: int = 600) -> str:
    """A text of random allowed tokens; half of the time one that closes something, where there is one."""
    closers = {i for i, token in tokenizer.token_of().items() if token[0] in '"}]'} | {EOS}
    ids: list[int] = []
    for _ in range(most):
        allowed = writer.allowed()
        closing = allowed & closers
        token = int(rng.choice(sorted(closing if closing and rng.random() < 0.5 else allowed)))
        writer.grammars.advance(writer.name, [token])
        if token == EOS:
            return tokenizer.decode(ids)
        ids.append(token)
    pytest.fail(f"no end after {most} tokens: {tokenizer.decode(ids)}")


def assert_person(value: Any) -> None:
    assert list(value) == ["name", "age", "score", "code", "tags", "next"]
    assert isinstance(value["name"], str) and 1 <= len(value["name"]) <= 12
    assert isinstance(value["age"], int) and 0 <= value["age"] <= 150
    assert isinstance(value["score"], (int, float)) and 0 <= value["score"] <= 1
    assert re.fullmatch(r"[A-Z]{2}-[0-9]{3}", value["code"])
    assert set(value["tags"]) <= {"red", "green"} and len(value["tags"]) <= 3
    link = value["next"]
    while isinstance(link, dict):
        assert list(link) == ["deep"]
        link = link["deep"]
    assert link in (7, None)


def test_whole_texts_are_json_of_their_schema(grammars: Grammars, tokenizer: Tokenizer):
    rng = np.random.default_rng(11)
    for _ in range(12):
        text = write(Writer(grammars, PERSON), tokenizer, rng)
        assert_person(json.loads(text))
        assert re.search(r"\s", re.sub(r'"[^"\\]*(?:\\.[^"\\]*)*"|[,:] ', "", text)) is None
    for _ in range(12):
        assert isinstance(json.loads(write(Writer(grammars, OBJECT), tokenizer, rng)), dict)


# ---- ids that are no text ----


def test_special_tokens_padding_ids_and_several_ends(tokenizer: Tokenizer):
    """The model's vocabulary is larger than the tokenizer's, and two ids end a text: one of them special to the
    tokenizer, the other, "!", an ordinary token that the strings must then do without."""
    exclamation = tokenizer.encode("!")[0]
    vocab_size = V + 37
    grammars = Grammars(tokenizer, vocab_size, (EOS, exclamation))
    writer = Writer(grammars, {"type": "string"}, vocab_size=vocab_size)
    grammars.advance(writer.name, tokenizer.encode('"'))
    inside = writer.allowed()
    assert len(inside) > 1500 and max(inside) < tokenizer.vocab_size
    assert not inside & {*tokenizer.special_ids, exclamation}
    assert grammars.advance(writer.name, tokenizer.encode('a"'))
    assert writer.allowed() == {EOS, exclamation}
    masks = writer.masks([5, exclamation, EOS, 9], [-1, 0, 1, 1])
    assert [ids_of(mask) for mask in masks[:3]] == [{EOS, exclamation}] * 3
    assert ids_of(masks[3]) == set(range(vocab_size))
    assert grammars.advance(writer.name, [exclamation]) and grammars.advance(writer.name, [EOS])
    assert writer.allowed() == {EOS, exclamation}


def test_a_number_may_end_or_go_on(grammars: Grammars, tokenizer: Tokenizer):
    writer = Writer(grammars, {"type": "integer"})
    assert EOS not in writer.allowed()
    assert not grammars.advance(writer.name, tokenizer.encode("4"))
    assert EOS in writer.allowed() and tokenizer.encode("2")[0] in writer.allowed()


def test_a_forbidden_token_leaves_nothing_allowed(grammars: Grammars, tokenizer: Tokenizer):
    writer, neighbour = Writer(grammars, OBJECT), Writer(grammars, OBJECT, name="neighbour")
    assert not grammars.advance(writer.name, tokenizer.encode("x"))
    assert writer.allowed() == set()
    assert neighbour.allowed() != set()
    grammars.discard(writer.name)
    grammars.discard(writer.name)
    with pytest.raises(KeyError):
        grammars.advance(writer.name, [EOS])


# ---- what is kept, and by whom it may be asked ----


def constant(value: int) -> str:
    return json.dumps({"const": value})


def test_compiled_schemas_are_kept_up_to_a_bound(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    compiled: list[str] = []
    compile_schema = Vocabulary.compile
    monkeypatch.setattr(
        Vocabulary, "compile", lambda self, s, keep: (compiled.append(s), compile_schema(self, s, keep))[1]
    )
    grammars = Grammars(tokenizer, V, (EOS,), max_schemas=2)
    for value in (1, 2, 1, 3, 1, 2):
        grammars.prepare(constant(value)).result()
        assert grammars.num_prepared <= 2
    assert compiled == [constant(value) for value in (1, 2, 3, 2)]
    grammars.add("old", grammars.prepare(constant(1)).result())
    for value in (4, 5):
        grammars.prepare(constant(value)).result()
    masks = np.zeros((1, V // 32), np.uint32)
    grammars.fill("old", np.zeros(1, np.int32), np.full(1, -1, np.int32), masks)  # its schema is no longer kept
    assert ids_of(masks[0]) == set(tokenizer.encode("1"))


def test_a_schema_whose_states_are_used_up_is_prepared_anew(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LIMITS, "max_lexer_states", 300)
    grammars, rng = Grammars(tokenizer, V, (EOS,)), np.random.default_rng(0)
    for _ in range(3):
        writer = Writer(grammars, HOSTILE["pattern that looks back"])
        assert writer.why is None
        written = 0
        while allowed := writer.allowed():
            grammars.advance(writer.name, [int(rng.choice(sorted(allowed)))])
            written += 1
        assert 3 < written < 200 and grammars.num_prepared == 0
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

        def wait(vocabulary: Vocabulary, schema: dict[str, Any]) -> Any:
            self.count += 1
            assert self.open.wait(30)
            return compile_schema(vocabulary, schema)

        monkeypatch.setattr(Vocabulary, "_compile", wait)


def test_a_schema_is_prepared_once_for_all_who_ask_meanwhile(tokenizer: Tokenizer, gated: Gate):
    grammars = Grammars(tokenizer, V, (EOS,))
    futures = [grammars.prepare(constant(1)) for _ in range(5)]
    assert not any(future.done() for future in futures)
    gated.open.set()
    assert len({id(future.result(30)) for future in futures}) == 1 and gated.count == 1
    assert grammars.prepare(constant(1)).done()


def test_what_comes_too_late_is_refused_once_and_then_there(
    tokenizer: Tokenizer, gated: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("adaserve_jax.constraints.grammar_vocabulary.COMPILE_LIMIT_S", 0.05)
    grammars = Grammars(tokenizer, V, (EOS,))
    for _ in range(2):
        with pytest.raises(RequestError, match=r"more than 0.05 s to prepare"):
            grammars.prepare(constant(1)).result(30)
    assert gated.count == 1
    gated.open.set()
    wait_until(lambda: grammars.num_prepared)
    assert grammars.prepare(constant(1)).result(0).schema == constant(1) and gated.count == 1


def test_so_many_may_wait_and_refusals_are_remembered_up_to_a_bound(tokenizer: Tokenizer, gated: Gate):
    grammars = Grammars(tokenizer, V, (EOS,), max_schemas=2)
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

    grammars = Grammars(tokenizer, V, (EOS,))
    writer = Writer(grammars, OBJECT)
    monkeypatch.setattr(Vocabulary, "mask", panic)
    with pytest.raises(PanicException):
        writer.allowed()
    assert grammars.num_prepared == 0  # texts of a schema share what may be broken now
    with pytest.raises(AdaServeError, match="failed on this request's response_format") as caught:
        grammars.prepare(constant(1)).result(30)
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


# ---- what cannot be made ----


def test_engines_without_structured_output_say_why(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="end-of-text token"):
        Grammars(tokenizer, V, ())

    class Broken:
        def backend_json(self) -> str:
            return '{"version": "1.0"}'

    with pytest.raises(CheckpointError, match="cannot read the target's tokenizer with a vocabulary of 2048"):
        Grammars(Broken(), V, (EOS,))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'adaserve-jax\[server\]'"):
        Grammars(tokenizer, V, (EOS,))


def test_the_guide_names_the_limits():
    guide = (ROOT / "docs" / "structured-output.md").read_text()
    values = [int(value) for value in re.findall(r"^\| .* \| (\d+) \|$", guide, re.MULTILINE)]
    assert values == [
        MAX_SCHEMA_CHARS,
        MAX_NESTING,
        MAX_LEVELS,
        COMPILE_LIMIT_S,
        COMPILE_AT_ONCE,
        MAX_PREPARING,
        MAX_SCHEMAS,
    ]


# ---- schemas that are refused ----

TOO_DEEP = '{"type":"object","properties":{"a":' * 40 + "{}" + "}}" * 40


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"minimum": NaN}', "not JSON: NaN"),
        ("[1]", "expected an object"),
        ("true", "expected an object"),
        ('"object"', "expected an object"),
        ("null", "expected an object"),
        ('{"type": "objekt"}', "objekt"),
        ('{"type": 7}', "type"),
        ('{"type": "object", "properties": 3}', "properties"),
        ('{"type": "object", "required": "a"}', "required"),
        ('{"type": "string", "pattern": "("}', "pattern|regex|unclosed"),
        ('{"type": "string", "pattern": "(?=a)b"}', "look"),
        ('{"type": "string", "format": "shape-of-a-cloud"}', "format"),
        ('{"type": "integer", "minimum": 5, "maximum": 4}', "minimum|Unsatisfiable|range"),
        ('{"enum": []}', "enum|Unsatisfiable|empty"),
        ('{"not": {"type": "string"}}', "not"),
        ('{"$ref": "#/$defs/nowhere"}', "nowhere|ref"),
        ('{"$ref": "https://127.0.0.1:9/schema.json"}', "127.0.0.1|ref"),
        ('{"$ref": "file:///etc/passwd"}', "ref|file"),
        ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        ('{"type": "object", "x-guidance": {"lenient": true}}', "x-guidance"),
        (TOO_DEEP, f"at most {MAX_NESTING} objects"),
        ("[" * 60_000, "far more|not JSON"),
        ('{"enum": ["' + "a" * 70_000 + '"]}', "at most 65536 characters"),
        (
            json.dumps({"$ref": "#/a"} | {"a": [{"items": {"$ref": f"#/{i}"}} for i in range(1100)]}),
            f"at most {MAX_LEVELS} levels",
        ),
        ('{"$ref": "#"}', "no JSON at all fits it"),
        ('{"const": "\\ud800"}', "."),
        ('{"const": "\ud800"}', "."),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(grammars: Grammars, schema: str, says: str):
    with pytest.raises(RequestError, match=says) as caught:
        grammars.prepare(schema).result()
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_schema")
    assert len(str(caught.value)) < 700


def chain(length: int, link: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Definitions of which each is `link` of a reference to the next, begun at the first."""
    parts = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{length}": {"type": "object", "properties": {"x": {}}}}}


def nested(depth: int, schema: dict[str, Any]) -> dict[str, Any]:
    for _ in range(depth):
        schema = {"items": schema}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "nested": nested(60, {"type": "integer"}),
    "many words": {"enum": [f"w{i * 7919}" for i in range(5000)]},
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}},
    "its own reference": {"$ref": "#"},
    "both its own": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "either its own": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "in circles": chain(2, lambda ref: {"$ref": ref})
    | {"$defs": {"d0": {"$ref": "#/$defs/d1"}, "d1": {"$ref": "#/$defs/d0"}}},
    "long chain": chain(1400, lambda ref: {"$ref": ref}),
    "long chain of both": chain(400, lambda ref: {"$ref": ref, "type": "object", "properties": {"y": {}}}),
    "deep definitions": chain(100, lambda ref: nested(55, {"$ref": ref})),
    "definitions deep enough to read": chain(40, lambda ref: nested(25, {"$ref": ref})),
    "doubling all": chain(40, lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]}),
    "doubling any": chain(40, lambda ref: {"anyOf": [{"$ref": ref}, {"$ref": ref}]}),
    "doubling objects": chain(
        40, lambda ref: {"properties": {"a": {"$ref": ref}, "b": {"$ref": ref}}, "type": "object"}
    ),
    "alternatives of alternatives": {
        "allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(8)]} for i in range(8)]
    },
    "many items": {"type": "array", "items": {"type": "object"}, "minItems": 10**9},
    "long string": {"type": "string", "minLength": 10**9},
    "most of a string": {"type": "string", "maxLength": 10**9},
    "pattern that looks back": {"type": "string", "pattern": "^.*a.{60}$"},
    "pattern of ambiguity": {"type": "string", "pattern": "^(((a*)*)*)*(a|a|aa)*b$"},
    "pattern of choices": {"type": "string", "pattern": "^(a?){200}a{200}$"},
    "pattern of counts": {"type": "string", "pattern": "^((a{1,1000}){1,1000}b){1,1000}$"},
    "pattern of words": {"type": "string", "pattern": "^(" + "|".join(f"[a-z]*x{i}[0-9]*" for i in range(600)) + ")*$"},
    "patterns at once": {"allOf": [{"type": "string", "pattern": f"a.*{chr(98 + i)}.{{{i}}}"} for i in range(20)]},
    "fine steps": {"type": "number", "multipleOf": 1e-30, "minimum": 0.1, "maximum": 1e30},
    "coarse steps": {"type": "integer", "multipleOf": 99999999999999989},
    "steps at once": {"allOf": [{"type": "integer", "multipleOf": p} for p in (997, 991, 983, 977, 971, 967)]},
    "huge number": {"const": 10**4000},
    "a hundred choices": {"type": "array", "prefixItems": [{"anyOf": [{"type": "string"}, {"type": "array"}]}] * 900},
}


SLOW = {"patterns at once", "many properties", "doubling objects"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in HOSTILE])
def test_hostile_schemas_end_in_time(tokenizer: Tokenizer, grammars: Grammars, name: str):
    """Refused, or followed: then each mask is bounded as well, and a text at its limit is left with nothing."""
    began = time.process_time()  # of all threads, whatever else the machine does
    schema = json.dumps(HOSTILE[name])
    try:
        grammars.prepare(schema).result()
    except RequestError as error:
        assert error.code == "invalid_schema"
    else:
        writer, rng = Writer(grammars, HOSTILE[name]), np.random.default_rng(2)
        for _ in range(30):
            allowed = writer.allowed()
            if not allowed or grammars.advance(writer.name, [int(rng.choice(sorted(allowed)))]):
                break
    assert time.process_time() - began < 20
