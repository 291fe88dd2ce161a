"""How much of a real engine's wall time is not spent waiting for the device, by phase, on the embedded pair or with
another target.

    python -m benchmarks.engine.host_share --requests 16 --policies ar,adaserve --out host_share.json

Waiting is the time blocked on a result that was dispatched already; on a CPU the "device" computes on the same cores.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.stats import StepStats

PHASES = ("plan_s", "draft_s", "select_s", "verify_s", "commit_s", "wait_s")
PROMPT = "def add(a, b):\n"


def measure(llm: LLM, policy: str, requests: int, tokens: int) -> dict[str, float | str]:
    """Milliseconds per step by phase, and shares of the wall time."""
    llm.set_policy(policy)
    params = [SamplingParams(max_tokens=tokens, temperature=0.8, seed=i, ignore_eos=True) for i in range(requests)]
    started = time.perf_counter()
    llm.generate([PROMPT] * requests, params, slo=SLO(tpot_ms=50))
    wall_s = time.perf_counter() - started
    stats: StepStats = llm.stats().scheduler
    per_step = {name[:-2] + "_ms": 1e3 * getattr(stats, name) / stats.steps for name in PHASES}
    deciding_s = stats.plan_s + stats.select_s + stats.commit_s
    return {
        "policy": policy,
        "steps": stats.steps,
        "wall_ms": 1e3 * wall_s / stats.steps,
        **per_step,
        "plan_and_select_share": (stats.plan_s + stats.select_s) / wall_s,
        "deciding_share": deciding_s / wall_s,
        "not_waiting_share": 1 - stats.wait_s / wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--policies", default="ar,spec:4,adaserve")
    parser.add_argument("--target", default="demo", help="checkpoint folder, for example a grown one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with LLM(target=options.target, max_requests=options.requests, max_context=1024) as llm:
        rows = [measure(llm, policy, options.requests, options.tokens) for policy in options.policies.split(",")]
    table = Table("per step", *(name for name in rows[0] if name != "policy"))
    for row in rows:
        values = [f"{v:.3f}" if isinstance(v, float) else str(v) for k, v in row.items() if k != "policy"]
        table.add_row(str(row["policy"]), *values)
    Console(width=200).print(table)
    if options.out:
        report = {"commit": source_commit(), "machine": machine_name(), "requests": options.requests, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
