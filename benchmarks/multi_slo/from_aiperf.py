"""Make a submission to the multi-SLO benchmark from runs of aiperf, which judges one target per run.

    python -m benchmarks.multi_slo.from_aiperf --definition suite/definition.json --system vLLM --policy draft:4 \\
        --target Qwen3-8B --machine "H100" --out multi-slo.json \\
        2:code=code-2/profile_export.jsonl 2:chat=chat-2/profile_export.jsonl 4:code=...

Each argument is RATE:CLASS=FILE: the requests of one class, by the record of aiperf run at that class's share of RATE,
at the same time as the runs of the other classes. The definition is that of the run to compare with, written by
`adaserve bench --suite multi-slo`. Format of the records: "Working with Profile Export Files" of ai-dynamo/aiperf.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from adaserve_jax.errors import ConfigError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.submission import (
    ClassTarget,
    Definition,
    Submission,
    SuitePoint,
    System,
    count_classes,
    judge,
    write_submission,
)
from benchmarks import program

NOTE = "converted from aiperf: steady loads alone, without overload and burst"
PROFILING = "profiling"
"""Phase of the records that count."""
MS_PER = {"ms": 1.0, "sec": 1e3, "s": 1e3, "us": 1e-3, "ns": 1e-6}


def read_export(path: Path, target: ClassTarget) -> list[RequestRecord]:
    """Read the records of one class, without those of the warm-up, and judge each by the class's targets.

    Raises ConfigError naming the line.
    """
    records = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a profile_export.jsonl") from error
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if values["metadata"].get("benchmark_phase", PROFILING) == PROFILING:
                records.append(_record(values, target, f"{target.name}-{number}"))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: not a record of aiperf: {error!r}") from error
    if not records:
        raise ConfigError(f"{path} holds no records; give the profile_export.jsonl of a run that sent requests")
    return records


def _record(values: dict[str, Any], target: ClassTarget, name: str) -> RequestRecord:
    metadata, metrics = values["metadata"], values.get("metrics") or {}
    start_s = metadata["request_start_ns"] / 1e9
    finished = values.get("error") is None and not metadata.get("was_cancelled")
    first_s = last_s = None
    tokens = 0
    if finished:
        first_s = start_s + _ms(metrics["time_to_first_token"]) / 1e3
        last_s = start_s + _ms(metrics["request_latency"]) / 1e3
        tokens = int(metrics["output_sequence_length"]["value"])
    observed = RequestMetrics(
        arrival_s=start_s, first_token_s=first_s, last_token_s=last_s, output_tokens=tokens, slo_class=target.name,
        tpot_slo_s=_seconds(target.tpot_ms), ttft_slo_s=_seconds(target.ttft_ms), e2e_slo_s=_seconds(target.e2e_ms),
    )  # fmt: skip
    return RequestRecord.of(
        observed, run_id="aiperf", policy="", rate_rps=0.0, request_id=name, due_s=start_s,
        status="finished" if finished else "failed",
    )  # fmt: skip


def _ms(metric: dict[str, Any]) -> float:
    return float(metric["value"]) * MS_PER[metric["unit"]]


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def points_of(runs: Sequence[str], classes: Sequence[ClassTarget]) -> list[SuitePoint]:
    """Return a point per rate. Raises ConfigError: a run is not RATE:CLASS=FILE or is given twice, or a rate lacks a
    class."""
    targets = {each.name: each for each in classes}
    by_rate: dict[float, dict[str, list[RequestRecord]]] = defaultdict(dict)
    for text in runs:
        load, equals, file = text.partition("=")
        rate, _, name = load.partition(":")
        try:
            at = float(rate)
        except ValueError:
            at = 0.0
        if not (equals and at > 0 and name in targets):
            raise ConfigError(f"expected RATE:CLASS=FILE with a class of {', '.join(targets)}, got {text!r}")
        if name in by_rate[at]:
            raise ConfigError(f"a run of {rate}:{name} is given twice, the second as {file}; give each once")
        by_rate[at][name] = read_export(Path(file), targets[name])
    found = []
    for at, of_class in sorted(by_rate.items()):
        missing = targets.keys() - of_class.keys()
        if missing:
            raise ConfigError(f"rate {at:g} lacks a run of class {min(missing)!r}")
        first_s = {name: min(record.due_s for record in each) for name, each in of_class.items()}
        last_s = {name: max(record.due_s for record in each) for name, each in of_class.items()}
        begun, ended = max(first_s, key=first_s.__getitem__), min(last_s, key=last_s.__getitem__)
        if first_s[begun] > last_s[ended]:
            raise ConfigError(
                f"at rate {at:g} class {begun!r} starts after the last request of class {ended!r}; run the classes of "
                "a rate at the same time"
            )
        records = [record for each in of_class.values() for record in each]
        ends = [record.due_s + (record.e2e_s or 0.0) for record in records]
        wall_s = max(ends) - min(record.due_s for record in records)
        counts = count_classes(records, targets, wall_s=wall_s)
        found.append(SuitePoint(stage="rate", rate_rps=at, duration_s=wall_s, classes=counts))
    return found


def main(
    runs: Annotated[list[str], typer.Argument(help="RATE:CLASS=FILE for each class at each rate")],
    definition: Annotated[Path, typer.Option(help="definition.json of the suite to compare with")],
    system: Annotated[str, typer.Option(help="name of the server")],
    target: Annotated[str, typer.Option(help="its target model")],
    machine: Annotated[str, typer.Option(help="what it ran on")],
    out: Annotated[Path, typer.Option(help="file to write")],
    policy: Annotated[str, typer.Option(help="how the server decodes")] = "plain",
    draft: Annotated[str | None, typer.Option(help="its draft model")] = None,
    device: Annotated[str, typer.Option(help="its accelerator")] = "cpu",
) -> None:
    """Convert runs of aiperf to a submission."""
    try:
        asked = TypeAdapter(Definition).validate_json(definition.read_bytes(), strict=True, extra="forbid")
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{definition} is not the definition of a suite: {error}") from error
    points = points_of(runs, asked.classes)
    measured = System(
        name=system, policy=policy, target=target, draft=draft, device=device, machine=machine, client="aiperf",
        commit="unknown", measured_at=datetime.now(UTC).isoformat(timespec="seconds"), notes=(NOTE,),
    )  # fmt: skip
    found = Submission(definition=asked, system=measured, points=tuple(points), verdict=judge(points))
    write_submission(out, found)


if __name__ == "__main__":
    program.run(main)
