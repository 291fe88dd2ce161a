"""Interfaces that constraints depend on: a grammar backend, and a tokenizer that spells words."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np


class Spells(Protocol):
    """The part of a tokenizer that constraints use."""

    def spell(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens."""
        ...


class GrammarBackend(Protocol):
    """Structured output: follows each sequence that has a schema. Only `prepare` is thread-safe.

    Axes: N nodes of one tree, V vocabulary.
    """

    def prepare(self, schema: str) -> Future[Any]:
        """Prepare a schema in the background; the result is for `add`.

        It may raise RequestError (code invalid_schema): the schema cannot be enforced; QueueFullError: too many others
        are being prepared.
        """
        ...

    def add(self, sequence_id: str, start: Any) -> None:
        """Start a sequence, with no output yet."""
        ...

    def discard(self, sequence_id: str) -> None:
        """Remove a sequence. Unknown ids are ignored."""
        ...

    def advance(self, sequence_id: str, token_ids: Sequence[int]) -> bool:
        """Add output tokens, which the schema allows. True: the text is complete, and only end-of-text may follow; it
        may be the last of these tokens."""
        ...

    def fill(self, sequence_id: str, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> str | None:
        """Write the tokens that may follow each node, bit v % 32 of word v // 32 for token v; does not advance.

        Args:
            sequence_id: The sequence.
            tokens: i32[N]; node 0 is the root, whose token was added already.
            parents: i32[N], -1 for the root.
            masks: u32[N, ceil(V / 32)], to fill. Undefined for nodes that the schema forbids and for ids from V on.

        Returns:
            The error of a grammar that failed at a node, which then allows nothing; None if it did not.
        """
        ...
