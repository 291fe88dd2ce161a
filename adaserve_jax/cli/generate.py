"""`adaserve generate`: streams the continuation of one prompt to the terminal, then its cost."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from adaserve_jax.cli.options import read_text, takes
from adaserve_jax.cli.terminal import open_llm, say, with_options
from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import DrafterOptions
from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.learn_config import LearnOptions
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.types import SLO, SamplingParams


@takes("config", EngineConfig, without=("seed",))
@takes("drafter_options", DrafterOptions)
def generate(
    config: EngineConfig,
    drafter_options: DrafterOptions,
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 1.0,
    top_p: Annotated[float, typer.Option(help="keep the likeliest tokens of this total probability; 1: all")] = 1.0,
    top_k: Annotated[int, typer.Option(help="keep this many likeliest tokens; 0: all")] = 0,
    seed: Annotated[int | None, typer.Option(help="same seed, same text; without one it is drawn and shown")] = None,
    regex: Annotated[str | None, typer.Option(help="the whole text matches this regular expression")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="the text is this, or another --choice")] = None,
    grammar: Annotated[Path | None, typer.Option(help="file of a Lark or EBNF grammar that the text fits")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="file of a JSON Schema; the text is JSON that fits")] = None,
    adapter: Annotated[
        str | None, typer.Option(help="name of the --lora to use, or '' for the model alone; without: the first")
    ] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="target: milliseconds per token after the first")] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="target: milliseconds to the first token")] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="target: milliseconds to the last token")] = None,
) -> None:
    """Continue a prompt; say tokens per second, accepted tokens per step, and whether the target was met."""
    chosen_seed = secrets.randbits(32) if seed is None else seed
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=chosen_seed,
        regex=regex, choice=tuple(choice or ()),
        grammar=None if grammar is None else read_text(grammar, "grammar"),
        json_schema=None if json_schema is None else read_text(json_schema, "JSON schema"),
    )  # fmt: skip
    slo = SLO(tpot_ms=slo_tpot_ms, ttft_ms=slo_ttft_ms, e2e_ms=slo_e2e_ms)
    used = next(iter(config.lora_folders), "") if adapter is None else adapter
    with open_llm(with_options(config, LearnOptions(), drafter_options)) as llm:
        metrics = show(llm.stream(prompt, sampling, slo=slo, adapter=used))
    if metrics is not None:
        say(f"{summary(metrics)}, seed {chosen_seed}", style="dim")


def show(chunks: Iterable[OutputChunk]) -> RequestMetrics | None:
    """Print text as it comes; return the metrics of the last chunk."""
    metrics = None
    for chunk in chunks:
        print(chunk.text, end="", flush=True)
        metrics = chunk.metrics or metrics
    print(flush=True)
    return metrics


def summary(metrics: RequestMetrics) -> str:
    """Return one line: tokens, speed, acceptance, and whether the target was met."""
    parts = [f"{metrics.output_tokens} tokens"]
    if metrics.last_token_s is not None and metrics.last_token_s > metrics.arrival_s:
        parts.append(f"{metrics.output_tokens / (metrics.last_token_s - metrics.arrival_s):.1f} tokens/s")
    if metrics.ttft_s is not None:
        parts.append(f"first token after {metrics.ttft_s * 1e3:.0f} ms")
    if metrics.tpot_s is not None:
        parts.append(f"{metrics.tpot_s * 1e3:.1f} ms per token")
    parts.append(f"{metrics.mean_accepted:.2f} accepted per step")
    if metrics.slo_met is not None:
        out_of_reach = ": below what this machine gives one request alone" if metrics.slo_feasible is False else ""
        parts.append(f"SLO {'met' if metrics.slo_met else 'missed'} ({_targets(metrics)}{out_of_reach})")
    return ", ".join(parts)


def _targets(metrics: RequestMetrics) -> str:
    targets = (("TPOT", metrics.tpot_slo_s), ("TTFT", metrics.ttft_slo_s), ("deadline", metrics.e2e_slo_s))
    return ", ".join(f"{name} {target_s * 1e3:g} ms" for name, target_s in targets if target_s is not None)
