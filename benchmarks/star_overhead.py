"""What the protocol of a draft service costs beside the draft's work: p50 and p99 of a round trip on loopback.

    python benchmarks/star_overhead.py [--rows 8] [--nodes 20] [--rounds 2000] [--out star_overhead.json]

A process of its own serves with everything that `adaserve draft` has but a device: its searches return at once. This
one sends a frame with a Draft for each of `--rows` sessions, waits for all their trees, and takes from the round trip
what the trees say of service; that they waited is the protocol's too, since nobody else is there. The aim is a p50 of
at most 0.5 ms; the machine must be quiet for it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import queue
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console

from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.star.core import DraftCore
from adaserve_jax.star.dispatch import Batch
from adaserve_jax.star.limits import DraftLimits, Quotas
from adaserve_jax.star.messages import Draft, Hello, Open, Tree
from adaserve_jax.star.server import DraftServer
from adaserve_jax.star.settings import DraftServiceSettings
from adaserve_jax.star.wire import METHOD, Caps, read_service_frame, target_frame
from adaserve_jax.star.worker import Worker
from adaserve_jax.types import CandidateTrees

WIDTH = 4
AIM_MS = 0.5
MOST_MESSAGES = 10**9
"""A second: nothing waits for its allowance here."""
WARM_UP = 200
"""Rounds that are not counted."""


class Nothing:
    """A device that finds the same nodes at once, and has room for all."""

    capacity = 1 << 20

    def __init__(self, nodes: int, depth: int) -> None:
        rng = np.random.default_rng(0)
        self._depth = np.repeat(np.arange(1, depth + 1, dtype=np.int32), WIDTH)
        columns = np.arange(depth * WIDTH)
        self._token = rng.integers(0, 30_000, (64, depth * WIDTH)).astype(np.int32)
        self._parent = np.where(columns < WIDTH, -1, columns - WIDTH).astype(np.int32) + 0 * self._token
        self._cell = rng.integers(0, 500, self._token.shape).astype(np.int32)
        self._log_q = -rng.random(self._token.shape).astype(np.float32)
        self._log_f = np.where(columns < nodes, 0.0, -np.inf).astype(np.float32) + 0 * self._log_q

    def run(self, batch: Batch) -> CandidateTrees | None:
        if not batch.depth:
            return None
        n = len(batch.rows)
        arrays = (self._token[:n], self._parent[:n], self._log_f[:n], self._depth, self._cell[:n], self._log_q[:n])
        return CandidateTrees(*arrays)

    def reserve(self, key: int, tokens: int) -> bool:
        return True

    def shrink(self, key: int, tokens: int) -> None:
        return None

    def release(self, key: int) -> None:
        return None


def serve(port: Connection, rows: int, nodes: int) -> None:
    """Serve until `port` says something."""
    depth = math.ceil(nodes / WIDTH)
    limits = DraftLimits("v", "v", "c", 32_000, depth, WIDTH, 1 << 16, max_rows=rows, max_feed=1024)
    device = Nothing(nodes, depth)
    quotas = Quotas(messages_per_s=MOST_MESSAGES, messages_at_once=MOST_MESSAGES)
    worker = Worker(DraftCore(limits, device, quotas=quotas), device)
    settings = DraftServiceSettings(listen="127.0.0.1:0", http="", max_messages_per_s=MOST_MESSAGES)
    server = DraftServer(settings, worker, Caps())
    worker.start()
    server.start()
    port.send(server.port)
    port.recv()
    ended = server.stop(1.0)
    worker.stop(5.0)
    ended.wait()


def measure(port: int, rows: int, depth: int, rounds: int) -> np.ndarray:
    """Seconds of each round beyond service. f64[rounds]."""
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    overheads = []
    text = np.arange(1, 65, dtype=np.int32)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        incoming = channel.stream_stream(METHOD)(iter(outgoing.get, None))
        outgoing.put(target_frame([Hello("bench", "v", "c")]))
        read_service_frame(next(incoming))
        sessions = range(1, rows + 1)
        outgoing.put(target_frame([Open(s, 1, text, s, 0, 1.0, 0, 1.0, 0.0) for s in sessions]))
        length = len(text)
        new = np.array([5, 6, 7], np.int32)
        for round_number in range(1, WARM_UP + rounds + 1):
            started = time.perf_counter()
            drafts = [Draft(s, 1, round_number, length, new, depth, WIDTH, True, 0.05, 1.0) for s in sessions]
            outgoing.put(target_frame(drafts))
            length += len(new)
            trees: list[Any] = []
            while len(trees) < rows:
                trees += [each for each in read_service_frame(next(incoming)) if isinstance(each, Tree)]
            taken_s = time.perf_counter() - started
            if round_number > WARM_UP:
                overheads.append(taken_s - max(tree.service_s for tree in trees))
        outgoing.put(None)
    return np.array(overheads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="sessions that draft in each round")
    parser.add_argument("--nodes", type=int, default=20, help="candidates of each")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    service = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, given.rows, given.nodes))
    service.start()
    try:
        overheads_ms = 1e3 * measure(ours.recv(), given.rows, math.ceil(given.nodes / WIDTH), given.rounds)
    finally:
        ours.send("end")
        service.join(20)
    result = {
        "commit": source_commit(), "machine": machine_name(), "load_1m": os.getloadavg()[0], "rows": given.rows,
        "nodes": given.nodes, "rounds": given.rounds, "aim_p50_ms": AIM_MS,
        "p50_ms": float(np.percentile(overheads_ms, 50)), "p90_ms": float(np.percentile(overheads_ms, 90)),
        "p99_ms": float(np.percentile(overheads_ms, 99)), "least_ms": float(overheads_ms.min()),
    }  # fmt: skip
    Console().print_json(data=result)
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
