"""Structured output with llguidance: masks of the tokens that may follow, so that a text is JSON of a schema.

`read_schema` checks a schema, `Vocabulary` compiles it over the model's vocabulary, `GrammarCache` keeps it, and
`Grammars` follows it for each sequence and fills the masks of every node of a token tree. llguidance is imported when
the first `Vocabulary` is made.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import numpy as np

from adaserve_jax.constraints.masks import all_but, num_words
from adaserve_jax.constraints.sandbox import BoundedWork, contained
from adaserve_jax.errors import CheckpointError, ConfigError, QueueFullError, RequestError
from adaserve_jax.sampling import MAX_SCHEMA_CHARS

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")
MAX_NESTING = 64
"""Most levels of objects and arrays in a schema's own text."""
MAX_LEVELS = 4096
"""Most levels if every referenced definition stood inside the one before; llguidance recurses that deep."""
MAX_MESSAGE_CHARS = 500
MAX_SCHEMAS = 64
MAX_PREPARING = 32
COMPILE_LIMIT_S = 2.0
COMPILE_AT_ONCE = 2
_STACK_BYTES = 128 << 20
"""Reading a schema takes about 8 KiB for each of MAX_LEVELS levels."""
_SILENT = 0
LIMITS = {
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
"""Limits on the cost of a schema: symbols of its grammar and work to build its lexer; for each mask, work of the lexer
and items of the parser; states of the lexer in all, of one to two kilobytes each."""
OPTIONS_KEY = "x-guidance"
OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
"""Format of the JSON: at most one space, and only after a comma or colon. Else a model could write white space for
ever."""


def refuse(why: str) -> NoReturn:
    """Raise RequestError: the schema cannot be enforced."""
    why = why.removesuffix("<non-verbose/>").strip()
    shown = why if len(why) <= MAX_MESSAGE_CHARS else why[:MAX_MESSAGE_CHARS] + "..."
    raise RequestError(
        f"response_format must hold a JSON schema that can be enforced: {shown}",
        param="response_format",
        code="invalid_schema",
    )


def read_schema(text: str) -> dict[str, Any]:
    """Parse a schema and add the options under which it is enforced.

    Raises RequestError: the text is too long, no JSON, no object, nested too deeply, or sets options itself.
    """
    if len(text) > MAX_SCHEMA_CHARS:
        refuse(f"at most {MAX_SCHEMA_CHARS} characters, got {len(text)}")
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        refuse(f"at most {MAX_NESTING} objects and arrays inside each other, got far more")
    except ValueError as error:
        refuse(f"it is not JSON: {error}")
    if not isinstance(schema, dict):
        refuse(f'expected an object such as {{"type": "object"}}, got {text[:40]}')
    if OPTIONS_KEY in schema:
        refuse(f"{OPTIONS_KEY!r} is no keyword of JSON Schema; leave it out")
    if (depth := sum(1 for _ in _levels(schema))) > MAX_NESTING:
        refuse(f"at most {MAX_NESTING} objects and arrays inside each other, got {depth}")
    references = _references(schema)
    if (levels := depth * (1 + len(references))) > MAX_LEVELS:
        refuse(
            f"at most {MAX_LEVELS} levels, of nesting times definitions referred to, got {levels}: "
            f"{len(references)} different $ref in {depth} levels"
        )
    return {**schema, OPTIONS_KEY: OPTIONS}


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _levels(schema: Any) -> Iterator[list[dict[str, Any] | list[Any]]]:
    """Yield the objects and arrays of a schema, level by level."""
    level = [schema]
    while holders := [part for part in level if isinstance(part, (dict, list))]:
        yield holders
        level = [child for part in holders for child in (part.values() if isinstance(part, dict) else part)]


def _references(schema: dict[str, Any]) -> set[str]:
    found = (part.get("$ref") for level in _levels(schema) for part in level if isinstance(part, dict))
    return {reference for reference in found if isinstance(reference, str)}


class Vocabulary:
    """A model's vocabulary in llguidance: compiles schemas over it and computes masks.

    A mask is W = ceil(vocab_size / 32) words of bits; id i is bit i % 32 of word i // 32.
    """

    def __init__(self, backend_json: str, vocab_size: int, eos_ids: frozenset[int]):
        """Read a tokenizer in the JSON of the `tokenizers` library. eos_ids: allowed only where a text may end.

        Raises ConfigError: llguidance is not installed; CheckpointError: it cannot read the tokenizer.
        """
        try:
            import llguidance
        except ImportError:
            raise ConfigError(
                "structured output needs the package llguidance, which is not installed; "
                "install it with: pip install 'adaserve-jax[server]'"
            ) from None
        self._matcher_class = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._work = BoundedWork(stack_bytes=_STACK_BYTES, limit_s=COMPILE_LIMIT_S, at_once=COMPILE_AT_ONCE)
        self._eos_id = min(eos_ids)
        try:
            self._tokens = llguidance.LLTokenizer(backend_json, n_vocab=vocab_size, eos_token=sorted(eos_ids))
        except Exception as error:
            raise CheckpointError(
                f"llguidance cannot read the target's tokenizer with a vocabulary of {vocab_size}: {error}"
            ) from error
        self.num_words = num_words(vocab_size)
        self.all = all_but(vocab_size)
        self.end = ~all_but(vocab_size, eos_ids) & self.all
        self._not_end = ~self.end

    def compile(self, schema: str, keep: Callable[[LLMatcher], T]) -> T:
        """Compile a schema and return `keep(matcher)`, the matcher being before the first token. Thread-safe.

        `keep` runs in a thread of its own, and also after this has stopped waiting for it.
        Raises RequestError: the schema is invalid, cannot be enforced, or exceeds the limits; QueueFullError: too many
        are being compiled.
        """
        read = read_schema(schema)
        try:
            return self._work.run(lambda: keep(self._compile(read)))
        except TimeoutError:
            refuse(f"it takes more than {COMPILE_LIMIT_S:g} s to prepare; make it simpler")

    def _compile(self, schema: dict[str, Any]) -> LLMatcher:
        try:
            grammar = self._matcher_class.grammar_from_json_schema(schema)
        except ValueError as error:
            refuse(str(error))
        start = self._matcher_class(self._tokens, grammar, log_level=_SILENT, limits=self._limits)
        if start.is_error():
            refuse(start.get_error())
        probe, mask = start.deep_copy(), np.empty(self.num_words, np.uint32)
        self.mask(probe, mask)
        if not mask.any():
            why = probe.get_error()
            refuse("no JSON at all fits it" if "NoExtension" in why else why)
        return start

    def mask(self, matcher: LLMatcher, mask: np.ndarray) -> bool:
        """Write the tokens that may follow into mask, u32[W]. False: the matcher has failed, and the mask is 0."""
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            mask[:] = 0
            return False
        may_end = mask[self._eos_id // 32] >> np.uint32(self._eos_id % 32) & 1
        mask &= self._not_end
        if may_end:
            mask |= self.end
        return True


@dataclass(frozen=True, eq=False)
class PreparedSchema:
    """A compiled schema. matcher: before the first token; copy it for each text."""

    schema: str
    matcher: LLMatcher


class GrammarCache:
    """LRU cache of prepared schemas, and of refusals, by text. Prepares in threads of its own. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, max_schemas: int):
        """Start empty. max_schemas: most prepared schemas to keep, and most refusals."""
        self._vocabulary = vocabulary
        self._max_schemas = max_schemas
        self._pool = ThreadPoolExecutor(MAX_PREPARING, "schemas")
        self._lock = threading.Lock()  # guards the rest
        self._prepared: OrderedDict[str, PreparedSchema] = OrderedDict()
        self._refused: OrderedDict[str, RequestError] = OrderedDict()
        self._running: dict[str, Future[PreparedSchema]] = {}

    def __len__(self) -> int:
        return len(self._prepared)

    def prepare(self, schema: str) -> Future[PreparedSchema]:
        """Return a future of the prepared schema, the same to all who ask while it is being prepared.

        It may raise RequestError (code invalid_schema): the schema cannot be enforced; QueueFullError: too many others
        are being prepared.
        """
        known: Future[PreparedSchema] = Future()
        with self._lock:
            if (start := self._prepared.get(schema)) is not None:
                self._prepared.move_to_end(schema)
                known.set_result(start)
            elif (error := self._refused.get(schema)) is not None:
                self._refused.move_to_end(schema)
                known.set_exception(_fresh_copy(error))
            elif (running := self._running.get(schema)) is not None:
                known = running
            elif len(self._running) >= MAX_PREPARING:
                known.set_exception(QueueFullError("too many schemas are being prepared; retry later"))
            else:
                known = self._running[schema] = self._pool.submit(self._prepare, schema)
        return known

    def forget(self, schema: str) -> None:
        """Drop a schema, so that it is prepared anew when it is used next."""
        with self._lock:
            self._prepared.pop(schema, None)

    def _prepare(self, schema: str) -> PreparedSchema:
        try:
            with contained("response_format"):
                return self._vocabulary.compile(schema, lambda matcher: self._keep(PreparedSchema(schema, matcher)))
        except RequestError as error:
            return self._refuse(schema, error)
        finally:
            with self._lock:
                del self._running[schema]

    def _keep(self, start: PreparedSchema) -> PreparedSchema:
        """Store a prepared schema, even if its compilation was too late for the request."""
        with self._lock:
            self._refused.pop(start.schema, None)
            self._prepared[start.schema] = start
            if len(self._prepared) > self._max_schemas:
                self._prepared.popitem(last=False)
        return start

    def _refuse(self, schema: str, error: RequestError) -> PreparedSchema:
        """Store a refusal and raise it, unless the schema was prepared after all."""
        with self._lock:
            if (late := self._prepared.get(schema)) is not None:
                return late
            self._refused[schema] = _fresh_copy(error)
            if len(self._refused) > self._max_schemas:
                self._refused.popitem(last=False)
        raise error


def _fresh_copy(error: RequestError) -> RequestError:
    """Return a copy of the error without its traceback and cause."""
    return RequestError(str(error), param=error.param, code=error.code)


class HasBackend(Protocol):
    """The part of `models.tokenizer.Tokenizer` that grammars use."""

    def backend_json(self) -> str: ...


class Grammars:
    """Implements `protocols.GrammarBackend` with llguidance: one preparation per schema, one matcher per sequence."""

    def __init__(
        self, tokenizer: HasBackend, vocab_size: int, eos_ids: Iterable[int], *, max_schemas: int = MAX_SCHEMAS
    ):
        """Read a tokenizer.

        Args:
            tokenizer: The target's tokenizer.
            vocab_size: V of the target's logits; ids that the tokenizer does not have are never allowed.
            eos_ids: End-of-text tokens, allowed only where the text may end.
            max_schemas: Most prepared schemas to keep.

        Raises:
            ConfigError: llguidance is not installed, or the model has no end-of-text token.
            CheckpointError: llguidance cannot read the tokenizer.
        """
        self._eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        if not self._eos_ids:
            raise ConfigError("structured output needs an end-of-text token, but the target's config.json names none")
        self._vocabulary = Vocabulary(tokenizer.backend_json(), vocab_size, self._eos_ids)
        self._cache = GrammarCache(self._vocabulary, max_schemas)
        self._texts: dict[str, _GrammarText] = {}

    @property
    def num_prepared(self) -> int:
        """Prepared schemas in the cache."""
        return len(self._cache)

    def prepare(self, schema: str) -> Future[PreparedSchema]:
        return self._cache.prepare(schema)

    def add(self, sequence_id: str, start: PreparedSchema) -> None:
        self._texts[sequence_id] = _GrammarText(start, self._eos_ids)

    def discard(self, sequence_id: str) -> None:
        self._texts.pop(sequence_id, None)

    def advance(self, sequence_id: str, token_ids: Iterable[int]) -> bool:
        """Implement `GrammarBackend.advance`.

        A text that may end but can go on, as a number can, is not complete. After a forbidden token nothing is allowed.
        """
        with self._text(sequence_id) as text:
            return text.advance(token_ids)

    def fill(self, sequence_id: str, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> str | None:
        """Implement `GrammarBackend.fill`.

        A node that cannot be reached, because its token or one above it is forbidden, allows all ids; one at which the
        schema exceeds the limits allows none. Ids from V on are never allowed.
        """
        assert masks.dtype == np.uint32 and masks.shape == (len(tokens), self._vocabulary.num_words)
        assert masks.flags.c_contiguous
        with self._text(sequence_id) as text:
            return self._fill(text, tokens.tolist(), parents.tolist(), masks)

    def _fill(self, text: _GrammarText, tokens: list[int], parents: list[int], masks: np.ndarray) -> str | None:
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents):
            if parent >= 0:
                children[parent].append(node)
        why = None
        unreached = set(range(len(tokens)))
        open_nodes: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        while open_nodes:
            node, path = open_nodes.pop()
            unreached.remove(node)
            mask = masks[node]
            if (failure := text.mask_after(path, self._vocabulary, mask)) is not None:
                why = failure
                self._cache.forget(text.schema)  # texts share its lexer, whose states are bounded and now used up
            for child in children[node]:
                token = tokens[child]
                if mask[token // 32] >> np.uint32(token % 32) & 1:
                    open_nodes.append((child, (*path, token)))
        text.rewind()
        masks[list(unreached)] = self._vocabulary.all
        return why

    @contextmanager
    def _text(self, sequence_id: str) -> Iterator[_GrammarText]:
        """Yield a sequence's text. If an error escapes, later sequences of the schema get a new matcher."""
        text = self._texts[sequence_id]
        try:
            yield text
        except BaseException:
            self._cache.forget(text.schema)
            raise


class _GrammarText:
    """One text: its committed tokens, and a matcher after them or some tokens ahead."""

    def __init__(self, start: PreparedSchema, eos_ids: frozenset[int]):
        self._start = start
        self._eos_ids = eos_ids
        self._tokens: list[int] = []
        self._ended = False
        self._matcher = start.matcher.deep_copy()
        self._ahead: tuple[int, ...] = ()

    @property
    def schema(self) -> str:
        return self._start.schema

    def advance(self, token_ids: Iterable[int]) -> bool:
        for token in map(int, token_ids):
            self._ended = self._ended or token in self._eos_ids
            if self._ended:
                return True
            self._tokens.append(token)
            self._matcher.consume_token(token)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask_after(self, path: tuple[int, ...], vocabulary: Vocabulary, mask: np.ndarray) -> str | None:
        """Write the tokens that may follow the text and `path`, a path that the schema allows.

        Returns the error of a matcher that failed, with the mask 0; None if it did not.
        """
        if self._ended or not self._eos_ids.isdisjoint(path):
            mask[:] = vocabulary.end
            return None
        self._go(path)
        if vocabulary.mask(self._matcher, mask):
            return None
        why = self._matcher.get_error()
        if path:
            self._restart()
        return why

    def rewind(self) -> None:
        """Put the matcher after the committed text."""
        self._go(())

    def _go(self, path: tuple[int, ...]) -> None:
        """Put the matcher after the text and `path` with the fewest rollbacks and tokens."""
        same = 0
        for ours, theirs in zip(self._ahead, path, strict=False):
            if ours != theirs:
                break
            same += 1
        if same < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - same)
        if same < len(path):
            self._matcher.consume_tokens(list(path[same:]))
        self._ahead = path

    def _restart(self) -> None:
        """Replace a matcher that failed ahead of the text, since it fails for ever, by one after the text."""
        self._matcher = self._start.matcher.deep_copy()
        self._matcher.consume_tokens(self._tokens)
        self._ahead = ()
