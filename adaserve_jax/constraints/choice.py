"""What one choice asks of its logits, given its output so far. Knows one request and nothing of steps or devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaserve_jax.constraints.masks import all_but, forbid
from adaserve_jax.constraints.shared import Shared
from adaserve_jax.errors import AdaServeError
from adaserve_jax.sampling import SamplingParams
from adaserve_jax.types import Request

ASKING = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "bad_words", "logprobs",
    "json_schema",
)  # fmt: skip
"""Fields of SamplingParams that change logits or tell of them."""
_DEFAULTS = SamplingParams()


def asked(sampling: SamplingParams) -> list[str]:
    """The fields by which a request asks for anything here."""
    return [name for name in ASKING if getattr(sampling, name) != getattr(_DEFAULTS, name)]


class ConstrainedChoice:
    """One choice between its admission and its end."""

    def __init__(self, request: Request, shared: Shared, vocab_size: int):
        sampling = request.sampling
        self.sampling = sampling
        self.has_grammar = sampling.json_schema is not None
        self.output: list[int] = []
        self.touched = None if shared.touched is None else shared.touched.copy()
        """Where penalties or biases apply."""
        self.failure: AdaServeError | None = None
        """Following it failed: it must end."""
        self.gave_up: str | None = None
        """Why the grammar gave up at a node of the last tree."""
        self._counts_output = shared.counts_output
        self._bad_words = words = shared.bad_words
        self._without_words = None if words is None else all_but(vocab_size, words.always)
        self._without_stops = all_but(vocab_size, request.stop_token_ids) if request.stop_token_ids else None

    def push(self, token_ids: Sequence[int]) -> None:
        """Take in output tokens."""
        self.output += token_ids
        if self.touched is not None and self._counts_output:
            self.touched.count(token_ids)

    @property
    def bans(self) -> bool:
        """Whether any token is forbidden at the root; if not, none is below it."""
        return self.has_grammar or self._bad_words is not None or self._waits_for_stops

    def apply_bans(self, tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray, masks: np.ndarray) -> None:
        """Forbid after each node of a tree what bad_words and min_tokens do. tokens, parents, depths: i32[N], the root
        (depth 0) first; masks: u32[N, words], in place."""
        if self._waits_for_stops and self._without_stops is not None:
            early = len(self.output) + depths < self.sampling.min_tokens
            masks[early] &= self._without_stops
        if self._bad_words is not None:
            masks &= self._without_words
            for node, token in self._bad_words.completions(self.output, tokens, parents):
                forbid(masks[node], token)

    @property
    def _waits_for_stops(self) -> bool:
        return self._without_stops is not None and len(self.output) < self.sampling.min_tokens
