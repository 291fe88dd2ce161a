"""Constraints on the logits of sequences: penalties, biases, bad words, minimum lengths, grammars and logprobs.

The engine reports every sequence and its output; the executor gets `types.LogitEdits` for each step. Texts are those of
plain decoding because of one rule: the edits after a tree node are those that plain decoding would make after the same
tokens (docs/architecture/constraints.md).
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adaserve_jax.constraints.bad_words import BadWords, spellings
from adaserve_jax.constraints.masks import all_but, forbid
from adaserve_jax.constraints.protocols import GrammarBackend, Spells
from adaserve_jax.constraints.sandbox import contained
from adaserve_jax.errors import AdaServeError, RequestError
from adaserve_jax.sampling import SamplingParams
from adaserve_jax.types import DraftTrees, LogitEdits, Sequence, StepOutcome, StepPlan

FIELDS = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "bad_words", "logprobs",
    "json_schema",
)  # fmt: skip
"""Fields of SamplingParams that edit logits or report them."""
_DEFAULTS = SamplingParams()
MAX_REASON_CHARS = 300


class Constraints:
    """Constraints of all running sequences. Only `check` and `prepare` are thread-safe."""

    def __init__(
        self, vocab_size: int, tokenizer: Spells, grammars: GrammarBackend | None = None,
        no_grammars: str = "this engine was started without structured output", refusal: str = "",
    ):  # fmt: skip
        """Start without sequences.

        Args:
            vocab_size: V of the target.
            tokenizer: Spells bad words.
            grammars: Structured output; None refuses it, with the reason `no_grammars`.
            no_grammars: End of the message to requests with a schema, if `grammars` is None.
            refusal: Reason why this engine refuses all constraints, as the end of a sentence; "" to accept them.
        """
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._no_grammars = no_grammars
        self._refusal = refusal
        self._everything = all_but(vocab_size)
        self._sequences: dict[str, ConstrainedSequence] = {}

    @property
    def active(self) -> bool:
        """True if any running sequence has constraints."""
        return bool(self._sequences)

    @property
    def failed(self) -> list[str]:
        """Sequences whose grammar or bad words failed in this step; they must end with `why_ended`."""
        return [name for name, sequence in self._sequences.items() if sequence.failure is not None]

    def check(
        self, sampling: SamplingParams, prompt_ids: abc.Sequence[int] | np.ndarray = ()
    ) -> RequestConstraints | None:
        """Return the constraints of a request; None: it has none. Thread-safe.

        Raises RequestError: this engine cannot enforce them.
        """
        names = requested_fields(sampling)
        if not names:
            return None
        if self._refusal:
            raise RequestError(
                f"{names[0]} must be left out, got {getattr(sampling, names[0])!r:.200}: {self._refusal}",
                param=names[0],
                code="unsupported_parameter",
            )
        highest = max((token for token, _ in sampling.logit_bias), default=0)
        if highest >= self._vocab_size:
            raise RequestError(
                f"logit_bias must be of token ids from 0 to {self._vocab_size - 1}, got {highest}",
                param="logit_bias",
                code="invalid_value",
            )
        if sampling.json_schema is not None and self._grammars is None:
            raise RequestError(
                f"json_schema must be left out: {self._no_grammars}",
                param="json_schema",
                code="unsupported_parameter",
            )
        return RequestConstraints.of(sampling, np.asarray(prompt_ids, np.int32), self._tokenizer, self._vocab_size)

    def prepare(self, sampling: SamplingParams, shared: RequestConstraints | None, then: Callable[[], None]) -> None:
        """Begin to prepare the schema, if there is one. Thread-safe.

        `then` is called once the schema is prepared or refused, in this thread or in another.
        """
        if shared is None or sampling.json_schema is None or self._grammars is None:
            then()
            return
        shared.grammar = self._grammars.prepare(sampling.json_schema)
        shared.grammar.add_done_callback(lambda _: then())

    def add(self, request: Sequence, shared: RequestConstraints | None = None) -> None:
        """Start a sequence, if it has constraints. shared: from `check`; None: make them now, which may take long.

        Raises RequestError: this engine cannot enforce them; AdaServeError: the grammar failed.
        """
        sampling = request.sampling
        if not requested_fields(sampling):
            return
        if shared is None:
            shared = self.check(sampling, request.prompt_ids)
            self.prepare(sampling, shared, lambda: None)
        assert shared is not None
        sequence = ConstrainedSequence(request, shared, self._vocab_size)
        if shared.grammar is not None and self._grammars is not None:
            with contained("json_schema"):
                self._grammars.add(request.sequence_id, shared.grammar.result())
        self._sequences[request.sequence_id] = sequence

    def discard(self, sequence_id: str) -> None:
        """Remove a sequence; unknown ids are ignored."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None and sequence.has_grammar and self._grammars is not None:
            self._grammars.discard(sequence_id)

    def why_ended(self, sequence_id: str) -> AdaServeError:
        """Return the error of a sequence that must end: it failed, or no token may follow its text."""
        sequence = self._sequences[sequence_id]
        return sequence.failure or no_token_error(sequence.grammar_error)

    def push(self, sequence_id: str, token_ids: abc.Sequence[int]) -> int | None:
        """Add output tokens. Return how many to keep if a grammar says that the text is complete, else None."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return None
        kept = None
        if sequence.has_grammar:
            try:
                with contained("json_schema"):
                    kept = self._advance_grammar(sequence_id, token_ids)
            except AdaServeError as error:
                sequence.failure = error
        sequence.push(token_ids[:kept])
        return kept

    def _advance_grammar(self, sequence_id: str, token_ids: abc.Sequence[int]) -> int | None:
        """Advance a grammar and return after how many tokens the text is complete, if after any.

        One token at a time, so that the text ends where it would if each came in a step of its own.
        """
        assert self._grammars is not None
        for count, token in enumerate(token_ids, 1):
            if self._grammars.advance(sequence_id, [token]):
                return count
        return None

    def edits(self, plan: StepPlan, trees: DraftTrees, sequence_ids: abc.Sequence[str]) -> LogitEdits | None:
        """Return the edits of a step; None: no row has any. sequence_ids: of the R rows."""
        rows = [(row, self._sequences[name]) for row, name in enumerate(sequence_ids) if name in self._sequences]
        if not rows:
            return None
        nodes = SampledNodes.of(plan, trees)
        spans = nodes.spans(plan.num_rows)
        sampled = [
            (row, sequence, slice(spans[row], spans[row + 1])) for row, sequence in rows if spans[row + 1] > spans[row]
        ]
        edits = self._edits(plan.num_rows, nodes, sampled, sequence_ids)
        return edits if edits.changed.any() or (edits.logprobs >= 0).any() else None

    def _edits(
        self, num_rows: int, nodes: SampledNodes, rows: list[tuple[int, ConstrainedSequence, slice]],
        sequence_ids: abc.Sequence[str],
    ) -> LogitEdits:  # fmt: skip
        penalties = np.zeros((3, num_rows), np.float32)
        penalties[2] = 1.0
        changed = np.zeros(len(nodes.row), bool)
        logprobs = np.full(num_rows, -1, np.int32)
        columns = [(np.zeros(0, np.int32),) * 5]
        masks = None
        for row, sequence, span in rows:
            sampling = sequence.sampling
            if sampling.logprobs is not None:
                logprobs[row] = sampling.logprobs
            if sequence.columns is not None:
                penalties[:, row] = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
                token, *others = sequence.columns.columns()
                columns.append((np.full(len(token), row, np.int32), token, *others))
                changed[span] = True
            if sequence.bans:
                if masks is None:
                    masks = np.tile(self._everything, (len(nodes.row), 1))
                self._fill_or_fail(sequence_ids[row], sequence, nodes, span, masks[span])
                changed[span] |= (masks[span] != self._everything).any(axis=1)
        row, token, output_count, in_prompt, bias = (np.concatenate(column) for column in zip(*columns, strict=True))
        presence, frequency, repetition = penalties
        return LogitEdits(
            presence, frequency, repetition, row, token, output_count, in_prompt.astype(bool), bias.astype(np.float32),
            masks, changed, logprobs,
        )  # fmt: skip

    def _fill_or_fail(
        self, sequence_id: str, sequence: ConstrainedSequence, nodes: SampledNodes, span: slice, masks: np.ndarray
    ) -> None:
        """Call `_fill`; if it fails, allow the sequence no token and record the failure."""
        try:
            with contained("json_schema" if sequence.has_grammar else "bad_words"):
                self._fill(sequence_id, sequence, nodes, span, masks)
        except AdaServeError as error:
            sequence.failure = error
            masks[:] = 0

    def _fill(
        self, sequence_id: str, sequence: ConstrainedSequence, nodes: SampledNodes, span: slice, masks: np.ndarray
    ) -> None:
        """Narrow the masks of one tree, u32[nodes, words], which allow everything, in place."""
        parents = np.maximum(nodes.parent[span] - span.start, -1)
        tokens = nodes.token[span]
        if sequence.has_grammar and self._grammars is not None:
            sequence.grammar_error = self._grammars.fill(sequence_id, tokens, parents, masks)
            masks &= self._everything
        sequence.apply_bans(tokens, parents, nodes.depth[span], masks)


def requested_fields(sampling: SamplingParams) -> list[str]:
    """Return the fields of FIELDS that a request sets."""
    return [name for name in FIELDS if getattr(sampling, name) != getattr(_DEFAULTS, name)]


@dataclass(eq=False)
class RequestConstraints:
    """Constraints that the sequences of one request share, made once for all of them.

    counts_output: penalties apply. columns: penalised and biased tokens before any output; None if there are none.
    grammar: the prepared schema, from `GrammarBackend.prepare`; None without one.
    """

    counts_output: bool = False
    bad_words: BadWords | None = None
    columns: TokenColumns | None = None
    grammar: Future[Any] | None = None

    @classmethod
    def of(
        cls, sampling: SamplingParams, prompt_ids: np.ndarray, tokenizer: Spells, vocab_size: int
    ) -> RequestConstraints:
        """Build all but the grammar. prompt_ids: i32[tokens]. Raises RequestError: a bad word is no valid Unicode."""
        penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0, 0, 1)
        spelled = spellings(tokenizer, sampling.bad_words)
        columns = None
        if penalised or sampling.logit_bias:
            seen = np.unique(prompt_ids) if penalised else prompt_ids[:0]
            most = len(sampling.logit_bias) + len(seen) + sampling.max_tokens
            columns = TokenColumns(sampling.logit_bias, seen, min(most, vocab_size))
        return cls(penalised, BadWords(spelled) if spelled else None, columns)


class ConstrainedSequence:
    """Constraints of one running sequence, given its output so far."""

    def __init__(self, request: Sequence, shared: RequestConstraints, vocab_size: int):
        sampling = request.sampling
        self.sampling = sampling
        self.has_grammar = sampling.json_schema is not None
        self.output: list[int] = []
        self.columns = None if shared.columns is None else shared.columns.copy()
        """Penalised and biased tokens; None if there are none."""
        self.failure: AdaServeError | None = None
        """Error of its grammar or bad words; the sequence must end."""
        self.grammar_error: str | None = None
        """Reason why the grammar failed at a node of the last tree."""
        self._counts_output = shared.counts_output
        self._bad_words = words = shared.bad_words
        self._without_words = None if words is None else all_but(vocab_size, words.always)
        self._without_stops = all_but(vocab_size, request.stop_token_ids) if request.stop_token_ids else None

    def push(self, token_ids: abc.Sequence[int]) -> None:
        """Add output tokens."""
        self.output += token_ids
        if self.columns is not None and self._counts_output:
            self.columns.count(token_ids)

    @property
    def bans(self) -> bool:
        """True if a token may be forbidden at the root; if not, none is at any node below it."""
        return self.has_grammar or self._bad_words is not None or self._below_min_tokens

    def apply_bans(self, tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray, masks: np.ndarray) -> None:
        """Clear the tokens that bad_words and min_tokens forbid after each node of a tree.

        tokens, parents, depths: i32[N], the root (depth 0) first. masks: u32[N, words], changed in place.
        """
        if self._below_min_tokens and self._without_stops is not None:
            early = len(self.output) + depths < self.sampling.min_tokens
            masks[early] &= self._without_stops
        if self._bad_words is not None:
            masks &= self._without_words
            for node, token in self._bad_words.completions(self.output, tokens, parents):
                forbid(masks[node], token)

    @property
    def _below_min_tokens(self) -> bool:
        return self._without_stops is not None and len(self.output) < self.sampling.min_tokens


class TokenColumns:
    """The E tokens that a sequence's penalties or biases concern, as columns that grow with the output."""

    def __init__(self, biases: abc.Sequence[tuple[int, float]], prompt_ids: np.ndarray, most: int):
        """Start with the tokens of biases and prompt, i32[U], each once. most: largest E that is possible."""
        first = [token for token, _ in biases]
        tokens = [*first, *np.setdiff1d(prompt_ids, first, assume_unique=True).tolist()]
        self._place = {token: place for place, token in enumerate(tokens)}
        self._token = np.zeros(most, np.int32)
        self._output_count = np.zeros(most, np.int32)
        self._in_prompt = np.zeros(most, bool)
        self._bias = np.zeros(most, np.float32)
        self._token[: len(tokens)] = tokens
        self._bias[: len(first)] = [bias for _, bias in biases]
        self._in_prompt[: len(tokens)] = np.isin(tokens, prompt_ids)

    def copy(self) -> TokenColumns:
        """Return a copy that grows independently."""
        twin = copy(self)
        twin._place = self._place.copy()
        twin._token, twin._output_count = self._token.copy(), self._output_count.copy()
        twin._in_prompt, twin._bias = self._in_prompt.copy(), self._bias.copy()
        return twin

    def count(self, token_ids: abc.Sequence[int]) -> None:
        """Count output tokens."""
        for token in token_ids:
            self._output_count[self._place_of(token)] += 1

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return token and output_count, i32[E]; in_prompt, bool[E]; bias, f32[E]. They are views."""
        columns = (self._token, self._output_count, self._in_prompt, self._bias)
        token, output_count, in_prompt, bias = (column[: len(self._place)] for column in columns)
        return token, output_count, in_prompt, bias

    def _place_of(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        self._token[place] = token
        return place


@dataclass(frozen=True, eq=False)
class SampledNodes:
    """The N sampled positions of a step: tree nodes, then prompt ends as trees of one node. row, token, parent, depth:
    i32[N]; parent is an index of a position, -1 for a root."""

    row: np.ndarray
    token: np.ndarray
    parent: np.ndarray
    depth: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan, trees: DraftTrees) -> SampledNodes:
        """List the positions of a step in the order in which `LogitEdits` has them."""
        final = np.flatnonzero(plan.prefill_final)
        last = plan.prefill_counts.cumsum()[final] - 1
        root = np.zeros(len(final), np.int32)
        return cls(
            np.concatenate([trees.row, final + plan.num_decode]).astype(np.int32),
            np.concatenate([trees.token, plan.prefill_tokens[last]]),
            np.concatenate([trees.parent, root - 1]),
            np.concatenate([trees.depth, root]),
        )

    def spans(self, num_rows: int) -> list[int]:
        """Return R + 1 indices: row r has the positions from spans[r] to spans[r + 1]."""
        return np.searchsorted(self.row, np.arange(num_rows + 1)).tolist()


def edited_rows(edits: LogitEdits, plan: StepPlan, trees: DraftTrees) -> np.ndarray:
    """Return bool[R], the rows whose logits change at any sampled position."""
    edited = np.zeros(plan.num_rows, bool)
    edited[SampledNodes.of(plan, trees).row[edits.changed]] = True
    return edited


def no_token_error(grammar_error: str | None) -> RequestError:
    """Return the error of a sequence after whose text no token is allowed."""
    if grammar_error is None:
        why = "json_schema, bad_words and min_tokens together allow no token after this text; leave one of them out"
        return RequestError(why, code="no_token_allowed")
    return RequestError(
        f"the JSON schema costs more after this text than it may; make it simpler: {grammar_error[:MAX_REASON_CHARS]}",
        param="response_format",
        code="no_token_allowed",
    )


def drop_disallowed(
    outcome: StepOutcome, edits: LogitEdits, plan: StepPlan, trees: DraftTrees, sequence_ids: abc.Sequence[str]
) -> tuple[StepOutcome, list[str]]:
    """Cut tokens drawn where no token was allowed, and return the sequences that this happened to.

    A grammar whose only continuation is a bad word leads there, and so may one that the tokenizer cannot spell.
    """
    kept = _counts_before_dead_ends(edits, plan, trees, outcome.accepted)
    if not kept:
        return outcome, []
    counts = outcome.counts.copy()
    for row, count in kept.items():
        counts[row] = count
    return replace(outcome, counts=counts), [sequence_ids[row] for row in kept]


def _counts_before_dead_ends(
    edits: LogitEdits, plan: StepPlan, trees: DraftTrees, accepted: np.ndarray
) -> dict[int, int]:
    """Return the tokens to keep of each row that accepted a node without allowed tokens. accepted: bool[nodes]."""
    if edits.allowed is None:
        return {}
    dead = np.flatnonzero(~edits.allowed.any(axis=1)).tolist()
    if not dead:
        return {}
    nodes = SampledNodes.of(plan, trees)
    found: dict[int, int] = {}
    for position in dead:
        if position >= trees.num_nodes or accepted[position]:
            row, depth = int(nodes.row[position]), int(nodes.depth[position])
            found[row] = min(depth, found.get(row, depth))
    return found
