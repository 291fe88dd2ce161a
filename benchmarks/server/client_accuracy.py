"""How well the bench's clients keep their schedule and the time, on servers that compute nothing.

    python -m benchmarks.server.client_accuracy --out client_accuracy.json [--rate 200] [--seconds 20] [--tokens 16]

Lateness: how much later than due requests were sent, with Poisson arrivals, to a server that answers at once and to
one that gives each stream a token every --pace-ms. Error: the time at which the client says that a token came, less the
time that the paced server wrote into it just before it went to the socket; the clock is the machine's, for both. The
client by URL is measured against null_server.py in a process of its own, the client in the engine's process against the
engine of paced_engine.py, which stamps likewise; there tokens come from another thread. Client and server share the
machine's cores, as they would on one; *others* is the share of the cores' time that other processes took.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax.bench.engine import Ask, BenchEngine, Due, LoopResult
from adaserve_jax.bench.http_load import UrlEngine
from adaserve_jax.bench.http_probe import UrlProbe
from adaserve_jax.bench.local_client import ClientEngine
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import GenerateRequest, OutputChunk, Sink
from adaserve_jax.http_client.settings import UrlSettings
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import WorkloadItem
from benchmarks.engine.cpu_time import CpuTimer
from benchmarks.server.http_load import HOST, command_line, quantile, served
from benchmarks.server.paced_engine import PacedEngine

SERVER = Path(__file__).resolve().parent / "null_server.py"
AIMS_MS = {"late_p50": 1.0, "error_p99": 5.0}
WARM_UP_S = 1.0
Errors = list[float]


class StampedEngine(PacedEngine):
    """Notes the stamp of each token, by request."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.stamps: dict[str, list[float]] = {}

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        stamps = self.stamps.setdefault(request.request_id, [])

        def noted(chunk: OutputChunk) -> None:
            sink(chunk)
            stamps.append(float(chunk.text))

        super().submit(request, noted)


def arrivals(rate: float, seconds: float) -> list[float]:
    """Times of a Poisson process, the same in every run."""
    gaps = np.random.default_rng(0).exponential(1 / rate, int(rate * seconds))
    return [float(at) for at in np.cumsum(gaps)]


def driven(engine: BenchEngine, times: Sequence[float], tokens: int, name: str) -> LoopResult:
    item = WorkloadItem("Say something.", (), tokens, "none", SLO(), 0.0, 0, None)
    asks = [Ask(f"{name}-{i}", item, 0, SLO(), "", tokens) for i in range(len(times))]
    due = [Due(at, engine.prepare(ask)) for at, ask in zip(times, asks, strict=True)]
    loop = engine.drive(due, drain_s=30.0)
    if len(loop.probes) != len(times) or any(len(probe.token_times_s) != tokens for probe in loop.probes):
        raise SystemExit(f"error: expected {len(times)} requests of {tokens} tokens each, and not all came")
    return loop


def url_errors(loop: LoopResult) -> Errors:
    """Seconds from each stamp to the client's time of it."""
    return [at - float(text) for probe in loop.probes if isinstance(probe, UrlProbe) for at, text in probe.texts]


def local_errors(loop: LoopResult, stamps: Sequence[Sequence[float]]) -> Errors:
    """stamps: by request, in the order of the probes."""
    pairs = zip(loop.probes, stamps, strict=True)
    return [at - stamp for probe, of in pairs for at, stamp in zip(probe.token_times_s, of, strict=True)]


def summary(client: str, server: str, loop: LoopResult, errors: Errors | None, others: float | None) -> dict[str, Any]:
    late = [probe.late_s for probe in loop.probes]
    found: dict[str, Any] = {"client": client, "server": server, "requests": len(late), "others_share": others}
    found["requests_per_s"] = len(late) / loop.wall_s
    for name, values in (("late", late), ("error", errors)):
        for label, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            found[f"{name}_{label}_ms"] = None if values is None else 1e3 * quantile(values, share)
    return found


@contextmanager
def url_engine(pace_ms: float) -> Iterator[tuple[UrlEngine, int]]:
    """The client of a server that was started for it, and the server's process."""
    with served([sys.executable, str(SERVER), "--pace-ms", str(pace_ms)]) as server:
        engine = UrlEngine(UrlSettings(f"http://{HOST}:{server.port}", baseline_s=1.0), keep_texts=True)
        try:
            yield engine, server.process.pid
        finally:
            engine.close()


def by_url(times: Sequence[float], tokens: int, pace_ms: float) -> dict[str, Any]:
    with url_engine(pace_ms) as (engine, server_pid):
        driven(engine, [at for at in times if at < WARM_UP_S], tokens, "warm-up")
        watch = CpuTimer(server_pid)
        loop = driven(engine, times, tokens, "timed")
        others = watch.read()[1]
    server = f"a token every {pace_ms:g} ms" if pace_ms else "at once"
    return summary("by URL", server, loop, url_errors(loop) if pace_ms else None, others)


def in_process(times: Sequence[float], tokens: int, pace_ms: float) -> dict[str, Any]:
    client = StampedEngine(EngineConfig(target="paced", seed=round(1e3 / pace_ms)))
    client.start()
    engine = ClientEngine(client, lambda item, _: [1], lambda _: None)
    try:
        driven(engine, [at for at in times if at < WARM_UP_S], tokens, "warm-up")
        client.stamps.clear()
        watch = CpuTimer()
        loop = driven(engine, times, tokens, "timed")
        others = watch.read()[1]
    finally:
        engine.close()
    return summary(
        "in process", f"a step every {pace_ms:g} ms", loop, local_errors(loop, list(client.stamps.values())), others
    )


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    rate: Annotated[float, typer.Option(help="requests per second")] = 200.0,
    seconds: Annotated[float, typer.Option(help="how long requests are sent")] = 20.0,
    tokens: Annotated[int, typer.Option(help="of each request")] = 16,
    pace_ms: Annotated[float, typer.Option(help="between two tokens of a stream")] = 20.0,
) -> None:
    """Measure both clients, and write and show what was found."""
    times = arrivals(rate, seconds)
    measured = [by_url(times, tokens, 0.0), by_url(times, tokens, pace_ms), in_process(times, tokens, pace_ms)]
    report = {
        "commit": source_commit(),
        "machine": machine_name(),
        "command": command_line(out),
        "python": sys.version.split()[0],
        "httptools": version("httptools"),
        "rate_rps": rate,
        "seconds": seconds,
        "tokens": tokens,
        "pace_ms": pace_ms,
        "aims_ms": AIMS_MS,
        "measured": measured,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    names = [f"{kind}_{label}_ms" for kind in ("late", "error") for label in ("p50", "p99", "max")]
    labels = [name.removesuffix("_ms").replace("_", " ") for name in names]
    table = Table("client", "server", *labels, "others", title="milliseconds")
    for each in measured:
        cells = ["-" if each[name] is None else f"{each[name]:.3f}" for name in names]
        others = "-" if each["others_share"] is None else f"{each['others_share']:.0%}"
        table.add_row(each["client"], each["server"], *cells, others)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
