"""One engine that serves a stream of requests and learns from it, judged on the way."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax import LLM, EngineConfig, SamplingParams
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.export import export
from adaserve_jax.models.loading import load_params
from benchmarks.osd.judge import Judge

WAVE = 8
"""Requests that come together; the next ones come when nothing is left to be learned from them."""
MAX_TOKENS, TEMPERATURE = 64, 1.0
MAX_CONTEXT = 512
F32 = np.dtype(np.float32)
SERVED_WINDOW = 50


@dataclass(frozen=True)
class Asked:
    """One request of a stream. domain: where its prompt is from; tag: the draft that it asks for, or none."""

    domain: str
    prompt: str
    tag: str = ""


@dataclass
class Point:
    """After so many requests. acceptance: by domain, on its judged texts, of the draft that serves it. served: accepted
    drafted tokens per verification, of the latest SERVED_WINDOW requests, by domain."""

    requests: int
    acceptance: dict[str, float]
    served: dict[str, float] = field(default_factory=dict)
    version: dict[str, int] = field(default_factory=dict)


@dataclass
class Run:
    """Everything that is known of one. seconds: of serving and of training."""

    name: str
    learn: dict[str, Any] | None
    points: list[Point]
    learning: dict[str, Any]
    serve_s: float
    train_s: float
    compiles_after_ready: int


def sampling(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=index, ignore_eos=True)


def judge_of(target: str, draft: str, judged: dict[str, list[str]]) -> Judge:
    """Has the target, alone, write a text after each prompt."""
    with LLM(target, None, policy="ar", max_context=MAX_CONTEXT) as llm:
        texts = {
            name: [
                (np.array([*output.prompt_token_ids, *output.token_ids], np.int32), len(output.prompt_token_ids))
                for output in llm.generate(prompts, [sampling(1_000_000 + i) for i in range(len(prompts))])
            ]
            for name, prompts in judged.items()
        }
    folder = resolve_folder(target, "target")
    config = ModelConfig.from_folder(folder)
    head_or_draft = ModelConfig.from_folder(resolve_folder(draft, "draft"), may_be_head=True)
    return Judge(config, load_params(folder, config, F32), head_or_draft, texts, TEMPERATURE)


def acceptance_of(draft: str, judge: Judge, target: str = "demo") -> dict[str, float]:
    """Return the acceptance of a draft or a head as it lies in a folder."""
    folder = resolve_folder(draft, "draft")
    config = ModelConfig.from_folder(folder, may_be_head=True)
    return judge.acceptance(load_params(folder, config, F32, target=resolve_folder(target, "target")))


def run(
    name: str, config: EngineConfig, stream: Sequence[Asked], judge: Judge, *, every: int,
    note: Callable[[str], None], keep: Path | None = None,
) -> Run:  # fmt: skip
    """Serve the stream in waves, and judge after each `every` requests. keep: folder that the first draft is written
    to as it is in the end."""
    engine = LocalEngine(config)
    engine.start()
    with LLM.over(engine) as llm:
        watch = _Watch(engine, judge)
        points = [watch.point(0)]
        serve_s = wait_s = 0.0
        for first in range(0, len(stream), WAVE):
            wave = stream[first : first + WAVE]
            began = time.monotonic()
            outputs = llm.generate(
                [each.prompt for each in wave], [sampling(first + i) for i in range(len(wave))],
                draft_tag=[each.tag for each in wave],
            )  # fmt: skip
            done = time.monotonic()
            learner = engine.assembly.learner
            while learner is not None and not learner.is_idle:
                time.sleep(0.002)
            serve_s, wait_s = serve_s + done - began, wait_s + time.monotonic() - done
            for asked, output in zip(wave, outputs, strict=True):
                watch.served(asked.domain, output.metrics.accepted_tokens, output.metrics.verify_steps)
            served = first + len(wave)
            if served // every > first // every or served == len(stream):
                points.append(watch.point(served))
                note(f"{name}: {served} requests, {_shown(points[-1].acceptance)}, version {points[-1].version}")
        learning = engine.stats().learning
        compiles = engine.stats().compiles_after_ready
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
            export(engine.executor.draft_params(0), resolve_folder(str(config.draft), "draft"), keep, dtype="f32")
    learn = None if config.learning is None else asdict(config.learning)
    return Run(name, learn, points, asdict(learning), serve_s, learning.train_s, compiles)


class _Watch:
    """Judges the drafts of an engine. A domain is judged by the draft of its name, where there is one."""

    def __init__(self, engine: LocalEngine, judge: Judge):
        self._engine, self._judge = engine, judge
        self._latest: list[tuple[str, int, int]] = []

    def served(self, domain: str, accepted: int, steps: int) -> None:
        self._latest.append((domain, accepted, steps))

    def point(self, requests: int) -> Point:
        executor = self._engine.executor
        names = executor.draft_names
        by_draft = [self._judge.acceptance(executor.draft_params(index)) for index in range(len(names))]
        acceptance = {
            domain: by_draft[names.index(domain) if domain in names else 0][domain] for domain in by_draft[0]
        }  # fmt: skip
        sums: dict[str, np.ndarray] = {}
        for domain, accepted, steps in self._latest[-SERVED_WINDOW:]:
            sums[domain] = sums.get(domain, np.zeros(2)) + np.array([accepted, steps])
        served = {domain: float(accepted / steps) for domain, (accepted, steps) in sums.items() if steps}
        learning = self._engine.stats().learning
        return Point(requests, acceptance, served, dict(learning.version))


def learning_config(
    draft: str, learn: LearnConfig | None, drafts: dict[str, str], route: str, policy: str
) -> EngineConfig:
    named = tuple(f"{name}={folder}" for name, folder in drafts.items())
    return EngineConfig(
        draft=draft, drafts=named, route=route, policy=policy, learning=learn, max_context=MAX_CONTEXT,
        max_requests=4 * WAVE,
    )  # fmt: skip


def _shown(acceptance: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in acceptance.items())
