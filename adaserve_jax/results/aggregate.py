"""Turns request records into the summary of one class or of all. Definitions: docs/metrics.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from adaserve_jax.results.causes import violation_cause
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.schema import ALL_CLASSES, Summary


def summarize(records: Sequence[RequestRecord], *, wall_s: float) -> list[Summary]:
    """One summary over all records, then one per SLO class in name order. wall_s: wall time of the whole run."""
    run_acceptance = _ratio(sum(r.accepted_tokens for r in records), sum(r.drafted_tokens for r in records)) or 0.0
    groups = {ALL_CLASSES: list(records)}
    for name in sorted({r.slo_class for r in records}):
        groups[name] = [r for r in records if r.slo_class == name]
    return [_summary(name, group, wall_s, run_acceptance) for name, group in groups.items()]


def _summary(name: str, records: list[RequestRecord], wall_s: float, run_acceptance: float) -> Summary:
    causes = Counter(violation_cause(r, acceptance_rate=run_acceptance) for r in records)
    status = Counter(r.status for r in records)
    attainment = _share(r.slo_met for r in records)
    ttft = percentiles([r.ttft_s for r in records if r.ttft_s is not None])
    tpots = [r.tpot_s for r in records if r.tpot_s is not None]
    tpot = percentiles(tpots)
    papers = [r.tpot_paper_s for r in records if r.tpot_paper_s is not None]
    itl = percentiles(_gaps(records))
    queue = percentiles([r.queue_s for r in records if r.queue_s is not None])
    verify_steps = sum(r.verify_steps for r in records)
    e2es = [r.e2e_s for r in records if r.status == "finished" and r.e2e_s is not None]
    drafted, accepted = sum(r.drafted_tokens for r in records), sum(r.accepted_tokens for r in records)
    return Summary(
        slo_class=name,
        requests=len(records),
        requests_with_slo=sum(r.slo_met is not None for r in records),
        finished=status["finished"],
        rejected=status["rejected"],
        failed=status["failed"],
        unfinished=status["unfinished"],
        prompt_tokens=sum(r.prompt_tokens for r in records),
        output_tokens=sum(r.output_tokens for r in records),
        attainment=attainment,
        attainment_tpot=_share(r.tpot_met for r in records),
        attainment_ttft=_share(r.ttft_met for r in records),
        attainment_tpot_paper=_share(r.tpot_paper_met for r in records),
        violations=None if attainment is None else 1 - attainment,
        goodput_tps=_rate((r.output_tokens for r in records if r.slo_met), wall_s),
        goodput_tpot_tps=_rate((r.output_tokens for r in records if r.tpot_met), wall_s),
        throughput_tps=_rate((r.output_tokens for r in records), wall_s),
        ttft_p50_s=ttft[0],
        ttft_p90_s=ttft[1],
        ttft_p99_s=ttft[2],
        tpot_mean_s=_ratio(sum(tpots), len(tpots)),
        tpot_p50_s=tpot[0],
        tpot_p90_s=tpot[1],
        tpot_p99_s=tpot[2],
        tpot_paper_mean_s=_ratio(sum(papers), len(papers)),
        itl_p50_s=itl[0],
        itl_p90_s=itl[1],
        itl_p99_s=itl[2],
        queue_p50_s=queue[0],
        queue_p99_s=queue[2],
        verify_steps=verify_steps,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        mean_accepted=_ratio(accepted, verify_steps),
        acceptance_rate=_ratio(accepted, drafted),
        preemptions=sum(r.preemptions for r in records),
        fluidity=_fluidity(records),
        cause_rejected=causes["rejected"],
        cause_failed=causes["failed"],
        cause_unfinished=causes["unfinished"],
        cause_queueing=causes["queueing"],
        cause_prefill=causes["prefill"],
        cause_infeasible=causes["infeasible"],
        cause_preemption=causes["preemption"],
        cause_low_acceptance=causes["low_acceptance"],
        cause_budget=causes["budget"],
        e2e_mean_s=_ratio(sum(e2es), len(e2es)),
        running_mean=_ratio(sum(r.e2e_s - (r.queue_s or 0.0) for r in records if r.e2e_s is not None), wall_s),
        busy_throughput_tps=_ratio(sum(r.output_tokens for r in records), _busy_s(records)),
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _rate(tokens: Iterable[int], wall_s: float) -> float:
    return sum(tokens) / wall_s if wall_s > 0 else 0.0


def _busy_s(records: Iterable[RequestRecord]) -> float:
    """Time with at least one request between its arrival and its last token."""
    busy_s, until_s = 0.0, -math.inf
    spans = sorted((r.due_s + r.late_s, r.due_s + r.late_s + r.e2e_s) for r in records if r.e2e_s is not None)
    for start_s, end_s in spans:
        busy_s += max(end_s - max(start_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return busy_s


def _share(outcomes: Iterable[bool | None]) -> float | None:
    """Share of True among the outcomes that are not None."""
    known = [outcome for outcome in outcomes if outcome is not None]
    return _ratio(sum(known), len(known))


def percentiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """50th, 90th and 99th percentile, linearly interpolated."""
    if not len(values):
        return None, None, None
    p50, p90, p99 = (float(p) for p in np.percentile(np.asarray(values, np.float64), (50, 90, 99)))
    return p50, p90, p99


def _gaps(records: Iterable[RequestRecord]) -> list[float]:
    """Times between successive tokens of each request; 0 between tokens of one step."""
    timed = (r.token_offsets_s for r in records if len(r.token_offsets_s) > 1)
    return [gap for offsets in timed for gap in np.diff(np.asarray(offsets, np.float64)).tolist()]


def _fluidity(records: Iterable[RequestRecord]) -> float | None:
    """Share of the tokens after each first one that came by first token + i * target."""
    paced = [r for r in records if r.tpot_slo_s is not None]
    total = sum(max(0, len(r.token_offsets_s) - 1) for r in paced)
    return _ratio(total - sum(r.late_tokens for r in paced), total)
