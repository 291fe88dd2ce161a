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
from itertools import accumulate

import numpy as np

from adaserve_jax.constraints.bad_words import BadWords, Spells, spellings
from adaserve_jax.constraints.grammar import Grammars, PreparedGrammar
from adaserve_jax.constraints.grammar_source import field_of, refuse
from adaserve_jax.constraints.masks import all_but, allow, forbid
from adaserve_jax.constraints.sandbox import contained
from adaserve_jax.constraints.tool_formats import FORMATS
from adaserve_jax.errors import AdaServeError, RequestError
from adaserve_jax.sampling import ANSWERING, BEFORE_THINKING, GrammarKind, SamplingParams, ToolCalls
from adaserve_jax.types import DraftTrees, LogitEdits, Sequence, StepOutcome, StepPlan

FIELDS = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "bad_words", "logprobs",
    "prompt_logprobs", "json_schema", "regex", "choice", "grammar", "tool_calls", "allowed_token_ids",
    "max_thinking_tokens",
)  # fmt: skip
"""Fields of SamplingParams that edit logits or report them."""
_DEFAULTS = SamplingParams()
MAX_REASON_CHARS = 300


class Constraints:
    """Constraints of all running sequences. Only `check` and `prepare` are thread-safe."""

    def __init__(
        self, vocab_size: int, tokenizer: Spells, grammars: Grammars | None = None,
        no_grammars: str = "this engine was started without structured output", refusal: str = "",
    ):  # fmt: skip
        """Start without sequences.

        no_grammars: why requests with a grammar are refused if `grammars` is None. refusal: why this engine refuses all
        constraints, as the end of a sentence; "" to accept them.
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
        """True if any open sequence has constraints."""
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
        highest = max(sampling.allowed_token_ids, default=0)
        if highest >= self._vocab_size:
            raise RequestError(
                f"allowed_token_ids must be ids of the vocabulary, 0 to {self._vocab_size - 1}, got {highest}",
                param="allowed_token_ids",
                code="invalid_value",
            )
        marks = sampling.thinking
        if marks is not None and max(marks.opening, marks.closing) >= self._vocab_size:
            raise RequestError(
                f"thinking must be marked by ids of the vocabulary, 0 to {self._vocab_size - 1}, got "
                f"{marks.opening} and {marks.closing}",
                param="thinking",
                code="invalid_value",
            )
        source = sampling.grammar_source
        if source is not None and self._grammars is None:
            raise RequestError(
                f"{source[1]} must be left out: {self._no_grammars}", param=source[1], code="unsupported_parameter"
            )
        calls = sampling.tool_calls
        if calls is not None and calls.format not in FORMATS:
            refuse(f"format must be one of {', '.join(FORMATS)}, got {calls.format!r}", "tool_calls")
        return RequestConstraints.of(sampling, np.asarray(prompt_ids, np.int32), self._tokenizer, self._vocab_size)

    def prepare(self, sampling: SamplingParams, shared: RequestConstraints | None, then: Callable[[], None]) -> None:
        """Begin to prepare the grammar, if there is one. Thread-safe.

        `then` is called once it is prepared or refused, in this thread or in another.
        """
        source = sampling.grammar_source
        if shared is None or source is None or self._grammars is None:
            then()
            return
        shared.grammar = self._grammars.prepare(*source)
        shared.grammar.add_done_callback(lambda _: then())

    def add(self, request: Sequence, shared: RequestConstraints | None) -> None:
        """Start a sequence, if it has constraints. shared: from `check`, and prepared.

        Raises AdaServeError: the grammar failed.
        """
        if shared is None:
            return
        sequence = ConstrainedSequence(request, shared, self._vocab_size)
        if shared.grammar is not None and self._grammars is not None:
            with contained(sequence.grammar_kind or "bad_words"):
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
        return sequence.failure or no_token_error(sequence.grammar_kind, sequence.grammar_error)

    def push(self, sequence_id: str, token_ids: abc.Sequence[int]) -> int | None:
        """Add output tokens. Return how many to keep if a grammar says that the text is complete, else None."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return None
        kept = None
        if sequence.has_grammar and self._grammars is not None:
            advance, thought = self._grammars.advance, sequence.num_before_answer(token_ids)
            try:
                # One token at a time, so that the text ends where it would if each came in a step of its own.
                with contained(sequence.grammar_kind or "bad_words"):
                    ends = (advance(sequence_id, [token]) for token in token_ids[thought:])
                    kept = next((count for count, complete in enumerate(ends, thought + 1) if complete), None)
            except AdaServeError as error:
                sequence.failure = error
        sequence.push(token_ids[:kept])
        return kept

    def edits(self, plan: StepPlan, trees: DraftTrees, sequence_ids: abc.Sequence[str]) -> LogitEdits | None:
        """Return the edits of a step; None: no row has any, and no prompt is scored. sequence_ids: of the R rows."""
        rows = [(row, self._sequences[name]) for row, name in enumerate(sequence_ids) if name in self._sequences]
        if not rows:
            return None
        nodes = SampledNodes.of(plan, trees)
        spans = nodes.spans(plan.num_rows)
        penalties = np.zeros((3, plan.num_rows), np.float32)
        penalties[2] = 1.0
        changed = np.zeros(len(nodes.row), bool)
        logprobs = np.full(plan.num_rows, -1, np.int32)
        columns = [(np.zeros(0, np.int32),) * 5]
        masks = None
        for row, sequence in rows:
            span, sampling = slice(spans[row], spans[row + 1]), sequence.sampling
            if span.start == span.stop:
                continue
            if sampling.logprobs is not None:
                logprobs[row] = sampling.logprobs
            if sequence.columns is not None:
                penalties[:, row] = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
                token, *others = sequence.columns.columns()
                columns.append((np.full(len(token), row, np.int32), token, *others))
                changed[span] = True
            if sequence.bans(nodes.depth[span]):
                if masks is None:
                    masks = np.tile(self._everything, (len(nodes.row), 1))
                self._fill(sequence_ids[row], sequence, nodes, span, masks[span])
                changed[span] |= (masks[span] != self._everything).any(axis=1)
        if not changed.any() and (logprobs < 0).all() and plan.scored is None:
            return None
        row, token, output_count, in_prompt, bias = (np.concatenate(column) for column in zip(*columns, strict=True))
        presence, frequency, repetition = penalties
        return LogitEdits(
            presence, frequency, repetition, row, token, output_count, in_prompt.astype(bool), bias.astype(np.float32),
            masks, changed, logprobs,
        )  # fmt: skip

    def _fill(
        self, sequence_id: str, sequence: ConstrainedSequence, nodes: SampledNodes, span: slice, masks: np.ndarray
    ) -> None:
        """Narrow the masks of one tree, u32[nodes, words], which allow everything, in place; to nothing on failure."""
        parents = np.maximum(nodes.parent[span] - span.start, -1)
        tokens = nodes.token[span]
        try:
            with contained(sequence.grammar_kind or "bad_words"):
                if sequence.has_grammar and self._grammars is not None:
                    if sequence.state == ANSWERING:
                        sequence.grammar_error = self._grammars.fill(sequence_id, tokens, parents, masks)
                    else:
                        sequence.grammar_error = self._fill_answers(sequence_id, sequence, tokens, parents, masks)
                    masks &= self._everything
                sequence.apply_bans(tokens, parents, nodes.depth[span], masks)
        except AdaServeError as error:
            sequence.failure = error
            masks[:] = 0

    def _fill_answers(
        self, sequence_id: str, sequence: ConstrainedSequence, tokens: np.ndarray, parents: np.ndarray,
        masks: np.ndarray,
    ) -> str | None:  # fmt: skip
        """Fill the masks of a tree at whose root no answer has begun, as `Grammars.fill` does.

        The grammar begins behind each node that ends the thinking. Behind the root, and white space after it, it may
        begin in place of the thinking.
        """
        thinking = sequence.sampling.thinking
        assert self._grammars is not None and thinking is not None
        states, why = np.asarray(sequence.states(tokens, parents)), None
        # For each node, the one at which the grammar of its answer begins; -1: it thinks.
        begins = np.where(states == BEFORE_THINKING, 0, -1)
        for node, parent in enumerate(parents.tolist()):
            if states[node] == ANSWERING:
                begins[node] = node if states[parent] >= 0 else begins[parent]
        masks[states >= 0] = self._everything if sequence.thought is None else sequence.thought
        above = np.where(states[parents] == BEFORE_THINKING, 0, parents)  # as if white space before were not there
        for root in sorted({*begins.tolist()} - {-1}):
            part = np.flatnonzero((begins == root) & ((states == ANSWERING) | (np.arange(len(states)) == root)))
            within = np.where(part == root, -1, np.searchsorted(part, above[part]))
            answer = np.empty((len(part), masks.shape[1]), np.uint32)
            why = self._grammars.fill(sequence_id, tokens[part], within, answer) or why
            masks[part] = answer
        for node in np.flatnonzero(states == BEFORE_THINKING):
            masks[node] = masks[0]
            allow(masks[node], thinking.opening)
        return why


def requested_fields(sampling: SamplingParams) -> list[str]:
    """Return the fields of FIELDS that a request sets."""
    return [name for name in FIELDS if getattr(sampling, name) != getattr(_DEFAULTS, name)]


@dataclass(eq=False)
class RequestConstraints:
    """Constraints that the sequences of one request share, made once for all of them.

    counts_output: penalties apply. columns: penalised and biased tokens before any output; None if there are none.
    allowed: mask of allowed_token_ids, u32[ceil(V / 32)]; None: all are. grammar: from `Grammars.prepare`; None
    without one.
    """

    counts_output: bool = False
    bad_words: BadWords | None = None
    columns: TokenColumns | None = None
    allowed: np.ndarray | None = None
    grammar: Future[PreparedGrammar] | None = None

    @classmethod
    def of(
        cls, sampling: SamplingParams, prompt_ids: np.ndarray, tokenizer: Spells, vocab_size: int
    ) -> RequestConstraints:
        """Build all but the grammar. prompt_ids: i32[tokens]. Raises RequestError: a bad word is no valid Unicode."""
        penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0, 0, 1)
        spelled = {one for one in spellings(tokenizer, sampling.bad_words) if max(one) < vocab_size}
        columns = None
        if penalised or sampling.logit_bias:
            seen = np.unique(prompt_ids) if penalised else prompt_ids[:0]
            most = len(sampling.logit_bias) + len(seen) + sampling.max_tokens
            columns = TokenColumns(sampling.logit_bias, seen, min(most, vocab_size))
        allowed = all_but(vocab_size) & ~all_but(vocab_size, listed) if (listed := sampling.allowed_token_ids) else None
        return cls(penalised, BadWords(spelled) if spelled else None, columns, allowed)


class ConstrainedSequence:
    """Constraints of one running sequence, given its output so far."""

    def __init__(self, request: Sequence, shared: RequestConstraints, vocab_size: int):
        sampling = request.sampling
        self.sampling = sampling
        source = sampling.grammar_source
        self.has_grammar = source is not None
        self.grammar_kind: GrammarKind | None = None if source is None else source[1]
        self.output: list[int] = []
        self.state = ANSWERING if sampling.thinking is None else sampling.thinking.state
        """See `Thinking`."""
        self.columns = None if shared.columns is None else shared.columns.copy()
        """Penalised and biased tokens; None if there are none."""
        self.failure: AdaServeError | None = None
        """Error of its grammar or bad words; the sequence must end."""
        self.grammar_error: str | None = None
        """Reason why the grammar failed at a node of the last tree."""
        self._counts_output = shared.counts_output
        self._allowed = shared.allowed
        self._bad_words = words = shared.bad_words
        self._without_words = None if words is None else all_but(vocab_size, words.always)
        self._without_stops = all_but(vocab_size, request.stop_token_ids) if request.stop_token_ids else None
        may_stop = source is None or (isinstance(source[0], ToolCalls) and source[0].are_optional)
        self.thought = None if may_stop else self._without_stops
        """Mask while it thinks: it may not end before an answer that must fit a grammar; None: all tokens."""
        closing = [] if sampling.thinking is None else [sampling.thinking.closing]
        self._only_closing = all_but(vocab_size) & ~all_but(vocab_size, closing)

    def push(self, token_ids: abc.Sequence[int]) -> None:
        """Add output tokens."""
        self.output += token_ids
        if self.state != ANSWERING:
            self.state = self._states_along(token_ids)[-1]
        if self.columns is not None and self._counts_output:
            self.columns.count(token_ids)

    def bans(self, depths: np.ndarray) -> bool:
        """Return whether a token may be forbidden at a node of a tree. depths: i32[N], 0 for the root."""
        if self.has_grammar or self._allowed is not None or self._bad_words is not None or self._below_min_tokens:
            return True
        most = self.sampling.max_thinking_tokens
        return most is not None and self.state != ANSWERING and max(self.state, 0) + int(depths.max()) >= most

    def num_before_answer(self, token_ids: abc.Sequence[int]) -> int:
        """Return how many of the next tokens are not of the answer: they are thought, or marks."""
        if self.state == ANSWERING:
            return 0
        states = self._states_along(token_ids)
        before = sum(state != ANSWERING for state in states[1:])
        return min(len(token_ids), before + (states[before] >= 0))

    def states(self, tokens: np.ndarray, parents: np.ndarray) -> list[int]:
        """Return the states after the nodes of a tree (`Thinking`). tokens, parents: i32[N], the root first."""
        thinking = self.sampling.thinking
        assert thinking is not None
        found: list[int] = []
        for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
            found.append(self.state if parent < 0 else thinking.after(found[parent], token))
        return found

    def _states_along(self, token_ids: abc.Sequence[int]) -> list[int]:
        """Return the state now and after each of the next tokens."""
        thinking = self.sampling.thinking
        assert thinking is not None
        return list(accumulate(map(int, token_ids), thinking.after, initial=self.state))

    def apply_bans(self, tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray, masks: np.ndarray) -> None:
        """Clear the tokens that allowed_token_ids, bad_words, min_tokens and max_thinking_tokens forbid after each node
        of a tree; the last decides alone.

        tokens, parents, depths: i32[N], the root (depth 0) first. masks: u32[N, words], changed in place.
        """
        if self._allowed is not None:
            masks &= self._allowed
        if self._below_min_tokens and self._without_stops is not None:
            early = len(self.output) + depths < self.sampling.min_tokens
            masks[early] &= self._without_stops
        if self._bad_words is not None:
            masks &= self._without_words
            for node, token in self._bad_words.completions(self.output, tokens, parents):
                forbid(masks[node], token)
        if (most := self.sampling.max_thinking_tokens) is not None and self.state != ANSWERING:
            masks[np.asarray(self.states(tokens, parents)) >= most] = self._only_closing

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
        self._columns = [np.zeros(most, dtype) for dtype in (np.int32, np.int32, bool, np.float32)]
        token, _, in_prompt, bias = self._columns
        token[: len(tokens)] = tokens
        bias[: len(first)] = [bias for _, bias in biases]
        in_prompt[: len(tokens)] = np.isin(tokens, prompt_ids)

    def copy(self) -> TokenColumns:
        """Return a copy that grows independently."""
        twin = copy(self)
        twin._place = self._place.copy()
        twin._columns = [column.copy() for column in self._columns]
        return twin

    def count(self, token_ids: abc.Sequence[int]) -> None:
        """Count output tokens."""
        tokens, output_count, *_ = self._columns
        for token in token_ids:
            place = self._place.setdefault(token, len(self._place))
            tokens[place] = token
            output_count[place] += 1

    def columns(self) -> list[np.ndarray]:
        """Return token and output_count, i32[E]; in_prompt, bool[E]; bias, f32[E]. They are views."""
        return [column[: len(self._place)] for column in self._columns]


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


def no_token_error(kind: GrammarKind | None, grammar_error: str | None) -> RequestError:
    """Return the error of a sequence after whose text no token is allowed. kind: that of its grammar, if it has one."""
    if kind is None or grammar_error is None:
        grammar = "" if kind is None else f"{kind}, "
        why = f"{grammar}bad_words, allowed_token_ids and min_tokens together allow no token after this text"
        return RequestError(f"{why}; leave one of them out", code="no_token_allowed")
    what = {"json_schema": "JSON schema", "tool_calls": "grammar of the tools"}.get(kind, kind)
    return RequestError(
        f"the {what} costs more after this text than it may; make it simpler: {grammar_error[:MAX_REASON_CHARS]}",
        param=field_of(kind),
        code="no_token_allowed",
    )


def drop_disallowed(
    outcome: StepOutcome, edits: LogitEdits, plan: StepPlan, trees: DraftTrees, sequence_ids: abc.Sequence[str]
) -> tuple[StepOutcome, list[str]]:
    """Cut tokens drawn where no token was allowed, and return the sequences that this happened to.

    A grammar whose only continuation is a bad word leads there, and so may one that the tokenizer cannot spell.
    """
    dead = [] if edits.allowed is None else np.flatnonzero(~edits.allowed.any(axis=1)).tolist()
    reached = [position for position in dead if position >= trees.num_nodes or outcome.accepted[position]]
    if not reached:
        return outcome, []
    nodes, counts = SampledNodes.of(plan, trees), outcome.counts.copy()
    rows = nodes.row[reached]
    np.minimum.at(counts, rows, nodes.depth[reached])
    return replace(outcome, counts=counts), [sequence_ids[int(row)] for row in np.unique(rows)]
