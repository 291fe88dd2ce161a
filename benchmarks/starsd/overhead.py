"""What the protocol of a draft service costs beside the draft's work: p50 and p99 of a round trip on loopback.

    python -m benchmarks.starsd.overhead [--rows 8] [--nodes 20] [--rounds 2000] [--out star_overhead.json]

A process of its own serves with everything that `adaserve draft` has but a device: its searches return at once. This
one sends a frame with a Draft for each of `--rows` sessions, waits for all their trees, and takes from the round trip
what the trees say of service; that they waited is the protocol's too, since nobody else is there. The aim is a p50 of
at most 0.5 ms; the machine must be quiet for it.

Beside it, in turns of `TURN` rounds each, so that all three meet the same machine: `drafter_*`, the same through the
`RemoteDrafter` of a target, from its plan to its candidates; and `bare_grpc_*`, frames of the same sizes to a process
that has an answer ready, which is what gRPC's Python streams take themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np
from rich.console import Console

from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.sampling import RowSampling
from adaserve_jax.star.client.channel import GrpcTransport
from adaserve_jax.star.client.drafter import RemoteDrafter
from adaserve_jax.star.client.link import OnFrame, OnLost, Stream, Transport
from adaserve_jax.star.messages import Draft, FromService, Hello, Open, SessionSampling, Tree
from adaserve_jax.star.service.core import DraftCore
from adaserve_jax.star.service.dispatch import DraftBatch
from adaserve_jax.star.service.limits import DraftLimits, Quotas
from adaserve_jax.star.service.server import DraftServer
from adaserve_jax.star.service.worker import Worker
from adaserve_jax.star.settings import DraftServiceSettings
from adaserve_jax.star.wire import METHOD, Caps, WireError, read_service_frame, target_frame
from adaserve_jax.tree.acceptance_table import ChanceTable
from adaserve_jax.types import CandidateTrees, DraftPlan, StepPlan

WIDTH = 4
AIM_MS = 0.5
MOST_MESSAGES = 10**9
"""A second: nothing waits for its allowance here."""
WARM_UP = 200
"""Rounds of each that are not counted."""
TURN = 50
"""Rounds of one, until it is the next one's turn."""
LONG_S = 1.0
"""Longest that a round waits for its trees."""
RANKS, BINS = WIDTH, 25
"""Of the acceptance table, whose cells trees name."""
TEXT, NEW = np.arange(1, 65, dtype=np.int32), np.array([5, 6, 7], np.int32)
"""What each session begins with, and what it grows by in each round."""


class Nothing:
    """A device that finds the same nodes at once, and has room for all."""

    capacity = 1 << 20

    def __init__(self, nodes: int, depth: int) -> None:
        rng = np.random.default_rng(0)
        self._depth = np.repeat(np.arange(1, depth + 1, dtype=np.int32), WIDTH)
        columns = np.arange(depth * WIDTH)
        self._token = rng.integers(0, 30_000, (64, depth * WIDTH)).astype(np.int32)
        self._parent = np.where(columns < WIDTH, -1, columns - WIDTH).astype(np.int32) + 0 * self._token
        self._cell = ((self._depth - 1) * RANKS * BINS + rng.integers(0, RANKS * BINS, self._token.shape)).astype(
            np.int32
        )
        self._log_q = -rng.random(self._token.shape).astype(np.float32)
        self._log_f = np.where(columns < nodes, 0.0, -np.inf).astype(np.float32) + 0 * self._log_q

    def run(self, batch: DraftBatch) -> CandidateTrees | None:
        if not batch.depth:
            return None
        n = len(batch.rows)
        arrays = (self._token[:n], self._parent[:n], self._log_f[:n], self._depth, self._cell[:n], self._log_q[:n])
        return CandidateTrees(*arrays)

    def reserve(self, key: int, tokens: int) -> bool:
        return True

    def release(self, key: int) -> None:
        return None


def serve(port: Connection, rows: int, nodes: int) -> None:
    """Serve until `port` says something."""
    depth = math.ceil(nodes / WIDTH)
    limits = DraftLimits("v", "v", "c", depth, WIDTH, 1 << 16, max_rows=rows, max_feed=1024)
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


def echo(port: Connection) -> None:
    """Answer every frame with what the first one was, until `port` says something."""

    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        answer = next(requests)
        yield answer
        for _ in requests:
            yield answer

    class Handlers(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.stream_stream_rpc_method_handler(serve)

    server = grpc.server(ThreadPoolExecutor(4), handlers=[Handlers()])
    port.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    port.recv()
    server.stop(1.0).wait()


class Frames:
    """A stream of frames to one port, sent and received as they are."""

    def __init__(self, port: int) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._incoming = self._channel.stream_stream(METHOD)(iter(self._outgoing.get, None))

    def send(self, data: bytes) -> None:
        self._outgoing.put(data)

    def receive(self) -> bytes:
        return next(self._incoming)

    def close(self) -> None:
        self._outgoing.put(None)
        self._channel.close()


class Bare:
    """Frames of these sizes there and back, and nothing else."""

    def __init__(self, port: int, there: int, back: int) -> None:
        self._frames, self._there = Frames(port), bytes(there)
        self._frames.send(bytes(back))
        self._frames.receive()
        self.close = self._frames.close

    def round(self) -> float:
        started = time.perf_counter()
        self._frames.send(self._there)
        self._frames.receive()
        return time.perf_counter() - started


class Protocol:
    """Messages as frames, and frames as messages, without what a target does with them. sizes: of the last frames, in
    bytes, there and back."""

    def __init__(self, port: int, rows: int, depth: int) -> None:
        self._frames, self._depth = Frames(port), depth
        self._frames.send(target_frame([Hello("frames", "v", "c")]))
        read_service_frame(self._frames.receive())
        self._sessions = range(1, rows + 1)
        self._frames.send(
            target_frame([Open(s, 1, TEXT, SessionSampling(s, 0, 1.0, 0, 1.0, 0.0)) for s in self._sessions])
        )
        self._length, self._round = len(TEXT), 0
        self.sizes = 0, 0
        self.close = self._frames.close

    def round(self) -> float:
        """Return the seconds beyond service."""
        self._round += 1
        base, self._length = self._length, self._length + len(NEW)
        started = time.perf_counter()
        said = target_frame(
            [Draft(s, 1, self._round, base, NEW, self._depth, WIDTH, True, 0.05, LONG_S) for s in self._sessions]
        )
        self._frames.send(said)
        trees: list[Tree] = []
        while len(trees) < len(self._sessions):
            data = self._frames.receive()
            trees += [each for each in read_service_frame(data) if isinstance(each, Tree)]
        taken_s = time.perf_counter() - started
        self.sizes = len(said), len(data)
        return taken_s - max(tree.service_s for tree in trees)


class Target:
    """A target's drafter, with a step's rows for each round. It must get a tree for each."""

    def __init__(self, port: int, rows: int, depth: int) -> None:
        address = f"127.0.0.1:{port}"
        config = DrafterConfig((f"grpc://{address}",), drafter_deadline_ms=1e3 * LONG_S)
        chances = np.random.default_rng(0).random((2, depth, RANKS, BINS)).astype(np.float32)
        table = ChanceTable(chances, np.full((2, BINS - 1), np.inf, np.float32))
        self._transport = Noting(GrpcTransport(address, config))
        self._drafter = RemoteDrafter(
            [self._transport], config, hello=Hello("target", "v", "c"), table=table, max_rows=rows
        )
        if self._drafter.connect(LONG_S) is None:
            raise SystemExit("the draft service did not admit the target")
        self._rows, self._depth, self._length, self._step = rows, depth, 0, 0
        self.close = self._drafter.close

    def round(self) -> float:
        """Return the seconds beyond service."""
        plan = self._plan(NEW if self._length else TEXT)
        started = time.perf_counter()
        self._drafter.propose(plan)
        taken_s = time.perf_counter() - started
        if self._drafter.stats().trees != self._step * self._rows:
            raise SystemExit(f"a tree did not come within {LONG_S:g} s, or made no sense; measure again")
        return taken_s - self._transport.service_s

    def _plan(self, fed: np.ndarray) -> StepPlan:
        num, i32 = self._rows, np.int32
        zeros, none = np.zeros(num, i32), np.zeros(0, i32)
        sampling = RowSampling.greedy(num)
        sampling.seed[:], sampling.temperature[:] = np.arange(num), 1.0
        counts, known = np.full(num, len(fed), i32), np.full(num, self._length, i32)
        draft = DraftPlan(self._depth, WIDTH, np.tile(fed, num), counts, known, np.ones(num, bool))
        self._length += len(fed)
        self._step += 1
        return StepPlan(
            self._step, np.arange(num, dtype=i32), num, zeros, known, zeros[:, None], sampling, none, none,
            np.zeros(0, bool), draft, tree_token_cap=num,
        )  # fmt: skip


class Noting:
    """A transport that notes the longest service of the last trees."""

    def __init__(self, transport: Transport) -> None:
        self.address = transport.address
        self.service_s = 0.0
        self._transport = transport

    def open(self, received: OnFrame, lost: OnLost) -> Stream:
        def noted(frame: Sequence[FromService | WireError]) -> None:
            times = [each.service_s for each in frame if isinstance(each, Tree)]
            self.service_s = max(times, default=self.service_s)
            received(frame)

        return self._transport.open(noted, lost)


def measure(port: int, bare_port: int, rows: int, depth: int, rounds: int) -> dict[str, np.ndarray]:
    """Milliseconds of each round beyond service, f64[rounds], by what was measured."""
    protocol, target = Protocol(port, rows, depth), Target(port, rows, depth)
    for _ in range(WARM_UP):
        protocol.round()
        target.round()
    bare = Bare(bare_port, *protocol.sizes)
    for _ in range(WARM_UP):
        bare.round()
    taken_s: dict[str, list[float]] = {"": [], "drafter_": [], "bare_grpc_": []}
    for first in range(0, rounds, TURN):
        for each, found in zip((protocol, target, bare), taken_s.values(), strict=True):
            found += [each.round() for _ in range(min(TURN, rounds - first))]
    for each in (protocol, target, bare):
        each.close()
    return {name: 1e3 * np.array(found) for name, found in taken_s.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="sessions that draft in each round")
    parser.add_argument("--nodes", type=int, default=20, help="candidates of each")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    load_1m = os.getloadavg()[0]  # of what ran already
    spawn, depth = multiprocessing.get_context("spawn"), math.ceil(given.nodes / WIDTH)
    (ours, theirs), (our_echo, their_echo) = spawn.Pipe(), spawn.Pipe()
    processes = [
        spawn.Process(target=serve, args=(theirs, given.rows, given.nodes)),
        spawn.Process(target=echo, args=(their_echo,)),
    ]
    for process in processes:
        process.start()
    try:
        taken_ms = measure(ours.recv(), our_echo.recv(), given.rows, depth, given.rounds)
    finally:
        for end, process in zip((ours, our_echo), processes, strict=True):
            end.send("end")
            process.join(20)
    result = {
        "commit": source_commit(), "machine": machine_name(), "load_1m": load_1m, "rows": given.rows,
        "nodes": given.nodes, "rounds": given.rounds, "aim_p50_ms": AIM_MS,
    } | {
        f"{name}{statistic}_ms": float(np.percentile(found, percent))
        for name, found in taken_ms.items()
        for statistic, percent in (("p50", 50), ("p90", 90), ("p99", 99), ("least", 0))
    }  # fmt: skip
    Console().print_json(data=result)
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
