"""One engine that serves a stream of requests and learns from it, judged on the way."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax import LLM, EngineConfig, SamplingParams
from adaserve_jax.distill.heads import HeadTarget
from adaserve_jax.distill.offline import Scorer
from adaserve_jax.distill.programs import batch_sums, head_sums
from adaserve_jax.distill.records import PackedBatch, pack
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.decoder import Params
from adaserve_jax.models.export import export
from adaserve_jax.models.loading import load_params

WAVE = 8
"""Requests that come together; the next ones come when nothing is left to be learned from them."""
MAX_TOKENS, TEMPERATURE = 64, 1.0
MAX_CONTEXT = 512
F32 = np.dtype(np.float32)
JUDGED_TOKENS = 512
"""Tokens of a packed batch that is judged."""


@dataclass(frozen=True)
class Asked:
    """One request of a stream. domain: where its prompt is from; tag: the draft that it asks for, or none."""

    domain: str
    prompt: str
    tag: str = ""


@dataclass
class Point:
    """Acceptance after so many requests: by domain, on its judged texts, by the draft of its name, else the first one.
    version: of each draft."""

    requests: int
    acceptance: dict[str, float]
    version: dict[str, int]


@dataclass
class Run:
    """Result of one run."""

    name: str
    learn: dict[str, Any]
    points: list[Point]
    learning: dict[str, Any]
    serve_s: float
    train_s: float
    compiles_after_ready: int


def sampling(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=index, ignore_eos=True)


class Judge:
    """Measures the acceptance of drafts on texts of the target that nobody was served.

    It is exact over the whole vocabulary: the mean over positions of sum min(p, q), and for a head also over the
    levels that it is trained for. texts: (tokens i32[n], tokens of the prompt) by domain.
    """

    def __init__(
        self, target: ModelConfig, target_params: Params, draft: ModelConfig,
        texts: Mapping[str, Sequence[tuple[np.ndarray, int]]], temperature: float,
    ) -> None:  # fmt: skip
        top_k = draft.vocab_size
        scorer = Scorer(target, top_k=top_k, vocab_size=top_k, temperature=temperature)
        self._batches: dict[str, list[PackedBatch]] = {}
        for name, each in texts.items():
            records = scorer.records(target_params, [text for text, _ in each], [prompt - 1 for _, prompt in each])
            packed = pack(records, JUDGED_TOKENS, np.random.default_rng(0))
            self._batches[name] = [PackedBatch(*map(jnp.asarray, batch)) for batch in packed]
        learn = LearnConfig(learn_top_k=top_k, learn_temperature=temperature)
        self._target_params = target_params
        self._sums: Any = jax.jit(partial(_sums, draft, target, learn))

    def acceptance(self, params: Params) -> dict[str, float]:
        """Return the acceptance by domain."""
        found = {}
        for name, batches in self._batches.items():
            sums = [np.asarray(self._sums(params, self._target_params, batch)) for batch in batches]
            overlap, rows = np.sum(sums, axis=0)
            found[name] = float(overlap / rows)
        return found


def _sums(
    draft: ModelConfig, target: ModelConfig, learn: LearnConfig, params: Params, target_params: Params,
    batch: PackedBatch,
) -> jax.Array:  # fmt: skip
    """Return the sums of overlaps and of weights, f32[2]."""
    if not draft.is_head:
        overlap, weight = batch_sums(params, draft, learn, batch)[1], batch.weight.sum()
    else:
        features = HeadTarget(target, target_params).features(target_params, draft, batch)
        _, overlap, weight = head_sums(params, draft, learn, batch, features, 1.0)
    return jnp.stack([overlap, weight])


def judge_of(target: str, draft: str, judged: dict[str, list[str]]) -> Judge:
    """Let the target, alone, write a text after each prompt; return a Judge of these texts."""
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


def acceptance_of(draft: str, judge: Judge) -> dict[str, float]:
    """Return the acceptance of a draft or a head as it lies in a folder."""
    folder = resolve_folder(draft, "draft")
    config = ModelConfig.from_folder(folder, may_be_head=True)
    return judge.acceptance(load_params(folder, config, F32, target=resolve_folder("demo", "target")))


def run(
    name: str, config: EngineConfig, stream: Sequence[Asked], judge: Judge, *, every: int,
    note: Callable[[str], None], keep: Path | None = None,
) -> Run:  # fmt: skip
    """Serve the stream in waves, and judge after each `every` requests. keep: folder that the first draft is written
    to as it is in the end."""
    engine = LocalEngine(config)
    engine.start()
    with LLM.over(engine) as llm:
        points = [_point(engine, judge, 0)]
        serve_s = 0.0
        for first in range(0, len(stream), WAVE):
            wave = stream[first : first + WAVE]
            began = time.monotonic()
            llm.generate(
                [each.prompt for each in wave], [sampling(first + i) for i in range(len(wave))],
                draft_tag=[each.tag for each in wave],
            )  # fmt: skip
            serve_s += time.monotonic() - began
            wait_until_learned(engine)
            served = first + len(wave)
            if served // every > first // every or served == len(stream):
                points.append(_point(engine, judge, served))
                note(f"{name}: {served} requests, {_shown(points[-1].acceptance)}, version {points[-1].version}")
        learning = engine.stats().learning
        compiles = engine.stats().compiles_after_ready
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
            export(engine.executor.draft_params(0), resolve_folder(str(config.draft), "draft"), keep, dtype="f32")
    assert config.learning is not None
    return Run(name, asdict(config.learning), points, asdict(learning), serve_s, learning.train_s, compiles)


def wait_until_learned(engine: LocalEngine) -> None:
    """Wait until nothing is left to be learned."""
    learner = engine.assembly.learner
    while learner is not None and not learner.is_idle:
        time.sleep(0.002)


def _point(engine: LocalEngine, judge: Judge, requests: int) -> Point:
    """Judge the drafts of an engine, which has served so many requests."""
    executor = engine.executor
    names = executor.draft_names
    by_draft = [judge.acceptance(executor.draft_params(index)) for index in range(len(names))]
    acceptance = {domain: by_draft[names.index(domain) if domain in names else 0][domain] for domain in by_draft[0]}
    return Point(requests, acceptance, dict(engine.stats().learning.version))


def learning_config(draft: str, learn: LearnConfig, drafts: dict[str, str], route: str, policy: str) -> EngineConfig:
    named = tuple(f"{name}={folder}" for name, folder in drafts.items())
    return EngineConfig(
        draft=draft, drafts=named, route=route, policy=policy, learning=learn, max_context=MAX_CONTEXT,
        max_requests=4 * WAVE,
    )  # fmt: skip


def _shown(acceptance: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in acceptance.items())
