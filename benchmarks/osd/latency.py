"""What acceptance that was learned brings in time per token, on a target of the cost of 110M parameters.

    python -m benchmarks.osd.latency --drafts start=FOLDER,online=FOLDER --out FILE [--domain code]

Drafts are models, or heads of the demo's target, which grow with it. One engine holds all drafts; each prompt is
continued by every policy with every draft in turn, one request at a time, so that whatever else runs on the machine
meets all alike. Beside what was measured stands the closed form (1 - a^(k+1)) / ((1 - a)(k c + 1)): a, the chance that
a drafted token is kept, is that with which a chain of k keeps as many as were kept; c, seconds of one draft step over
those of a target step, is measured in the same runs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from adaserve_jax import LLM, EngineConfig
from adaserve_jax.bench.profile import chance_of_chains
from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import notes, progress_bar
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks import program
from benchmarks.engine.throughput_rows import paired_ratio
from benchmarks.grown import grown_head, grown_target
from benchmarks.osd.prompts import domains
from benchmarks.osd.runs import sampling

PLAIN, SIZE = "ar", "110M"


@dataclass(frozen=True)
class Row:
    """One draft under one chain. kept: accepted tokens per verification; tpot_ms: median over prompts; times: plain
    decoding's over it, the median of the prompts' ratios, with its interval; formula_times: the closed form."""

    draft: str
    policy: str
    kept: float
    acceptance: float
    draft_share: float
    tpot_ms: float
    times: float
    times_low: float
    times_high: float
    formula_times: float


def closed_form(acceptance: float, chain: int, draft_share: float) -> float:
    """Return the speedup that online speculative decoding predicts (eq. 1)."""
    return sum(acceptance**depth for depth in range(chain + 1)) / (chain * draft_share + 1)


app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.command()
def main(
    drafts: Annotated[str, typer.Option(help="NAME=FOLDER, comma-separated; the first is the engine's own")],
    out: Annotated[Path, typer.Option(help="file of results")],
    domain: str = "code",
    gsm8k: Annotated[Path | None, typer.Option(help="GSM8K's train.jsonl.gz, for maths prompts")] = None,
    prompts: Annotated[int, typer.Option(help="prompts, none of which was served while learning")] = 16,
    chains: Annotated[str, typer.Option(help="lengths of chains")] = "2,4",
) -> None:
    """Measure and write."""
    named = dict(each.split("=", 1) for each in drafts.split(","))
    with tempfile.TemporaryDirectory(prefix="grown-heads-") as grown:
        measured = {name: of_grown(draft, Path(grown) / name) for name, draft in named.items()}
        result = measure(measured, domain, gsm8k, prompts, comma_list("chains", chains, int))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def of_grown(draft: str, folder: Path) -> str:
    """Return the folder of the draft for the grown target: a head grows with it, into `folder`."""
    head = resolve_folder(draft, "draft")
    is_head = ModelConfig.from_folder(head, may_be_head=True).is_head
    return str(grown_head(head, SIZE, folder)) if is_head else draft


def measure(
    named: dict[str, str], domain: str, gsm8k: Path | None, prompts: int, lengths: tuple[int, ...]
) -> dict[str, Any]:
    """Continue the prompts in all ways. named: folders of drafts by name; lengths: of chains."""
    first, *others = named
    config = EngineConfig(
        target=str(grown_target(SIZE)), draft=named[first], policy=PLAIN, max_context=512, max_requests=1,
        drafts=tuple(f"{name}={named[name]}" for name in others), prefix_cache=False,
    )  # fmt: skip
    texts = domains((domain,), gsm8k, 1, prompts)[0].judged
    with progress_bar() as progress:
        engine = LocalEngine(config, progress)
        engine.start()
    plain: list[float] = []
    found: dict[tuple[str, int], list[tuple[float, int, int]]] = {(n, k): [] for n in named for k in lengths}
    shares: dict[int, list[float]] = {k: [] for k in lengths}
    with LLM.over(engine) as llm:
        for index, text in enumerate(["warm up", *texts]):
            llm.set_policy(PLAIN)
            before = engine.stats().scheduler
            tpot = llm.generate(text, sampling(index))[0].metrics.tpot_s
            after = engine.stats().scheduler
            target_s = (after.verify_s - before.verify_s) / max(after.steps - before.steps, 1)
            if index:
                plain.append(tpot or 0.0)
            for chain in lengths:
                llm.set_policy(f"spec:{chain}")
                for name in named:
                    before = engine.stats().scheduler
                    tag = "" if name == first else name
                    metrics = llm.generate(text, sampling(index), draft_tag=tag)[0].metrics
                    after = engine.stats().scheduler
                    if index:
                        found[name, chain].append(
                            (metrics.tpot_s or 0.0, metrics.accepted_tokens, metrics.verify_steps)
                        )
                        steps = max(after.spec_steps - before.spec_steps, 1)
                        shares[chain].append((after.draft_s - before.draft_s) / steps / chain / target_s)
        compiles = engine.stats().compiles_after_ready
    rows = [row_of(name, chain, each, plain, statistics.median(shares[chain])) for (name, chain), each in found.items()]
    for row in rows:
        notes().print(f"{row}", highlight=False, markup=False)
    return {
        "commit": source_commit(), "machine": machine_name(), "target": SIZE, "domain": domain, "prompts": prompts,
        "plain_tpot_ms": 1e3 * statistics.median(plain), "compiles_after_ready": compiles,
        "rows": [asdict(row) for row in rows],
    }  # fmt: skip


def row_of(name: str, chain: int, each: list[tuple[float, int, int]], plain: list[float], share: float) -> Row:
    tpots = [tpot for tpot, _, _ in each]
    kept = sum(accepted for _, accepted, _ in each) / sum(steps for _, _, steps in each)
    ratio = paired_ratio(plain, tpots)
    a = chance_of_chains(kept, chain)
    return Row(
        name, f"spec:{chain}", kept, a, share, 1e3 * float(np.median(tpots)), ratio.median, ratio.low, ratio.high,
        closed_form(a, chain, share),
    )  # fmt: skip


if __name__ == "__main__":
    program.run(app)
