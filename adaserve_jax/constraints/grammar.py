"""Which tokens may follow while a text must stay JSON of a schema: a bit per token id, for every node of a token tree.

Host side; knows requests by their ids, and nothing of logits. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from adaserve_jax.constraints.grammar_cache import MAX_SCHEMAS, GrammarCache, Start
from adaserve_jax.constraints.grammar_vocabulary import Vocabulary
from adaserve_jax.errors import ConfigError


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

    def add(self, request_id: str, start: Start) -> None:
        self._texts[request_id] = _Text(start, self._eos_ids)

    def discard(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def advance(self, request_id: str, token_ids: Iterable[int]) -> bool:
        """A text that may end but can go on, as a number can, is not complete. A token that was forbidden leaves the
        request with nothing allowed."""
        with self._text(request_id) as text:
            return text.advance(token_ids)

    def fill(self, request_id: str, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> str | None:
        """A node that cannot be reached, because its token or one above it is forbidden, gets all ids; one at which the
        schema costs more than the limits gets none. Ids from V on are never allowed."""
        assert masks.dtype == np.uint32 and masks.shape == (len(tokens), self._vocabulary.num_words)
        assert masks.flags.c_contiguous
        with self._text(request_id) as text:
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
    def _text(self, request_id: str) -> Iterator[_Text]:
        """A request's text; where following it breaks, others of the schema get a new matcher from then on."""
        text = self._texts[request_id]
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
