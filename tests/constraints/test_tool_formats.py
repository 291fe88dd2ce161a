"""A text that may call tools is free until a call begins, and from there on nothing but calls that fit the schemas."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaserve_jax.constraints.constraints import Constraints
from adaserve_jax.constraints.grammar import Grammars
from adaserve_jax.constraints.tool_formats import FORMATS, detect
from adaserve_jax.engine.core import OutputTracker
from adaserve_jax.errors import RequestError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.sampling import SamplingParams, ToolCalls
from adaserve_jax.types import Sequence, SequenceUpdate
from tests.constraints.grammar_texts import EOS, V, Writer, ids_of
from tests.slow import slow_after

pytest.importorskip("llguidance", reason="llguidance is not installed; `make test` installs it")

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo", 'a "b" }{']}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
SHELL = {
    "type": "object",
    "properties": {"command": {"type": "string", "minLength": 1, "maxLength": 8}},
    "required": ["command"],
    "additionalProperties": False,
}
TOOLS = (("get_weather", json.dumps(WEATHER)), ("shell", json.dumps(SHELL)), ("shell_2", json.dumps(SHELL)))
MARKS = {
    "<tool_call>": False, "</tool_call>": False, "<|python_tag|>": True, "[TOOL_CALLS]": True, "[ARGS]": True,
    "<arg_key>": False, "</arg_key>": False, "<arg_value>": False, "</arg_value>": False,
}  # fmt: skip
"""Marks that a model of its own has as tokens, and whether they are hidden from texts."""
FRAMES = {
    "hermes": r"(?:<tool_call>\n\{{\"name\": \"{name}\", \"arguments\": {arguments}\}}\n</tool_call>\n?)",
    "llama3_json": r"(?:(?:<\|python_tag\|>)?\{{\"name\": \"{name}\", \"parameters\": {arguments}\}}(?:; )?)",
    "mistral": r"(?:(?:\[TOOL_CALLS\] ?\[|, )\{{\"name\": \"{name}\", \"arguments\": {arguments}\}}\]?)",
    "mistral_v11": r"(?:\[TOOL_CALLS\]{name}\[ARGS\]{arguments})",
}
"""One call of each format, told once more."""
ONE_BY_ONE = {
    "glm45": (
        r"<tool_call>{name}\n{arguments}</tool_call>\n?", r"<arg_key>(\w+)</arg_key>\n<arg_value>(.*?)</arg_value>\n",
    ),
    "qwen3_coder": (
        r"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>\n?",
        r"<parameter=(\w+)>\n(.*?)\n</parameter>\n",
    ),
    "minimax_m2": (
        r'(?:<minimax:tool_call>\n)?<invoke name="{name}">\n{arguments}</invoke>\n(?:</minimax:tool_call>)?',
        r'<parameter name="(\w+)">(.*?)</parameter>\n',
    ),
}  # fmt: skip
"""One call, and one argument, of the formats that write arguments one by one."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and grammars of its ids."""

    tokenizer: Tokenizer
    grammars: Grammars
    vocab_size: int

    def writer(self, calls: ToolCalls) -> Writer:
        return Writer(self.grammars, calls, vocab_size=self.vocab_size)


@pytest.fixture(scope="module", params=["spelled", "tokens"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """The embedded pair's vocabulary, as it is and with the marks as tokens of their own and ids without a token."""
    folder = resolve_folder("demo", "target")
    if request.param == "spelled":
        tokenizer = Tokenizer.from_folder(folder)
        return Vocabulary(tokenizer, Grammars(tokenizer.backend_json(), V, (EOS,)), V)
    tokenizer = with_marks(folder, tmp_path_factory.mktemp("marks"))
    size = V + len(MARKS) + 29
    return Vocabulary(tokenizer, Grammars(tokenizer.backend_json(), size, (EOS,)), size)


def with_marks(folder: Path, to: Path) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, to)
    data = json.loads((to / "tokenizer.json").read_text())
    like = data["added_tokens"][0]
    for place, (text, special) in enumerate(MARKS.items()):
        data["added_tokens"].append({**like, "id": V + place, "content": text, "special": special})
    (to / "tokenizer.json").write_text(json.dumps(data))
    return Tokenizer.from_folder(to)


def written(vocabulary: Vocabulary, writer: Writer, rng: np.random.Generator) -> str:
    """A text of random allowed tokens, which goes on for 60 of them if it may and then ends as soon as it may."""
    ids: list[int] = []
    for _ in range(400):
        allowed = writer.allowed()
        wanted = allowed - {EOS} if len(ids) < 60 else allowed & {EOS}
        token = int(rng.choice(sorted(wanted or allowed)))
        complete = writer.grammars.advance(writer.name, [token])
        if token != EOS:
            ids.append(token)
        if complete:
            return vocabulary.tokenizer.showing(list(MARKS)).decode(ids)
    pytest.fail(f"no end: {vocabulary.tokenizer.decode(ids)}")


def calls_in(text: str, form: str) -> list[tuple[str, Any]]:
    """Read the calls of a text that is nothing else, by a regular expression of one call."""
    if form in ONE_BY_ONE:
        call, argument = ONE_BY_ONE[form]
        found = list(re.finditer(call.format(name=r"(\w+)", arguments=f"((?:{argument})*)"), text, re.DOTALL))
        assert "".join(one[0] for one in found) == text
        pairs = [(one[1], re.findall(argument, one[2], re.DOTALL)) for one in found]
        read = {"days": json.loads}
        return [(name, {key: read.get(key, str)(value) for key, value in each}) for name, each in pairs]
    call = FRAMES[form].format(name=r"(\w+)", arguments=r"(\{.*?\})(?=\}|\n|\[TOOL|$)")
    found = list(re.finditer(call, text, re.DOTALL))
    assert "".join(one[0] for one in found) == text
    return [(one[1], json.loads(one[2])) for one in found]


@pytest.mark.parametrize("form", slow_after(6, FORMATS))
def test_required_calls_are_whatever_the_tokens_calls_that_fit(vocabulary: Vocabulary, form: str):
    rng, names, most = np.random.default_rng(5), set(), 0
    for parallel in (False, True) * 6:
        writer = vocabulary.writer(ToolCalls(form, TOOLS, required=True, parallel=parallel))
        text = written(vocabulary, writer, rng)
        if "}{" in text and form not in ONE_BY_ONE:  # the expression of one call is not made for it
            assert '"a \\"b\\" }{"' in text
            continue
        calls = calls_in(text, form)
        assert len(calls) == 1 or parallel
        most = max(most, len(calls))
        for name, arguments in calls:
            names.add(name)
            if name == "get_weather":
                assert arguments["city"] in ("Rome", "Oslo", 'a "b" }{') and arguments.get("days", 0) <= 9
            else:
                assert list(arguments) == ["command"] and 1 <= len(arguments["command"]) <= 8
    assert names == {"get_weather", "shell", "shell_2"} and most > 1


BEFORE = 'I look. {"a": 1} <tool_cal [TOOL é '


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("before", ["", BEFORE])
def test_text_is_free_until_a_call_begins_and_then_no_longer(vocabulary: Vocabulary, form: str, before: str):
    fixed = FORMATS[form]
    if fixed.bare and not before:
        whole = fixed.write([("shell", '{"command": "ls"}')]).removeprefix(fixed.mark)
    else:
        whole = before + fixed.write([("shell", '{"command": "ls"}'), ("get_weather", '{"city": "Oslo"}')])
    writer, text = vocabulary.writer(ToolCalls(form, TOOLS)), ""
    everything = set(range(vocabulary.vocab_size))
    free = []
    *tokens, last = vocabulary.tokenizer.encode(whole)
    for token in (*tokens, last):
        allowed = writer.allowed()
        assert token in allowed, (text, whole)
        free.append(allowed == everything)
        ended = vocabulary.grammars.advance(writer.name, [token])
        assert not ended or token == last
        text += vocabulary.tokenizer.showing(list(MARKS)).decode([token])
    opened = len(vocabulary.tokenizer.encode(before + fixed.mark)) if not fixed.bare or before else 0
    words = len(vocabulary.tokenizer.encode(before))
    assert sum(free[:words]) >= words - 2, "all but inside a character, and where a mark is spelled"
    assert not any(free[opened:])
    assert EOS in writer.allowed()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("before", ["", BEFORE])
def test_a_call_whose_mark_is_spelled_is_held_too(vocabulary: Vocabulary, tokenizer: Tokenizer, form: str, before: str):
    """Also where the model has a token for the mark."""
    fixed = FORMATS[form]
    call = fixed.write([("shell", '{"command": "ls"}')])
    writer = vocabulary.writer(ToolCalls(form, TOOLS))
    spelled = tokenizer.encode(before + fixed.mark)
    for token in spelled:
        assert token in writer.allowed()
        vocabulary.grammars.advance(writer.name, [token])
    for token in vocabulary.tokenizer.encode(call.removeprefix(fixed.mark)):
        assert token in (allowed := writer.allowed()) and len(allowed) < vocabulary.vocab_size
        vocabulary.grammars.advance(writer.name, [token])
    assert EOS in writer.allowed()


def test_tokens_that_are_no_text_may_come_in_free_text(vocabulary: Vocabulary):
    """Bytes that no character begins with, hidden tokens, ids without a token: as without tools."""
    writer = vocabulary.writer(ToolCalls("hermes", TOOLS))
    everything = set(range(vocabulary.vocab_size))
    (continuation,) = [i for i in range(V) if vocabulary.tokenizer.spelled(i) == b"\xa9"]
    strange = [continuation, 190, 1, continuation, vocabulary.vocab_size - 1, 2]
    for token in (*strange, *vocabulary.tokenizer.encode("so <tool")):
        assert writer.allowed() == everything
        assert not vocabulary.grammars.advance(writer.name, [token])
    masks = writer.masks([5, *strange], [-1, 0, 1, 2, 3, 4, 5])
    assert [ids_of(mask) == everything for mask in masks] == [True] * 7
    for token in vocabulary.tokenizer.encode("<tool_call>"):
        vocabulary.grammars.advance(writer.name, [token])
    assert [vocabulary.tokenizer.decode([token]) for token in writer.allowed()] == ["\n"]


CORRUPTED = {
    "a second tag instead of the call": ("<tool_call>\n", "<<tool_code>"),
    "the tag of another format": ("<tool_call>\n", "<function=shell>"),
    "a name with its argument inside": ('<tool_call>\n{"name": "', 'runshell command=\\"ls\\"'),
    "an unknown tool": ('<tool_call>\n{"name": "', "get_whether"),
    "arguments that are empty": ('<tool_call>\n{"name": "shell", "arguments": {', "}"),
    "a key with its value inside": ('<tool_call>\n{"name": "shell", "arguments": {"', 'command=ls": ""'),
    "a key twice": ('<tool_call>\n{"name": "shell", "arguments": {"command": "ls"', ', "command": "x"'),
    "a value of the wrong type": ('<tool_call>\n{"name": "shell", "arguments": {"command": ', "[1]"),
    "an end inside the arguments": ('<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}', "</tool_call>"),
    "text behind the call": ('<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>', " and"),
}


@pytest.mark.parametrize("case", CORRUPTED)
def test_what_speculation_corrupted_elsewhere_cannot_be_written(vocabulary: Vocabulary, case: str):
    """The texts of vLLM's issues 40875 and 56077, proposed by a draft in a tree or drawn by the target."""
    before, wrong = CORRUPTED[case]
    writer = vocabulary.writer(ToolCalls("hermes", TOOLS))
    for token in vocabulary.tokenizer.encode(before):
        assert token in writer.allowed()
        vocabulary.grammars.advance(writer.name, [token])
    tokens = vocabulary.tokenizer.encode(wrong)
    masks = writer.masks([5, *tokens], [-1, *range(len(tokens))])
    refused = [token not in ids_of(mask) for token, mask in zip(tokens, masks, strict=False)]
    assert any(refused), wrong
    assert EOS not in ids_of(masks[0]) or case == "text behind the call"


@pytest.mark.parametrize("form", slow_after(2, FORMATS))
def test_trees_around_the_beginning_of_a_call_get_the_masks_of_texts(vocabulary: Vocabulary, form: str):
    calls = ToolCalls(form, TOOLS)
    chain = vocabulary.tokenizer.encode("hé " + FORMATS[form].write([("shell", '{"command": "ls"}')]))
    rng = np.random.default_rng(2)
    tokens, parents = [5, *chain], [-1, *range(len(chain))]
    for _ in range(20):  # branches off the chain, of any tokens
        parents.append(int(rng.integers(len(tokens))))
        tokens.append(int(rng.integers(vocabulary.vocab_size)))
    writer = vocabulary.writer(calls)
    masks = writer.masks(tokens, parents)
    everything = set(range(vocabulary.vocab_size))
    for node in range(len(tokens)):
        path, at = [], node
        while at:
            path.insert(0, tokens[at])
            at = parents[at]
        fresh, reached = Writer(vocabulary.grammars, calls, name="fresh", vocab_size=vocabulary.vocab_size), True
        for token in path:
            reached = reached and token in fresh.allowed()
            if reached:
                vocabulary.grammars.advance(fresh.name, [token])
        assert ids_of(masks[node]) == (fresh.allowed() if reached else everything), path


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_that_calls_nothing_fits_its_schema(vocabulary: Vocabulary, form: str):
    calls = ToolCalls(form, TOOLS, answer=json.dumps({"const": {"ok": True}}))
    for text in ('{"ok":true}', FORMATS[form].write([("shell", '{"command":"x"}')])):
        writer = vocabulary.writer(calls)
        for token in vocabulary.tokenizer.encode(text):
            assert token in writer.allowed(), text
            vocabulary.grammars.advance(writer.name, [token])
        assert EOS in writer.allowed()
    assert vocabulary.tokenizer.encode("So")[0] not in vocabulary.writer(calls).allowed()


def test_the_format_is_that_of_the_chat_template():
    assert detect("{% for t in tools %}<tool_call>\n</tool_call>{% endfor %}").name == "hermes"
    assert detect("'<|python_tag|>' + tool_call.name").name == "llama3_json"
    assert detect("""Respond in the format {"name": function name, "parameters": arguments}""").name == "llama3_json"
    assert detect("{{ '[TOOL_CALLS][' }}").name == "mistral"
    assert detect("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}").name == "mistral_v11"
    assert detect("{{ message.content }}").name == "hermes"
    glm = "<tool_call>{{ name }}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value></tool_call>"
    assert detect(glm).name == "glm45"
    assert detect("<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter></tool_call>").name == "qwen3_coder"
    assert detect('<minimax:tool_call>\n<invoke name="f"></invoke>\n</minimax:tool_call>').name == "minimax_m2"


HARD = {
    "type": "object", "$defs": {"unit": {"enum": ["C", "F"]}},
    "properties": {
        "text": {"type": "string"}, "date": {"type": "string", "format": "date"}, "unit": {"$ref": "#/$defs/unit"},
        "any": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    },
    "required": ["text"],
}  # fmt: skip


@pytest.mark.parametrize("form", ONE_BY_ONE)
@pytest.mark.parametrize("arguments, allowed", [
    ({"text": "a < b </arg \n</para é"}, True), ({"text": ""}, True), ({"unit": "C"}, False), ({"more": 1}, False),
    ({"text": "x", "any": 3}, True), ({"unit": "C", "text": "x"}, False),
])  # fmt: skip
def test_arguments_are_written_one_by_one_in_the_order_of_the_schema(
    vocabulary: Vocabulary, form: str, arguments: dict[str, Any], allowed: bool
):
    assert written_as(vocabulary, form, FORMATS[form].write([("f", json.dumps(arguments))])) == allowed


@pytest.mark.parametrize("form", ONE_BY_ONE)
def test_strings_of_a_form_stand_there_as_json(vocabulary: Vocabulary, form: str):
    texts = FORMATS[form].arguments
    assert texts is not None
    one = FORMATS[form].write([("f", '{"text": "x"}')])
    for key, value, allowed in (
        ("date", '"2026-11-28"', True), ("date", "2026-11-28", False), ("unit", '"F"', True), ("unit", '"K"', False),
        ("any", '"x"', True), ("any", "x", False),
    ):  # fmt: skip
        more = f"{texts.after}{texts.before}{key}{texts.between}{value}{texts.after}"
        assert written_as(vocabulary, form, one.replace(texts.after, more, 1)) == allowed, (key, value)


@pytest.mark.parametrize("form", ONE_BY_ONE)
@pytest.mark.parametrize("more, message", [
    ({"anyOf": [{"required": ["text"]}]}, "f: 'anyOf' does not hold where arguments are written one by one"),
    ({"minProperties": 1}, "f: 'minProperties' does not hold where"),
    ({"required": ["none"]}, "f: properties must declare what is required"),
    ({"required": [{}]}, "f: properties must declare what is required"),
    ({"properties": {"text": {}, "a": {"items": {"$ref": "#/properties/text"}}}},
     "f: $ref must begin with #/$defs/ or #/definitions/ in this format, got '#/properties/text'"),
    ({"$defs": {"unit": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}, "f: $ref must begin with #/$defs/ or"),
    ({"properties": {"text": {"$ref": "#/$defs/own", "$defs": {"own": {}}}}}, "own"),
    ({"properties": {"text": {"type": "array", "x-guidance": {"whitespace_flexible": True}}}},
     "f: 'x-guidance' is no keyword of JSON Schema"),
    ({"properties": {"text": {}, "\ud800": {}}}, "f: its texts must be valid Unicode, got half of a surrogate pair"),
])  # fmt: skip
def test_what_cannot_be_held_one_by_one_is_refused(
    vocabulary: Vocabulary, form: str, more: dict[str, Any], message: str
):
    with pytest.raises(RequestError, match=re.escape(message)):
        vocabulary.writer(ToolCalls(form, (("f", json.dumps(HARD | more)),)))


@pytest.mark.parametrize("form", ONE_BY_ONE)
def test_words_that_join_no_arguments_may_stand_beside_them(vocabulary: Vocabulary, form: str):
    more = {"$id": "x", "$comment": "y", "readOnly": True, "deprecated": False, "x-order": 1}
    text = FORMATS[form].write([("f", '{"text": "a"}')])
    assert written_as(vocabulary, form, text, HARD | more)
    assert not written_as(vocabulary, form, FORMATS[form].write([("f", '{"other": "a"}')]), HARD | more)


@pytest.mark.parametrize("form", ["hermes", *ONE_BY_ONE])
@pytest.mark.parametrize("part", [
    {"type": "string", "format": "path"}, {"type": "string", "pattern": "^(?=a)b"}, {"not": {"const": 7}},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
])  # fmt: skip
def test_a_lenient_tool_has_what_can_be_enforced_of_its_schema(vocabulary: Vocabulary, form: str, part: dict[str, Any]):
    schema = json.dumps({
        "type": "object", "required": ["n"], "additionalProperties": False,
        "properties": {"n": {"type": "integer", "maximum": 5}, "odd": part},
    })  # fmt: skip
    plain = ("g", '{"type": "object", "properties": {}, "additionalProperties": false}')
    calls = ToolCalls(form, (("f", schema), plain), required=True, parallel=False)
    with pytest.raises(RequestError, match="tools must hold parameters that can be enforced: f: "):
        vocabulary.writer(calls)
    for name, arguments, allowed in (
        ("f", '{"n": 5}', True), ("f", '{"n": 6}', False), ("f", '{"n": 5, "other": 1}', False), ("g", "{}", True),
        ("g", '{"n": 5}', False),
    ):  # fmt: skip
        writer = vocabulary.writer(replace(calls, lenient=("f",)))
        ids = vocabulary.tokenizer.encode(FORMATS[form].write([(name, arguments)]))
        assert follows(vocabulary, writer, ids) == allowed, (name, arguments)


@pytest.mark.parametrize("form", ONE_BY_ONE)
def test_references_of_an_argument_lead_to_the_definitions_of_the_root(vocabulary: Vocabulary, form: str):
    own = {"$defs": {"unit": {"const": "K"}}, "x": 1}
    schema = {**HARD, "properties": {"text": {}, "unit": {"$ref": "#/$defs/unit", **own}}}
    texts = FORMATS[form].arguments
    assert texts is not None
    for value, allowed in (('"F"', True), ('"K"', False)):
        text = FORMATS[form].write([("f", '{"text": 1, "unit": "?"}')])
        text = text.replace(f"{texts.between}?{texts.after}", f"{texts.between}{value}{texts.after}")
        assert written_as(vocabulary, form, text, schema) == allowed


@pytest.mark.parametrize("form", ONE_BY_ONE)
@pytest.mark.parametrize("least", [0, 1, 3])
@pytest.mark.parametrize(
    "value", ["", "x", "ab", "abc", "{after}", "a{after}", "abc{after}d", "{begun}", "abc{begun}d"]
)
def test_a_text_has_its_length_and_ends_where_the_text_behind_it_first_stands(
    vocabulary: Vocabulary, form: str, least: int, value: str
):
    """In any tokens: its characters are written one by one, so that they may spell a mark that has a token."""
    texts = FORMATS[form].arguments
    assert texts is not None
    value = value.format(after=texts.after, begun=texts.after[:-1])
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": least}}, "required": ["text"]}
    before, behind = FORMATS[form].write([("f", '{"text": "?"}')]).split("?")
    ids = [token for text in (before, *value, behind) for token in vocabulary.tokenizer.encode(text)]
    is_whole = (value + texts.after).find(texts.after) == len(value) >= least
    assert written_in(vocabulary, form, ids, schema) == is_whole


@pytest.mark.parametrize("form", ONE_BY_ONE)
@pytest.mark.parametrize("anything", [{}, True])
def test_an_argument_of_any_kind_is_json_with_few_spaces(vocabulary: Vocabulary, form: str, anything: Any):
    schema = {"type": "object", "properties": {"k": anything}, "required": ["k"]}
    before, behind = FORMATS[form].write([("f", '{"k": "?"}')]).split("?")
    found = [
        written_as(vocabulary, form, f"{before}{value}{behind}", schema) for value in ("[1, 2]", "[1,\n2]", "[ 1]")
    ]
    assert found == [True, False, False]


@pytest.mark.parametrize("form", ONE_BY_ONE)
@pytest.mark.parametrize("keyword", [
    {"minLength": '0}/\nX: "b"\nY: /c{1'}, {"maxLength": True}, {"minLength": -1}, {"enum": None}, {"enum": "abc"},
])  # fmt: skip
def test_a_keyword_of_another_type_is_refused_and_never_part_of_a_grammar(
    vocabulary: Vocabulary, form: str, keyword: dict[str, Any]
):
    schema = {"type": "object", "properties": {"text": {"type": "string"} | keyword}, "required": ["text"]}
    with pytest.raises(RequestError) as caught:
        vocabulary.writer(ToolCalls(form, (("f", json.dumps(schema)),)))
    assert caught.value.code == "invalid_schema"


@pytest.mark.parametrize("form", ONE_BY_ONE)
def test_texts_of_another_type_or_length_are_refused(vocabulary: Vocabulary, form: str):
    for contradiction in ({"type": "integer", "enum": ["x"]}, {"type": "string", "enum": ["abc"], "maxLength": 2}):
        schema = {"type": "object", "properties": {"k": contradiction}, "required": ["k"]}
        with pytest.raises(RequestError, match="Unsatisfiable schema"):
            vocabulary.writer(ToolCalls(form, (("f", json.dumps(schema)),)))


@pytest.mark.parametrize("form", ONE_BY_ONE)
@pytest.mark.parametrize("keywords", [{"const": "x"}, {"enum": ["x", "abc"], "maxLength": 2}])
def test_a_string_with_another_keyword_stands_there_as_json(
    vocabulary: Vocabulary, form: str, keywords: dict[str, Any]
):
    properties = {"k": {"type": "string"} | keywords}
    schema = json.dumps({"type": "object", "properties": properties, "required": ["k"]})
    texts = FORMATS[form].write([("f", '{"k": "x"}')]), FORMATS[form].write([("f", '{"k": "\\"x\\""}')])
    found = []
    for text in texts:
        writer, allowed = vocabulary.writer(ToolCalls(form, (("f", schema),), required=True)), True
        for token in vocabulary.tokenizer.encode(text):
            allowed = allowed and token in writer.allowed()
            if allowed:
                vocabulary.grammars.advance(writer.name, [token])
        found.append(allowed)
    assert found == [False, True]


def written_as(vocabulary: Vocabulary, form: str, text: str, schema: dict[str, Any] = HARD) -> bool:
    """Whether a call of `f`, whose arguments are of this schema, may be this text."""
    return written_in(vocabulary, form, vocabulary.tokenizer.encode(text), schema)


def written_in(vocabulary: Vocabulary, form: str, ids: list[int], schema: dict[str, Any]) -> bool:
    """Whether a call of `f`, whose arguments are of this schema, may be these tokens."""
    return follows(vocabulary, vocabulary.writer(ToolCalls(form, (("f", json.dumps(schema)),), required=True)), ids)


def follows(vocabulary: Vocabulary, writer: Writer, ids: list[int]) -> bool:
    """Whether a text may be these tokens and end behind them."""
    for token in ids:
        if token not in writer.allowed():
            return False
        vocabulary.grammars.advance(writer.name, [token])
    return EOS in writer.allowed()


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ((), "tools must be 1 to 128 functions with different names"),
        ((("f", "{}"), ("f", "{}")), "tools must be 1 to 128 functions with different names"),
        ((('a"b', "{}"),), "tools must be named by 1 to 64 of A-Za-z0-9_.-"),
        ((("f", " " * 300_000),), "tools must be of at most 262144 characters of parameters together, got 300000"),
        (None, "tools must be a tuple of pairs of a name and a JSON schema, as texts, got None"),
        ([("f", "{}")], "tools must be a tuple of pairs of a name and a JSON schema, as texts, got [('f', '{}')]"),
        ((5,), "tools must be a tuple of pairs of a name and a JSON schema, as texts, got (5,)"),
        ((("f", None),), "tools must be a tuple of pairs of a name and a JSON schema, as texts, got (('f', None),)"),
        (((1, "{}"),), "tools must be a tuple of pairs of a name and a JSON schema, as texts, got ((1, '{}'),)"),
    ],
)
def test_tools_that_cannot_be(tools: Any, message: str):
    with pytest.raises(RequestError) as caught:
        ToolCalls("hermes", tools)
    assert str(caught.value).startswith(message) and caught.value.param == "tools"


def test_an_answer_beside_tools_is_a_schema_as_text():
    answer: Any = {"type": "object"}
    with pytest.raises(RequestError, match="tools must be beside an answer that is a JSON schema, as text, or none"):
        ToolCalls("hermes", TOOLS, answer=answer)


def test_a_schema_beside_tools_belongs_into_them():
    with pytest.raises(RequestError, match="tool_calls must be left out where json_schema is given"):
        SamplingParams(json_schema="{}", tool_calls=ToolCalls("hermes", TOOLS))


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (
            ToolCalls("hermes", (*TOOLS, ("bad", "[]"))),
            "tools must hold parameters that can be enforced: bad: ",
        ),
        (ToolCalls("hermes", (*TOOLS, ("no", '{"not": {}}'))), "tools must hold parameters that can be enforced: no: "),
        (
            ToolCalls("hermes", (*TOOLS, ("cut", '{"properties": {"a": {"type": "string", "pattern": "("}}}'))),
            "tools must hold parameters that can be enforced: cut: ",
        ),
        (
            ToolCalls("hermes", (*TOOLS, ("half", '{"properties": {"\\udc00": {}}}'))),
            "tools must hold parameters that can be enforced: half: its texts must be valid Unicode",
        ),
        (ToolCalls("hermes", TOOLS, answer='{"not": {}}'), "tools must hold parameters that can be enforced: "),
    ],
)
def test_tools_that_no_grammar_can_hold(vocabulary: Vocabulary, calls: ToolCalls, message: str):
    with pytest.raises(RequestError) as caught:
        vocabulary.grammars.prepare(calls, "tool_calls").result()
    assert message in str(caught.value) and (caught.value.param, caught.value.code) == ("tools", "invalid_schema")


def test_a_format_that_is_none_is_refused(vocabulary: Vocabulary):
    constraints = Constraints(vocabulary.vocab_size, vocabulary.tokenizer, vocabulary.grammars)
    constraints.check(SamplingParams(tool_calls=ToolCalls("hermes", TOOLS)))
    with pytest.raises(RequestError) as caught:
        constraints.check(SamplingParams(tool_calls=ToolCalls("xml", TOOLS)))
    assert f"format must be one of {', '.join(FORMATS)}, got 'xml'" in str(caught.value)
    assert (caught.value.param, caught.value.code) == ("tools", "invalid_schema")
    wrong: Any = "hermes"
    with pytest.raises(RequestError, match="tool_calls must be a ToolCalls, or none, got 'hermes'"):
        SamplingParams(tool_calls=wrong)


@pytest.mark.parametrize("form", FORMATS)
def test_hidden_marks_are_shown_in_texts_with_tools_only(vocabulary: Vocabulary, form: str):
    text = FORMATS[form].write([("shell", '{"command": "é"}')])
    ids = vocabulary.tokenizer.encode("é " + text)
    shown = []
    for calls in (ToolCalls(form, TOOLS), None):
        tracker = OutputTracker(vocabulary.tokenizer)
        sampling = SamplingParams(tool_calls=calls)
        tracker.add("r", Sequence("r/0", np.asarray([5], np.int32), sampling, seed=0, arrival_s=0.0))
        for token in ids:
            assert tracker.stop_check("r/0", [token]) is None
        shown.append(tracker.chunk(SequenceUpdate("r/0", tuple(ids), "stop")).text)
    hidden = [mark for mark in FORMATS[form].marks if MARKS.get(mark) and vocabulary.vocab_size > V]
    without = "é " + text
    for mark in hidden:
        without = without.replace(mark, "")
    assert shown == ["é " + text, without]
