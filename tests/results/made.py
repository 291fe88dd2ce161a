"""A made file of records whose report can be worked out by hand; shared by the tests of the store and the report."""

from __future__ import annotations

from pathlib import Path

from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.record_store import RecordStore
from adaserve_jax.results.records import ServedRecord, ServerRun, served_record, unstarted_metrics

RUN = ServerRun("r1", 1000.0, "0.1.0", "0.10.2", "cpu", "adaserve", "served", "folder/target", "folder/draft", 0.05)
OTHER_RUN = ServerRun("r2", 1004.5, "0.1.0", "0.10.2", "cpu", "ar", "served", "folder/target", None, 0.06)


def begun(
    name: str,
    arrival: float,
    *,
    ended: float,
    ttft: float,
    last: float,
    tokens: int,
    queue: float = 0.0,
    ending: str = "stop",
    slo_class: str = "chat",
    tpot_slo: float | None = 0.125,
    ttft_slo: float | None = None,
    spec: tuple[int, int, int] = (0, 0, 0),
    cached: int = 0,
    key: str = "",
    run: ServerRun = RUN,
    texts: tuple[str | None, str | None] = (None, None),
) -> ServedRecord:
    """A choice that the engine began. ttft, last, queue: since its arrival. spec: verifications, drafted, accepted."""
    steps, drafted, accepted = spec
    metrics = RequestMetrics(
        arrival_s=7.0, first_scheduled_s=7.0 + queue, first_token_s=7.0 + ttft, last_token_s=7.0 + last,
        prompt_tokens=10, output_tokens=tokens, verify_steps=steps, drafted_tokens=drafted, accepted_tokens=accepted,
        cached_tokens=cached, tpot_slo_s=tpot_slo, ttft_slo_s=ttft_slo, slo_class=slo_class,
        slo_feasible=None if tpot_slo is None else True,
    )  # fmt: skip
    return served_record(
        metrics, run=run, request_id=name, choice=0, key=key, ending=ending, error_code=None, arrival_unix_s=arrival,
        ended_unix_s=ended, acceptance_rate=0.5, prompt=texts[0], output=texts[1],
    )  # fmt: skip


def refused(name: str, at: float, code: str, run: ServerRun = RUN) -> ServedRecord:
    """A choice of class chat that the engine never began."""
    return served_record(
        unstarted_metrics(0.125, None, "chat", code), run=run, request_id=name, choice=0, key="", ending="rejected",
        error_code=code, arrival_unix_s=at, ended_unix_s=at, acceptance_rate=0.5,
    )  # fmt: skip


def made() -> list[ServedRecord]:
    """Six choices between 1000 and 1008; times are halves and eighths, so that sums are exact."""
    return [
        begun("a", 1000.0, ended=1001.0, queue=0.25, ttft=0.5, last=1.0, tokens=5, spec=(2, 8, 3)),
        begun("b", 1001.0, ended=1003.0, queue=0.75, ttft=1.0, last=2.0, tokens=3, spec=(2, 4, 0)),
        refused("c", 1004.0, "queue_full"),
        begun(
            "d", 1005.0, ended=1006.25, ttft=0.25, last=1.25, tokens=9, slo_class="batch", tpot_slo=None, cached=3,
            ending="length", spec=(4, 8, 5), key="team", run=OTHER_RUN,
        ),
        begun("e", 1006.0, ended=1007.0, ttft=0.5, last=0.75, tokens=2, ttft_slo=0.25, ending="abort", run=OTHER_RUN),
        refused("f", 1008.0, "slo_infeasible", OTHER_RUN),
    ]  # fmt: skip


def records_file(folder: Path) -> Path:
    """A file with those of `made`."""
    path = folder / "records.sqlite"
    store = RecordStore.open(path)
    store.add(made())
    store.close()
    return path
