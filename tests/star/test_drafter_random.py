"""Requests come, grow, pause and go, while services lose, double, delay and garble what is said, die and come back.

What must hold all the time is in `Scene.check`: no exception, no wait beyond the deadline, and every tree is that of
its row's text. And once everything works again, every row gets trees again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from adaserve_jax.star.messages import FromTarget, Load, Refused, Resync, SessionSampling, Tree, WireError
from adaserve_jax.star.service.core import DraftCore
from adaserve_jax.star.wire import read_service_frame, service_frame
from adaserve_jax.tree.acceptance_table import ChanceTable
from adaserve_jax.types import DraftPlan
from tests.slow import longer_when_slow
from tests.star import toys
from tests.star.scripted import HELLO, VOCABULARY, Frame, Row, Scene, ScriptedStream, Service

SLOTS = 4
NO_FAULT = "none"
FAULTS = (NO_FAULT, "silent", "lossy", "doubled", "late", "reordered", "garbled", "resyncs", "refuses", "away", "deaf")


@dataclass
class Request:
    """known: tokens that the plans have fed so far."""

    text: list[int]
    seed: int
    temperature: float
    known: int = 0


class Weather:
    """What one service does to what is said, by the name of a fault."""

    def __init__(self, service: Service, seed: int) -> None:
        self._service = service
        self._drawn = np.random.default_rng(seed)
        self._kept: list[Frame] = []

    def become(self, fault: str) -> None:
        service = self._service
        service.up = fault != "away"
        if fault == "away":
            service.restart()
        service.listen = self._heard_in_part if fault == "deaf" else lambda frame: frame
        service.answer = getattr(self, f"_{fault}", lambda draft, tree: tree)
        service.spoil = getattr(self, f"_spoil_{fault}", lambda frame: [(0.0, frame)])

    def _maybe(self, chance: float = 0.5) -> bool:
        return bool(self._drawn.random() < chance)

    def _heard_in_part(self, frame: Sequence[FromTarget]) -> list[FromTarget]:
        return [message for message in frame if self._maybe(0.7)]

    def _silent(self, draft: Any, tree: Tree) -> None:
        return None

    def _resyncs(self, draft: Any, tree: Tree) -> Tree | Resync:
        return Resync(draft.session, draft.epoch) if self._maybe() else tree

    def _refuses(self, draft: Any, tree: Tree) -> Tree | Refused:
        if self._maybe(0.1):
            return Refused("shutting_down", "bye", retry_after_s=0.2)
        return Refused("quota", "full", draft.session, draft.epoch, 0.3) if self._maybe() else tree

    def _garbled(self, draft: Any, tree: Tree) -> Any:
        parts = {name: getattr(tree, name) for name in ("index", "token", "parent", "cell", "log_q")}
        name = str(self._drawn.choice([*parts, "epoch", "round", "length", "session", "width", "text"]))
        if name == "text":
            return WireError("junk", draft.session, draft.epoch)
        if name not in parts:
            return replace(tree, **{name: getattr(tree, name) + int(self._drawn.integers(-2, 3))})
        spoiled = parts[name].copy()
        if len(spoiled) and self._maybe():
            spoiled[self._drawn.integers(len(spoiled))] = self._drawn.choice([-5, -1, 0, 1, 3, 10**9])
            if not np.array_equal(spoiled, parts[name]):  # by luck it may make as much sense as before
                spoiled = np.full_like(spoiled, 7 if name == "log_q" else -7)
        else:
            spoiled = spoiled[:-1]
        (received,) = read_service_frame(service_frame([replace(tree, **{name: spoiled})]))
        return received

    def _spoil_lossy(self, frame: Frame) -> list[tuple[float, Frame]]:
        kept = [message for message in frame if self._maybe(0.6)]
        return [(0.0, kept)] if kept else []

    def _spoil_doubled(self, frame: Frame) -> list[tuple[float, Frame]]:
        return [(0.0, frame), (float(self._drawn.random()) * 0.2, frame)]

    def _spoil_late(self, frame: Frame) -> list[tuple[float, Frame]]:
        return [(float(self._drawn.random()) * 0.3, frame)]

    def _spoil_reordered(self, frame: Frame) -> list[tuple[float, Frame]]:
        self._kept.append(frame)
        if len(self._kept) < 2:
            return []
        kept, self._kept = self._kept[::-1], []
        return [(0.001 * at, each) for at, each in enumerate(kept)]


class Requests:
    """The engine's side: plans as a scheduler makes them. errors: what the drafter logged of itself."""

    def __init__(self, services: int, seed: int, vocabulary: int = VOCABULARY, **how: Any) -> None:
        self.scene = Scene.of(services, max_rows=SLOTS, deadline_ms=50.0, **how)
        self.weather = [Weather(service, seed + at) for at, service in enumerate(self.scene.services)]
        self._drawn = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._requests: dict[int, Request] = {}

    def _tokens(self, count: int) -> list[int]:
        return self._drawn.integers(0, self._vocabulary, count).tolist()

    def _slot(self, at: int) -> int:
        return sorted(self._requests)[at % len(self._requests)]

    def begin(self, turn: Turn) -> None:
        slot = next((slot for slot in range(SLOTS) if slot not in self._requests), None)
        if slot is not None:
            self._requests[slot] = Request(self._tokens(turn.length), turn.seed, turn.temperature)

    def end(self, turn: Turn) -> None:
        if self._requests:
            slot = self._slot(turn.at)
            del self._requests[slot]
            if turn.tells:
                self.scene.drafter.ended(np.array([slot], np.int32))

    def preempt(self, turn: Turn) -> None:
        """A slot's KV is gone; its request is fed from the beginning again, perhaps in another slot."""
        if self._requests:
            slot = self._slot(turn.at)
            request = self._requests.pop(slot)
            self.scene.drafter.ended(np.array([slot], np.int32))
            request.known = 0
            self._requests[next(free for free in reversed(range(SLOTS)) if free not in self._requests)] = request

    def cut(self, turn: Turn) -> None:
        service = self.scene.services[turn.at % len(self.scene.services)]
        self.scene.world.later(0.001 * turn.length / 8, service.restart if turn.tells else service.cut)

    def change(self, turn: Turn) -> None:
        self.weather[turn.at % len(self.weather)].become(turn.fault)

    def load(self, turn: Turn) -> None:
        service = self.scene.services[turn.at % len(self.scene.services)]
        if service.streams:
            service.say([Load(turn.temperature, turn.length / 1e3, 0, 0)])

    def step(self, turn: Turn) -> None:
        """What each row does: s speculates, f is fed a part while it decodes, p is fed a part of its prompt, - is not
        fed."""
        self.scene.world.sleep(turn.wait_s)
        rows = []
        for slot, request in sorted(self._requests.items()):
            part, lag = turn.parts[slot], len(request.text) - request.known
            end = None if part == "s" and lag else request.known + (0 if part == "-" else (lag + 1) // 2)
            speculates = part == "s" and lag > 0 and turn.depth > 0
            sampled = (request.seed, request.temperature)
            rows.append(Row(slot, request.text, request.known, end, speculates, part != "p", *sampled, turn.due_s))
        rows.sort(key=lambda row: not row.decodes)
        self.scene.propose(rows, turn.depth, turn.width, calibrated=turn.tells)
        for row in rows:
            request = self._requests[row.slot]
            request.known = len(request.text) if row.end is None else row.end
            request.text = request.text + self._tokens(turn.grows)

    def check_counts(self) -> None:
        held = [state.sessions for state in self.scene.drafter.stats().services.values()]
        assert sum(held) <= SLOTS and min(held) >= 0

    def check_that_all_works_again(self) -> None:
        """Once every fault is over, after a trial of each service and a round beyond it."""
        for weather in self.weather:
            weather.become(NO_FAULT)
        self.begin(Turn())
        got: list[bool] = []
        for _ in range(4):
            self.scene.world.sleep(40.0)
            for request in self._requests.values():
                request.text = request.text + self._tokens(1)
            rows = [
                Row(slot, request.text, request.known, seed=request.seed, temperature=request.temperature)
                for slot, request in sorted(self._requests.items())
            ]
            got = self.scene.propose(rows)
            for request in self._requests.values():
                request.known = len(request.text)
        self.scene.world.sleep(1.0)
        assert got and all(got)


@dataclass
class CoreService(Service):
    """The draft service itself, without its connections, with a toy for its device and little room for KV."""

    def __post_init__(self) -> None:
        names = {"vocabulary_hash": HELLO.vocabulary_hash, "cells_hash": HELLO.cells_hash}
        bounds = toys.limits(draft_version="draft-1", max_context=4096, **names)
        room = toys.ToyPages(pages=400)
        self._core, self._device = DraftCore(bounds, room), toys.ToyDevice(room, bounds)
        self._works = False
        self._greeted: ScriptedStream | None = None

    def restart(self) -> None:
        self.__post_init__()
        super().restart()

    def hear(self, stream: ScriptedStream, frame: Sequence[FromTarget]) -> None:
        core = self._core
        if stream is not self._greeted:
            core.disconnect(HELLO.target_id, self.world.now)
            self._greeted = stream
        self._answer_with(stream, core.receive(HELLO.target_id, self.listen(frame), self.world.now))
        self._work()

    def _answer_with(self, stream: ScriptedStream, answers: Sequence[Any]) -> None:
        said = [self.answer(each, each) if isinstance(each, Tree) else each for each in answers]  # type: ignore[arg-type]
        frame = [each for each in said if each is not None]
        for delay_s, spoiled in self.spoil(frame) if frame else []:
            self.world.later(self.way_s + delay_s, lambda frame=spoiled: stream.deliver(frame))

    def _work(self) -> None:
        core = self._core
        batch = None if self._works else core.next_batch(self.world.now)
        for _, answers in core.given_up():
            self._answer_with(self.streams[-1], answers)
        if batch is None:
            return
        self._works = True
        found = self._device.run(batch)

        def done() -> None:
            if core is not self._core:
                return  # killed meanwhile
            self._works = False
            for _, answers in core.done(batch, found, self.world.now):
                self._answer_with(self.streams[-1], answers)
            self._work()

        self.world.later(self.work_s, done)


def foretold(text: np.ndarray, sampling: tuple[Any, ...], draft: DraftPlan) -> toys.Columns:
    return toys.toy_columns(text, SessionSampling(*sampling), draft.depth, draft.width, draft.calibrated)


@dataclass(frozen=True)
class Turn:
    """What happens, and after a while a step."""

    event: str = ""
    at: int = 0
    length: int = 5
    seed: int = 1
    temperature: float = 0.0
    tells: bool = True
    fault: str = NO_FAULT
    wait_s: float = 0.0
    parts: str = "ssss"
    depth: int = 3
    width: int = 2
    grows: int = 1
    due_s: float = np.inf


def turns(drawn: np.random.Generator, count: int) -> Iterator[Turn]:
    """Random ones: often nothing happens, so that there is something to disturb; faults last for some turns."""
    events = ["", "", "", "begin", "begin", "change", "change", "end", "preempt", "load", "cut"]
    faults = [*FAULTS, NO_FAULT, NO_FAULT, NO_FAULT]
    for _ in range(count):
        yield Turn(
            event=events[drawn.integers(len(events))],
            at=int(drawn.integers(SLOTS)),
            length=int(drawn.integers(1, 40)),
            seed=int(drawn.integers(3)),
            temperature=float(drawn.integers(2)),
            tells=bool(drawn.integers(2)),
            fault=faults[drawn.integers(len(faults))],
            wait_s=[0.0, 0.0, 0.01, 0.3, 2.0][drawn.integers(5)],
            parts="".join(drawn.choice(list("ssssspf-"), SLOTS)),
            depth=int(drawn.integers(5)),
            width=int(drawn.integers(1, 4)),
            grows=int(drawn.integers(3)),
            due_s=[np.inf, np.inf, 0.0, 0.02][drawn.integers(4)],
        )


@pytest.mark.parametrize("examples", longer_when_slow([12, 25]))
def test_whatever_happens_every_tree_is_of_its_rows_text(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.integers(1, 3), st.integers(0, 2**32))
    def check(services: int, seed: int) -> None:
        live(Requests(services, seed), seed)

    check()


@pytest.mark.parametrize("examples", longer_when_slow([6, 12]))
def test_nor_with_the_draft_services_own_sessions_order_and_batches(examples: int) -> None:
    chances = ChanceTable(np.full((2, 1, 1, 11), 0.5, np.float32), np.zeros((2, 10), np.float32))

    @settings(max_examples=examples)
    @given(st.integers(1, 3), st.integers(0, 2**32))
    def check(services: int, seed: int) -> None:
        live(Requests(services, seed, toys.VOCABULARY, make=CoreService, chances=chances, oracle=foretold), seed)

    check()


def live(requests: Requests, seed: int) -> None:
    errors: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("adaserve_jax.star")
    logger.addHandler(handler)
    try:
        requests.begin(Turn())
        for turn in turns(np.random.default_rng(seed), 60):
            if turn.event:
                getattr(requests, turn.event)(turn)
            requests.step(turn)
            requests.check_counts()
        requests.check_that_all_works_again()
    finally:
        logger.removeHandler(handler)
    assert errors == []
