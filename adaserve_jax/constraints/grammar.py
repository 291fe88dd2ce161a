"""Structured output with llguidance: masks of the next tokens, so that a text fits a schema, regex, choice or grammar,
or calls tools with arguments that fit theirs.

`grammar_source` checks and translates it, `Vocabulary` compiles it over the model's vocabulary, `GrammarCache` keeps
it, and `Grammars` follows it for each sequence and fills the masks of every node of a token tree. llguidance is
imported when the first `Vocabulary` is made.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from adaserve_jax.constraints.grammar_source import field_of, refuse, translate
from adaserve_jax.constraints.masks import all_but, has, num_words
from adaserve_jax.constraints.sandbox import BoundedWork, contained
from adaserve_jax.constraints.tool_formats import free_text
from adaserve_jax.errors import CheckpointError, ConfigError, QueueFullError, RequestError
from adaserve_jax.sampling import GrammarKind, GrammarSource, ToolCalls

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")
MAX_GRAMMARS = 64
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
"""Limits on the cost of a grammar: symbols of its grammar and work to build its lexer; for each mask, work of the lexer
and items of the parser; states of the lexer in all, of one to two kilobytes each."""
GrammarKey = tuple[GrammarKind, GrammarSource]
"""Kind and source of a grammar."""


class Vocabulary:
    """A model's vocabulary in llguidance: compiles grammars over it and computes masks.

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
        added = json.loads(backend_json).get("added_tokens", [])
        named = {token["content"]: token["id"] for token in added if token["id"] < vocab_size}
        self._special = {
            text: token
            for text, token in named.items()
            if self._tokens.is_special_token(token) and token not in eos_ids
        }

    @cached_property
    def free(self) -> np.ndarray:
        """Tokens that may follow a text of any kind, u32[W]. Bytes that never begin a character are not among them, nor
        are ids that the tokenizer lacks."""
        mask = np.empty(self.num_words, np.uint32)
        self.mask(self._matcher(self._matcher_class.grammar_from_lark(free_text(self._special.values()))), mask)
        return mask

    def compile(self, key: GrammarKey, keep: Callable[[LLMatcher], T]) -> T:
        """Compile a grammar and return `keep(matcher)`, the matcher being before the first token. Thread-safe.

        `keep` runs in a thread of its own, and also after this has stopped waiting for it.
        Raises RequestError: the grammar is invalid, cannot be enforced, or exceeds the limits; QueueFullError: too many
        are being compiled.
        """
        kind, source = key
        try:
            return self._work.run(lambda: keep(self._compile(kind, source)))
        except TimeoutError:
            refuse(f"it takes more than {COMPILE_LIMIT_S:g} s to prepare; make it simpler", kind)

    def _compile(self, kind: GrammarKind, source: GrammarSource) -> LLMatcher:
        try:
            return self._start(translate(kind, source, self._matcher_class, self._special), kind)
        except RequestError:
            relaxed = self._unenforced(kind, source) if isinstance(source, ToolCalls) else frozenset()
            if not relaxed:
                raise
        return self._start(translate(kind, source, self._matcher_class, self._special, relaxed), kind)

    def _unenforced(self, kind: GrammarKind, calls: ToolCalls) -> frozenset[str]:
        """Return the lenient tools whose schemas cannot be enforced. Raises RequestError for one that is not
        lenient."""
        found: set[str] = set()
        for name, schema in calls.tools:
            alone = ToolCalls(calls.format, ((name, schema),), required=True)
            try:
                self._start(translate(kind, alone, self._matcher_class, self._special), kind, name)
            except RequestError:
                if name not in calls.lenient:
                    raise
                found.add(name)
        return frozenset(found)

    def _matcher(self, grammar: str) -> LLMatcher:
        return self._matcher_class(self._tokens, grammar, log_level=_SILENT, limits=self._limits)

    def _start(self, grammar: str, kind: GrammarKind, tool: str = "") -> LLMatcher:
        """Return a matcher before the first token. tool: the one whose arguments it is for. Raises RequestError."""
        start = self._matcher(grammar)
        if start.is_error():
            refuse(start.get_error(), kind, tool)
        probe, mask = start.deep_copy(), np.empty(self.num_words, np.uint32)
        self.mask(probe, mask)
        if not mask.any():
            why = probe.get_error()
            what = "JSON" if kind == "json_schema" or tool else "text"
            refuse(f"no {what} at all fits it" if "NoExtension" in why else why, kind, tool)
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
class PreparedGrammar:
    """A compiled grammar. matcher: before the first token; copy it for each text. free: tokens after which the text is
    free of any rule, u32[W], and so are those that it lacks; None: it is never free."""

    key: GrammarKey
    matcher: LLMatcher
    free: np.ndarray | None = None


class GrammarCache:
    """LRU cache of prepared grammars, and of refusals, by kind and text. Prepares in own threads. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, max_grammars: int):
        """Start empty. max_grammars: most prepared grammars to keep, and most refusals."""
        self._vocabulary = vocabulary
        self._max_grammars = max_grammars
        self._pool = ThreadPoolExecutor(MAX_PREPARING, "schemas")
        self._lock = threading.Lock()  # guards the rest
        self._prepared: OrderedDict[GrammarKey, PreparedGrammar] = OrderedDict()
        self._refused: OrderedDict[GrammarKey, RequestError] = OrderedDict()
        self._running: dict[GrammarKey, Future[PreparedGrammar]] = {}

    def prepare(self, key: GrammarKey) -> Future[PreparedGrammar]:
        """Implement `Grammars.prepare`: all who ask while a grammar is being prepared get the same future."""
        known: Future[PreparedGrammar] = Future()
        with self._lock:
            if (start := self._prepared.get(key)) is not None:
                self._prepared.move_to_end(key)
                known.set_result(start)
            elif (error := self._refused.get(key)) is not None:
                self._refused.move_to_end(key)
                known.set_exception(_fresh_copy(error))
            elif (running := self._running.get(key)) is not None:
                known = running
            elif len(self._running) >= MAX_PREPARING:
                known.set_exception(QueueFullError("too many schemas are being prepared; retry later"))
            else:
                known = self._running[key] = self._pool.submit(self._prepare, key)
        return known

    def forget(self, key: GrammarKey) -> None:
        """Drop a grammar, so that it is prepared anew when it is used next."""
        with self._lock:
            self._prepared.pop(key, None)

    def _prepare(self, key: GrammarKey) -> PreparedGrammar:
        try:
            with contained(field_of(key[0])):
                return self._vocabulary.compile(key, lambda matcher: self._keep(self._prepared_by(key, matcher)))
        except RequestError as error:
            return self._refuse(key, error)
        finally:
            with self._lock:
                del self._running[key]

    def _prepared_by(self, key: GrammarKey, matcher: LLMatcher) -> PreparedGrammar:
        source = key[1]
        may_be_free = isinstance(source, ToolCalls) and source.are_optional
        return PreparedGrammar(key, matcher, self._vocabulary.free if may_be_free else None)

    def _keep(self, start: PreparedGrammar) -> PreparedGrammar:
        """Store a prepared grammar, even if its compilation was too late for the request."""
        with self._lock:
            self._refused.pop(start.key, None)
            self._prepared[start.key] = start
            if len(self._prepared) > self._max_grammars:
                self._prepared.popitem(last=False)
        return start

    def _refuse(self, key: GrammarKey, error: RequestError) -> PreparedGrammar:
        """Store a refusal and raise it, unless the grammar was prepared after all."""
        with self._lock:
            if (late := self._prepared.get(key)) is not None:
                return late
            self._refused[key] = _fresh_copy(error)
            if len(self._refused) > self._max_grammars:
                self._refused.popitem(last=False)
        raise error


def _fresh_copy(error: RequestError) -> RequestError:
    """Return a copy of the error without its traceback and cause."""
    return RequestError(str(error), param=error.param, code=error.code)


class Grammars:
    """Follows each sequence that has a grammar: one preparation per grammar, one matcher per sequence.

    Only `prepare` is thread-safe. Axes: N nodes of one tree, V vocabulary.
    """

    def __init__(self, backend_json: str, vocab_size: int, eos_ids: Iterable[int], *, max_grammars: int = MAX_GRAMMARS):
        """Read the target's tokenizer as `Vocabulary` does; ids of the vocabulary that it lacks are never allowed.

        Raises ConfigError: llguidance is not installed, or the model has no end-of-text token; CheckpointError:
        llguidance cannot read the tokenizer.
        """
        self._eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        if not self._eos_ids:
            raise ConfigError("structured output needs an end-of-text token, but the target's config.json names none")
        self._vocabulary = Vocabulary(backend_json, vocab_size, self._eos_ids)
        self._cache = GrammarCache(self._vocabulary, max_grammars)
        self._texts: dict[str, _GrammarText] = {}

    def prepare(self, source: GrammarSource, kind: GrammarKind = "json_schema") -> Future[PreparedGrammar]:
        """Prepare a grammar in the background.

        The future may raise RequestError (code invalid_schema or invalid_grammar): it cannot be enforced;
        QueueFullError: too many others are being prepared.
        """
        return self._cache.prepare((kind, source))

    def add(self, sequence_id: str, start: PreparedGrammar) -> None:
        """Start a sequence, with no output yet."""
        self._texts[sequence_id] = _GrammarText(start, self._eos_ids)

    def discard(self, sequence_id: str) -> None:
        """Remove a sequence. Unknown ids are ignored."""
        self._texts.pop(sequence_id, None)

    def advance(self, sequence_id: str, token_ids: Iterable[int]) -> bool:
        """Add output tokens. True: the text is complete, and only end-of-text may follow; it may be the last of these.

        A text that may end but can go on, as a number can, is not complete. After a forbidden token nothing is allowed.
        """
        with self._text(sequence_id) as text:
            return text.advance(token_ids)

    def fill(self, sequence_id: str, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> str | None:
        """Write the tokens that may follow each node into masks, u32[N, ceil(V / 32)]; does not advance.

        tokens, parents: i32[N]; node 0 is the root (parent -1), whose token was added already. A node that cannot be
        reached, because its token or one above it is forbidden, allows all ids; one at which the grammar exceeds the
        limits allows none, and their error is returned. Ids from V on are never allowed.
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
                self._cache.forget(text.start.key)  # texts share its lexer, whose states are bounded and now used up
            # A text that is free goes on after tokens that the matcher cannot read, and it is told nothing of them.
            readable = text.start.free if np.array_equal(mask, self._vocabulary.all) else None
            for child in children[node]:
                token = tokens[child]
                if has(mask, token):
                    open_nodes.append((child, (*path, token) if readable is None or has(readable, token) else path))
        text.go(())
        masks[list(unreached)] = self._vocabulary.all
        return why

    @contextmanager
    def _text(self, sequence_id: str) -> Iterator[_GrammarText]:
        """Yield a sequence's text. If an error escapes, later sequences of the grammar get a new matcher."""
        text = self._texts[sequence_id]
        try:
            yield text
        except BaseException:
            self._cache.forget(text.start.key)
            raise


class _GrammarText:
    """One text: its committed tokens, and a matcher after them or some tokens ahead."""

    def __init__(self, start: PreparedGrammar, eos_ids: frozenset[int]):
        self.start = start
        self._eos_ids = eos_ids
        self._tokens: list[int] = []
        self._ended = False
        self._matcher = start.matcher.deep_copy()
        self._ahead: tuple[int, ...] = ()

    def advance(self, token_ids: Iterable[int]) -> bool:
        for token in map(int, token_ids):
            self._ended = self._ended or token in self._eos_ids
            if self._ended:
                return True
            if self.start.free is not None and not self._matcher.validate_tokens([token]):
                continue  # `Grammars.fill` allowed it, because the text is free
            self._tokens.append(token)
            self._matcher.consume_token(token)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask_after(self, path: tuple[int, ...], vocabulary: Vocabulary, mask: np.ndarray) -> str | None:
        """Write the tokens that may follow the text and `path`, a path that the grammar allows.

        Returns the error of a matcher that failed, with the mask 0; None if it did not.
        """
        if self._ended or not self._eos_ids.isdisjoint(path):
            mask[:] = vocabulary.end
            return None
        self.go(path)
        if vocabulary.mask(self._matcher, mask):
            if self.start.free is not None and np.array_equal(mask, self.start.free):
                mask[:] = vocabulary.all
            return None
        why = self._matcher.get_error()
        if path:  # a matcher that failed ahead of the text fails for ever
            self._matcher = self.start.matcher.deep_copy()
            self._matcher.consume_tokens(self._tokens)
            self._ahead = ()
        return why

    def go(self, path: tuple[int, ...]) -> None:
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
