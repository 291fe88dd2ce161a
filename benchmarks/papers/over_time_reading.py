"""What Nightjar's figures 10 and 11 state, read from benchmarks/nightjar/over_time.py. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from benchmarks.nightjar.views import OURS, PLAIN
from benchmarks.papers.entry import Claim, Folders, Found
from benchmarks.papers.reading import figure, over, read_json, series

CHAIN = "spec:3"
RATE_CLAIMS = (
    Claim("requests of the busiest minute over those of the quietest", "swing", "at least", 2.0),
)  # fmt: skip
TIME_CLAIMS = (
    Claim("busiest third: tokens/s over plain decoding's", "busiest: times plain", "at least", 1.0),
    Claim(f"busiest third: tokens/s over `{CHAIN}`", "busiest: times chain", "at least", 1.0),
    Claim("quietest third: mean latency over plain decoding's", "quietest: latency times plain", "at most", 1.0),
    Claim("busiest third: mean latency over plain decoding's", "busiest: latency times plain", "at most", 1.0),
)


def rate_trace(step: str) -> Callable[[Folders], Found]:
    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "over-time.json")
        minutes = result["segment_minutes_rps"]
        curve = series({"Azure": {float(minute): rate for minute, rate in enumerate(minutes)}})
        shown = figure(
            "rate", "Request rate", result["workload"], "minute", [("rate", "requests/s", curve)], kind="step"
        )
        return Found({"swing": over(max(minutes), min(minutes))}, (shown,), _about(result))

    return read


def over_time(step: str) -> Callable[[Folders], Found]:
    """By thirds of the intervals, in order of the requests that arrive in them."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "over-time.json")
        order = sorted(range(len(result["arrivals_rps"])), key=lambda at: result["arrivals_rps"][at])
        third = max(len(order) // 3, 1)
        quiet, busy = order[:third], order[-third:]
        policies = result["policies"]

        def times(other: str, what: str, at: Sequence[int]) -> float | None:
            return (
                over(_mean(policies[OURS][what], at), _mean(policies[other][what], at)) if other in policies else None
            )

        values = {
            "busiest: times plain": times(PLAIN, "tokens_per_s", busy),
            "busiest: times chain": times(CHAIN, "tokens_per_s", busy),
            "quietest: latency times plain": times(PLAIN, "latency_s", quiet),
            "busiest: latency times plain": times(PLAIN, "latency_s", busy),
        }
        seconds = [result["interval_s"] * at for at in range(len(order))]
        panels = [
            (
                label,
                unit,
                series({name: dict(zip(seconds, each[what], strict=True)) for name, each in policies.items()}),
            )
            for what, label, unit in (("tokens_per_s", "throughput", "tokens/s"), ("latency_s", "latency", "s"))
        ]
        shown = figure("over-time", "Dynamic load", f"{result['setup']}, simulated.", "seconds", panels, kind="step")
        return Found(values, (shown,), _about(result))

    return read


def _mean(values: Sequence[float | None], at: Sequence[int]) -> float | None:
    known = [value for index in at if (value := values[index]) is not None]
    return fmean(known) if known else None


def _about(result: dict[str, Any]) -> dict[str, str]:
    return {
        "commit": result["commit"], "machine": result["machine"], "device": f"simulated: {result['setup']}",
        "workload": result["workload"],
    }  # fmt: skip
