"""Same seed, same text: every policy, one at a time and 16 at once, at several temperatures, on the embedded pair.

Deterministic mode must not differ at all. The default mode may part at near-ties: sequences that do are counted, with
the smallest margin between the two best perturbed scores at the token where they part.

    python -m benchmarks.engine.exactness --out exactness.json
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.decoder import decode, logits
from adaserve_jax.models.loading import load_params
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.runtime.loading import device_name
from adaserve_jax.tree.sampling import gumbel_noise
from adaserve_jax.workloads.workload import load_workload

POLICIES = ("ar", "spec:4", "adaserve@suffix", "adaserve@model", "adaserve")
TEMPERATURES = (0.0, 0.8, 1.2)


@dataclass
class Comparison:
    """One mode. margins: score gaps at the first differing token of each sequence that parts from the reference."""

    mode: str
    sequences: int = 0
    tokens: int = 0
    differing: int = 0
    smallest_margins: list[float] = field(default_factory=list)


def prompts(count: int) -> list[str]:
    """The packaged workload's prompts, again with other seeds when there are fewer than `count`."""
    texts = [item.prompt or item.messages[-1].content for item in load_workload(None).items]
    return [text[-600:] for text in itertools.islice(itertools.cycle(texts), count)]


def run(llm: LLM, texts: list[str], temperature: float, tokens: int, at_once: int) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, output ids) of every prompt; the seed is its index."""
    results = []
    for start in range(0, len(texts), at_once):
        batch = range(start, min(start + at_once, len(texts)))
        params = [SamplingParams(max_tokens=tokens, temperature=temperature, seed=i, ignore_eos=True) for i in batch]
        outputs = llm.generate([texts[i] for i in batch], params, slo=SLO(relative=0.5))
        results += [(output.prompt_token_ids, output.token_ids) for output in outputs]
    return results


class Margins:
    """Gap between the two best perturbed scores, by one plain forward of the target."""

    def __init__(self) -> None:
        folder = resolve_folder("demo", "target")
        self.config = ModelConfig.from_folder(folder)
        self.params = load_params(folder, self.config, jnp.float32)

    def at(self, sequence: list[int], temperature: float, seed: int) -> float:
        tokens = jnp.asarray(sequence)
        visible = jnp.tril(jnp.ones((len(sequence), len(sequence)), bool))

        def attend(
            layer: int, q: jnp.ndarray, k: jnp.ndarray, v: jnp.ndarray, sinks: jnp.ndarray | None
        ) -> jnp.ndarray:
            group = q.shape[0] // k.shape[0]
            k, v = jnp.repeat(k, group, axis=0), jnp.repeat(v, group, axis=0)
            scores = jnp.einsum("hdt,hds->hts", q, k) * q.shape[1] ** -0.5
            weights = jnp.exp(scores - scores.max(-1, keepdims=True)) * visible
            return jnp.einsum("hts,hds->hdt", weights / weights.sum(-1, keepdims=True), v)

        hidden = decode(self.params, self.config, tokens, jnp.arange(len(sequence)), attend)
        scores = logits(self.params, self.config, hidden[:, -1:])[0]
        if temperature > 0:
            words = jnp.asarray([[seed & 0xFFFFFFFF, seed >> 32]], jnp.uint32)
            noise = gumbel_noise(words, jnp.zeros(1, jnp.int32), jnp.asarray([len(sequence)]), scores.shape[0])
            scores = scores / temperature + noise[0]
        best = np.sort(np.asarray(scores))
        return float(best[-1] - best[-2])


def compare(llm: LLM, mode: str, texts: list[str], tokens: int, margins: Margins) -> Comparison:
    """Every policy and load against `ar` one at a time."""
    result = Comparison(mode)
    for temperature in TEMPERATURES:
        llm.set_policy("ar")
        reference = run(llm, texts, temperature, tokens, 1)
        for policy, at_once in itertools.product(POLICIES, (1, 16)):
            if (policy, at_once) == ("ar", 1):
                continue
            llm.set_policy(policy)
            for seed, ((prompt, expected), (_, found)) in enumerate(
                zip(reference, run(llm, texts, temperature, tokens, at_once), strict=True)
            ):
                result.sequences += 1
                result.tokens += len(found)
                if found != expected:
                    part = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
                    result.differing += 1
                    result.smallest_margins.append(margins.at([*prompt, *expected[:part]], temperature, seed))
            print(f"{mode}: T={temperature} {policy} {at_once} at once: {result.differing} differ so far", flush=True)
    result.smallest_margins.sort()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--modes", default="deterministic,default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    commit = source_commit()  # of the code that runs, whatever is committed meanwhile
    texts, margins = prompts(options.prompts), Margins()
    results = []
    for mode in options.modes.split(","):
        small = {"max_requests": 16, "max_context": 512, "max_depth": 4, "max_batch_tokens": 64}
        with LLM(deterministic=mode == "deterministic", eq8_eq9=True, **small) as llm:
            results.append(compare(llm, mode, texts, options.tokens, margins))
            if llm.stats().compiles_after_ready:
                raise SystemExit(f"{llm.stats().compiles_after_ready} programs were compiled after ready")
    report = {
        "commit": commit,
        "machine": machine_name(),
        "device": device_name(1),
        "prompts": options.prompts,
        "tokens_each": options.tokens,
        "results": [asdict(result) for result in results],
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
