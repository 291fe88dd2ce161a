"""How honest f is: expected calibration error of the draft's own probability, of the table that an engine starts with,
and of the table that it learns, side by side on the same verified nodes; greedy and sampled.

    python -m benchmarks.adaserve.calibration --out calibration.json

Texts go on from held-out code and from the packaged workload. The engine is started with the pair's table, with one
that says 0.9 everywhere, and with the wrong one again but told not to learn: what calibration is worth to acceptance.
Texts come in two halves; the second shows what was learned by then. The error is defined in docs/metrics.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.results.provenance import count_parameters, machine_name, source_commit
from adaserve_jax.scheduler.acceptance import PREDICTIONS, errors_by_mode
from adaserve_jax.tree.acceptance_table import MODES, ChanceTable, write_chances
from adaserve_jax.workloads.workload import load_workload

AIM = 0.03
WRONG = 0.9
PROMPT_CHARS = 400
AT_ONCE = 16


@dataclass
class Measured:
    """One temperature in one half of the texts. outcomes: nodes verified behind an accepted parent; honest: what
    chances without fault would show in the place of `online`; accepted_per_step: draft tokens accepted in a
    verification of a request."""

    start: str
    learns: bool
    temperature: float
    half: int
    outcomes: int
    raw: float
    loaded: float
    online: float
    honest: float
    accepted_per_step: float


def honest_error(sums: np.ndarray) -> np.ndarray:
    """Return f64[groups], the error that exact probabilities would show on average by chance; nan for an empty
    group.
    """
    count, stated, _ = sums
    spread = np.sqrt(2 / np.pi * stated * (1 - np.divide(stated, count, out=np.zeros_like(stated), where=count > 0)))
    number = count.sum(axis=-1)
    return np.divide(spread.sum(axis=-1), number, out=np.full(len(number), np.nan), where=number > 0)


def prompts(count: int, seed: int) -> list[str]:
    """The packaged workload's prompts, each once, among pieces of held-out code; where there is no code, the prompts
    again."""
    rng = random.Random(seed)
    workload = [item.prompt or item.messages[-1].content for item in load_workload(None).items]
    code = [text for text in held_out_code() if len(text) > 2 * PROMPT_CHARS]
    texts = workload[:count]
    while len(texts) < count:
        text = rng.choice(code or workload)
        start = rng.randrange(max(1, len(text) - PROMPT_CHARS))
        texts.append(text[start : start + PROMPT_CHARS])
    rng.shuffle(texts)
    return texts


def measure(
    engine: LocalEngine, start: str, texts: list[str], temperatures: list[float], tokens: int
) -> list[Measured]:
    """Both halves at every temperature; the engine learns all the while."""
    llm, calibrator, rows = LLM.over(engine), engine.assembly.calibrator, []
    assert calibrator is not None
    middle = len(texts) // 2
    for temperature, half in itertools.product(temperatures, (0, 1)):
        part = range(middle) if half == 0 else range(middle, len(texts))
        before = calibrator.sums.sums.copy()
        params = [SamplingParams(max_tokens=tokens, temperature=temperature, seed=i) for i in part]
        # a target that is hard to meet makes every request spend its budget on trees
        outputs = llm.generate([texts[i] for i in part], params, slo=SLO(relative=0.5), cache_salt=f"{temperature:g}")
        calibrator.take_in()
        sums = calibrator.sums.sums - before
        mode = MODES[int(temperature > 0)]
        steps = sum(output.metrics.verify_steps for output in outputs)
        accepted = sum(output.metrics.accepted_tokens for output in outputs)
        rows.append(
            Measured(
                start=start,
                learns=engine.config.calibrate,
                temperature=temperature,
                half=half + 1,
                outcomes=int(sums[0, MODES.index(mode)].sum()),
                accepted_per_step=accepted / steps,
                honest=float(honest_error(sums)[PREDICTIONS.index("online") * len(MODES) + MODES.index(mode)]),
                **errors_by_mode(sums)[mode],
            )
        )
    return rows


def wrong(table: ChanceTable) -> ChanceTable:
    """The same cells, WRONG everywhere."""
    return ChanceTable(np.full_like(table.chance, WRONG), table.edges)


def run(config: EngineConfig, texts: list[str], temperatures: list[float], tokens: int) -> list[Measured]:
    rows: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "wrong.json"
        for start, options in (
            ("pair", {}),
            ("wrong", {"calibration": str(file)}),
            ("wrong", {"calibration": str(file), "calibrate": False}),
        ):
            engine = LocalEngine(replace(config, **options))
            engine.start()
            try:
                rows += measure(engine, start, texts, temperatures, tokens)
                compiled = engine.stats().compiles_after_ready
                chances = engine.executor.chances
            finally:
                engine.close()
            if compiled:
                raise SystemExit(f"{compiled} programs were compiled after ready")
            assert chances is not None
            write_chances(file, wrong(chances))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--policy", default="adaserve")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    commit = source_commit()  # of the code that runs, whatever is committed meanwhile
    temperatures = [float(part) for part in options.temperatures.split(",")]
    config = EngineConfig(
        target=options.target, draft=options.draft, policy=options.policy, eq8_eq9=options.policy == "adaserve",
        max_requests=AT_ONCE, max_context=512, max_depth=4, token_edges=(16, 128), row_edges=(AT_ONCE,),
    )  # fmt: skip
    rows = run(config, prompts(options.prompts, options.seed), temperatures, options.tokens)

    table = Table(title=f"expected calibration error (aim: online at most {AIM:g} in the second half)")
    columns = [field.name for field in fields(Measured)]
    for column in columns:
        table.add_column(column.replace("_", " "))
    for row in rows:
        values = (getattr(row, column) for column in columns)
        table.add_row(*(f"{value:.3f}" if column > 4 else f"{value}" for column, value in enumerate(values)))
    Console(width=100).print(table)
    if options.out:
        report = {
            "commit": commit,
            "machine": machine_name(),
            "target": options.target,
            "draft": options.draft,
            "target_params": count_parameters(resolve_folder(options.target, "target")),
            "draft_params": count_parameters(resolve_folder(options.draft, "draft")),
            "policy": options.policy,
            "prompts": options.prompts,
            "tokens_each": options.tokens,
            "seed": options.seed,
            "aim": AIM,
            "results": [asdict(row) for row in rows],
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
