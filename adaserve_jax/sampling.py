"""Sampling parameters of one request: plain data, every field checked by an error that names it. Imports no jax."""

# pyright: reportUnnecessaryIsInstance=false
# What users pass is looked at whatever its type says.
from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import numpy as np

from adaserve_jax.errors import RequestError

MAX_CHOICES = 64
MAX_SEED = 2**64 - 1
MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_IDS = 16, 1024, 1024
MAX_TOKEN_ID = 2**31 - 1
MAX_LOGIT_BIASES, MAX_LOGIT_BIAS = 1024, 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 128, 128
MAX_LOGPROBS = 20
MAX_SCHEMA_CHARS = 64 * 1024
MAX_GRAMMAR_CHARS = 16 * 1024
MAX_CHOICE_TEXTS, MAX_CHOICE_CHARS = 1024, 64 * 1024
MAX_ALLOWED_IDS = 64 * 1024
MAX_TOOLS, MAX_TOOLS_CHARS = 128, 256 * 1024
INTEGERS = {"max_tokens": (1, 2**31 - 1), "top_k": (0, 2**31 - 1), "n": (1, MAX_CHOICES)}
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100), "min_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
}  # fmt: skip
"""Least and largest value of fields of SamplingParams."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "tool_calls"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "choice", "grammar", "tool_calls")
"""Fields of SamplingParams that a text must fit; a request has at most one of them."""


def is_integer(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    """Return whether a value is an int within the bounds; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float; True and False are neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Return whether a value is a number that a float can hold, and neither infinite nor NaN."""
    return isinstance(value, (int, float)) and is_number(value) and abs(value) <= sys.float_info.max


def require(ok: bool, param: str, expected: str, value: object, code: str = "invalid_value") -> None:
    """Raise RequestError naming the field at fault unless `ok`, with the beginning of what came."""
    if not ok:
        shown = repr(value).removesuffix(".0")  # a body's 5 is read as 5.0 where a fraction may come
        raise RequestError(f"{param} must be {expected}, got {shown:.200}", param=param, code=code)


def is_unicode(text: str) -> bool:
    """Return whether a text holds no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    """Return pairs of a token id and a bias, from a mapping or pairs. Raises RequestError."""
    expected = (
        f"at most {MAX_LOGIT_BIASES} pairs of a token id and a number from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
    )
    try:
        biases = dict(cast("Mapping[int, float]", given))
        ok = len(biases) <= MAX_LOGIT_BIASES and all(
            is_integer(token, 0, MAX_TOKEN_ID) and is_number(bias) and abs(bias) <= MAX_LOGIT_BIAS
            for token, bias in biases.items()
        )
    except (TypeError, ValueError):
        ok, biases = False, {}
    require(ok, "logit_bias", expected, given)
    return tuple(sorted((token, float(bias)) for token, bias in biases.items()))


@dataclass(frozen=True)
class ToolCalls:
    """Tools that a text may call. Raises RequestError naming tools.

    format: how the model writes a call, a name of `constraints.tool_formats.FORMATS`. tools: pairs of a name and the
    JSON schema, as text, of its arguments. required: the text is calls and nothing else. parallel: several calls may
    follow each other. answer: JSON schema of a text that calls nothing; None: any text. lenient: names of the tools of
    whose schemas keywords that cannot be enforced are left out; those of others are refused.
    """

    format: str
    tools: tuple[tuple[str, str], ...]
    required: bool = False
    parallel: bool = True
    answer: str | None = None
    lenient: tuple[str, ...] = ()

    @property
    def are_optional(self) -> bool:
        """Return whether the text may be any text without a call."""
        return not self.required and self.answer is None

    def __post_init__(self) -> None:
        ok = isinstance(self.tools, tuple) and all(
            isinstance(tool, tuple) and len(tool) == 2 and all(isinstance(text, str) for text in tool)
            for tool in self.tools
        )
        require(ok, "tools", "a tuple of pairs of a name and a JSON schema, as texts", self.tools)
        ok = self.answer is None or isinstance(self.answer, str)
        require(ok, "tools", "beside an answer that is a JSON schema, as text, or none", self.answer)
        names = [name for name, _ in self.tools]
        expected = f"1 to {MAX_TOOLS} functions with different names"
        require(1 <= len(names) <= MAX_TOOLS and len(set(names)) == len(names), "tools", expected, names)
        for name in names:
            require(TOOL_NAME.fullmatch(name) is not None, "tools", "named by 1 to 64 of A-Za-z0-9_.-", name)
        size = sum(len(schema) for _, schema in self.tools)
        expected = f"of at most {MAX_TOOLS_CHARS} characters of parameters together"
        require(size <= MAX_TOOLS_CHARS, "tools", expected, size)


BEFORE_THINKING, ANSWERING = -1, -2


@dataclass(frozen=True)
class Thinking:
    """Marks, each one token, between which a text thinks before it answers. Raises RequestError naming thinking.

    opening, closing: token ids. started: the prompt ends behind the opening mark. blanks: tokens of white space, which
    the text may have before its opening mark.

    How far a text is, is one number, so that each node of a token tree can have its own: the count of thought tokens
    while it thinks, else BEFORE_THINKING or ANSWERING.
    """

    opening: int
    closing: int
    started: bool = False
    blanks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        marks = (self.opening, self.closing)
        ok = self.opening != self.closing and all(is_integer(token, 0, MAX_TOKEN_ID) for token in marks)
        require(ok, "thinking", "marked by two different token ids", marks)

    @property
    def state(self) -> int:
        """The state of a text without tokens."""
        return 0 if self.started else BEFORE_THINKING

    def after(self, state: int, token: int) -> int:
        """Return the state after one more token. A text thinks once, at its beginning."""
        if state >= 0:
            return ANSWERING if token == self.closing else state + 1
        if state == BEFORE_THINKING and token == self.opening:
            return 0
        return state if state == BEFORE_THINKING and token in self.blanks else ANSWERING


GrammarSource = str | tuple[str, ...] | ToolCalls
"""Value of a field of GRAMMAR_KINDS."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters by which tokens are drawn; defaults are OpenAI's. Raises RequestError naming the field at fault.

    temperature 0 is greedy. top_k 0 and top_p 1 mean off. seed None: one is drawn at admission and kept through
    preemption. stop strings are not part of the returned text.

    The others change the logits before temperature and filters, in this order. repetition_penalty divides positive and
    multiplies negative logits of tokens that the prompt or the output has; presence_penalty is taken from those of
    tokens that the output has, frequency_penalty once for each time it has them. logit_bias: (token id, what is added
    to its logit), from a mapping or pairs. min_tokens: no stop token, end-of-text included, before so many. bad_words:
    texts that the output never spells, token by token. json_schema: the output is JSON that fits this schema, itself
    JSON; "{}" and the like: any object of that schema's kind. Where it allows nothing more the text ends, whatever
    min_tokens says. regex: the whole output matches it. choice: the output is one of these texts. grammar: the output
    fits this grammar, in Lark or in EBNF. tool_calls: from the moment a call begins, the text is calls of these tools
    with arguments that fit their schemas. At most one of these five. allowed_token_ids: no other token is drawn,
    end-of-text included unless it is one of them; empty: all are.
    logprobs: report the log probability of every output token, by the model's own logits, and this many of the
    likeliest; None: report none. prompt_logprobs: report the same of every token of the prompt but the first, after
    those before it; the prompt is then computed without the prefix cache. thinking: report the text between these marks
    apart from the text behind them, which alone must fit a grammar; None: the text has no marks. max_thinking_tokens:
    once so many tokens were thought the closing mark comes, whatever other fields say; None: no limit.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    tool_calls: ToolCalls | None = None
    allowed_token_ids: tuple[int, ...] = ()
    thinking: Thinking | None = None
    max_thinking_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, expected in (("stop", "a string or several"), ("stop_token_ids", "a sequence of token ids")):
            value = getattr(self, name)
            listed = (value,) if isinstance(value, str) else () if value is None else value
            require(isinstance(listed, Iterable), name, expected, value)
            object.__setattr__(self, name, tuple(listed))
        stop = self.stop
        for name, (low, high) in INTEGERS.items():
            value = getattr(self, name)
            require(is_integer(value, low, high), name, f"an integer from {low} to {high}", value)
        for name, (low, high) in NUMBERS.items():
            value = getattr(self, name)
            ok = is_number(value) and low <= value <= high
            require(ok, name, f"a number from {low:g} to {high:g}", value)
        require(is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number above 0 and at most 1", self.top_p)
        if self.seed is not None:
            require(is_integer(self.seed, 0, MAX_SEED), "seed", f"an integer from 0 to {MAX_SEED}", self.seed)
        require(isinstance(self.ignore_eos, bool), "ignore_eos", "true or false", self.ignore_eos)
        ok = len(stop) <= MAX_STOPS and all(isinstance(s, str) and 1 <= len(s) <= MAX_STOP_CHARS for s in stop)
        expected = f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters"
        require(ok, "stop", expected, self.stop)
        ids = self.stop_token_ids
        ok = all(is_integer(token, 0, MAX_TOKEN_ID) for token in ids)
        expected = f"at most {MAX_STOP_IDS} token ids from 0 to {MAX_TOKEN_ID}"
        require(ok and len(ids) <= MAX_STOP_IDS, "stop_token_ids", expected, ids)
        self._check_changes()

    def _check_changes(self) -> None:
        """Check the fields that change logits or report on them."""
        expected = f"an integer from 0 to max_tokens ({self.max_tokens})"
        require(is_integer(self.min_tokens, 0, self.max_tokens), "min_tokens", expected, self.min_tokens)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        words = self.bad_words
        words = (words,) if isinstance(words, str) else words
        ok = isinstance(words, Iterable) and len(words := tuple(words)) <= MAX_BAD_WORDS
        ok = ok and all(isinstance(word, str) and 1 <= len(word) <= MAX_BAD_WORD_CHARS for word in words)
        expected = f"at most {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_CHARS} characters"
        require(ok, "bad_words", expected, self.bad_words)
        object.__setattr__(self, "bad_words", words)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            ok = count is None or is_integer(count, 0, MAX_LOGPROBS)
            require(ok, name, f"an integer from 0 to {MAX_LOGPROBS}, or none", count)
        marks = self.thinking
        require(marks is None or isinstance(marks, Thinking), "thinking", "a Thinking, or none", marks)
        most = self.max_thinking_tokens
        require(most is None or is_integer(most, 0), "max_thinking_tokens", "an integer from 0 on, or none", most)
        if most is not None and self.thinking is None:
            raise RequestError(
                f"max_thinking_tokens must be left out where thinking has no marks, got {most}; the model has none, or "
                "the server runs with --reasoning-parser none",
                param="max_thinking_tokens", code="unsupported_parameter",
            )  # fmt: skip
        schema = self.json_schema
        ok = schema is None or (isinstance(schema, str) and 0 < len(schema) <= MAX_SCHEMA_CHARS)
        expected = f"JSON of 1 to {MAX_SCHEMA_CHARS} characters"
        shown = f"{len(schema)} characters" if isinstance(schema, str) else schema
        require(ok, "json_schema", expected, shown)
        self._check_grammars()

    def _check_grammars(self) -> None:
        """Check regex, choice, grammar, tool_calls and allowed_token_ids, and that one grammar at most is given."""
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            ok = text is None or (isinstance(text, str) and 0 < len(text) <= MAX_GRAMMAR_CHARS and is_unicode(text))
            shown = f"{len(text)} characters" if isinstance(text, str) else text
            require(ok, name, f"valid Unicode of 1 to {MAX_GRAMMAR_CHARS} characters", shown)
        texts = self.choice
        ok = isinstance(texts, Iterable) and not isinstance(texts, str)
        ok = ok and len(texts := tuple(texts)) <= MAX_CHOICE_TEXTS
        ok = ok and all(isinstance(text, str) and is_unicode(text) for text in texts)
        ok = ok and sum(map(len, texts)) <= MAX_CHOICE_CHARS
        expected = f"at most {MAX_CHOICE_TEXTS} texts of at most {MAX_CHOICE_CHARS} characters together"
        require(ok, "choice", expected, self.choice)
        object.__setattr__(self, "choice", texts)
        calls = self.tool_calls
        require(calls is None or isinstance(calls, ToolCalls), "tool_calls", "a ToolCalls, or none", calls)
        ids = self.allowed_token_ids
        ok = isinstance(ids, Iterable) and len(ids := tuple(ids)) <= MAX_ALLOWED_IDS
        ok = ok and all(is_integer(token, 0, MAX_TOKEN_ID) for token in ids)
        expected = f"at most {MAX_ALLOWED_IDS} token ids from 0 to {MAX_TOKEN_ID}"
        require(ok, "allowed_token_ids", expected, self.allowed_token_ids)
        object.__setattr__(self, "allowed_token_ids", ids)
        asked = [kind for kind in GRAMMAR_KINDS if getattr(self, kind) not in (None, ())]
        if len(asked) > 1:
            raise RequestError(
                f"{asked[1]} must be left out where {asked[0]} is given: a text can fit only one of them",
                param=asked[1],
                code="invalid_value",
            )
        may_be_any = calls is not None and calls.are_optional
        if asked and not may_be_any and self.thinking is not None:  # white space before the mark fits no grammar
            object.__setattr__(self, "thinking", replace(self.thinking, blanks=()))

    @property
    def grammar_source(self) -> tuple[GrammarSource, GrammarKind] | None:
        """Return source and kind of the grammar that the output must fit; None without one."""
        for kind in GRAMMAR_KINDS:
            if (source := getattr(self, kind)) not in (None, ()):
                return source, kind
        return None


Value = TypeVar("Value")


class RowSampling(NamedTuple, Generic[Value]):
    """Sampling parameters that the device applies: the values of one row, or an array of R rows each.

    seed: u64[R] on the host, u32[R, 2] on the device; choice, top_k: i32[R]; the others f32[R]. Every field but seed
    and choice has the name of its field in `SamplingParams`. Each is a column of the slot table, of the step arrays and
    of a draft service's sessions under its name.
    """

    seed: Value
    choice: Value
    temperature: Value
    top_k: Value
    top_p: Value
    min_p: Value

    @staticmethod
    def greedy(rows: int) -> RowSampling[np.ndarray]:
        """Return writable columns of rows that draw at temperature 0 from all tokens."""
        columns = {name: np.full(rows, value, dtype) for name, (dtype, value) in ROW_SAMPLING.items()}
        return RowSampling(np.zeros(rows, np.uint64), **columns)

    @staticmethod
    def of(rows: Iterable[RowSampling[float]]) -> RowSampling[np.ndarray]:
        """Return the columns of rows."""
        types = [np.dtype(np.uint64), *(dtype for dtype, _ in ROW_SAMPLING.values())]
        said = list(rows)
        return RowSampling(*(np.array([row[index] for row in said], dtype) for index, dtype in enumerate(types)))

    def take(self, rows: Any) -> RowSampling[Value]:
        """Return the parameters of these rows, by index."""
        return RowSampling(*(cast("Any", column)[rows] for column in self))


_I32, _F32 = np.dtype(np.int32), np.dtype(np.float32)
ROW_SAMPLING: dict[str, tuple[np.dtype[Any], float]] = {
    "choice": (_I32, 0), "temperature": (_F32, 0.0), "top_k": (_I32, 0), "top_p": (_F32, 1.0), "min_p": (_F32, 0.0),
}  # fmt: skip
"""Type of each column of `RowSampling` but the seed, in order, and its value in a row of `RowSampling.greedy`."""
