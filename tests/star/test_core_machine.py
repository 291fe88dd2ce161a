"""The protocol under faults: frames lost, doubled, swapped; streams and service lost; nonsense; little room.

After every step: what the KV holds is what the service takes it to hold, and room is held for sessions that exist.
Every tree must be that of the text, sampling and shape that were asked for under its epoch and round. In the end,
without faults, every Draft is answered within a few exchanges, and all room comes back.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adaserve_jax.star.core import DraftCore
from adaserve_jax.star.dispatch import Batch
from adaserve_jax.star.session import Sampling
from tests.star.model_target import ModelSession, ModelTarget
from tests.star.toys import VOCABULARY, ToyDevice, ToyRoom, draft, hello, limits, opened

TIMES = {"level_s": {(1, 3): 0.01, (4, 3): 0.02}, "catchup_s": {4: 0.01, 16: 0.03}}
LONGEST = 40
SAMPLINGS = (Sampling(1, 0, 0.0, 0, 1.0, 0.0), Sampling(2**64 - 1, 3, 0.8, 20, 0.9, 0.05))

pick = st.integers(0, 1000)
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
texts = st.lists(st.integers(0, 3), max_size=20)  # few kinds of tokens: beginnings are often the same


def nonsense(session: int, epoch: int, at: int):
    """Messages that no target should send, all of one session."""
    good_open, good = opened(session, epoch, [1, 2]), draft(session, epoch, at, 0, [1])
    drafts = {
        "base": [-1, 2**31, 1.5, None, math.nan],
        "round": [-1, 2**63, math.nan, "x"],
        "epoch": [-3, 2**64, None],
        "depth": [-1, 5, 10**9, math.nan],
        "width": [0, -2, 4, None],
        "due_s": [math.nan, -math.inf, "soon", None],
        "give_up_s": [math.nan, -math.inf, None],
        "calibrated": [2, None],
        "tokens": [np.array([-1]), np.array([VOCABULARY]), np.array([1.5]), np.zeros((2, 2), np.int32), None, [1]],
    }
    opens = {
        "seed": [-1, 2**64, None],
        "choice": [-1, 2**31],
        "temperature": [-1.0, math.nan, math.inf],
        "top_k": [-1, 1.5],
        "top_p": [0.0, 1.1, math.nan],
        "min_p": [-0.1, math.nan, 2.0],
        "epoch": [-1, 2**64],
        "tokens": [np.array([2**40]), np.array([[1]]), np.full(10**5, 1, np.int32)],
    }
    yield from (replace(good, **{name: value}) for name, values in drafts.items() for value in values)
    yield from (replace(good_open, **{name: value}) for name, values in opens.items() for value in values)
    yield replace(good, tokens=np.ones(2**16, np.int32))


class DraftServiceMachine(RuleBasedStateMachine):
    @initialize(batching=st.booleans(), timed=st.booleans(), pages=st.integers(10, 30))
    def begin(self, batching: bool, timed: bool, pages: int) -> None:
        self.bounds = limits(max_context=LONGEST + 4, **(TIMES if timed else {}))
        self.batching, self.pages = batching, max(pages, -(-self.bounds.max_context // 4))
        self.now = 0.0
        self.targets = [ModelTarget("a"), ModelTarget("b")]
        self.trees = 0
        self.start_service()
        for target in self.targets:
            target.connect()

    def start_service(self) -> None:
        self.room = ToyRoom(self.pages)
        self.device = ToyDevice(self.room, self.bounds)
        self.core = DraftCore(self.bounds, self.room, batching=self.batching)
        self.flying: tuple[Batch, object] | None = None

    # ---- targets ----

    @rule(who=pick, text=texts, sampling=st.sampled_from(SAMPLINGS))
    def begin_session(self, who: int, text: list[int], sampling: Sampling) -> None:
        target = self.targets[who % 2]
        if len(target.live) < 4:
            target.begin(text, sampling)

    @rule(
        who=pick,
        which=pick,
        said=tokens,
        overlap=st.integers(0, 3),
        depth=st.integers(0, 4),
        width=st.integers(1, 3),
        calibrated=st.booleans(),
        due_s=st.sampled_from([-1.0, 0.02, 0.1, math.inf]),
        give_up_s=st.sampled_from([0.0, 0.03, 0.1, 1.0, math.inf]),
    )
    def speak(self, who: int, which: int, said: list[int], overlap: int, **shape) -> None:
        session = self.session(who, which)
        if session is not None and len(session.text) + len(said) <= LONGEST:
            self.targets[who % 2].up.append(session.speak(said, overlap, **shape))

    @rule(who=pick, which=pick, kept=pick, text=texts)
    def rewrite(self, who: int, which: int, kept: int, text: list[int]) -> None:
        """The text is another from somewhere on: a new epoch."""
        session = self.session(who, which)
        if session is not None:
            session.text = [*session.text[: kept % (len(session.text) + 1)], *text][:LONGEST]
            session.renew()

    @rule(who=pick, which=pick)
    def end_session(self, who: int, which: int) -> None:
        session = self.session(who, which)
        if session is not None:
            self.targets[who % 2].end(session)

    @rule(who=pick, which=pick, what=pick)
    def say_nonsense(self, who: int, which: int, what: int) -> None:
        session = self.session(who, which)
        if session is not None:
            said = list(nonsense(session.number, session.epoch, session.round))
            session.is_bad = True
            self.targets[who % 2].up.append([said[what % len(said)]])

    @rule(who=pick, what=st.sampled_from([-1, 0, 2**64, None, "x"]))
    def say_nonsense_of_no_session(self, who: int, what: object) -> None:
        answers = self.core.receive(self.targets[who % 2].id, [replace(draft(1, 0, 0, 0, [1]), session=what)], self.now)
        assert all(refused.message == "say Hello first" for refused in answers)

    # ---- the way ----

    @rule(who=pick, fault=st.sampled_from(["", "", "", "drop", "double", "swap"]))
    def deliver_up(self, who: int, fault: str) -> None:
        target = self.targets[who % 2]
        for frame in taken(target.up, fault):
            answers = self.core.receive(target.id, frame, self.now)
            if answers:
                target.down.append(answers)

    @rule(who=pick, fault=st.sampled_from(["", "", "", "drop", "double", "swap"]))
    def deliver_down(self, who: int, fault: str) -> None:
        target = self.targets[who % 2]
        for frame in taken(target.down, fault):
            target.hear(frame)

    @rule(who=pick)
    def lose_stream(self, who: int) -> None:
        target = self.targets[who % 2]
        self.core.gone(target.id, self.now)
        target.connect()

    @rule()
    def kill_service(self) -> None:
        self.start_service()
        for target in self.targets:
            target.connect()

    # ---- the service ----

    @precondition(lambda self: self.flying is None)
    @rule()
    def take_off(self) -> None:
        batch = self.core.next_batch(self.now)
        if batch is not None:
            self.flying = batch, self.device.run(batch)

    @precondition(lambda self: self.flying is not None)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def land(self, fails: bool) -> None:
        assert self.flying is not None
        (batch, trees), self.flying = self.flying, None
        if fails:
            for row in batch.rows:
                self.device.kv[row.key][row.start :] = [-1] * len(row.tokens)
        answers = self.core.failed(batch, self.now) if fails else self.core.done(batch, trees, self.now)
        for target in self.targets:
            target.down += [frame for target_id, frame in answers if target_id == target.id]

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.5, 70.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.core.expire(self.now)

    # ---- what holds ----

    @invariant()
    def kv_is_what_the_service_takes_it_to_be(self) -> None:
        sessions = {s.key: s for t in self.core._registry._targets.values() for s in t.sessions.values()}
        flying = {row.key: row for row in self.flying[0].rows} if self.flying else {}
        assert set(self.room.held) <= set(sessions) | set(flying)
        for key, session in sessions.items():
            kv = self.device.kv.get(key, [])
            until = min(session.computed, flying[key].start) if key in flying else session.computed
            assert session.text[:until].tolist() == kv[:until]
            assert session.computed <= session.length
            assert session.flying == (key in flying)
        assert {session.key for session in self.core._flying.values()} == set(flying)

    def teardown(self) -> None:
        if hasattr(self, "core"):
            if self.flying is not None:
                self.land(fails=False)
            for target in self.targets:
                self.settle(target)
            self.leave()

    def settle(self, target: ModelTarget) -> None:
        """Without faults every live session gets a tree soon."""
        if not target.is_welcome:
            self.core.gone(target.id, self.now)
            target.connect()
        self.exchange()
        live = [session for session in target.live if not session.is_bad and session.text]
        for _ in range(3):
            waiting = [session for session in live if not session.answered_last]
            for session in waiting:
                target.up.append(session.speak([], 0, depth=2, width=2, give_up_s=math.inf))
            self.exchange()
        assert all(session.answered_last for session in live if not session.is_over)
        assert not any(session.is_over for session in live)

    def exchange(self) -> None:
        """Everything that was said is heard, everything that can run has run."""
        for target in self.targets:
            while target.up:
                self.deliver_up(self.targets.index(target), "")
        for _ in range(200):
            self.take_off()
            if self.flying is None:
                break
            self.land(fails=False)
        assert self.core.num_waiting == 0
        for target in self.targets:
            while target.down:
                self.deliver_down(self.targets.index(target), "")

    def leave(self) -> None:
        """Half of them say so, the others just fall silent: all room comes back."""
        for session in self.targets[0].live:
            self.targets[0].end(session)
        self.exchange()
        self.core.gone("a", self.now)
        self.now += 61.0
        self.core.expire(self.now)
        assert self.core.num_sessions == 0 and self.core.num_holding == 0
        assert self.room.held == {} and self.device.kv == {}
        assert self.core.next_batch(self.now) is None

    def session(self, who: int, which: int) -> ModelSession | None:
        live = self.targets[who % 2].live
        return live[which % len(live)] if live else None


def taken(queue: list, fault: str) -> list:
    """The frames that arrive now, taken from the front of a queue."""
    if fault == "swap" and len(queue) > 1:
        queue[0], queue[1] = queue[1], queue[0]
    if not queue:
        return []
    frame = queue.pop(0) if fault != "double" else queue[0]
    return [] if fault == "drop" else [frame]


class TestDraftService(DraftServiceMachine.TestCase):
    settings = settings(
        max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestDraftServiceLong(DraftServiceMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=150, deadline=None, suppress_health_check=list(HealthCheck)
    )


def test_a_target_that_says_hello_for_another_is_refused():
    core = DraftCore(limits(), ToyRoom())
    (refused,) = core.receive("a", [hello("b")], 0.0)
    assert refused.code == "invalid" and "target a" in refused.message
