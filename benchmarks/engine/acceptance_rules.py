"""Acceptance of one level of drafts by three lossless rules, on the distributions of a real pair of models.

    python -m benchmarks.engine.acceptance_rules --out rules.json

With K children of one node, how likely is it that the target's token is among them?

* `coupled`: this engine's rule. Target and draft draw by one Gumbel noise; the children are the best K of
  log q + g (docs/architecture/tree.md).
* `gls`: Gumbel-max list sampling (arXiv 2506.05632). Each of K drafts draws by a noise of its own, and the target by
  the best of the K noises at each id. So its text depends on K.
* `rejection`: K independent draws from q, tried one after another, each refusal replacing p by what is left of it
  (SpecInfer's multi-step speculative sampling). Its chance is computed, not drawn.

Texts are held-out files of the standard library, which the embedded pair was not trained on; the context of every
position is the file's own text. The intervals are bootstrapped over files.
Axes: N positions, B draws of noise, K children, V vocabulary.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer

from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import progress_bar
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.decoder import Params, attend_dense, decode, logits
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks import program

RULES = ("coupled", "gls", "rejection")
RESAMPLES = 2000
"""Bootstrap samples of an interval."""


@dataclass(frozen=True)
class Point:
    """Mean acceptance of a rule. low, high: 95 % interval over texts."""

    rule: str
    temperature: float
    children: int
    acceptance: float
    low: float
    high: float


@partial(jax.jit, static_argnames="children")
def drawn_acceptance(p: jax.Array, q: jax.Array, noise: jax.Array, children: int) -> jax.Array:
    """Return f32[2, N], the share of draws in which the target's token is among the children: coupled, gls.

    p, q: f32[N, V], log probabilities of target and draft. noise: f32[B, K, V], standard Gumbel, K at least `children`.
    """

    def one(noise: jax.Array) -> jax.Array:
        target = (p + noise[0]).argmax(-1)
        proposed = jax.lax.top_k(q + noise[0], children)[1]
        coupled = (proposed == target[:, None]).any(-1)
        each = noise[:children]
        listed = (p + each.max(0)).argmax(-1)
        drafts = (q + each[:, None]).argmax(-1)  # [K, N]
        return jnp.stack([coupled, (drafts == listed).any(0)]).astype(jnp.float32)

    return jax.lax.map(one, noise).mean(0)


def rejection_acceptance(p: np.ndarray, q: np.ndarray, children: int) -> np.ndarray:
    """Return f64[N], the chance that one of `children` independent draws from q is accepted. p, q: [N, V], log."""
    left, draft = np.exp(p, dtype=np.float64), np.exp(q, dtype=np.float64)
    draft /= draft.sum(-1, keepdims=True)
    left /= left.sum(-1, keepdims=True)
    refused = np.ones(len(left))
    for _ in range(children):
        refused *= 1 - np.minimum(left, draft).sum(-1)
        left = np.maximum(left - draft, 0)
        mass = left.sum(-1, keepdims=True)
        left = np.divide(left, mass, out=draft.copy(), where=mass > 0)
    return 1 - refused


def _logs(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Return f32[N, V], the logits after each token of a text."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    return logits(params, config, decode(params, config, tokens, positions, attend_dense(config)))


def measure(
    texts: int, tokens: int, temperatures: list[float], children: list[int], draws: int, seed: int
) -> list[Point]:
    """Measure every rule on the embedded pair. texts: files. tokens: positions of each. draws: B.

    Raises ConfigError: there are fewer held-out files of that length.
    """
    folders = [resolve_folder("demo", role) for role in ("target", "draft")]
    tokenizer = Tokenizer.from_folder(folders[0])
    ids = [found for text in held_out_code() if len(found := tokenizer.encode(text[: 8 * tokens])) >= tokens]
    if len(ids) < texts:
        raise ConfigError(f"--texts must be at most {len(ids)}, the held-out files of {tokens} tokens, got {texts}")
    configs = [ModelConfig.from_folder(folder) for folder in folders]
    models = [load_params(folder, config, jnp.float32) for folder, config in zip(folders, configs, strict=True)]
    run = [jax.jit(partial(_logs, config)) for config in configs]
    found: dict[tuple[str, float, int], list[float]] = {}
    key = jax.random.key(seed)
    with progress_bar() as progress:
        for done, text in enumerate(ids[:texts]):
            progress("measuring", done, texts)
            window = jnp.array(text[:tokens], jnp.int32)
            raw = [each(params, window) for each, params in zip(run, models, strict=True)]
            for temperature in temperatures:
                p, q = (jax.nn.log_softmax(each / temperature) for each in raw)
                key, fresh = jax.random.split(key)
                noise = jax.random.gumbel(fresh, (draws, max(children), p.shape[1]))
                for count in children:
                    drawn = np.asarray(drawn_acceptance(p, q, noise, count)).mean(1)
                    computed = rejection_acceptance(np.asarray(p), np.asarray(q), count).mean()
                    for rule, value in zip(RULES, (*drawn.tolist(), float(computed)), strict=True):
                        found.setdefault((rule, temperature, count), []).append(value)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, texts, (RESAMPLES, texts))
    return [
        Point(*which, float(np.mean(values)), *np.quantile(np.array(values)[picks].mean(1), [0.025, 0.975]).tolist())
        for which, values in found.items()
    ]


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    texts: Annotated[int, typer.Option(help="held-out files")] = 16,
    tokens: Annotated[int, typer.Option(help="positions of each")] = 128,
    temperatures: Annotated[str, typer.Option(help="temperatures above 0, separated by commas")] = "0.6,1.0",
    children: Annotated[str, typer.Option(help="children of a node, separated by commas")] = "1,2,4,8",
    draws: Annotated[int, typer.Option(help="draws of noise for each position")] = 32,
    seed: Annotated[int, typer.Option(help="seeds the noise and the bootstrap")] = 0,
) -> None:
    """Measure how often a node's children hold the target's token, by rule, temperature and number of children."""
    warm = comma_list("temperatures", temperatures, float)
    counts = comma_list("children", children, int)
    if min(warm, default=0.0) <= 0 or min(counts, default=0) < 1 or min(texts, tokens, draws) < 1:
        raise ConfigError("--temperatures must be above 0; --children, --texts, --tokens and --draws at least 1")
    points = measure(texts, tokens, warm, counts, draws, seed)
    result = {
        "commit": source_commit(), "machine": machine_name(),
        "command": shlex.join(["python", "-m", "benchmarks.engine.acceptance_rules", *sys.argv[1:]]),
        "texts": texts, "tokens": tokens, "draws": draws, "points": [asdict(point) for point in points],
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    program.run(main)
