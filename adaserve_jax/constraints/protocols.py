"""What constraints need of others: grammars, and token ids of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Spells(Protocol):
    """What is needed of a tokenizer."""

    def spell(self, text: str) -> list[int]:
        """Token ids of a text by itself, with no special tokens around it."""
        ...


class Grammars(Protocol):
    """Structured output: where each choice that has a schema is in it. `check` may be called from any thread, the
    others from the engine's only. N nodes of one tree, V vocabulary."""

    def check(self, schema: str) -> None:
        """Raise RequestError, of code invalid_schema, unless `schema` can be held to."""
        ...

    def add(self, request_id: str, schema: str) -> None:
        """A choice begins, with no output yet. Raises RequestError as `check` does."""
        ...

    def discard(self, request_id: str) -> None:
        """A choice ended. Unknown ids are ignored."""
        ...

    def advance(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Take in output tokens, which all follow the schema. True: the text is complete, and nothing may follow but
        end-of-text, which may be the last of them."""
        ...

    def fill(self, request_id: str, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> None:
        """Write which tokens may follow each node: bit v % 32 of word v // 32 for token v.

        tokens, parents: i32[N], parents before children, parent -1: node 0, the root, whose token was taken in already.
        masks: u32[N, ceil(V / 32)]; of a node that does not follow the schema itself, and of ids from V on, anything.
        """
        ...
