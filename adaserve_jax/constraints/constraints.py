"""All choices in flight that ask for changed logits, and what they ask of each step.

Host only. Told of every choice and its output by the engine; tells the executor by `types.LogitEdits`. That the text
is that of plain decoding rests on one rule: what is asked after a tree node is what plain decoding would ask after the
same tokens (docs/architecture/constraints.md).
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
from adaserve_jax.constraints.protocols import Grammars, Spells
from adaserve_jax.constraints.sandbox import contained
from adaserve_jax.errors import AdaServeError, RequestError
from adaserve_jax.sampling import SamplingParams
from adaserve_jax.types import DraftTrees, LogitEdits, Sequence, StepOutcome, StepPlan

# The tokens that one choice's penalties and biases concern: those it has seen, how often, and those with a
# bias.


class Touched:
    """Columns of E tokens, each once, in the order in which they came; they grow as the output does."""

    def __init__(self, biases: abc.Sequence[tuple[int, float]], prompt_ids: np.ndarray, most: int):
        """biases: of tokens, each once. prompt_ids: i32[U], each once. most: tokens that there can ever be."""
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

    def copy(self) -> Touched:
        """One that grows by itself."""
        twin = copy(self)
        twin._place = self._place.copy()
        twin._token, twin._output_count = self._token.copy(), self._output_count.copy()
        twin._in_prompt, twin._bias = self._in_prompt.copy(), self._bias.copy()
        return twin

    def count(self, token_ids: abc.Sequence[int]) -> None:
        """Take in output tokens."""
        for token in token_ids:
            self._output_count[self._place_of(token)] += 1

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """token, output_count: i32[E]; in_prompt: bool[E]; bias: f32[E]. Views: they change with the next token."""
        columns = (self._token, self._output_count, self._in_prompt, self._bias)
        token, output_count, in_prompt, bias = (column[: len(self._place)] for column in columns)
        return token, output_count, in_prompt, bias

    def _place_of(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        self._token[place] = token
        return place


# What the choices of one request have in common of what they ask, made once for all of them. Imports no jax.


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


# What one choice asks of its logits, given its output so far. Knows one request and nothing of steps or
# devices.

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

    def __init__(self, request: Sequence, shared: Shared, vocab_size: int):
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

    def push(self, token_ids: abc.Sequence[int]) -> None:
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


# The sampled positions of a step, as trees.


@dataclass(frozen=True, eq=False)
class Positions:
    """Tree nodes, then the ends of prompts as trees of one node, N of them. row, token, parent, depth: i32[N]; parent
    is a position too, -1 for a root."""

    row: np.ndarray
    token: np.ndarray
    parent: np.ndarray
    depth: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan, trees: DraftTrees) -> Positions:
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
        """[R + 1]: row r has the positions from spans[r] to spans[r + 1]."""
        return np.searchsorted(self.row, np.arange(num_rows + 1)).tolist()


def edited_rows(edits: LogitEdits, plan: StepPlan, trees: DraftTrees) -> np.ndarray:
    """bool[R]: rows of which anything changes at any sampled position."""
    edited = np.zeros(plan.num_rows, bool)
    edited[Positions.of(plan, trees).row[edits.changed]] = True
    return edited


# Texts after which what a request forbids leaves no token: the step is cut before what it drew there.
#
# A grammar whose only way on is a word that is banned leads there; so may a grammar that a tokenizer cannot
# spell.

MAX_REASON_CHARS = 300


def dead_end(gave_up: str | None) -> RequestError:
    """What a request is told that came there. gave_up: why its grammar did, if it did."""
    if gave_up is None:
        why = "json_schema, bad_words and min_tokens together allow no token after this text; leave one of them out"
        return RequestError(why, code="no_token_allowed")
    return RequestError(
        f"the JSON schema costs more after this text than it may; make it simpler: {gave_up[:MAX_REASON_CHARS]}",
        param="response_format",
        code="no_token_allowed",
    )


def without_dead_ends(
    outcome: StepOutcome, edits: LogitEdits, plan: StepPlan, trees: DraftTrees, sequence_ids: abc.Sequence[str]
) -> tuple[StepOutcome, list[str]]:
    """The outcome without tokens that stand where none was allowed, and the requests that came there. sequence_ids: of
    the step's rows."""
    ends = _dead_ends(edits, plan, trees, outcome.accepted)
    if not ends:
        return outcome, []
    counts = outcome.counts.copy()
    for row, left in ends.items():
        counts[row] = left
    return replace(outcome, counts=counts), [sequence_ids[row] for row in ends]


def _dead_ends(edits: LogitEdits, plan: StepPlan, trees: DraftTrees, accepted: np.ndarray) -> dict[int, int]:
    """How many tokens are left, by row. accepted: bool[nodes], of the walk; the end of a prompt always is."""
    if edits.allowed is None:
        return {}
    dead = np.flatnonzero(~edits.allowed.any(axis=1)).tolist()
    if not dead:
        return {}
    positions = Positions.of(plan, trees)
    found: dict[int, int] = {}
    for position in dead:
        if position >= trees.num_nodes or accepted[position]:
            row, depth = int(positions.row[position]), int(positions.depth[position])
            found[row] = min(depth, found.get(row, depth))
    return found


class Constraints:
    """Not thread-safe, but for `check` and `prepare`. vocab_size: of the target. grammars: None: no structured output,
    and no_grammars says why. refusal: why this engine does none of it, as the end of a sentence; "": it does."""

    def __init__(
        self, vocab_size: int, tokenizer: Spells, grammars: Grammars | None = None,
        no_grammars: str = "this engine was started without structured output", refusal: str = "",
    ):  # fmt: skip
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._no_grammars = no_grammars
        self._refusal = refusal
        self._everything = all_but(vocab_size)
        self._choices: dict[str, ConstrainedChoice] = {}

    @property
    def active(self) -> bool:
        """Whether any choice in flight asks for anything."""
        return bool(self._choices)

    @property
    def failed(self) -> list[str]:
        """Choices whose following failed in this step; they must end, as `why_ended` says."""
        return [sequence_id for sequence_id, choice in self._choices.items() if choice.failure is not None]

    def check(self, sampling: SamplingParams, prompt_ids: abc.Sequence[int] | np.ndarray = ()) -> Shared | None:
        """What the choices of a request have in common, before `prepare`; None: they ask for nothing. Raises
        RequestError when what they ask for can never be done here. Safe in any thread."""
        names = asked(sampling)
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
        return Shared.of(sampling, np.asarray(prompt_ids, np.int32), self._tokenizer, self._vocab_size)

    def prepare(self, sampling: SamplingParams, shared: Shared | None, then: Callable[[], None]) -> None:
        """Begin what takes long, as a schema does; `then` is called once it is done or refused, here or in another
        thread. Safe in any thread."""
        if shared is None or sampling.json_schema is None or self._grammars is None:
            then()
            return
        shared.start = self._grammars.prepare(sampling.json_schema)
        shared.start.add_done_callback(lambda _: then())

    def add(self, request: Sequence, shared: Shared | None = None) -> None:
        """Follow one choice, if it asks for anything. shared: of its request; None: made here, which takes its time.
        Raises RequestError; AdaServeError: the grammar failed."""
        sampling = request.sampling
        if not asked(sampling):
            return
        if shared is None:
            shared = self.check(sampling, request.prompt_ids)
            self.prepare(sampling, shared, lambda: None)
        assert shared is not None
        choice = ConstrainedChoice(request, shared, self._vocab_size)
        if shared.start is not None and self._grammars is not None:
            with contained("json_schema"):
                self._grammars.add(request.sequence_id, shared.start.result())
        self._choices[request.sequence_id] = choice

    def discard(self, sequence_id: str) -> None:
        """Forget a choice; unknown ids are ignored."""
        choice = self._choices.pop(sequence_id, None)
        if choice is not None and choice.has_grammar and self._grammars is not None:
            self._grammars.discard(sequence_id)

    def why_ended(self, sequence_id: str) -> AdaServeError:
        """Why a choice that is followed goes on no more: it failed, or no token may follow its text."""
        choice = self._choices[sequence_id]
        return choice.failure or dead_end(choice.gave_up)

    def push(self, sequence_id: str, token_ids: abc.Sequence[int]) -> int | None:
        """Take in output tokens; how many to keep where a grammar says that the text is complete then, else None."""
        choice = self._choices.get(sequence_id)
        if choice is None:
            return None
        kept = None
        if choice.has_grammar:
            try:
                with contained("json_schema"):
                    kept = self._end(sequence_id, token_ids)
            except AdaServeError as error:
                choice.failure = error
        choice.push(token_ids[:kept])
        return kept

    def _end(self, sequence_id: str, token_ids: abc.Sequence[int]) -> int | None:
        """Let a grammar take in tokens one by one, so that the text ends where it would end if each came in a step of
        its own: after how many, if after any."""
        assert self._grammars is not None
        for count, token in enumerate(token_ids, 1):
            if self._grammars.advance(sequence_id, [token]):
                return count
        return None

    def edits(self, plan: StepPlan, trees: DraftTrees, sequence_ids: abc.Sequence[str]) -> LogitEdits | None:
        """What the step's rows ask for; None: nothing. sequence_ids: [R], of the rows."""
        rows = [(row, self._choices[name]) for row, name in enumerate(sequence_ids) if name in self._choices]
        if not rows:
            return None
        positions = Positions.of(plan, trees)
        spans = positions.spans(plan.num_rows)
        asking = [
            (row, choice, slice(spans[row], spans[row + 1])) for row, choice in rows if spans[row + 1] > spans[row]
        ]
        edits = self._edits(plan.num_rows, positions, asking, sequence_ids)
        return edits if edits.changed.any() or (edits.logprobs >= 0).any() else None

    def _edits(
        self, num_rows: int, positions: Positions, asking: list[tuple[int, ConstrainedChoice, slice]],
        sequence_ids: abc.Sequence[str],
    ) -> LogitEdits:  # fmt: skip
        penalties = np.zeros((3, num_rows), np.float32)
        penalties[2] = 1.0
        changed = np.zeros(len(positions.row), bool)
        logprobs = np.full(num_rows, -1, np.int32)
        touched = [(np.zeros(0, np.int32),) * 5]
        masks = None
        for row, choice, span in asking:
            sampling = choice.sampling
            if sampling.logprobs is not None:
                logprobs[row] = sampling.logprobs
            if choice.touched is not None:
                penalties[:, row] = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
                columns = choice.touched.columns()
                touched.append((np.full(len(columns[0]), row, np.int32), *columns))
                changed[span] = True
            if choice.bans:
                if masks is None:
                    masks = np.tile(self._everything, (len(positions.row), 1))
                self._fill_or_fail(sequence_ids[row], choice, positions, span, masks[span])
                changed[span] |= (masks[span] != self._everything).any(axis=1)
        row, token, output_count, in_prompt, bias = (np.concatenate(column) for column in zip(*touched, strict=True))
        presence, frequency, repetition = penalties
        return LogitEdits(
            presence, frequency, repetition, row, token, output_count, in_prompt.astype(bool), bias.astype(np.float32),
            masks, changed, logprobs,
        )  # fmt: skip

    def _fill_or_fail(
        self, sequence_id: str, choice: ConstrainedChoice, positions: Positions, span: slice, masks: np.ndarray
    ) -> None:
        """`_fill`; where it fails, the choice is left with nothing allowed."""
        try:
            with contained("json_schema" if choice.has_grammar else "bad_words"):
                self._fill(sequence_id, choice, positions, span, masks)
        except AdaServeError as error:
            choice.failure = error
            masks[:] = 0

    def _fill(
        self, sequence_id: str, choice: ConstrainedChoice, positions: Positions, span: slice, masks: np.ndarray
    ) -> None:
        """Write the masks of one tree, u32[its nodes, words], which allow everything."""
        parents = np.maximum(positions.parent[span] - span.start, -1)
        tokens = positions.token[span]
        if choice.has_grammar and self._grammars is not None:
            choice.gave_up = self._grammars.fill(sequence_id, tokens, parents, masks)
            masks &= self._everything
        choice.apply_bans(tokens, parents, positions.depth[span], masks)
