"""All choices in flight that ask for changed logits, and what they ask of each step.

Host only. Told of every choice and its output by the engine; tells the executor by `types.LogitEdits`. That the text
is that of plain decoding rests on one rule: what is asked after a tree node is what plain decoding would ask after the
same tokens (docs/architecture/constraints.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from adaserve_jax.constraints.choice import ConstrainedChoice, asked
from adaserve_jax.constraints.contained import contained
from adaserve_jax.constraints.dead_ends import dead_end
from adaserve_jax.constraints.masks import all_but
from adaserve_jax.constraints.positions import Positions
from adaserve_jax.constraints.protocols import Grammars, Spells
from adaserve_jax.constraints.shared import Shared
from adaserve_jax.errors import AdaServeError, RequestError
from adaserve_jax.sampling import SamplingParams
from adaserve_jax.types import DraftTrees, LogitEdits, Request, StepPlan


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
        return [request_id for request_id, choice in self._choices.items() if choice.failure is not None]

    def check(self, sampling: SamplingParams, prompt_ids: Sequence[int] | np.ndarray = ()) -> Shared | None:
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

    def add(self, request: Request, shared: Shared | None = None) -> None:
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
                self._grammars.add(request.request_id, shared.start.result())
        self._choices[request.request_id] = choice

    def discard(self, request_id: str) -> None:
        """Forget a choice; unknown ids are ignored."""
        choice = self._choices.pop(request_id, None)
        if choice is not None and choice.has_grammar and self._grammars is not None:
            self._grammars.discard(request_id)

    def why_ended(self, request_id: str) -> AdaServeError:
        """Why a choice that is followed goes on no more: it failed, or no token may follow its text."""
        choice = self._choices[request_id]
        return choice.failure or dead_end(choice.gave_up)

    def push(self, request_id: str, token_ids: Sequence[int]) -> int | None:
        """Take in output tokens; how many to keep where a grammar says that the text is complete then, else None."""
        choice = self._choices.get(request_id)
        if choice is None:
            return None
        kept = None
        if choice.has_grammar:
            try:
                with contained("json_schema"):
                    kept = self._end(request_id, token_ids)
            except AdaServeError as error:
                choice.failure = error
        choice.push(token_ids[:kept])
        return kept

    def _end(self, request_id: str, token_ids: Sequence[int]) -> int | None:
        """Let a grammar take in tokens one by one, so that the text ends where it would end if each came in a step of
        its own: after how many, if after any."""
        assert self._grammars is not None
        for count, token in enumerate(token_ids, 1):
            if self._grammars.advance(request_id, [token]):
                return count
        return None

    def edits(self, plan: StepPlan, trees: DraftTrees, request_ids: Sequence[str]) -> LogitEdits | None:
        """What the step's rows ask for; None: nothing. request_ids: [R], of the rows."""
        rows = [(row, self._choices[name]) for row, name in enumerate(request_ids) if name in self._choices]
        if not rows:
            return None
        positions = Positions.of(plan, trees)
        spans = positions.spans(plan.num_rows)
        asking = [
            (row, choice, slice(spans[row], spans[row + 1])) for row, choice in rows if spans[row + 1] > spans[row]
        ]
        edits = self._edits(plan.num_rows, positions, asking, request_ids)
        return edits if edits.changed.any() or (edits.logprobs >= 0).any() else None

    def _edits(
        self, num_rows: int, positions: Positions, asking: list[tuple[int, ConstrainedChoice, slice]],
        request_ids: Sequence[str],
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
                self._fill_or_fail(request_ids[row], choice, positions, span, masks[span])
                changed[span] |= (masks[span] != self._everything).any(axis=1)
        row, token, output_count, in_prompt, bias = (np.concatenate(column) for column in zip(*touched, strict=True))
        presence, frequency, repetition = penalties
        return LogitEdits(
            presence, frequency, repetition, row, token, output_count, in_prompt.astype(bool), bias.astype(np.float32),
            masks, changed, logprobs,
        )  # fmt: skip

    def _fill_or_fail(
        self, request_id: str, choice: ConstrainedChoice, positions: Positions, span: slice, masks: np.ndarray
    ) -> None:
        """`_fill`; where it fails, the choice is left with nothing allowed."""
        try:
            with contained("json_schema" if choice.has_grammar else "bad_words"):
                self._fill(request_id, choice, positions, span, masks)
        except AdaServeError as error:
            choice.failure = error
            masks[:] = 0

    def _fill(
        self, request_id: str, choice: ConstrainedChoice, positions: Positions, span: slice, masks: np.ndarray
    ) -> None:
        """Write the masks of one tree, u32[its nodes, words], which allow everything."""
        parents = np.maximum(positions.parent[span] - span.start, -1)
        tokens = positions.token[span]
        if choice.has_grammar and self._grammars is not None:
            choice.gave_up = self._grammars.fill(request_id, tokens, parents, masks)
            masks &= self._everything
        choice.apply_bans(tokens, parents, positions.depth[span], masks)
