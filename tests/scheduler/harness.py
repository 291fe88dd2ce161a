"""What the scheduler's tests share: a small machine, a load, and a loop that runs it to its end on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.memory.residency import ElasticRule
from adaserve_jax.scheduler.acceptance import Calibrator
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.scheduler.step import StepResult, begin_step, end_step
from adaserve_jax.sim.executor import SimExecutor, VirtualClock
from adaserve_jax.sim.text import token_at
from adaserve_jax.types import (
    CostSamples,
    DraftSessions,
    DraftTrees,
    Limits,
    SamplingParams,
    Sequence,
    SequenceUpdate,
    StepPlan,
)
from tests.sim_kv import StrictExecutor

VOCAB = 1000


def limits_of(**changes) -> Limits:
    values = {
        "max_requests": 8,
        "token_edges": (1, 2, 4, 8, 16, 32, 64),
        "max_tree_tokens": 48,
        "max_context": 256,
        "page_size": 8,
        "num_pages": 256,
        "max_depth": 4,
        "max_width": 4,
    }
    return Limits(**{**values, **changes})


def costs_of(limits: Limits, knee: int = 16) -> CostSamples:
    """16 ms up to `knee` tokens, then 1 ms a token; a draft of about a tenth of that."""
    verify = {(e, r): 0.016 + 0.001 * max(0, e - knee) for e in limits.token_edges for r in (1, 8)}
    if not limits.max_depth:
        return CostSamples(verify, {}, {})
    levels = {(r, w): 0.001 for r in (1, 8) for w in (1, limits.max_width)}
    return CostSamples(verify, {16: 0.001, 64: 0.003}, levels)


def request_of(name: str, prompt: int = 10, tokens: int = 20, **changes) -> Sequence:
    sampling = SamplingParams(max_tokens=tokens)
    values = {"sampling": sampling, "seed": sum(name.encode()), "arrival_s": 0.0}
    return Sequence(name, np.arange(1, prompt + 1, dtype=np.int32), **{**values, **changes})


def random_load(seed: int, count: int, rate: float) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Sequence(
            f"r{index}",
            rng.integers(0, VOCAB, int(rng.integers(1, 90))).astype(np.int32),
            SamplingParams(max_tokens=int(rng.integers(1, 60))),
            seed=int(rng.integers(0, 2**63)),
            choice=int(rng.integers(0, 3)),
            arrival_s=float(arrival),
            tpot_slo_s=[None, 0.015, 0.03, 0.2][int(rng.integers(0, 4))],
            ttft_slo_s=[None, 0.3, 2.0][int(rng.integers(0, 3))],
            priority=int(rng.integers(-1, 2)),
            stop_token_ids=frozenset(rng.integers(0, VOCAB, 12).tolist()),
        )
        for index, arrival in enumerate(arrivals)
    ]


def expected_text(request: Sequence, max_context: int) -> tuple[list[int], str]:
    """What plain decoding emits, from the definition of the simulated target alone."""
    start = len(request.prompt_ids)
    end = min(start + request.sampling.max_tokens, max_context)
    text = token_at(request.seed, request.choice, np.arange(start, end), VOCAB).tolist()
    for index, token in enumerate(text):
        if token in request.stop_token_ids:
            return text[: index + 1], "stop"
    return text, "length"


def run_step(scheduler: Scheduler, executor: SimExecutor, clock: Callable[[], float]) -> StepResult | None:
    """Run one whole step without edits or stop checks; None if nothing can run."""
    step = begin_step(scheduler, executor, clock)
    return None if step is None else end_step(scheduler, executor, clock, step)


@dataclass
class Run:
    """A scheduler and its simulated machine. text, last: what each request was given, by id."""

    scheduler: Scheduler
    executor: StrictExecutor
    clock: VirtualClock
    text: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, SequenceUpdate] = field(default_factory=dict)
    steps: int = 0

    @classmethod
    def of(
        cls, limits: Limits, *, acceptance: float = 0.75, knee: int = 16, elastic_rule: ElasticRule | None = None,
        executor: type[StrictExecutor] = StrictExecutor, calibrator: Calibrator | None = None,
        draft_sessions: DraftSessions | None = None, **config,
    ) -> Run:  # fmt: skip
        clock, costs = VirtualClock(), costs_of(limits, knee)
        scheduler = Scheduler(EngineConfig(**config), limits, costs, calibrator, elastic_rule, draft_sessions)
        return cls(scheduler, executor(limits, costs, acceptance, clock, vocab_size=VOCAB), clock)

    def add(self, request: Sequence) -> None:
        self.scheduler.add(request)
        self.executor.know(request)

    def take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            assert update.sequence_id not in self.last, "tokens after the end"
            self.text.setdefault(update.sequence_id, []).extend(update.token_ids)
            if update.finish_reason is not None:
                assert update.metrics is not None
                self.last[update.sequence_id] = update

    def step(self, in_flight: Callable[[StepPlan], object] | None = None):
        """Run one step; `in_flight` is called between selection and verification. Returns the plan and the trees."""

        def edit(plan: StepPlan, trees: DraftTrees) -> None:
            if in_flight is not None:
                in_flight(plan)

        step = begin_step(self.scheduler, self.executor, self.clock.now, edit)
        if step is None:
            return None, None
        end_step(self.scheduler, self.executor, self.clock.now, step, observe=self._observe)
        if self.scheduler.elastic_memory is not None:  # else nothing happens behind what was observed
            self.scheduler.check_integrity()
        self.steps += 1
        return step.plan, step.trees

    def _observe(self, result: StepResult) -> None:
        self.take(result.updates)
        self.scheduler.check_integrity()

    def serve(self, load: list[Sequence], before_step: Callable[[int], None] | None = None) -> None:
        """Run `load`, in order of arrival, to its end."""
        waiting = list(load)
        while waiting or self.scheduler.has_work:
            while waiting and waiting[0].arrival_s <= self.clock.now():
                self.add(waiting.pop(0))
            if before_step is not None:
                before_step(self.steps)
            plan, _ = self.step()
            if plan is None and waiting:
                self.clock.advance(max(waiting[0].arrival_s - self.clock.now(), 1e-3))
