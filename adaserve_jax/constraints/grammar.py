"""Which tokens may follow while a text must stay JSON of a schema: a bit per token id, for every node of a token tree.

Host side; knows requests by their ids, and nothing of logits. Imports no jax.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from adaserve_jax.constraints.grammar_vocabulary import Vocabulary
from adaserve_jax.errors import ConfigError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_SCHEMAS = 64


class HasBackend(Protocol):
    """The part of `models.tokenizer.Tokenizer` that is needed here."""

    def backend_json(self) -> str: ...


class Grammars:
    """The grammars of the requests that have one: compiled once per schema, followed once per request.

    `check` may be called in any thread; all else belongs to the thread that steps the engine.

    vocab_size: of the model's logits; ids that the tokenizer does not have are never allowed. eos_ids: allowed where
    the text may end, and nowhere else. max_schemas: compiled schemas that are kept, the least recently used goes first.
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
        self._max_schemas = max_schemas
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._texts: dict[str, _Text] = {}

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def check(self, schema: str) -> None:
        """Raises RequestError (param response_format, code invalid_schema) saying why a schema cannot be enforced, and
        QueueFullError when too many others are being prepared."""
        self._start(schema)

    def add(self, request_id: str, schema: str) -> None:
        """From now on the request's text must be JSON of this schema. Raises as `check` does."""
        self._texts[request_id] = _Text(schema, self._start(schema), self._eos_ids)

    def discard(self, request_id: str) -> None:
        """Forget a request, if it is known."""
        self._texts.pop(request_id, None)

    def advance(self, request_id: str, token_ids: Iterable[int]) -> bool:
        """Append committed tokens. True: the JSON is complete, and only end-of-text can follow; a text that may end but
        can go on, as a number can, is not. A token that was forbidden leaves the request with nothing allowed."""
        return self._texts[request_id].advance(token_ids)

    def fill(self, request_id: str, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> None:
        """Write into masks what may follow each node of a tree; the text itself stays where it is.

        tokens: i32[T], parents: i32[T], -1 for node 0, the root, whose token is committed. masks: u32[T, W],
        W = ceil(vocab_size / 32), id i at bit i % 32 of word i // 32. A node that cannot be reached, because its token
        or one above it is forbidden, gets all ids; one at which the schema costs more than the limits gets none.
        """
        assert masks.dtype == np.uint32 and masks.shape == (len(tokens), self._vocabulary.num_words)
        assert masks.flags.c_contiguous
        text = self._texts[request_id]
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents.tolist()):
            if parent >= 0:
                children[parent].append(node)
        token_of = tokens.tolist()
        unreached = set(range(len(token_of)))
        open_nodes: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        while open_nodes:
            node, path = open_nodes.pop()
            unreached.remove(node)
            mask = masks[node]
            if not text.mask_after(path, self._vocabulary, mask):
                self._forget(text.schema)
            for child in children[node]:
                token = token_of[child]
                if mask[token // 32] >> np.uint32(token % 32) & 1:
                    open_nodes.append((child, (*path, token)))
        text.take_back()
        masks[list(unreached)] = self._vocabulary.all

    def _forget(self, schema: str) -> None:
        """Texts of a schema share its lexer, whose states are bounded: once used up, new texts get a new one."""
        with self._lock:
            self._compiled.pop(schema, None)

    def _start(self, schema: str) -> LLMatcher:
        with self._lock:
            if (known := self._compiled.get(schema)) is not None:
                self._compiled.move_to_end(schema)
                return known
        start = self._vocabulary.compile(schema)  # not under the lock: others' schemas do not wait for this one
        with self._lock:
            self._compiled[schema] = start
            if len(self._compiled) > self._max_schemas:
                self._compiled.popitem(last=False)
        return start


class _Text:
    """One text: its committed tokens, and a matcher that stands after them or some tokens ahead."""

    def __init__(self, schema: str, start: LLMatcher, eos_ids: frozenset[int]):
        self.schema = schema
        self._start = start
        self._eos_ids = eos_ids
        self._tokens: list[int] = []
        self._ended = False
        self._matcher = start.deep_copy()
        self._ahead: tuple[int, ...] = ()

    def advance(self, token_ids: Iterable[int]) -> bool:
        for token in map(int, token_ids):
            self._ended = self._ended or token in self._eos_ids
            if self._ended:
                return True
            self._tokens.append(token)
            self._matcher.consume_token(token)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask_after(self, path: tuple[int, ...], vocabulary: Vocabulary, mask: np.ndarray) -> bool:
        """Write what may follow the text and `path`, each of whose tokens may follow those before it. False: the
        matcher has failed, and nothing may."""
        if self._ended or not self._eos_ids.isdisjoint(path):
            mask[:] = vocabulary.end
            return True
        self._go(path)
        ok = vocabulary.mask(self._matcher, mask)
        if not ok and path:
            self._start_again()
        return ok

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
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._tokens)
        self._ahead = ()
