"""One engine that completes batches and closed loops of token ids by one policy after another, and notes its steps.

Knows no rounds, rows or tables.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import GenerateRequest, OutputChunk
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.stats import StepStats
from adaserve_jax.types import DraftTrees, Progress, StepOutcome, StepPlan
from benchmarks.engine.cpu_time import CpuTimer

TOTALS = ("steps", "plan_s", "draft_s", "select_s", "verify_s", "commit_s", "wait_s")


@dataclass(frozen=True)
class Batch:
    """What every system completes. prompts: token ids. seeds: one per prompt."""

    prompts: list[list[int]]
    seeds: list[int]
    new_tokens: int
    temperature: float


@dataclass(frozen=True)
class Load:
    """A closed loop: `at_once` requests run, and the next one replaces each that ends. lengths: new tokens of each.

    It is measured from when as many requests have ended as run at once, so that the policy has learnt and requests end
    at different times, until one ends and none is left to replace it.
    """

    at_once: int
    prompts: Sequence[list[int]]
    lengths: Sequence[int]
    seeds: Sequence[int]
    temperature: float

    def request(self, index: int, slo: SLO) -> GenerateRequest:
        sampling = SamplingParams(
            max_tokens=self.lengths[index], temperature=self.temperature, seed=self.seeds[index], ignore_eos=True
        )
        return GenerateRequest(str(index), self.prompts[index], sampling, slo)


@dataclass(frozen=True)
class Step:
    """One step of the engine. rows: that decode. nodes: verified, roots included. emitted: tokens of those rows.
    ended_s: time.perf_counter when its outcome was there."""

    rows: int
    prefill_tokens: int
    depth: int
    width: int
    nodes: int
    emitted: int
    ended_s: float


@dataclass(frozen=True)
class Measured:
    """One timed call. wall_s: all of it. steps: all, in order. totals: what the scheduler counted meanwhile.
    others_share: of the cores' time, that other processes took; None: unknown."""

    token_ids: list[list[int]]
    wall_s: float
    steps: tuple[Step, ...] = ()
    totals: StepStats | None = None
    others_share: float | None = None

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def whole_tps(self) -> float:
        return self.new_tokens / self.wall_s

    @property
    def decode_tps(self) -> float | None:
        """Tokens emitted after the last step that prefilled, over the time since; None: unknown."""
        if not self.steps:
            return None
        last_prefill = max(index for index, step in enumerate(self.steps) if step.prefill_tokens)
        decoding = self.steps[last_prefill + 1 :]
        return sum(step.emitted for step in decoding) / (decoding[-1].ended_s - self.steps[last_prefill].ended_s)


@dataclass(frozen=True)
class Looped:
    """A measured part of a closed loop. token_ids: of every request, as far as it came. tokens, seconds, steps, totals,
    others_share: of the part."""

    token_ids: list[list[int]]
    tokens: int
    seconds: float
    steps: tuple[Step, ...]
    totals: StepStats
    others_share: float | None

    @property
    def tps(self) -> float:
        return self.tokens / self.seconds


class Engine:
    """One engine that serves every policy in turn. Notes each step by standing before its executor's `verify`.

    noted_steps: of the batch that runs, or ran last.
    """

    def __init__(self, config: EngineConfig, slo: SLO, progress: Progress | None = None):
        self.local = LocalEngine(config, progress)
        self.local.start()
        self.llm = LLM.over(self.local)
        self._slo = slo
        self.noted_steps: list[Step] = []
        verify = self.local.executor.verify

        def noted(plan: StepPlan, trees: DraftTrees, *rest: Any) -> StepOutcome:
            outcome = verify(plan, trees, *rest)
            depth, width = (plan.draft.depth, plan.draft.width) if plan.draft else (0, 0)
            emitted = int(outcome.counts[: plan.num_decode].sum())
            now = time.perf_counter()
            self.noted_steps.append(
                Step(plan.num_decode, plan.num_prefill_tokens, depth, width, trees.num_nodes, emitted, now)
            )
            return outcome

        self.local.executor.verify = noted

    def run(self, policy: str, batch: Batch) -> Measured:
        """Complete a batch by `policy`, which starts anew."""
        params = [
            SamplingParams(max_tokens=batch.new_tokens, temperature=batch.temperature, seed=seed, ignore_eos=True)
            for seed in batch.seeds
        ]
        self.llm.set_policy(policy)
        self.noted_steps.clear()
        before = self.llm.stats().scheduler
        watch = CpuTimer()
        outputs = self.llm.generate(batch.prompts, params, slo=self._slo)
        wall_s, others_share = watch.read()
        after = self.llm.stats().scheduler
        return Measured(
            token_ids=[output.token_ids for output in outputs],
            wall_s=wall_s,
            steps=tuple(self.noted_steps),
            totals=_between(before, after),
            others_share=others_share,
        )

    def loop(self, policy: str, load: Load) -> Looped:
        """Run a closed loop by `policy`, which starts anew."""
        self.llm.set_policy(policy)
        self.noted_steps.clear()
        return _Loop(self, load, self._slo).run()

    def close(self) -> None:
        self.llm.close()


@dataclass(frozen=True)
class _Mark:
    """What an engine had done at a moment."""

    tokens: int
    steps: int
    totals: StepStats


class _Loop:
    """Sink of a closed loop's requests. It submits the next one in the engine's thread, before the next step."""

    def __init__(self, engine: Engine, load: Load, slo: SLO):
        self._engine, self._load, self._slo = engine, load, slo
        self._token_ids: list[list[int]] = [[] for _ in load.prompts]
        self._begun = self._ended = self._tokens = 0
        self._first: _Mark | None = None
        self._watch: CpuTimer | None = None
        self._found: Looped | None = None
        self._over = threading.Event()
        self._idle = threading.Event()

    def run(self) -> Looped:
        for _ in range(self._load.at_once):
            self._submit()
        self._over.wait()
        for index in range(len(self._token_ids)):
            self._engine.local.abort(str(index))
        self._idle.wait()
        assert self._found is not None
        return replace(self._found, token_ids=self._token_ids)

    def _submit(self) -> None:
        request = self._load.request(self._begun, self._slo)
        self._begun += 1
        self._engine.local.submit(request, self)

    def __call__(self, chunk: OutputChunk) -> None:
        self._token_ids[int(chunk.request_id)] += chunk.token_ids
        self._tokens += len(chunk.token_ids)
        if chunk.finish_reason is None:
            return
        self._ended += 1
        if self._ended == self._load.at_once:
            self._first, self._watch = self._mark(), CpuTimer()
        if self._begun < len(self._token_ids):
            self._submit()
            return
        if self._found is None:
            self._found = self._measured()
            self._over.set()
        if self._ended == self._begun:
            self._idle.set()

    def _mark(self) -> _Mark:
        return _Mark(self._tokens, len(self._engine.noted_steps), replace(self._engine.llm.stats().scheduler))

    def _measured(self) -> Looped:
        assert self._first is not None and self._watch is not None
        first, last = self._first, self._mark()
        seconds, others_share = self._watch.read()
        steps = tuple(self._engine.noted_steps[first.steps : last.steps])
        return Looped([], last.tokens - first.tokens, seconds, steps, _between(first.totals, last.totals), others_share)


def _between(before: StepStats, after: StepStats) -> StepStats:
    """Return what was counted from one moment to another."""
    return StepStats(**{name: getattr(after, name) - getattr(before, name) for name in TOTALS})
