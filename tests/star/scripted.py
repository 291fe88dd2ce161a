"""A draft service in memory, on a virtual clock: what it says, when, and what gets lost is up to the test.

Its draft is a toy: a tree is a pure function of the session's text and sampling, so that any mix-up shows.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.sampling import RowSampling
from adaserve_jax.star.client.drafter import RemoteDrafter
from adaserve_jax.star.client.link import OnFrame, OnLost
from adaserve_jax.star.messages import (
    Close,
    Draft,
    FromService,
    FromTarget,
    Hello,
    Load,
    Open,
    Resync,
    Tree,
    Welcome,
    WireError,
)
from adaserve_jax.tree.acceptance_table import ChanceTable
from adaserve_jax.types import DraftPlan, StepPlan
from tests.plans import step_plan

VOCABULARY = 512
DEPTHS, RANKS, BINS = 3, 2, 4
HELLO = Hello("target", "vocabulary", "cells", verify_s=0.010)
WELCOME = Welcome("draft-1", 6, 4, 4096, 64, 60.0, {(1, 1): 0.001}, {16: 0.002})
Frame = Sequence[FromService | WireError]


def table(seed: int = 0) -> ChanceTable:
    """An acceptance table with random chances, and edges that differ between the modes."""
    chance = np.random.default_rng(seed).random((2, DEPTHS, RANKS, BINS)).astype(np.float32)
    return ChanceTable(chance, np.array([[-3, -2, -1], [0, 1, np.inf]], np.float32))


class World:
    """Virtual seconds, and what happens at which of them. `held`: whether the lock of the drafter is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.held = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def clock(self) -> float:
        return self.now

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), call))

    def run(self, until: float, ended: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until then, or until `ended`."""
        while not ended():
            if not self._events or self._events[0][0] > until:
                self.now = max(self.now, until)
                return
            self.now, _, call = heapq.heappop(self._events)
            call()

    def sleep(self, seconds: float) -> None:
        self.run(self.now + seconds)


class Changed:
    """Stands in for a threading.Condition: waiting lets the world go on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._notified = False

    def __enter__(self) -> bool:
        self._world.held += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._world.held -= 1

    def notify_all(self) -> None:
        assert self._world.held, "notified without the lock"
        self._notified = True

    def wait(self, timeout: float | None = None) -> bool:
        assert self._world.held == 1 and timeout is not None and timeout >= 0
        self._notified = False
        self._world.held = 0
        self._world.run(self._world.now + timeout, lambda: self._notified)
        self._world.held = 1
        return self._notified


@dataclass
class Held:
    """A session at the service."""

    epoch: int
    text: np.ndarray
    sampling: tuple[float, ...]


@dataclass
class Service:
    """Implements `Transport` too. way_s: there, and back; work_s: of a tree. heard: all that ever came. spoil: what
    becomes of an answer frame on its way: (seconds later, frame) each; listen: what arrives of a frame. answer: in the
    place of the toy's tree."""

    world: World
    address: str = "draft.example:7070"
    way_s: float = 0.001
    work_s: float = 0.002
    up: bool = True
    welcome: FromService = WELCOME
    sessions: dict[int, Held] = field(default_factory=dict)
    heard: list[FromTarget] = field(default_factory=list)
    streams: list[ScriptedStream] = field(default_factory=list)
    spoil: Callable[[Frame], list[tuple[float, Frame]]] = lambda frame: [(0.0, frame)]
    listen: Callable[[Sequence[FromTarget]], Sequence[FromTarget]] = lambda frame: frame
    answer: Callable[[Draft, Tree], FromService | WireError | None] = lambda draft, tree: tree

    def open(self, received: OnFrame, lost: OnLost) -> ScriptedStream:
        assert not self.world.held, "opened with the lock held"
        stream = ScriptedStream(self, received, lost)
        self.streams.append(stream)
        if not self.up:
            self.world.later(self.way_s, lambda: stream.lose("connection refused"))
        return stream

    def restart(self) -> None:
        """Be killed, and be there again at once with nothing."""
        self.cut()
        self.sessions.clear()

    def cut(self, why: str = "reset") -> None:
        """End all streams; sessions stay."""
        for stream in self.streams:
            stream.lose(why)

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.heard]

    def say(self, frame: Frame) -> None:
        """Say something that nobody asked for, in the newest stream, now."""
        self.streams[-1].deliver(frame)

    def hear(self, stream: ScriptedStream, frame: Sequence[FromTarget]) -> None:
        answers: list[FromService | WireError] = []
        for message in self.listen(frame):
            self.heard.append(message)
            answered = self._answer(message)
            if answered is not None:
                answers.append(answered)
        works = any(isinstance(message, Tree) for message in answers)
        for delay_s, spoiled in self.spoil(answers) if answers else []:
            self.world.later(
                (self.work_s if works else 0.0) + self.way_s + delay_s, lambda frame=spoiled: stream.deliver(frame)
            )

    def _answer(self, message: FromTarget) -> FromService | WireError | None:
        if isinstance(message, Hello):
            return self.welcome
        if isinstance(message, Close):
            self.sessions.pop(message.session, None)
            return None
        held = self.sessions.get(message.session)
        if isinstance(message, Open):
            if held is None or message.epoch > held.epoch:
                self.sessions[message.session] = Held(message.epoch, message.tokens, message.sampling)
            return None
        if held is None or message.epoch > held.epoch:
            return Resync(message.session, message.epoch)
        if message.epoch < held.epoch:
            return None
        overlap = held.text[message.base : message.base + len(message.tokens)]
        if message.base > len(held.text) or not np.array_equal(overlap, message.tokens[: len(overlap)]):
            return Resync(message.session, message.epoch)
        held.text = np.concatenate([held.text[: message.base], message.tokens])
        if not message.depth:
            return None
        nodes = toy(held.text, held.sampling, message.depth, message.width)
        tree = Tree(
            message.session, message.epoch, message.round, len(held.text), message.width, *nodes, 0.0, self.work_s
        )
        return self.answer(message, tree)


class ScriptedStream:
    def __init__(self, service: Service, received: OnFrame, lost: OnLost) -> None:
        self._service = service
        self._received = received
        self._lost = lost
        self.ended = False

    def send(self, frame: Sequence[FromTarget]) -> None:
        service = self._service
        assert not service.world.held, "sent with the lock held"
        assert len(frame), "a frame with nothing in it"
        service.world.later(service.way_s, lambda: None if self.ended else service.hear(self, frame))

    def close(self) -> None:
        assert not self._service.world.held, "closed with the lock held"
        self.ended = True

    def deliver(self, frame: Frame) -> None:
        if not self.ended:
            self._received(frame)

    def lose(self, why: str) -> None:
        if not self.ended:
            self.ended = True
            self._lost(why)


def toy(text: np.ndarray, sampling: tuple[float, ...], depth: int, width: int) -> tuple[np.ndarray, ...]:
    """index, token, parent, cell, log_q of a tree: some ranks of some levels are absent, and none is without parent."""
    seed = zlib.crc32(np.asarray(text, np.int32).tobytes() + repr(tuple(map(float, sampling))).encode())
    nodes: list[tuple[int, int, int, int, float]] = []
    above = [-1]
    for level in range(depth):
        drawn = np.random.default_rng([seed, level, width])
        there = np.flatnonzero(drawn.random(width) < (1.0 if level == 0 else 0.8))
        if not len(above):
            break
        columns = [level * width + int(rank) for rank in there]
        for rank, column in zip(there.tolist(), columns, strict=True):
            cell = (min(level, DEPTHS - 1) * RANKS + rank % RANKS) * BINS + int(drawn.integers(BINS))
            parent = above[int(drawn.integers(len(above)))]
            nodes.append((column, int(drawn.integers(VOCABULARY)), parent, cell, -float(drawn.random())))
        above = columns
    columns_of = list(zip(*nodes, strict=True)) if nodes else [()] * 5
    return (*(np.array(part, np.int32) for part in columns_of[:4]), np.array(columns_of[4], np.float32))


@dataclass
class Row:
    """A row of a plan: the tokens of `text` from `known` up to `end` are fed; end None: all of them."""

    slot: int
    text: Sequence[int] | np.ndarray
    known: int = 0
    end: int | None = None
    speculates: bool = True
    decodes: bool = True
    seed: int = 7
    temperature: float = 0.0
    due_s: float = np.inf


def plan_of(
    rows: Sequence[Row], depth: int = 3, width: int = 2, *, calibrated: bool = True, chances: np.ndarray | None = None,
    step: int = 0, due: bool = True,
) -> StepPlan:  # fmt: skip
    """A step with these rows, decode rows first."""
    decoding = [row for row in rows if row.decodes]
    assert list(rows[: len(decoding)]) == decoding, "decode rows come first"
    fed = [np.asarray(row.text, np.int32)[row.known : row.end] for row in rows]
    num, i32 = len(rows), np.int32
    sampling = RowSampling.greedy(num)
    sampling.seed[:] = [row.seed for row in rows]
    sampling.temperature[:] = [row.temperature for row in rows]
    draft = DraftPlan(
        depth, width, np.concatenate([*fed, np.zeros(0, i32)]), np.array([len(tokens) for tokens in fed], i32),
        np.array([row.known for row in rows], i32), np.array([row.speculates for row in decoding], bool),
        calibrated, chances, due_s=np.array([row.due_s for row in decoding]) if due else None,
    )  # fmt: skip
    slots = np.array([row.slot for row in rows], i32)
    return step_plan(
        len(decoding), [[]] * (num - len(decoding)), step=step, slots=slots, sampling=sampling, draft=draft
    )


def sampling_of(row: Row) -> tuple[float, ...]:
    """As the service is told it."""
    return (row.seed, 0, float(np.float32(row.temperature)), 0, 1.0, 0.0)


@dataclass
class Scene:
    """A drafter and its services in one world."""

    world: World
    services: list[Service]
    drafter: RemoteDrafter
    oracle: Callable[..., tuple[Any, ...]]

    @classmethod
    def of(
        cls, services: int = 1, *, max_rows: int = 16, deadline_ms: float = 100.0, connected: bool = True,
        version: str = "", make: type[Service] = Service, chances: ChanceTable | None = None,
        oracle: Callable[..., tuple[Any, ...]] | None = None,
    ) -> Scene:  # fmt: skip
        world = World()
        made = [make(world, f"draft{number}.example:7070") for number in range(services)]
        config = DrafterConfig(tuple(f"grpc://{service.address}" for service in made), deadline_ms, version)
        drafter = RemoteDrafter(
            made, config, hello=HELLO, table=chances or table(), max_rows=max_rows, vocabulary=VOCABULARY,
            clock=world.clock, changed=Changed(world), draw=lambda: 0.0,  # type: ignore[arg-type]
        )  # fmt: skip
        if connected:
            assert drafter.connect(1.0) is not None
            world.sleep(0.1)
        return cls(
            world,
            made,
            drafter,
            oracle or (lambda text, sampling, draft: toy(text, sampling, draft.depth, draft.width)),
        )

    @property
    def service(self) -> Service:
        return self.services[0]

    def propose(self, rows: Sequence[Row], depth: int = 3, width: int = 2, **options: object) -> list[bool]:
        """Which rows got a tree. Raises AssertionError if one of them is not that of the row's text."""
        plan = plan_of(rows, depth, width, **options)  # type: ignore[arg-type]
        return self.check(plan, rows)

    def check(self, plan: StepPlan, rows: Sequence[Row]) -> list[bool]:
        began = self.world.now
        longest_s = self.drafter.longest_s(plan.draft)  # type: ignore[arg-type]
        found = self.drafter.propose(plan)
        assert self.world.now - began <= longest_s + 1e-9
        assert self.world.held == 0
        if not found.log_f.size:
            return [False] * plan.num_decode
        return [self._is_true(plan, row, at, found) for at, row in enumerate(rows[: plan.num_decode])]

    def _is_true(self, plan: StepPlan, row: Row, at: int, found: object) -> bool:
        draft = plan.draft
        assert draft is not None
        columns = np.flatnonzero(found.log_f[at] > -np.inf)  # type: ignore[attr-defined]
        if not len(columns):
            return False
        assert row.speculates and draft.depth
        text = np.asarray(row.text, np.int32)[: row.end]
        index, token, parent, cell, log_q = map(list, self.oracle(text, sampling_of(row), draft))
        assert columns.tolist() == index
        for name, expected in (("token", token), ("parent", parent), ("cell", cell), ("log_q", log_q)):
            assert getattr(found, name)[at, columns].tolist() == expected, name
        return True


def loaded(busy: float, queue_s: float) -> list[FromService]:
    return [Load(busy, queue_s, 0, 0)]


def without(welcome: Welcome, **changes: object) -> Welcome:
    return replace(welcome, **changes)  # type: ignore[arg-type]
