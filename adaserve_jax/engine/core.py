"""EngineCore: the engine without threads or sockets. It queues requests, runs steps and turns tokens into text."""

from __future__ import annotations

import heapq
import time
from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from adaserve_jax.constraints.bad_words import Spells
from adaserve_jax.constraints.constraints import Constraints, RequestConstraints, drop_disallowed
from adaserve_jax.constraints.tool_formats import FORMATS
from adaserve_jax.engine.adapters import AdapterTable
from adaserve_jax.engine.client import GenerateRequest, OutputChunk
from adaserve_jax.errors import SLO_INFEASIBLE, OverloadedError, RequestError
from adaserve_jax.models.detokenizer import MOST_CONTEXT, Decodes, IncrementalDetokenizer
from adaserve_jax.models.thinking_detokenizer import ThinkingDetokenizer
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.scheduler.elastic import bring_back_draft, expand_or_contract
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.scheduler.step import StepResult, begin_step, end_step
from adaserve_jax.types import (
    SLO,
    DraftTrees,
    Executor,
    LogitEdits,
    Logprobs,
    Sequence,
    SequenceUpdate,
    StepOutcome,
    StepPlan,
)

if TYPE_CHECKING:
    from adaserve_jax.distill.learner import Learner

DRAFT_POLL_S = 0.001
"""Seconds between two looks at whether the draft has been brought back."""


class EngineTokenizer(Decodes, Spells, Protocol):
    """Tokenizer interface that detokenisation and constraints need."""

    def showing(self, texts: abc.Collection[str]) -> Decodes:
        """Return a tokenizer that decodes special tokens of these texts as text."""
        ...


QUEUE_TIMEOUT = "queue_timeout"
"""Code of the error of a choice that waited longer than its request allows."""
_OVERDUE = {
    OverloadedError.code: "the request waited {wait_s:g} s for its turn, as long as this server lets it wait; retry "
    "after the time in Retry-After, or elsewhere",
    QUEUE_TIMEOUT: "the request had not begun after its max_queue_ms of {wait_ms:g} ms; allow more, or retry when the "
    "server has less to do",
}
"""Messages of choices that did not begin in time, by the error's code."""
HEAP_SLACK = 64
"""Slack of `_latest_begins`: entries of ended requests are dropped once it holds more than this and four for each open
request."""


class EngineCore:
    """Runs requests to their end, one step at a time. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: EngineTokenizer,
        *,
        eos_ids: tuple[int, ...],
        baseline_s: float,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        constraints: Constraints | None = None,
        learner: Learner | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        """Build a core over an executor that is ready to run, and a scheduler that nobody else uses.

        eos_ids: end a text unless the request ignores them. baseline_s: seconds per token that relative SLOs multiply.
        seed: seeds the generator of seeds for requests without one. constraints: logit edits that requests may ask for;
        None: none are supported. learner: trains drafts on the served texts. adapters: those that requests may name;
        None: none.
        """
        self.executor = executor
        self.scheduler = scheduler
        self.clock = clock
        self._eos_ids = frozenset(eos_ids)
        self._baseline_s = baseline_s
        self._seeds = np.random.default_rng(seed)
        self._tracker = OutputTracker(tokenizer)
        self._constraints = constraints or Constraints(0, tokenizer, refusal="this engine does not edit logits")
        self._learner = learner
        self._adapters = adapters or AdapterTable(0)
        self._choice_ids: dict[str, list[str]] = {}
        self._deliver: Callable[[list[OutputChunk]], None] | None = None
        self._undelivered: list[SequenceUpdate] = []
        """Updates of the last step whose text is not decoded yet."""
        self._latest_begins: list[tuple[float, str, float, str, list[str], int]] = []
        """Heap of the time by which a request must begin, its id, the wait until then, the error's code, its entry in
        `_choice_ids`, and the number of choices that it began with."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_open(self) -> int:
        """Number of choices that have not ended."""
        return len(self._tracker)

    def deliver_beside_device(self, deliver: Callable[[list[OutputChunk]], None]) -> None:
        """Decode and deliver a step's text while the device runs the next step, where that is possible.

        Steps then leave those chunks out. Text is delivered at once where a step must wait for it: while any
        open choice has constraints (grammars, penalties, log probabilities), with a learner, and when nothing else
        runs.
        """
        self._deliver = deliver

    def check(self, request: GenerateRequest) -> RequestConstraints | None:
        """Check what a request asks of the logits; return its constraints, for `prepare` and `add`.

        Safe in any thread. Raises RequestError. Lengths and ids are checked by `client.check_request`.
        """
        return self._constraints.check(request.sampling, request.prompt_ids)

    def prepare(self, request: GenerateRequest, shared: RequestConstraints | None, then: Callable[[], None]) -> None:
        """Begin to compile the request's grammar, if it has one; call `then` once it is ready to be added, in this
        thread or another. Safe in any thread."""
        self._constraints.prepare(request.sampling, shared, then)

    def add(
        self, request: GenerateRequest, arrival_s: float, shared: RequestConstraints | None = None, draft: int = 0
    ) -> None:  # fmt: skip
        """Queue every choice of a checked and prepared request, or none.

        arrival_s: when it came, on this core's clock. shared: its constraints, from `check`. draft: index of the draft
        that speculates for it.

        Raises:
            RequestError: its id is in use, its adapter is not loaded, or its targets are infeasible and refused.
            QueueFullError: the queue is full.
            AdaServeError: its constraints could not be prepared.
        """
        choices = self._sequences(request, arrival_s, draft)
        added: list[str] = []
        try:
            for choice in choices:
                self._queue(choice, request.slo)
                added.append(choice.sequence_id)
                self._tracker.add(request.request_id, choice)
                self._constraints.add(choice, shared)
        except BaseException:
            for sequence_id in added:
                self.scheduler.withdraw(sequence_id)
                self._tracker.discard(sequence_id)
                self._constraints.discard(sequence_id)
            raise
        self._choice_ids[request.request_id] = added
        for wait_s, code in ((request.max_wait_s, OverloadedError.code), (request.max_queue_s, QUEUE_TIMEOUT)):
            if wait_s:
                entry = arrival_s + wait_s, request.request_id, wait_s, code, added, len(added)
                heapq.heappush(self._latest_begins, entry)
        if len(self._latest_begins) > HEAP_SLACK + 4 * len(self._choice_ids):
            held = self._choice_ids
            self._latest_begins = [entry for entry in self._latest_begins if held.get(entry[1]) is entry[4]]
            heapq.heapify(self._latest_begins)
        if self._learner is not None:
            for choice in choices:
                self._learner.added(choice, learn=request.learn, tenant=request.tenant)

    def _queue(self, choice: Sequence, slo: SLO) -> None:
        """Add one choice to the scheduler, which knows no relative targets. Raises as `add`."""
        try:
            self.scheduler.add(choice)
        except RequestError as error:
            if error.code != SLO_INFEASIBLE or error.param != "slo_tpot_ms" or slo.relative is None:
                raise
            said = f"slo_relative {slo.relative:g} is out of reach: {error}"
            raise RequestError(said, param="slo_relative", code=error.code) from error

    def abort(self, request_id: str) -> list[OutputChunk]:
        """End all choices of a request and return their last chunks. Unknown ids are ignored."""
        self.deliver_rest()
        choices = self._choice_ids.pop(request_id, [])
        updates = [self.scheduler.abort(choice) for choice in choices]
        for choice in choices:
            self._constraints.discard(choice)
            if self._learner is not None:
                self._learner.dropped(choice, "abort")
        return [self._tracker.chunk(update) for update in updates if update is not None]

    def abort_unqueued(self, request: GenerateRequest, arrival_s: float) -> list[OutputChunk]:
        """Return the last chunks of a request that is aborted before it was added. Safe in any thread."""
        slo = request.slo
        metrics = RequestMetrics(
            arrival_s, prompt_tokens=len(request.prompt_ids), tpot_slo_s=slo.tpot_s(self._baseline_s),
            ttft_slo_s=slo.ttft_s, slo_class=request.slo_class, thinking_tpot_slo_s=slo.thinking_tpot_s,
            e2e_slo_s=slo.e2e_s,
        )  # fmt: skip
        choices = range(request.sampling.n)
        return [OutputChunk(request.request_id, choice, "", [], "abort", metrics) for choice in choices]

    def step(self) -> list[OutputChunk]:
        """Run one step and return its chunks, except those that `deliver_beside_device` hands out itself; empty if
        nothing can run."""
        sequence_ids: list[str] = []
        constrained = self._constraints.active
        at_once = self._deliver is None or constrained or self._learner is not None

        def edit(plan: StepPlan, trees: DraftTrees) -> LogitEdits | None:
            if constrained or self._learner is not None:
                sequence_ids.extend(self.scheduler.sequence_ids(plan))
            return self._constraints.edits(plan, trees, sequence_ids) if constrained else None

        chunks = self._end_overdue()
        step = begin_step(self.scheduler, self.executor, self.clock, edit, self.deliver_rest)
        if step is None:
            self.deliver_rest()
            return chunks
        stuck: list[str] = []
        if step.edits is not None:
            outcome, stuck = drop_disallowed(step.outcome, step.edits, step.plan, step.trees, sequence_ids)
            step = replace(step, outcome=outcome)
        if constrained:
            stop_check = self._stop_check
        else:
            stop_check = self._tracker.stop_check if at_once else self._tracker.stop_check_later
        end_step(
            self.scheduler, self.executor, self.clock, step, stop_check,
            lambda result: chunks.extend(self._take(result, sequence_ids, stuck, at_once)),
        )  # fmt: skip
        if not self.scheduler.has_work:
            self.deliver_rest()
        return chunks

    def deliver_rest(self) -> None:
        """Decode and deliver what the last step left."""
        if self._undelivered:
            assert self._deliver is not None
            updates, self._undelivered = self._undelivered, []
            chunks = [self._tracker.chunk(update) for update in updates]
            self._forget_finished(chunks)
            self._deliver(chunks)

    def _end_overdue(self) -> list[OutputChunk]:
        """End the requests that have waited as long as they allow and of which no choice has begun."""
        chunks: list[OutputChunk] = []
        now = self.clock()
        while self._latest_begins and self._latest_begins[0][0] <= now:
            _, request_id, wait_s, code, choices, count = heapq.heappop(self._latest_begins)
            if self._choice_ids.get(request_id) is not choices:
                continue  # it ended, and another request may have its id by now
            if len(choices) < count or not all(map(self.scheduler.never_ran, choices)):
                continue  # its other choices wait for their turn
            error = _OVERDUE[code].format(wait_s=wait_s, wait_ms=1e3 * wait_s)
            for sequence_id in choices:
                chunks += self._fail(sequence_id, error, code)
        self._forget_finished(chunks)
        return [replace(chunk, metrics=None) for chunk in chunks]  # nothing of them ran

    def _take(self, result: StepResult, sequence_ids: list[str], stuck: list[str], at_once: bool) -> list[OutputChunk]:
        """Return the chunks of a committed step, after ending choices that cannot go on.

        at_once: those with text too; otherwise `deliver_rest` makes them later.
        """
        step, updates = result.step, result.updates
        if self._learner is not None:
            capture = not self.scheduler.is_loaded(result.ended_s)
            self._learner.stepped(
                step.plan, step.trees, step.candidates, step.outcome, sequence_ids, updates, capture=capture
            )
        if step.edits is not None and step.outcome.logprobs is not None:
            updates = _with_logprobs(updates, sequence_ids, step.edits, step.outcome.logprobs)
        chunks = self._tracker.prompt_chunks(step.plan, step.outcome, sequence_ids)
        if at_once:
            chunks += [self._tracker.chunk(update) for update in updates]
        else:
            self._undelivered += updates
        if self._constraints.active:
            for sequence_id in dict.fromkeys([*stuck, *self._constraints.failed]):
                error = self._constraints.why_ended(sequence_id)
                chunks += self._fail(sequence_id, str(error), error.code, error.param)
        self._forget_finished(chunks)
        return chunks

    def _stop_check(self, sequence_id: str, token_ids: abc.Sequence[int]) -> int | None:
        """Return how many of the new tokens to keep if a grammar or a stop string ends the text, else None
        (`types.StopCheck`)."""
        complete = self._constraints.push(sequence_id, token_ids)
        stopped = self._tracker.stop_check(sequence_id, token_ids[:complete])
        return complete if stopped is None else stopped

    def _fail(self, sequence_id: str, error: str, code: str, param: str | None = None) -> list[OutputChunk]:
        """End a choice with an error and return its last chunk; none if it has ended already."""
        update = self.scheduler.abort(sequence_id, "error")
        if update is None:
            return []
        if self._learner is not None:
            self._learner.dropped(sequence_id, "error")
        return [replace(self._tracker.chunk(update), error=error, error_code=code, error_param=param)]

    def learn(self) -> None:
        """Run a piece of training between two steps if there is time for one."""
        if self._learner is not None and self.has_work:
            self._learner.work(self.scheduler.slack_s(self.clock()))
            self.scheduler.pause()

    @property
    def is_idle(self) -> bool:
        """True when no request is open, the draft is resident and the learner has nothing to train or save."""
        return not self.has_work and self.scheduler.draft_resident and (self._learner is None or self._learner.is_idle)

    @property
    def idle_for_s(self) -> float | None:
        """Seconds until an idle core has work of its own again; None: not before a request comes."""
        return None if self._learner is None else self._learner.idle_for_s

    def work_while_idle(self) -> bool:
        """Without requests, run a piece of training, or make the memory transition that is due while the draft is away.

        Never waits for the draft's weights; may wait for the copy of cached pages. Return True if there may be more
        training to do at once.
        """
        if self.scheduler.draft_resident and self._learner is not None:
            return self._learner.work(None)
        expand_or_contract(self.scheduler.elastic_memory, self.executor, self.clock)
        return False

    def bring_back_draft(self) -> None:
        """Make the draft resident before another core takes over the executor. Only without requests. Raises
        ElasticError."""
        bring_back_draft(self.scheduler.elastic_memory, self.executor, self.clock, lambda: time.sleep(DRAFT_POLL_S))

    def _sequences(self, request: GenerateRequest, arrival_s: float, draft: int) -> list[Sequence]:
        sampling = request.sampling
        seed = int(self._seeds.integers(0, 2**63)) if sampling.seed is None else sampling.seed
        stop_ids = frozenset(sampling.stop_token_ids)
        prompt = np.asarray(request.prompt_ids, np.int32)
        adapter = self._adapters.find(request.adapter)
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
                thinking_tpot_slo_s=request.slo.thinking_tpot_s,
                e2e_slo_s=request.slo.e2e_s,
                priority=request.priority,
                slo_class=request.slo_class,
                cache_salt=self._adapters.salted(adapter, request.cache_salt),
                keeps_text=request.learn,
                tenant=request.tenant,
                draft=draft,
                adapter=adapter.slot,
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


@dataclass
class _ChoiceText:
    """Text of one choice: its detokeniser, and the part that is decoded but not yet in a chunk."""

    request_id: str
    index: int
    detokenizer: IncrementalDetokenizer | ThinkingDetokenizer
    ends_at_strings: bool
    stop_token_ids: tuple[int, ...]
    text: str = ""
    is_behind: bool = False
    """True while the tokens of the next update are not decoded."""

    def stop_reason(self, update: SequenceUpdate) -> int | str | None:
        """Return `OutputChunk.stop_reason` of an update."""
        if update.finish_reason != "stop":
            return None
        last = update.token_ids[-1] if update.token_ids else None
        return self.detokenizer.stopped_by or (last if last in self.stop_token_ids else None)


class OutputTracker:
    """Turns tokens into text and output chunks: one detokeniser per choice in flight, by sequence id."""

    def __init__(self, tokenizer: EngineTokenizer):
        self._tokenizer = tokenizer
        self._choices: dict[str, _ChoiceText] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def add(self, request_id: str, sequence: Sequence) -> None:
        """Begin the text of one choice of a request."""
        prompt, sampling = sequence.prompt_ids[-MOST_CONTEXT:].tolist(), sequence.sampling
        calls, thinking = sampling.tool_calls, sampling.thinking
        tokenizer = self._tokenizer if calls is None else self._tokenizer.showing(FORMATS[calls.format].marks)
        if thinking is None:
            detokenizer = IncrementalDetokenizer(tokenizer, prompt, sampling.stop)
        else:
            detokenizer = ThinkingDetokenizer(self._tokenizer, tokenizer, prompt, sampling.stop, thinking)
        ends_at_strings = bool(sampling.stop) or thinking is not None
        self._choices[sequence.sequence_id] = _ChoiceText(
            request_id, sequence.choice, detokenizer, ends_at_strings, sampling.stop_token_ids
        )

    def discard(self, sequence_id: str) -> None:
        self._choices.pop(sequence_id, None)

    def stop_check(self, sequence_id: str, token_ids: abc.Sequence[int]) -> int | None:
        """Decode new tokens; return how many to keep if a stop string ended the text, else None."""
        choice = self._choices[sequence_id]
        shown, kept = choice.detokenizer.push(token_ids)
        choice.text += shown
        return kept

    def stop_check_later(self, sequence_id: str, token_ids: abc.Sequence[int]) -> int | None:
        """Do as `stop_check`, but leave tokens of texts without stop strings to be decoded by the next `chunk`."""
        choice = self._choices[sequence_id]
        if choice.ends_at_strings:
            return self.stop_check(sequence_id, token_ids)
        choice.is_behind = True
        return None

    def chunk(self, update: SequenceUpdate) -> OutputChunk:
        """Return the chunk of one update; forget the choice if it ended."""
        choice = self._choices[update.sequence_id]
        if choice.is_behind:
            choice.is_behind = False
            choice.text += choice.detokenizer.push(update.token_ids)[0]
        if update.finish_reason is not None:
            del self._choices[update.sequence_id]
            choice.text += choice.detokenizer.finish()
        text, choice.text = choice.text, ""
        detokenizer = choice.detokenizer
        reasoning, reasoning_tokens = detokenizer.take() if isinstance(detokenizer, ThinkingDetokenizer) else ("", 0)
        return OutputChunk(
            choice.request_id, choice.index, text, list(update.token_ids), update.finish_reason, update.metrics,
            logprobs=list(update.logprobs), reasoning=reasoning, reasoning_tokens=reasoning_tokens,
            stop_reason=choice.stop_reason(update),
        )  # fmt: skip

    def prompt_chunks(self, plan: StepPlan, outcome: StepOutcome, sequence_ids: list[str]) -> list[OutputChunk]:
        """Return a chunk without text for each row whose prompt the step scored. sequence_ids: of the R rows."""
        scored, found = plan.scored, outcome.prompt_logprobs
        if scored is None or found is None:
            return []
        chunks: list[OutputChunk] = []
        first = 0
        for row, count, top in np.stack([scored.rows, scored.counts, scored.tops], axis=1).tolist():
            part = slice(first, first + count)
            first += count
            choice = self._choices.get(sequence_ids[row])
            if choice is not None:
                told = list(found.of(part, scored.token[part].tolist(), top))
                chunks.append(OutputChunk(choice.request_id, choice.index, "", [], prompt_logprobs=told))
        return chunks


def _with_logprobs(
    updates: Iterable[SequenceUpdate], sequence_ids: list[str], edits: LogitEdits, found: Logprobs
) -> list[SequenceUpdate]:
    """Return the updates with one TokenLogprob per token for the requests that asked for them; `sequence_ids` are those
    of the step's rows."""
    rows = {sequence_ids[row]: row for row in np.flatnonzero(edits.logprobs >= 0).tolist()}
    return [
        replace(update, logprobs=found.of(row, update.token_ids, int(edits.logprobs[row])))
        if (row := rows.get(update.sequence_id)) is not None
        else update
        for update in updates
    ]
