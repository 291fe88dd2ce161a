"""One engine step, and what happens to requests between steps. No thread, no socket, no clock of its own.

Knows the scheduler, the executor protocol and the text tracker; decides nothing that they decide.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from adaserve_jax.constraints.constraints import Constraints, RequestConstraints, drop_disallowed
from adaserve_jax.constraints.protocols import Spells
from adaserve_jax.engine.client import GenerateRequest, OutputChunk, check_prompt, check_salt
from adaserve_jax.models.detokenizer import Decodes, IncrementalDetokenizer
from adaserve_jax.scheduler.elastic import bring_back_draft, expand_or_contract
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.scheduler.step import StepResult, begin_step, end_step
from adaserve_jax.types import (
    DraftTrees,
    Executor,
    LogitEdits,
    RequestMetrics,
    Sequence,
    SequenceUpdate,
    StepLogprobs,
    StepPlan,
    TokenLogprob,
)

if TYPE_CHECKING:
    from adaserve_jax.distill.learner import Learner

# From tokens to text: one detokeniser per running choice, stop strings, and the chunks that clients receive.
#
# Imports no jax. The scheduler asks it, as `types.StopCheck`, where a text ends.


@dataclass
class _Choice:
    request_id: str
    index: int
    detokenizer: IncrementalDetokenizer
    text: str = ""


class OutputTracker:
    """Text state of all choices in flight, by the sequence id."""

    def __init__(self, tokenizer: Decodes):
        self._tokenizer = tokenizer
        self._choices: dict[str, _Choice] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def add(self, client_id: str, request: Sequence) -> None:
        """Follow one choice. client_id: the id that the client gave the whole request."""
        prompt = request.prompt_ids.tolist()
        detokenizer = IncrementalDetokenizer(self._tokenizer, prompt, request.sampling.stop)
        self._choices[request.sequence_id] = _Choice(client_id, request.choice, detokenizer)

    def discard(self, sequence_id: str) -> None:
        self._choices.pop(sequence_id, None)

    def stop_check(self, sequence_id: str, token_ids: abc.Sequence[int]) -> int | None:
        """Take in new tokens; how many to keep when a stop string ended the text, else None."""
        choice = self._choices[sequence_id]
        shown, kept = choice.detokenizer.push(token_ids)
        choice.text += shown
        return kept

    def chunk(self, update: SequenceUpdate) -> OutputChunk:
        """The chunk of one update; forgets the choice when it ended."""
        choice = self._choices[update.sequence_id]
        if update.finish_reason is not None:
            del self._choices[update.sequence_id]
            choice.text += choice.detokenizer.finish()
        text, choice.text = choice.text, ""
        return OutputChunk(
            choice.request_id,
            choice.index,
            text,
            list(update.token_ids),
            update.finish_reason,
            update.metrics,
            logprobs=list(update.logprobs),
        )


# Log probabilities of a step put to the updates of the requests that asked for them. Imports no jax.


def with_logprobs(
    updates: Iterable[SequenceUpdate], sequence_ids: abc.Sequence[str], edits: LogitEdits, found: StepLogprobs
) -> list[SequenceUpdate]:
    """The updates, with one TokenLogprob per token where the request asked. sequence_ids: of the step's rows."""
    rows = {sequence_ids[row]: row for row in np.flatnonzero(edits.logprobs >= 0).tolist()}
    return [
        replace(update, logprobs=_told(update.token_ids, found, row, int(edits.logprobs[row])))
        if (row := rows.get(update.sequence_id)) is not None
        else update
        for update in updates
    ]


def _told(token_ids: tuple[int, ...], found: StepLogprobs, row: int, count: int) -> tuple[TokenLogprob, ...]:
    """Of a row's kept tokens, each with `count` of the likeliest."""
    drawn = found.drawn[row].tolist()
    ids, top = found.top_ids[row, :, :count].tolist(), found.top[row, :, :count].tolist()
    return tuple(
        TokenLogprob(token, drawn[place], tuple(zip(ids[place], top[place], strict=True)))
        for place, token in enumerate(token_ids)
    )


SETTLE_S = 0.001
"""Between two questions whether the draft is there."""


class Spelling(Decodes, Spells, Protocol):
    """What is needed of a tokenizer."""


class EngineCore:
    """Runs requests to their end, one step at a time. Not thread-safe: one thread owns it.

    eos_ids: end a text unless the request ignores them. baseline_s: what relative SLOs multiply. seed: of the seeds
    drawn for requests that bring none. constraints: what requests may ask of logits; None: nothing. learner: what
    learns from the texts.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Spelling,
        *,
        eos_ids: tuple[int, ...],
        baseline_s: float,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        constraints: Constraints | None = None,
        learner: Learner | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.clock = clock
        self._eos_ids = frozenset(eos_ids)
        self._baseline_s = baseline_s
        self._seeds = np.random.default_rng(seed)
        self._tracker = OutputTracker(tokenizer)
        self._constraints = constraints or Constraints(0, tokenizer, refusal="this engine does not edit logits")
        self._learner = learner
        self._choice_ids: dict[str, list[str]] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_open(self) -> int:
        """Choices that have not ended."""
        return len(self._tracker)

    def check(self, request: GenerateRequest) -> RequestConstraints | None:
        """What `prepare` and `add` take. Raises RequestError when a request can never be served, whatever else runs, as
        far as that is soon known. Safe in any thread."""
        check_salt(request.cache_salt)
        limits = self.scheduler.limits
        check_prompt(
            len(request.prompt_ids), limits.max_context, max_tokens=request.sampling.max_tokens,
            kv_tokens=limits.kv_tokens,
        )  # fmt: skip
        return self._constraints.check(request.sampling, request.prompt_ids)

    def prepare(self, request: GenerateRequest, shared: RequestConstraints | None, then: Callable[[], None]) -> None:
        """Begin what takes long before a request can be added; `then` is called once it is done, here or in another
        thread. Safe in any thread."""
        self._constraints.prepare(request.sampling, shared, then)

    def add(
        self, request: GenerateRequest, arrival_s: float, shared: RequestConstraints | None = None, draft: int = 0
    ) -> None:  # fmt: skip
        """Queue every choice of a request, or none. shared: prepared, of `check`. draft: index of the one that
        speculates for it. Raises RequestError, QueueFullError, and AdaServeError: what the request asks of logits
        failed."""
        choices = self._choices(request, arrival_s, draft)
        added: list[str] = []
        try:
            for choice in choices:
                self.scheduler.add(choice)
                added.append(choice.sequence_id)
                self._tracker.add(request.request_id, choice)
                self._constraints.add(choice, shared)
        except BaseException:
            for sequence_id in added:
                self.scheduler.abort(sequence_id)
                self._tracker.discard(sequence_id)
                self._constraints.discard(sequence_id)
            raise
        self._choice_ids[request.request_id] = added
        if self._learner is not None:
            for choice in choices:
                self._learner.added(choice, learn=request.learn, tenant=request.tenant)

    def abort(self, request_id: str) -> list[OutputChunk]:
        """End all choices of a request that still run. Unknown ids are ignored."""
        choices = self._choice_ids.pop(request_id, [])
        updates = [self.scheduler.abort(choice) for choice in choices]
        for choice in choices:
            self._constraints.discard(choice)
            if self._learner is not None:
                self._learner.dropped(choice, "abort")
        return [self._tracker.chunk(update) for update in updates if update is not None]

    def aborted(self, request: GenerateRequest, arrival_s: float) -> list[OutputChunk]:
        """The ends of the choices of a request that is aborted before it was added. Safe in any thread."""
        slo = request.slo
        metrics = RequestMetrics(
            arrival_s, prompt_tokens=len(request.prompt_ids), tpot_slo_s=slo.tpot_s(self._baseline_s),
            ttft_slo_s=slo.ttft_s, slo_class=request.slo_class,
        )  # fmt: skip
        choices = range(request.sampling.n)
        return [OutputChunk(request.request_id, choice, "", [], "abort", metrics) for choice in choices]

    def step(self) -> list[OutputChunk]:
        """Run one step and return the chunks that it brought; none if nothing can run."""
        sequence_ids: list[str] = []
        constrained = self._constraints.active

        def edit(plan: StepPlan, trees: DraftTrees) -> LogitEdits | None:
            if constrained or self._learner is not None:
                sequence_ids.extend(self.scheduler.sequence_ids(plan))
            return self._constraints.edits(plan, trees, sequence_ids) if constrained else None

        step = begin_step(self.scheduler, self.executor, self.clock, edit)
        if step is None:
            return []
        stuck: list[str] = []
        if step.edits is not None:
            outcome, stuck = drop_disallowed(step.outcome, step.edits, step.plan, step.trees, sequence_ids)
            step = replace(step, outcome=outcome)
        chunks: list[OutputChunk] = []
        stop_check = self._stop_check if constrained else self._tracker.stop_check
        end_step(
            self.scheduler, self.executor, self.clock, step, stop_check,
            lambda result: chunks.extend(self._take(result, sequence_ids, stuck)),
        )  # fmt: skip
        return chunks

    def _take(self, result: StepResult, sequence_ids: list[str], stuck: list[str]) -> list[OutputChunk]:
        """Return the chunks of a committed step, after ending choices that cannot go on."""
        step, updates = result.step, result.updates
        if self._learner is not None:
            capture = not self.scheduler.is_loaded(result.ended_s)
            self._learner.stepped(
                step.plan, step.trees, step.candidates, step.outcome, sequence_ids, updates, capture=capture
            )
        found: Iterable[SequenceUpdate] = updates
        if step.edits is not None and step.outcome.logprobs is not None:
            found = with_logprobs(updates, sequence_ids, step.edits, step.outcome.logprobs)
        chunks = [self._tracker.chunk(update) for update in found]
        if self._constraints.active:
            ending = dict.fromkeys([*stuck, *self._constraints.failed])
            chunks += [chunk for sequence_id in ending for chunk in self._end_stuck(sequence_id)]
        self._forget_finished(chunks)
        return chunks

    def _stop_check(self, sequence_id: str, token_ids: abc.Sequence[int]) -> int | None:
        """`types.StopCheck`: where a grammar or a stop string ends a text."""
        complete = self._constraints.push(sequence_id, token_ids)
        stopped = self._tracker.stop_check(sequence_id, token_ids[:complete])
        return complete if stopped is None else stopped

    def _end_stuck(self, sequence_id: str) -> list[OutputChunk]:
        """End a choice that cannot go on, unless its text has ended anyway."""
        update = self.scheduler.abort(sequence_id, "error")
        if update is None:
            return []
        if self._learner is not None:
            self._learner.dropped(sequence_id, "error")
        error = self._constraints.why_ended(sequence_id)
        chunk = self._tracker.chunk(update)
        return [replace(chunk, error=str(error), error_code=error.code, error_param=error.param)]

    def learn(self) -> None:
        """Between two steps: do a piece of training, where there is time for one."""
        if self._learner is not None and self.has_work:
            self._learner.work(self.scheduler.slack_s(self.clock()))

    @property
    def rests(self) -> bool:
        """Whether there is nothing to do for now: no request runs, the draft is where it belongs, and nothing is left
        to be learned, or to be kept of that."""
        return not self.has_work and self.scheduler.draft_resident and (self._learner is None or self._learner.rests)

    @property
    def wakes_in_s(self) -> float | None:
        """For how many seconds it then stays so; None: until a request comes."""
        return None if self._learner is None else self._learner.wakes_in_s

    def rest(self) -> bool:
        """Without requests: bring the draft back, a part of the way in each call, or do a piece of training. None waits
        for the draft; one may for the copy of cached pages. Returns whether there may be more to do at once."""
        if self.scheduler.draft_resident and self._learner is not None:
            return self._learner.work(None)
        expand_or_contract(self.scheduler.elastic_memory, self.executor, self.clock)
        return False

    def settle(self) -> None:
        """Bring the draft back; only while idle, before another core takes over the executor. Raises ElasticError."""
        memory = self.scheduler.elastic_memory
        bring_back_draft(memory, self.executor, self.clock, lambda: time.sleep(SETTLE_S))

    def _choices(self, request: GenerateRequest, arrival_s: float, draft: int) -> list[Sequence]:
        sampling = request.sampling
        seed = int(self._seeds.integers(0, 2**63)) if sampling.seed is None else sampling.seed
        stop_ids = frozenset(sampling.stop_token_ids)
        prompt = np.asarray(request.prompt_ids, np.int32)
        return [
            Sequence(
                sequence_id=f"{request.request_id}/{choice}",
                prompt_ids=prompt,
                sampling=sampling,
                seed=seed,
                arrival_s=arrival_s,
                choice=choice,
                tpot_slo_s=request.slo.tpot_s(self._baseline_s),
                ttft_slo_s=request.slo.ttft_s,
                priority=request.priority,
                slo_class=request.slo_class,
                cache_salt=request.cache_salt,
                draft=draft,
                stop_token_ids=stop_ids if sampling.ignore_eos else stop_ids | self._eos_ids,
            )
            for choice in range(sampling.n)
        ]

    def _forget_finished(self, chunks: list[OutputChunk]) -> None:
        for chunk in chunks:
            if chunk.finish_reason is not None:
                left = self._choice_ids.get(chunk.request_id, [])
                choice_id = f"{chunk.request_id}/{chunk.choice}"
                self._constraints.discard(choice_id)
                if choice_id in left:
                    left.remove(choice_id)
                if not left:
                    self._choice_ids.pop(chunk.request_id, None)
