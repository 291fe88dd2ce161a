"""Made run folders whose reports can be worked out by hand; rows are summaries of the made requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from adaserve_jax.report.points import measured
from adaserve_jax.report.view import View
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.records import RequestRecord, Status
from adaserve_jax.results.run_folder import RunResults, key_of
from adaserve_jax.results.samples import Sample
from adaserve_jax.results.schema import Conditions, Provenance, ResultRow
from tests.results.points import sample

PROVENANCE = Provenance(
    run_id="r1", started_at="2026-11-01T10:00:00+00:00", commit="0123456789abcdef", package_version="0.1.0",
    machine="a machine, 2 cores", device="cpu x1", jax_version="0.10.2", target="demo/target", draft="demo/draft",
    target_params=110_200_000, draft_params=12_600_000, deterministic=False, max_requests=8, max_context=512,
    baseline_s=0.05, workload="mixed", workload_hash="ab" * 32, seed=0,
)  # fmt: skip


def request(
    number: int = 0,
    *,
    slo_class: str = "chat",
    status: Status = "finished",
    due: float | None = None,
    queue: float = 0.125,
    ttft: float = 0.5,
    tpot: float = 0.125,
    tokens: int = 5,
    tpot_slo: float | None = 0.25,
    ttft_slo: float | None = None,
    spec: tuple[int, int, int] = (0, 0, 0),
    policy: str = "ar",
) -> RequestRecord:
    """A request that came `number` seconds after the start. spec: verifications, drafted, accepted."""
    began = status == "finished" or tokens > 0
    metrics = RequestMetrics(
        arrival_s=0.0, first_scheduled_s=queue if began else None, first_token_s=ttft if tokens else None,
        last_token_s=ttft + tpot * (tokens - 1) if tokens else None, prompt_tokens=10, output_tokens=tokens,
        verify_steps=spec[0], drafted_tokens=spec[1], accepted_tokens=spec[2], tpot_slo_s=tpot_slo,
        ttft_slo_s=ttft_slo, slo_class=slo_class, slo_feasible=None if tpot_slo is None else True,
    )  # fmt: skip
    return RequestRecord.of(
        metrics, run_id="r1", policy=policy, rate_rps=1.0, request_id=f"{policy}-{number}", status=status,
        due_s=float(number) if due is None else due, token_offsets_s=tuple(tpot * i for i in range(tokens)),
    )  # fmt: skip


def random_requests(count: int, seed: int, policy: str = "ar", tpot: float = 0.25) -> list[RequestRecord]:
    """Of three classes, one of them without a target; some end early."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        slo_class = ("chat", "code", "batch")[number % 3]
        status: Status = str(rng.choice(["finished"] * 8 + ["rejected", "unfinished"]))
        steps = int(rng.integers(1, 9))
        made.append(request(
            number, slo_class=slo_class, status=status, tokens=0 if status == "rejected" else int(rng.integers(1, 20)),
            ttft=float(rng.uniform(0.2, 1.0)), tpot=float(tpot * rng.uniform(0.5, 1.5)), policy=policy,
            tpot_slo={"chat": 0.25, "code": 0.2, "batch": None}[slo_class],
            ttft_slo=0.75 if slo_class == "chat" else None, spec=(steps, 4 * steps, int(rng.integers(0, 4 * steps))),
        ))  # fmt: skip
    return made


def rows_of(
    records: Sequence[RequestRecord], wall_s: float, provenance: Provenance = PROVENANCE, **changes: object
) -> list[ResultRow]:  # fmt: skip
    """The rows of one point, over all classes and by class. changes: of its conditions."""
    plain = Conditions(
        policy="ar", arrival_process="poisson", rate_rps=1.0, duration_s=10.0, wall_s=wall_s, client_late_max_s=0.001,
        client_late_p99_s=0.001, valid=True,
    )  # fmt: skip
    conditions = replace(plain, **changes)
    return [ResultRow.join(provenance, conditions, each) for each in summarize(records, wall_s=wall_s)]


def point(
    records: Sequence[RequestRecord], *, policy: str = "ar", rate: float = 1.0, repeat: int = 0, wall: float = 10.0,
    samples: Sequence[Sample] = (), provenance: Provenance = PROVENANCE, **changes: object,
) -> tuple[list[ResultRow], list[RequestRecord], list[Sample]]:  # fmt: skip
    """Rows, requests and samples of one point, tied by its name."""
    varied = "".join(f" {name}={changes[name]:g}" for name in ("urgent_share", "slo_scale") if name in changes)
    name = f"{policy}@{rate:g}/s{varied}" + (f" #{repeat}" if repeat else "")
    tied = {"run_id": provenance.run_id, "point": name}
    own = [replace(record, policy=policy, rate_rps=rate, **tied) for record in records]
    rows = rows_of(own, wall, provenance, policy=policy, rate_rps=rate, repeat=repeat, point=name, **changes)
    return rows, own, [replace(each, **tied) for each in samples]


def folder(
    *points: tuple[list[ResultRow], list[RequestRecord], list[Sample]], path: str = "run", notes: tuple[str, ...] = ()
) -> RunResults:  # fmt: skip
    return RunResults(
        path=Path(path),
        rows=tuple(row for rows, _, _ in points for row in rows),
        records={key_of(rows[0]): tuple(records) for rows, records, _ in points if records},
        samples={key_of(rows[0]): tuple(samples) for rows, _, samples in points if samples},
        notes=notes,
    )


def samples_over(seconds: int, **changes: object) -> list[Sample]:
    """One sample per second, 10 steps and 40 tokens in each; each phase takes a multiple of a millisecond per step."""
    made = []
    for second in range(1, seconds + 1):
        steps = 10 * second
        made.append(sample(
            t_s=float(second), steps=steps, spec_steps=steps // 2, generation_tokens=40 * second, preemptions=1,
            swaps=2, plan_s=0.001 * steps, draft_s=0.002 * steps, select_s=0.003 * steps, verify_s=0.004 * steps,
            commit_s=0.005 * steps, wait_s=0.003 * steps, depth=second, width=2, budget=8,
            draft_resident=second % 2 == 0, running=3, waiting=second,
            pages_used=5, pages_total=9, extension_used=0, extension_total=0, **changes,
        ))  # fmt: skip
    return made


def view_of(*points, rate: float | None = None) -> View:
    return View.of(measured([folder(*points)]), rate)
