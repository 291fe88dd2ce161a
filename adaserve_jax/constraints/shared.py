"""What the choices of one request have in common of what they ask, made once for all of them. Imports no jax."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaserve_jax.constraints.bad_words import BadWords, spellings
from adaserve_jax.constraints.protocols import Spells
from adaserve_jax.constraints.touched import Touched
from adaserve_jax.sampling import SamplingParams


@dataclass(eq=False)
class Shared:
    """bad_words: None where there are none. touched: before the first token of output; None where no penalty and no
    bias applies. start: of the grammar, as `protocols.Grammars.prepare` gives it; None without one."""

    counts_output: bool = False
    bad_words: BadWords | None = None
    touched: Touched | None = None
    start: Future[Any] | None = None

    @classmethod
    def of(cls, sampling: SamplingParams, prompt_ids: np.ndarray, tokenizer: Spells, vocab_size: int) -> Shared:
        """All but the start. prompt_ids: i32[tokens]. Raises RequestError: a bad word is no valid Unicode."""
        penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0, 0, 1)
        spelled = spellings(tokenizer, sampling.bad_words)
        touched = None
        if penalised or sampling.logit_bias:
            seen = np.unique(prompt_ids) if penalised else prompt_ids[:0]
            most = len(sampling.logit_bias) + len(seen) + sampling.max_tokens
            touched = Touched(sampling.logit_bias, seen, min(most, vocab_size))
        return cls(penalised, BadWords(spelled) if spelled else None, touched)
