"""Regexes, choices and grammars: masks are the true sets of next tokens, hostile ones end in time, refusals say why."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from adaserve_jax.constraints.grammar import Grammars
from adaserve_jax.constraints.grammar_source import MAX_RULES
from adaserve_jax.errors import RequestError
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.sampling import GrammarKind, GrammarSource
from tests.constraints.grammar_texts import EOS, FINITE, check_ends_in_time, mask
from tests.oracles.json_texts import all_texts
from tests.slow import slow_after

pytest.importorskip("llguidance", reason="llguidance is not installed; `make test` installs it")
WORDS = ["yes", "no", "not yet", "", "über €😀", 'a "q" \\ {x}\n\x00', "(a|b)*"]
LANGUAGES: dict[str, tuple[GrammarKind, GrammarSource, list[str]]] = {
    "choice": ("choice", tuple(WORDS), WORDS),
    "one word": ("choice", ("aye",), ["aye"]),
    "regex": ("regex", r"(ab|ac){1,2}[0-9]?", [
        one + two + digit for one in ("ab", "ac") for two in ("ab", "ac", "") for digit in ("", *"0123456789")
    ]),
    "anchored regex": ("regex", "^(?:é|x/y)$", ["é", "x/y"]),
    "lark": ("grammar", 'start: "do" " " verb | NUM\nverb: "run" | "walk"\nNUM: /[1-3]{1,2}/', [
        "do run", "do walk", *"123", *(a + b for a in "123" for b in "123")
    ]),
    "lark with a schema": ("grammar", 'start: "x=" %json {"enum": [1, "%json {", null]} ";"', [
        "x=1;", 'x="%json {";', "x=null;"
    ]),
    "ebnf": ("grammar", 'root ::= "if " cond " then " ("a" | "b")  # a comment\ncond ::= [p-q] "=" [0-1]{2}', [
        f"if {p}={a}{b} then {c}" for p in "pq" for a in "01" for b in "01" for c in "ab"
    ]),
    "ebnf with codes": ("grammar", r"""root ::= "\u0041bc" | "\u00e9" | "\U0001F600" | "\u0022\u005c" | "\\u0041" | two
        # \u000a ::=
        two ::= [\u0030-\u0032\u005d\u00E8\u002f]{2}""", [
        "Abc", "é", "😀", '"\\', "\\u0041", *(one + two for one in "012]è/" for two in "012]è/")
    ]),
    "ebnf of counts of counts": ("grammar", 'root ::= (("a"{2}){1,2})? ("b"?){2}', [
        a + b for a in ("", "aa", "aaaa") for b in ("", "b", "bb")
    ]),
    "ebnf of operators in classes": ("grammar", "root ::= [a-c--.&&b~-] [^a-y&&{-\U0010ffff\\x00-%'-`]", [
        one + two for one in "abc-.&~" for two in "z"
    ]),
    "ebnf with a rule start": ("grammar", 'root ::= start start-0\nstart ::= "a" | "b"\nstart-0 ::= "c"', ["ac", "bc"]),
    "lark whose start is inlined": ("grammar", '?start: word | "b"\n!word: "a"', ["a", "b"]),
    "lark of many words": ("grammar", "start: " + " | ".join(f'"W{i}:"' for i in range(MAX_RULES + 1)), [
        f"W{i}:" for i in range(MAX_RULES + 1)
    ]),
}  # fmt: skip
LANGUAGES |= {name: ("json_schema", json.dumps(schema), all_texts(schema)) for name, schema in FINITE.items()}
"""Kind, source, and every text that fits."""


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_are_the_true_sets_of_next_tokens(grammars: Grammars, tokenizer: Tokenizer, name: str):
    """Where one continuation is forced, it may come in the tokenizer's own spelling alone."""
    kind, source, fitting = LANGUAGES[name]
    texts = {text.encode() for text in fitting}
    prefixes = {text[:end] for text in texts for end in range(len(text) + 1)}
    spelled = {i: tokenizer.spelled(i) for i in range(tokenizer.vocab_size) if tokenizer.has_text(i)}
    start, rng, written = grammars.prepare(source, kind).result(), np.random.default_rng(5), set()
    for _ in range(20):
        grammars.add(name, start)
        text, ids, complete = b"", [], False
        while True:
            true = {i for i, piece in spelled.items() if text + piece in prefixes} | ({EOS} if text in texts else set())
            allowed = mask(grammars, name)
            following = {each[len(text) :][:1] for each in prefixes if each.startswith(text)} - {b""}
            forced = len(following) == 1 and text not in texts
            assert allowed == true or (forced and allowed < true and len(allowed) == 1), (text, allowed ^ true)
            assert not complete or true == {EOS}
            token = int(rng.choice(sorted(allowed)))
            ids.append(token)
            complete = grammars.advance(name, [token])
            if token == EOS:
                break
            text += spelled[token]
        assert complete and text in texts and tokenizer.decode(ids) == text.decode()
        assert mask(grammars, name) == {EOS}
        written.add(text)
    assert len(written) >= min(len(texts), 3)


REFUSED: list[tuple[GrammarKind, str, str]] = [
    ("regex", "(", "unclosed group"),
    ("regex", "a(?=b)", "look-around"),
    ("regex", r"(a)\1", "backreferences"),
    ("regex", "a^b", "lookarounds not supported"),
    ("regex", "[a&&b]", "no text at all fits it"),
    ("grammar", "the answer", "neither Lark, which has a rule `start: ...`, nor EBNF"),
    ("grammar", 'start: "a" b', "unknown name"),
    ("grammar", 'root ::= "a" b', "Rule 'b' not found"),
    ("grammar", 'item ::= "a"', "No 'root' rule"),
    ("grammar", "root ::= " + "(" * 6000, "it is nested too deeply"),
    ("grammar", "start: " + "(" * 8000 + '"a"' + ")" * 8000, "too deeply nested"),
    ("grammar", 'start: %json {"type": "objekt"}', "objekt"),
    ("grammar", "start: %json [1]", "expected an object"),
    ("grammar", "start: %json start", "%json must be followed by a JSON schema"),
    ("grammar", 'start: %json {"x-guidance": {"lenient": true}}', "no keyword of JSON Schema"),
    ("grammar", 'start: /a\nb/ %json {"x-guidance": {"lenient": true}} "/"', "no keyword of JSON Schema"),
    ("grammar", 'start: </s> %json {"x-guidance": {"lenient": true}} "/"', "no keyword of JSON Schema"),
    ("grammar", "start: %json " + '{"items":' * 90 + "{}" + "}" * 90, "at most 64 objects and arrays"),
    ("grammar", "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(999)), f"at most {MAX_RULES} rules"),
    ("grammar", "start: T0\n" + "\n".join(f"T{i}: T{i + 1}" for i in range(999)), f"at most {MAX_RULES} terminals"),
    ("grammar", "start: T-0\n" + "\n".join(f"T-{i}: T-{i + 1}" for i in range(999)), f"at most {MAX_RULES} terminals"),
    ("grammar", "start: T0\n" + "\n".join(f"%llguidance {{}} T{i}: T{i + 1}" for i in range(999)),
     f"at most {MAX_RULES} terminals, got 999"),
    ("grammar", "start: T0 -> a1T0: T1\n" + "\n".join(f"%import common.WS T{i}: T{i + 1}" for i in range(1, 999)),
     f"at most {MAX_RULES} terminals, got 999"),
    ("grammar", "start: A\nA: " + " & ".join(f"/.*{i}.*/" for i in range(14)), "at most 12 operators & and ~, got 13"),
    ("grammar", 'root ::= "\\ud83d"', "unexpected end of hex escape"),
    ("grammar", "start: start", "no text at all fits it"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_enforced_is_refused(grammars: Grammars, kind: GrammarKind, source: str, says: str):
    with pytest.raises(RequestError, match=re.escape(says)) as caught:
        grammars.prepare(source, kind).result()
    assert (caught.value.param, caught.value.code) == (kind, "invalid_grammar")
    assert str(caught.value).startswith(f"{kind} must be a ") and "that can be enforced" in str(caught.value)
    assert len(str(caught.value)) < 700


def nested_terminals(count: int) -> str:
    return "start: T0\n" + "\n".join(f'T{i}: "x"|(T{i + 1} "y")*' for i in range(count)) + f'\nT{count}: "z"'


HOSTILE: dict[str, tuple[GrammarKind, GrammarSource]] = {
    "terminals in terminals": ("grammar", nested_terminals(MAX_RULES - 2)),
    "doubling terminals": (
        "grammar", "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(60)) + '\nT60: "z"'
    ),
    "doubling rules": (
        "grammar", "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "z"'
    ),
    "ambiguous": ("grammar", 'start: start start | "a" | '),
    "a billion": ("grammar", 'start: "a"{1000000000}'),
    "a billion of a terminal": ("grammar", 'start: A\nA: "a"{1000000000}'),
    "counts of counts": ("grammar", 'start: A\nA: (((("x"{1000}){1000}){1000}){1000})'),
    "and not": ("grammar", "start: A\nA: /(.*a.{20})/ & ~/(.*b.{20})/ & /(.*c.{20})/"),
    "many and": ("grammar", "start: A\nA: " + " & ".join(f"/(z|.*a.{{{i}}}b.*)/" for i in range(30))),
    "and by names": (
        "grammar",
        "start: A0\n" + "\n".join(f"A{i}: /.*a.{{{i}}}b.*/ & A{i + 1}" for i in range(30)) + "\nA30: /.*/",
    ),
    "neither nor": ("grammar", "start: A\nA: ~(" + " | ".join(f"~/.*a.{{{i}}}b.*/" for i in range(30)) + ")"),
    "many alternatives": ("grammar", "start: (" + "|".join(f"/w{i}[a-z]*x/" for i in range(900)) + ")*"),
    "an ebnf of many rules": (
        "grammar", "root ::= r0\n" + "\n".join(f'r{i} ::= "x" r{i + 1} | root' for i in range(200)) + '\nr200 ::= "z"'
    ),
    "empty lines": ("grammar", 'start: "a"' + "\n" * 100_000),
    "strings without an end": ("grammar", 'start: "a" ' + '\\"' * 40_000),
    "regexes without an end": ("grammar", 'start: "a" ' + "\\/" * 40_000),
    "a long literal": ("grammar", 'root ::= "' + "x" * 16_000 + '"'),
    "a regex that looks back": ("regex", "[ab]*a[ab]{60}"),
    "a regex of counts": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "a regex of alternatives": ("regex", "|".join(f"w{i}[a-z]*x" for i in range(1200))),
    "a deep regex": ("regex", "(" * 8000 + "a" + ")" * 8000),
    "many texts": ("choice", tuple(f"w{i * 7919}" for i in range(1024))),
    "long texts": ("choice", tuple(chr(97 + i % 26) * (i * 11 % 255) for i in range(500))),
}  # fmt: skip


LONG = ("counts of counts", "doubling terminals")
"""Grammars that are followed for a second and more before they end."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in HOSTILE]
)
def test_hostile_grammars_end_in_time(grammars: Grammars, name: str):
    check_ends_in_time(grammars, *HOSTILE[name], "invalid_grammar")


PIECES = (
    '"a"', "/[a-z]+/", "start", "rule", "TERM", "(", ")", "[", "]", "|", "*", "+", "?", "{3,}", "~", "&", "\n", ":",
    "::=", "root", "%json", "{}", "%ignore", "<[5]>", ".", "\\", "//", "#", "\x00", "é", "%llguidance {}",
)  # fmt: skip


@pytest.mark.parametrize("seed", slow_after(2, range(4)))
def test_random_sources_are_followed_or_refused(grammars: Grammars, seed: int):
    rng = np.random.default_rng(seed)
    outcomes = set()
    for number in range(120):
        body = " ".join(rng.choice(PIECES, size=int(rng.integers(1, 14))))
        kind: GrammarKind = ("grammar", "grammar", "regex")[number % 3]
        source = (f"start: {body}", f"root ::= {body}", body)[number % 3]
        try:
            start = grammars.prepare(source, kind).result()
        except RequestError as error:
            assert error.code == "invalid_grammar", source
            outcomes.add("refused")
            continue
        grammars.add("random", start)
        for _ in range(4):
            if not (allowed := mask(grammars, "random")):
                break
            grammars.advance("random", [int(rng.choice(sorted(allowed)))])
        grammars.discard("random")
        outcomes.add("followed")
    assert outcomes == {"refused", "followed"}
