"""What sampling parameters do to logits, told once more from their definition, in float64 and one token at a time.

Shares no code with the package, and neither its forms: texts are lists, counts are counted anew, masks are sets.
"""

from __future__ import annotations

import numpy as np

from adaserve_jax.types import SamplingParams

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 ."
VOCAB = len(LETTERS) + 2
"""Ids 0 and 1 spell nothing; each other id is a character."""


class Letters:
    """A tokenizer of one character per token."""

    def spell(self, text: str) -> list[int]:
        return [2 + LETTERS.index(character) for character in text]


def text_of(tokens: list[int]) -> str:
    return "".join("#" if token < 2 else LETTERS[token - 2] for token in tokens)


def edited(
    logits: np.ndarray, prompt: list[int], output: list[int], sampling: SamplingParams, stops: frozenset[int]
) -> np.ndarray:
    """f64[V]: what the sampler sees of logits f64[V] after `output`; -inf where a token may not follow."""
    scores = logits.astype(np.float64).copy()
    for token in range(len(scores)):
        if token in prompt + output:
            factor = sampling.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        times = sum(1 for each in output if each == token)
        scores[token] -= sampling.frequency_penalty * times + (sampling.presence_penalty if times else 0.0)
        scores[token] += dict(sampling.logit_bias).get(token, 0.0)
        after = text_of([*output, token])
        if any(after.endswith(word) for word in sampling.bad_words):
            scores[token] = -np.inf
        if token in stops and len(output) < sampling.min_tokens:
            scores[token] = -np.inf
    return scores
