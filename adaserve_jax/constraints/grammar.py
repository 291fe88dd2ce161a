"""Which tokens may follow while a text must stay JSON of a schema: a bit per token id, for every node of a token tree.

Host side; knows requests by their ids, and nothing of logits. Imports no jax.
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

# JSON schemas of requests: read, bounded and refused by name. Knows neither tokens nor matchers. Imports no
# jax.

MAX_NESTING = 64
"""Objects and arrays inside each other in a schema's own text."""
MAX_LEVELS = 4096
"""Such levels if every definition that is referred to stood inside the one before: what is read in one descent."""
MAX_MESSAGE_CHARS = 500
OPTIONS_KEY = "x-guidance"
OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
"""How llguidance writes JSON. At most one space, and only after a comma or colon: a model that likes white space could
otherwise go on with it for ever."""


def refuse(why: str) -> NoReturn:
    """Raise RequestError: the schema cannot be used, and why."""
    why = why.removesuffix("<non-verbose/>").strip()
    shown = why if len(why) <= MAX_MESSAGE_CHARS else why[:MAX_MESSAGE_CHARS] + "..."
    raise RequestError(
        f"response_format must hold a JSON schema that can be enforced: {shown}",
        param="response_format",
        code="invalid_schema",
    )


def read_schema(text: str) -> dict[str, Any]:
    """The schema of a text, with the options under which it is enforced.

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
    """The objects and arrays of a schema, level by level."""
    level = [schema]
    while holders := [part for part in level if isinstance(part, (dict, list))]:
        yield holders
        level = [child for part in holders for child in (part.values() if isinstance(part, dict) else part)]


def _references(schema: dict[str, Any]) -> set[str]:
    found = (part.get("$ref") for level in _levels(schema) for part in level if isinstance(part, dict))
    return {reference for reference in found if isinstance(reference, str)}


# A model's vocabulary as llguidance knows it: compiles schemas over it, and asks for masks of it.
#
# llguidance is imported when the first `Vocabulary` is made. Imports no jax.

T = TypeVar("T")
COMPILE_LIMIT_S = 2.0
COMPILE_AT_ONCE = 2
_STACK_BYTES = 128 << 20
"""Reading a schema takes about 8 KiB for each of the levels that `grammar_schema.MAX_LEVELS` bounds."""
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
"""What a schema may cost: its grammar's symbols and the building of its lexer, then for each mask the lexer's work and
the parser's items, and in all the lexer's states, of one to two kilobytes each."""


class Vocabulary:
    """Ids 0..vocab_size-1, W = ceil(vocab_size / 32) words of bits; id i is bit i % 32 of word i // 32.

    backend_json: the tokenizer as the `tokenizers` library writes it. eos_ids: allowed where a text may end, and
    nowhere else. Raises ConfigError: llguidance is not installed; CheckpointError: it cannot read the tokenizer.
    """

    def __init__(self, backend_json: str, vocab_size: int, eos_ids: frozenset[int]):
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
        """What `keep` makes of a matcher before the first token of a schema's JSON. Safe in any thread.

        keep: called in a thread of its own, and even when this has given up waiting.

        Raises RequestError: the schema is invalid, uses what cannot be enforced, or costs more than the limits;
        QueueFullError: too many are being compiled.
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
        """Write into mask (u32[W]) what may follow. False: the matcher has failed, and nothing may follow."""
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            mask[:] = 0
            return False
        may_end = mask[self._eos_id // 32] >> np.uint32(self._eos_id % 32) & 1
        mask &= self._not_end
        if may_end:
            mask |= self.end
        return True


# JSON schemas, each prepared once, in threads of their own: nobody who asks for one waits here. Imports no jax.

MAX_SCHEMAS = 64
MAX_PREPARING = 32


@dataclass(frozen=True, eq=False)
class Start:
    """A prepared schema. matcher: before the first token; copy it for each text."""

    schema: str
    matcher: LLMatcher


class GrammarCache:
    """Prepared schemas by their texts, and refusals. Safe in any thread. max_schemas: so many of either are kept, the
    least recently used goes first."""

    def __init__(self, vocabulary: Vocabulary, max_schemas: int):
        self._vocabulary = vocabulary
        self._max_schemas = max_schemas
        self._pool = ThreadPoolExecutor(MAX_PREPARING, "schemas")
        self._lock = threading.Lock()  # guards the rest
        self._prepared: OrderedDict[str, Start] = OrderedDict()
        self._refused: OrderedDict[str, RequestError] = OrderedDict()
        self._running: dict[str, Future[Start]] = {}

    def __len__(self) -> int:
        return len(self._prepared)

    def prepare(self, schema: str) -> Future[Start]:
        """`schema`, as soon as it is prepared; who asks meanwhile gets the same future. It may raise RequestError (code
        invalid_schema): the schema cannot be enforced; QueueFullError: too many others are being prepared."""
        known: Future[Start] = Future()
        with self._lock:
            if (start := self._prepared.get(schema)) is not None:
                self._prepared.move_to_end(schema)
                known.set_result(start)
            elif (error := self._refused.get(schema)) is not None:
                self._refused.move_to_end(schema)
                known.set_exception(_again(error))
            elif (running := self._running.get(schema)) is not None:
                known = running
            elif len(self._running) >= MAX_PREPARING:
                known.set_exception(QueueFullError("too many schemas are being prepared; retry later"))
            else:
                known = self._running[schema] = self._pool.submit(self._prepare, schema)
        return known

    def forget(self, schema: str) -> None:
        """Whoever asks for it next gets it prepared anew."""
        with self._lock:
            self._prepared.pop(schema, None)

    def _prepare(self, schema: str) -> Start:
        try:
            with contained("response_format"):
                return self._vocabulary.compile(schema, lambda matcher: self._keep(Start(schema, matcher)))
        except RequestError as error:
            return self._refuse(schema, error)
        finally:
            with self._lock:
                del self._running[schema]

    def _keep(self, start: Start) -> Start:
        """Also of one that comes too late for who asked for it."""
        with self._lock:
            self._refused.pop(start.schema, None)
            self._prepared[start.schema] = start
            if len(self._prepared) > self._max_schemas:
                self._prepared.popitem(last=False)
        return start

    def _refuse(self, schema: str, error: RequestError) -> Start:
        """Raises the error, unless the schema came after all."""
        with self._lock:
            if (late := self._prepared.get(schema)) is not None:
                return late
            self._refused[schema] = _again(error)
            if len(self._refused) > self._max_schemas:
                self._refused.popitem(last=False)
        raise error


def _again(error: RequestError) -> RequestError:
    """The error without what it collected where it was raised."""
    return RequestError(str(error), param=error.param, code=error.code)


class HasBackend(Protocol):
    """The part of `models.tokenizer.Tokenizer` that is needed here."""

    def backend_json(self) -> str: ...


class Grammars:
    """`protocols.Grammars` by llguidance: prepared once per schema, followed once per request.

    vocab_size: of the model's logits; ids that the tokenizer does not have are never allowed. eos_ids: allowed where
    the text may end, and nowhere else. max_schemas: prepared schemas that are kept.
    Raises ConfigError: llguidance is not installed, or the model has no end-of-text token; CheckpointError: llguidance
    cannot read the tokenizer.
    """

    def __init__(
        self, tokenizer: HasBackend, vocab_size: int, eos_ids: Iterable[int], *, max_schemas: int = MAX_SCHEMAS
    ):
        self._eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        if not self._eos_ids:
            raise ConfigError("structured output needs an end-of-text token, but the target's config.json names none")
        self._vocabulary = Vocabulary(tokenizer.backend_json(), vocab_size, self._eos_ids)
        self._cache = GrammarCache(self._vocabulary, max_schemas)
        self._texts: dict[str, _Text] = {}

    def prepare(self, schema: str) -> Future[Start]:
        return self._cache.prepare(schema)

    def add(self, sequence_id: str, start: Start) -> None:
        self._texts[sequence_id] = _Text(start, self._eos_ids)

    def discard(self, sequence_id: str) -> None:
        self._texts.pop(sequence_id, None)

    def advance(self, sequence_id: str, token_ids: Iterable[int]) -> bool:
        """A text that may end but can go on, as a number can, is not complete. A token that was forbidden leaves the
        request with nothing allowed."""
        with self._text(sequence_id) as text:
            return text.advance(token_ids)

    def fill(self, sequence_id: str, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> str | None:
        """A node that cannot be reached, because its token or one above it is forbidden, gets all ids; one at which the
        schema costs more than the limits gets none. Ids from V on are never allowed."""
        assert masks.dtype == np.uint32 and masks.shape == (len(tokens), self._vocabulary.num_words)
        assert masks.flags.c_contiguous
        with self._text(sequence_id) as text:
            return self._fill(text, tokens.tolist(), parents.tolist(), masks)

    def _fill(self, text: _Text, tokens: list[int], parents: list[int], masks: np.ndarray) -> str | None:
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
        text.take_back()
        masks[list(unreached)] = self._vocabulary.all
        return why

    @contextmanager
    def _text(self, sequence_id: str) -> Iterator[_Text]:
        """A request's text; where following it breaks, others of the schema get a new matcher from then on."""
        text = self._texts[sequence_id]
        try:
            yield text
        except BaseException:
            self._cache.forget(text.schema)
            raise


class _Text:
    """One text: its committed tokens, and a matcher that stands after them or some tokens ahead."""

    def __init__(self, start: Start, eos_ids: frozenset[int]):
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
        """Write what may follow the text and `path`, each of whose tokens may follow those before it. Returns why the
        matcher has failed, and nothing may; None: it has not."""
        if self._ended or not self._eos_ids.isdisjoint(path):
            mask[:] = vocabulary.end
            return None
        self._go(path)
        if vocabulary.mask(self._matcher, mask):
            return None
        why = self._matcher.get_error()
        if path:
            self._start_again()
        return why

    def take_back(self) -> None:
        self._go(())

    def _go(self, path: tuple[int, ...]) -> None:
        """Put the matcher after the text and `path`, by the shortest way."""
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

    def _start_again(self) -> None:
        """A matcher that failed ahead of the text fails for ever: follow the text anew."""
        self._matcher = self._start.matcher.deep_copy()
        self._matcher.consume_tokens(self._tokens)
        self._ahead = ()
