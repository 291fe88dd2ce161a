"""Sampling parameters of one request: plain data, every field checked by an error that names it. Imports no jax."""

# pyright: reportUnnecessaryIsInstance=false
# What users pass is looked at whatever its type says.
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

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


def is_integer(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    """Return whether a value is an int within the bounds; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float; True and False are neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Return whether a value is a number, and neither infinite nor NaN."""
    return isinstance(value, (int, float)) and is_number(value) and math.isfinite(value)


def require(ok: bool, param: str, expected: str, value: object, code: str = "invalid_value") -> None:
    """Raise RequestError naming the field at fault unless `ok`, with the beginning of what came."""
    if not ok:
        raise RequestError(f"{param} must be {expected}, got {value!r:.200}", param=param, code=code)


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
    min_tokens says.
    logprobs: report the log probability of every output token, by the model's own logits, and this many of the
    likeliest; None: report none.
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
    json_schema: str | None = None

    def __post_init__(self) -> None:
        for name, expected in (("stop", "a string or several"), ("stop_token_ids", "a sequence of token ids")):
            value = getattr(self, name)
            listed = (value,) if isinstance(value, str) else () if value is None else value
            require(isinstance(listed, Iterable), name, expected, value)
            object.__setattr__(self, name, tuple(listed))
        stop = self.stop
        for name, low, high in (("max_tokens", 1, 2**31 - 1), ("top_k", 0, 2**31 - 1), ("n", 1, MAX_CHOICES)):
            value = getattr(self, name)
            require(is_integer(value, low, high), name, f"an integer from {low} to {high}", value)
        for name, low, high in (("temperature", 0.0, 100.0), ("min_p", 0.0, 1.0)):
            value = getattr(self, name)
            ok = is_number(value) and low <= value <= high
            require(ok, name, f"a number from {low:g} to {high:g}", value)
        require(is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number in (0, 1]", self.top_p)
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
        for name, low, high in (
            ("presence_penalty", -2.0, 2.0), ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        ):  # fmt: skip
            value = getattr(self, name)
            ok = is_number(value) and low <= value <= high
            require(ok, name, f"a number from {low:g} to {high:g}", value)
        least = self.min_tokens
        expected = f"an integer from 0 to max_tokens ({self.max_tokens})"
        require(is_integer(least, 0, self.max_tokens), "min_tokens", expected, least)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        words = self.bad_words
        words = (words,) if isinstance(words, str) else words
        ok = isinstance(words, Iterable) and len(words := tuple(words)) <= MAX_BAD_WORDS
        ok = ok and all(isinstance(word, str) and 1 <= len(word) <= MAX_BAD_WORD_CHARS for word in words)
        expected = f"at most {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_CHARS} characters"
        require(ok, "bad_words", expected, self.bad_words)
        object.__setattr__(self, "bad_words", words)
        count = self.logprobs
        ok = count is None or is_integer(count, 0, MAX_LOGPROBS)
        require(ok, "logprobs", f"an integer from 0 to {MAX_LOGPROBS}, or none", count)
        schema = self.json_schema
        ok = schema is None or (isinstance(schema, str) and 0 < len(schema) <= MAX_SCHEMA_CHARS)
        expected = f"JSON of 1 to {MAX_SCHEMA_CHARS} characters"
        shown = f"{len(schema)} characters" if isinstance(schema, str) else schema
        require(ok, "json_schema", expected, shown)
