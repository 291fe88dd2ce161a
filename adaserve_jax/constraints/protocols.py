"""What constraints need of others: grammars, and token ids of a text."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np


class Spells(Protocol):
    """What is needed of a tokenizer."""

    def spell(self, text: str) -> list[int]:
        """Token ids of a text by itself, with no special tokens around it."""
        ...


class Grammars(Protocol):
    """Structured output: where each choice that has a schema is in it. `prepare` may be called from any thread, the
    others from the engine's only. N nodes of one tree, V vocabulary."""

    def prepare(self, schema: str) -> Future[Any]:
        """What `add` takes, made without holding up the caller. It may raise RequestError, of code invalid_schema:
        `schema` cannot be held to; QueueFullError: too many others are being prepared."""
        ...

    def add(self, sequence_id: str, start: Any) -> None:
        """A choice begins, with no output yet."""
        ...

    def discard(self, sequence_id: str) -> None:
        """A choice ended. Unknown ids are ignored."""
        ...

    def advance(self, sequence_id: str, token_ids: Sequence[int]) -> bool:
        """Take in output tokens, which all follow the schema. True: the text is complete, and nothing may follow but
        end-of-text, which may be the last of them."""
        ...

    def fill(self, sequence_id: str, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> str | None:
        """Write which tokens may follow each node, bit v % 32 of word v // 32 for token v; the text stays where it is.
        Returns why the grammar gave up at a node, which then allows nothing; None: it did not.

        tokens, parents: i32[N], node 0 the root, whose parent is -1 and whose token was taken in already. masks:
        u32[N, ceil(V / 32)]; of a node that does not follow the schema itself, and of ids from V on, anything.
        """
        ...
