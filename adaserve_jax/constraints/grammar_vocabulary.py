"""A model's vocabulary as llguidance knows it: compiles schemas over it, and asks for masks of it.

llguidance is imported when the first `Vocabulary` is made. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from adaserve_jax.constraints.bounded_work import BoundedWork
from adaserve_jax.constraints.grammar_schema import read_schema, refuse
from adaserve_jax.constraints.masks import all_but, num_words
from adaserve_jax.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from llguidance import LLMatcher

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
