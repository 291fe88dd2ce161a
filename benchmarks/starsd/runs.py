"""Runs of StarSD's Table 1: so many targets at one draft service for some seconds, and what is made of several.

Knows neither what a target is (targets.py, engines.py) nor the table.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.engine.cpu_time import CpuTimer
from benchmarks.starsd.colocated import run_alone
from benchmarks.starsd.service import Counts, Service
from benchmarks.starsd.sim import StarRow
from benchmarks.starsd.targets import Shape, Tally, Text

MAX_ROWS, MAX_FEED, MAX_CONTEXT = 6, 32, 512
"""Requests of a batch, tokens that are fed at once, and tokens of a request: sizes between compiled ones are padded, so
as few as do."""
SETTLE_S = 2.0
"""From when targets begin until it counts."""


@dataclass(frozen=True)
class Run:
    """One number of targets at one service for some seconds. others_share: of the cores' time, taken by others."""

    n: int
    batched: bool
    round: int
    seconds: float
    counts: Counts
    tally: Tally
    others_share: float | None

    @property
    def service_s(self) -> float:
        """S as it was: seconds of a batch."""
        return self.counts.search_s / max(self.counts.searches, 1)

    @property
    def back_s(self) -> float:
        """Seconds of a round that a request neither waits in the queue nor is drafted: Z, with the way there and back
        and whatever else a target does."""
        loop_s = self.n * self.counts.loop_s / self.counts.rounds
        return loop_s - self.counts.queue_s / self.counts.trees - self.service_s

    def row(self) -> StarRow:
        """Where the service refused all targets, nothing was drafted."""
        counts, tps = self.counts, self.tally.tokens / self.seconds
        return StarRow(
            self.n, "measured", self.batched, tps, tps / self.n, counts.queue_s / max(counts.trees, 1),
            counts.idle_s / max(counts.searches, 1), counts.rounds / counts.loop_s, counts.service_s / counts.loop_s,
        )  # fmt: skip


class Targets:
    """Processes of paced targets at one service."""

    def __init__(self, ports: Sequence[Connection]) -> None:
        self._ports = ports

    def run(self, at: Service, count: int, seconds: float, **of: Any) -> Run:
        """The first `count` of them for so long."""
        ports = self._ports[:count]
        for port in ports:
            port.send("run")
        time.sleep(SETTLE_S)
        watch = CpuTimer(at.pid, *(child.pid or 0 for child in multiprocessing.active_children()))
        counts, before = at.counts(), self.tallies(ports)
        time.sleep(seconds)
        gone, after = at.counts() - counts, self.tallies(ports)
        _, others = watch.read()
        for port in ports:
            port.send("pause")
        time.sleep(0.5)
        changes = [(now - then, end - start) for (then, start), (now, end) in zip(before, after, strict=True)]
        tally = sum((each for each, _ in changes[1:]), changes[0][0])
        span_s = statistics.mean(lasted for _, lasted in changes)
        return Run(n=count, seconds=span_s, counts=gone, tally=tally, others_share=others, **of)

    @staticmethod
    def tallies(ports: Sequence[Connection]) -> list[tuple[Tally, float]]:
        """What each of them did since it began, and when it said so."""
        for port in ports:
            port.send("tally")
        return [port.recv() for port in ports]


@contextmanager
def targets_at(
    at: Service, count: int, run: Callable[..., None], *args: Any, in_turn: bool = False
) -> Iterator[Targets]:
    """So many processes, connected. run: what each of them does, told its connection, the service's port, its number
    and args. in_turn: each is begun when the one before is ready."""
    with ExitStack() as held:
        ports = []
        for number in range(count):
            ports.append(begun(held, run, at.port, number, *args, end="end"))
            if in_turn:
                expect_ready(ports[-1])
        for port in () if in_turn else ports:
            expect_ready(port)
        yield Targets(ports)


def begun(held: ExitStack, run: Callable[..., None], *args: Any, end: object) -> Connection:
    """The connection to a process that runs that, told its end of it and args; `end` is what ends it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, *args))
    process.start()
    theirs.close()  # so that reading ends where the process does
    held.callback(process.join, 30)
    held.callback(_send, ours, end)
    return ours


def expect_ready(port: Connection) -> None:
    """Raises EOFError: the process has ended."""
    assert port.recv() == "ready"


def _send(port: Connection, said: object) -> None:
    with suppress(OSError):  # it has ended by itself
        port.send(said)


def alone_in_turns(held: ExitStack, model: Path, texts: Sequence[Text], shape: Shape) -> Connection:
    """A paced target with the draft in its own process, ready."""
    port = begun(held, run_alone, model, texts, shape, MAX_CONTEXT, MAX_FEED, end=0)
    expect_ready(port)
    return port


def medians(runs: Sequence[Run]) -> list[StarRow]:
    """One row for each number of targets and service: of every quantity the median over rounds."""
    return [_over_rounds(rows, statistics.median) for rows in _by_kind(runs)]


def spread(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Beside `medians`, in their order: the least and the most of every quantity over rounds."""
    return [
        {"least": _over_rounds(rows, min).as_dict(), "most": _over_rounds(rows, max).as_dict()}
        for rows in _by_kind(runs)
    ]


def _by_kind(runs: Sequence[Run]) -> list[list[StarRow]]:
    """Of the same number of targets at the same service each."""
    kinds = dict.fromkeys((run.batched, run.n) for run in runs)
    return [[run.row() for run in runs if (run.batched, run.n) == kind] for kind in kinds]


def _over_rounds(rows: Sequence[StarRow], of: Callable[[Iterable[float]], float]) -> StarRow:
    numbers = [name for name, value in vars(rows[0]).items() if isinstance(value, float)]
    return replace(rows[0], **{name: of([getattr(row, name) for row in rows]) for name in numbers})
