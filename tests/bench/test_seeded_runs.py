"""A seeded bench run repeated gives the same tokens, request by request, though times differ: with the embedded pair,
in deterministic mode, where outputs do not depend on what else is in a step."""

from dataclasses import replace
from pathlib import Path

import pytest

from adaserve_jax.bench.plan import BenchPlan
from adaserve_jax.bench.runner import run_bench
from adaserve_jax.config import EngineConfig
from adaserve_jax.results.run_folder import RunResults
from adaserve_jax.results.schema import ALL_CLASSES
from adaserve_jax.workloads.workload import load_workload


@pytest.mark.slow
def test_a_seeded_run_repeated_has_identical_token_counts(tmp_path: Path) -> None:
    from adaserve_jax.bench.local_client import LocalBenchEngine

    config = EngineConfig(
        policy="adaserve", deterministic=True, max_requests=8, max_context=512, page_size=16, num_pages=128,
        max_depth=3, max_width=2, max_batch_tokens=64,
    )  # fmt: skip
    items = load_workload().items
    # some have no seed of their own, so that the run's counts; at these temperatures texts end where they want to
    workload = replace(
        load_workload(), items=tuple(replace(item, seed=None, temperature=1.2, max_tokens=240) for item in items)
    )
    plan = BenchPlan(
        ("ar", "adaserve"), (20.0,), duration_s=0.5, seed=5, drain_s=120.0, max_late_s=60.0, warmup_requests=1,
        repeats=2,
    )  # fmt: skip
    engine = LocalBenchEngine(config)
    try:
        for name in ("one", "other"):
            run_bench(plan, workload, lambda: engine, tmp_path / name, use="new")
    finally:
        engine.close()
    one, other = (RunResults.load(tmp_path / name) for name in ("one", "other"))
    counts = [
        {
            (point, r.request_id): (r.status, r.prompt_tokens, r.output_tokens)
            for (_, point), of in folder.records.items()
            for r in of
        }
        for folder in (one, other)
    ]
    assert counts[0] == counts[1] and len(counts[0]) > 12
    assert len({tokens for _, _, tokens in counts[0].values()}) > 3, "lengths differ, so that counts say something"
    by_repeat = {row.point: row.output_tokens for row in one.rows if row.slo_class == ALL_CLASSES}
    assert by_repeat["ar@20/s #0"] == by_repeat["adaserve@20/s #0"] != by_repeat["ar@20/s #1"]
    assert {row.plan_hash for row in one.rows} == {row.plan_hash for row in other.rows}
    samples = one.samples[one.rows[0].run_id, "adaserve@20/s #0"]
    assert samples[-1].generation_tokens == by_repeat["adaserve@20/s #0"] and samples[-1].running == 0
    assert all(row.valid and row.compiles_after_ready == 0 for row in one.rows)
