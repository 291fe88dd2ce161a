"""Tokens per second of one request by what drafts: nothing, text already seen, the draft model, or both.

    python -m benchmarks.engine.draft_sources --out draft-sources.json [--data FOLDER]

Every task is completed request by request under each policy, in rotation; the target is the demo's, grown to 110M
parameters. Tasks with a reference are replayed (`replay.py`): the target writes the reference. "Open text" is what the
target itself writes, at temperatures 0 and 0.8. Speed is that of decoding: tokens after the first over the time since.
--data names a folder with Spec-Bench, HumanEval and GSM8K; without it, the tasks that need none are measured.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.cli.options import comma_list, takes
from adaserve_jax.cli.terminal import progress_bar
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import AdaServeError
from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks.engine.replay import Reference, Replay
from benchmarks.engine.source_tasks import Item, encoded, tasks
from benchmarks.engine.throughput import grown_target

POLICIES = "ar,adaserve@none,adaserve@suffix,adaserve@model,adaserve@suffix+model,spec:4@suffix,spec:4@model"
MOST_PROMPT, MOST_NEW, OPEN_NEW = 900, 320, 192


@dataclass
class SourceRow:
    """Decoding of one task under one policy.

    seconds: of each round. tokens: of one round. texts_differ: texts that are not those of the first policy.
    """

    task: str
    policy: str
    replayed: bool
    temperature: float
    tokens: int
    seconds: list[float]
    steps: int
    drafted: int
    accepted: int
    suffix_drafted: int
    suffix_accepted: int
    texts_differ: int

    @property
    def rate(self) -> float:
        """Tokens per second of the median round."""
        return self.tokens / float(np.median(self.seconds))


def measure(
    engine: LocalEngine, replay: Replay, name: str, items: list[Item], policies: tuple[str, ...], repeats: int,
    temperature: float,
) -> list[SourceRow]:  # fmt: skip
    """Complete the items of a task one by one, under each policy in rotation."""
    llm = LLM.over(engine)
    encode = llm.tokenizer.encode
    prompts = [encoded(item, encode, MOST_PROMPT, MOST_NEW) for item in items]
    prompts = [each for each, item in zip(prompts, items, strict=True) if len(each[1]) > 1 or not item.reference]
    replayed = bool(prompts[0][1])
    replay.references = {
        index: Reference(len(ids), np.array(text, np.int32)) for index, (ids, text) in enumerate(prompts) if text
    }
    rows: dict[str, SourceRow] = {}
    texts: dict[str, list[list[int]]] = {}
    for number in range(repeats):
        first = number % len(policies)
        for policy in policies[first:] + policies[:first]:
            llm.set_policy(policy)  # a new scheduler, which knows no texts
            seconds, outputs = 0.0, []
            for index, (ids, text) in enumerate(prompts):
                params = SamplingParams(
                    max_tokens=len(text) or OPEN_NEW, temperature=temperature, seed=index, ignore_eos=True
                )
                (output,) = llm.generate([ids], params)
                outputs.append(output)
                assert output.metrics.tpot_s is not None
                seconds += output.metrics.tpot_s * (len(output.token_ids) - 1)
            stats, found = llm.stats().scheduler, [output.metrics for output in outputs]
            texts.setdefault(policy, [output.token_ids for output in outputs])
            if policy in rows:
                rows[policy].seconds.append(seconds)
                continue
            rows[policy] = SourceRow(
                name, policy, replayed, temperature, sum(len(output.token_ids) - 1 for output in outputs), [seconds],
                sum(m.verify_steps for m in found), sum(m.drafted_tokens for m in found),
                sum(m.accepted_tokens for m in found), stats.suffix_tokens, stats.suffix_accepted_tokens, 0,
            )  # fmt: skip
    for policy, row in rows.items():
        row.texts_differ = sum(a != b for a, b in zip(texts[policy], texts[policies[0]], strict=True))
    return [rows[policy] for policy in policies]


def show(rows: list[SourceRow], console: Console) -> None:
    """Print every task's speed over that of the first policy."""
    names = list(dict.fromkeys(row.policy for row in rows))
    table = Table("task", "T", f"{names[0]}, tokens/s", *names[1:], title="times the tokens/s of the first policy")
    for task, temperature in dict.fromkeys((row.task, row.temperature) for row in rows):
        here = {row.policy: row for row in rows if (row.task, row.temperature) == (task, temperature)}
        first = here[names[0]].rate
        cells = [f"{here[name].rate / first:.2f}" for name in names[1:]]
        table.add_row(task, f"{temperature:g}", f"{first:.1f}", *cells)
    console.print(table)


@takes("config", EngineConfig, without=("policy", "target"))
def draft_sources(
    config: EngineConfig,
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    data: Annotated[Path | None, typer.Option(help="folder with spec-bench/, human-eval/ and gsm8k/")] = None,
    policies: Annotated[str, typer.Option(help="policies, separated by commas; the first is the reference")] = POLICIES,
    params: Annotated[str, typer.Option(help="size to grow the demo target to; none: the demo target itself")] = "110M",
    count: Annotated[int, typer.Option(help="requests of each task")] = 6,
    repeats: Annotated[int, typer.Option(help="rounds")] = 3,
    only: Annotated[str, typer.Option(help="tasks, separated by commas; none: all")] = "",
) -> None:
    """Measure what each draft source is worth, task by task."""
    names, console, replay = comma_list("policies", policies, str), Console(width=160), Replay()
    if params != "none":
        config = replace(config, target=str(grown_target(params)))
    with progress_bar() as progress:
        engine = LocalEngine(config, progress, replay.observe)
        engine.start()
    wanted = comma_list("only", only, str) if only else ()
    started, rows = time.perf_counter(), []
    try:
        for name, items in tasks(data, count, config.seed).items():
            if wanted and name not in wanted:
                continue
            for temperature in (0.0,) if items[0].reference else (0.0, 0.8):
                rows += measure(engine, replay, name, items, names, repeats, temperature)
                console.print(f"{name}: {time.perf_counter() - started:.0f} s so far", highlight=False)
        compiles = engine.executor.compiles_after_ready
    finally:
        engine.close()
    show(rows, console)
    result = {
        "command": f"python -m benchmarks.engine.draft_sources --out {out.name} --data FOLDER "
        f"--policies {policies} --params {params} --count {count} --repeats {repeats}",
        "commit": source_commit(), "machine": machine_name(), "target": f"demo grown to {params}",
        "draft": config.draft, "compiles_after_ready": compiles, "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    try:
        typer.run(draft_sources)
    except AdaServeError as error:
        sys.exit(f"error: {error}")
