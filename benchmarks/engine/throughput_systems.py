"""The systems that benchmarks/engine/throughput.py compares: this engine by policy, and transformers on torch.

Each takes the same batch of token ids and gives back token ids, times and counts. Knows no rounds, rows or tables.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.llm import GenerateOutput
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.stats import StepStats
from adaserve_jax.types import DraftTrees, LogitEdits, Progress, StepOutcome, StepPlan
from benchmarks.engine.cpu_time import Watch
from benchmarks.engine.throughput_rows import ASSISTED

PLAIN = "transformers"
ASSISTANTS: dict[str, dict[str, Any]] = {
    ASSISTED: {},
    f"{ASSISTED}:4": {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"},
    f"{ASSISTED}:4, no threshold": {
        "num_assistant_tokens": 4,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    },
}
"""Assisted generation by transformers' own defaults and by other settings; the best of them is what counts."""
TOTALS = ("steps", "plan_s", "draft_s", "select_s", "verify_s", "commit_s", "wait_s")


@dataclass(frozen=True)
class Batch:
    """What every system completes. prompts: token ids. seeds: one per prompt."""

    prompts: list[list[int]]
    seeds: list[int]
    new_tokens: int
    temperature: float

    def shortened(self, new_tokens: int) -> Batch:
        return replace(self, new_tokens=min(new_tokens, self.new_tokens))


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
    """One timed call. wall_s: all of it. forwards: of the target, counted once for each request in them, prefill left
    out. drafted, accepted: nodes. steps: all, in order; none of transformers. totals: what the scheduler counted
    meanwhile; None: not the engine. others_share: of the cores' time, that other processes took; None: unknown."""

    token_ids: list[list[int]]
    wall_s: float
    forwards: int
    drafted: int = 0
    accepted: int = 0
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
    def decoded_tokens(self) -> int:
        """Tokens but each request's first one, which comes of its prefill."""
        return self.new_tokens - len(self.token_ids)

    @property
    def decode_tps(self) -> float | None:
        """Tokens emitted after the last step that prefilled, over the time since; None: unknown."""
        if not self.steps:
            return None
        last_prefill = max(index for index, step in enumerate(self.steps) if step.prefill_tokens)
        decoding = self.steps[last_prefill + 1 :]
        return sum(step.emitted for step in decoding) / (decoding[-1].ended_s - self.steps[last_prefill].ended_s)


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

        def noted(plan: StepPlan, trees: DraftTrees, edits: LogitEdits | None = None) -> StepOutcome:
            outcome = verify(plan, trees, edits)
            depth, width = (plan.draft.depth, plan.draft.width) if plan.draft else (0, 0)
            emitted = int(outcome.counts[: plan.num_decode].sum())
            now = time.perf_counter()
            self.noted_steps.append(
                Step(plan.num_decode, plan.num_prefill_tokens, depth, width, trees.num_nodes, emitted, now)
            )
            return outcome

        self.local.executor.verify = noted

    def run(self, policy: str, batch: Batch, settle_tokens: int) -> Measured:
        """Complete a batch by `policy`, which starts anew and first learns from `settle_tokens` tokens per request."""
        self.llm.set_policy(policy)
        if settle_tokens:
            self._generate(batch.shortened(settle_tokens), cache_salt="settling")
        self.noted_steps.clear()
        before = self.llm.stats().scheduler
        watch = Watch()
        outputs = self._generate(batch)
        wall_s, others_share = watch.read()
        after = self.llm.stats().scheduler
        metrics = [output.metrics for output in outputs]
        return Measured(
            token_ids=[output.token_ids for output in outputs],
            wall_s=wall_s,
            forwards=sum(m.verify_steps for m in metrics),
            drafted=sum(m.drafted_tokens for m in metrics),
            accepted=sum(m.accepted_tokens for m in metrics),
            steps=tuple(self.noted_steps),
            totals=StepStats(**{name: getattr(after, name) - getattr(before, name) for name in TOTALS}),
            others_share=others_share,
        )

    def _generate(self, batch: Batch, cache_salt: str = "") -> list[GenerateOutput]:
        params = [
            SamplingParams(max_tokens=batch.new_tokens, temperature=batch.temperature, seed=seed, ignore_eos=True)
            for seed in batch.seeds
        ]
        return self.llm.generate(batch.prompts, params, slo=self._slo, cache_salt=cache_salt)

    def close(self) -> None:
        self.llm.close()


class Transformers:
    """transformers' `generate` on torch, f32, over the same two folders, with as many threads as there are cores."""

    def __init__(self, target: Path, draft: Path):
        import torch
        import transformers

        self._torch = torch
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(os.cpu_count() or 1)
        self._target, self._draft = (
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
            for folder in (target, draft)
        )
        for model in (self._target, self._draft):
            model.generation_config.eos_token_id = None  # a text ends by its length alone, as with ignore_eos
        self._draft_settings = self._draft.generation_config.to_dict()
        self._forwards = 0
        self._target.register_forward_hook(self._count)

    @property
    def systems(self) -> tuple[str, ...]:
        return PLAIN, *ASSISTANTS

    def run(self, system: str, batch: Batch, settle_tokens: int) -> Measured:
        """Complete a batch of one request. Assisted generation prefills in its first verification, plain generation
        emits its first token by it; either way the first forward of the target is left out of the count."""
        (prompt,), (seed,) = batch.prompts, batch.seeds
        if settle_tokens:
            self._generate(system, prompt, seed, batch.shortened(settle_tokens))
        self._forwards = 0
        watch = Watch()
        token_ids = self._generate(system, prompt, seed, batch)
        wall_s, others_share = watch.read()
        return Measured([token_ids], wall_s, self._forwards - 1, others_share=others_share)

    def _generate(self, system: str, prompt: list[int], seed: int, batch: Batch) -> list[int]:
        torch = self._torch
        options: dict[str, Any] = {"max_new_tokens": batch.new_tokens, "do_sample": batch.temperature > 0}
        if batch.temperature > 0:
            options |= {"temperature": batch.temperature, "top_k": 0, "top_p": 1.0}
        if system != PLAIN:
            settings = self._draft_settings | ASSISTANTS[system]
            self._draft.generation_config = type(self._draft.generation_config).from_dict(settings)
            options["assistant_model"] = self._draft
        torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self._target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, len(prompt) :].tolist()

    def _count(self, *_: object) -> None:
        self._forwards += 1
