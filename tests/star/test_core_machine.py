"""The protocol under faults: frames lost, doubled, swapped; streams and service lost; refused messages; little room.

After every step: what the KV holds is what the service takes it to hold, and room is held for sessions that exist.
Every tree must be that of the text, sampling and shape that were asked for under its epoch and round. In the end,
without faults, every Draft is answered within a few exchanges, and all room comes back.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adaserve_jax.star.messages import SessionSampling
from adaserve_jax.star.service.core import DraftCore, Replies
from adaserve_jax.star.service.dispatch import DraftBatch
from adaserve_jax.types import CandidateTrees
from tests.star.model_target import ModelSession, ModelTarget
from tests.star.toys import PLAIN, SAMPLED, VOCABULARY, ToyDevice, ToyPages, draft, hello, limits, opened

TIMES = {"level_s": {(1, 3): 0.01, (4, 3): 0.02}, "catchup_s": {4: 0.01, 16: 0.03}}
LONGEST = 40
SAMPLINGS = (PLAIN, SAMPLED)

pick = st.integers(0, 1000)
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
texts = st.lists(st.integers(0, 3), max_size=20)  # few kinds of tokens: beginnings are often the same


faults = st.sampled_from(["", "", "", "", "drop", "double", "swap"])


def refused_messages(session: int, epoch: int, at: int):
    """Messages of valid fields that no target should send, all of one session."""
    yield draft(session, epoch, at, 0, [])  # a tree that grows from nothing
    yield draft(session, epoch, at, 0, np.ones(2**16))
    yield opened(session, epoch, np.ones(10**5))
    yield opened(session, epoch, [VOCABULARY - 1, 2])  # another text under the same number


class DraftServiceMachine(RuleBasedStateMachine):
    @initialize(batching=st.booleans(), timed=st.booleans(), pages=st.integers(10, 30))
    def begin(self, batching: bool, timed: bool, pages: int) -> None:
        self.bounds = limits(max_context=LONGEST + 4, **(TIMES if timed else {}))
        self.batching, self.pages = batching, max(pages, -(-self.bounds.max_context // 4))
        self.now = 0.0
        self.targets = [ModelTarget("a"), ModelTarget("b")]
        self.start_service()
        for who, target in enumerate(self.targets):
            target.connect()
            self.deliver_up(who, "")

    def start_service(self) -> None:
        self.count()
        self.pool = ToyPages(self.pages)
        self.device = ToyDevice(self.pool, self.bounds)
        self.core = DraftCore(self.bounds, self.pool, batching=self.batching)
        self.flying: list[tuple[DraftBatch, CandidateTrees | None]] = []

    counters: Counter[str] | None = None

    def count(self) -> None:
        """What the service that ends has done."""
        if self.counters is not None and hasattr(self, "core"):
            counted = vars(self.core.stats)
            self.counters.update({name: value for name, value in counted.items() if isinstance(value, int)})
            self.counters.update({f"refused: {code}": count for code, count in self.core.stats.refused.items()})

    # ---- targets ----

    @rule(who=pick, text=texts, sampling=st.sampled_from(SAMPLINGS))
    def begin_session(self, who: int, text: list[int], sampling: SessionSampling) -> None:
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

    @rule(who=pick, which=pick, kept=pick, text=texts, is_told=st.booleans())
    def rewrite(self, who: int, which: int, kept: int, text: list[int], is_told: bool) -> None:
        """The text is another from somewhere on, and drawn otherwise: a new epoch, told now or with the next Draft."""
        session = self.session(who, which)
        if session is not None:
            session.text = [*session.text[: kept % (len(session.text) + 1)], *text][:LONGEST]
            session.sampling = SAMPLINGS[which % 2]
            session.renew()
            if is_told:
                self.targets[who % 2].up.append([session.open()])

    @rule(who=pick, which=pick)
    def end_session(self, who: int, which: int) -> None:
        session = self.session(who, which)
        if session is not None:
            self.targets[who % 2].end(session)

    @rule(who=pick, which=pick, what=pick)
    def say_what_is_refused(self, who: int, which: int, what: int) -> None:
        session = self.session(who, which)
        if session is not None:
            said = list(refused_messages(session.number, session.epoch, session.round))
            session.is_bad = True
            self.targets[who % 2].up.append([said[what % len(said)]])

    @rule(
        who=pick,
        which=pick,
        said=tokens,
        depth=st.integers(1, 4),
        width=st.integers(1, 3),
        up=faults,
        down=faults,
        is_new=st.booleans(),
        lands=st.booleans(),
    )
    def whole_round(
        self, who: int, which: int, said: list[int], up: str, down: str, is_new: bool, lands: bool, **shape
    ):
        """What usually happens, with one fault on each way at most: a Draft, a batch, its answers."""
        if is_new or not self.targets[who % 2].live:
            self.begin_session(who, [1, 2, 3, *said], SAMPLINGS[which % 2])
        self.speak(who, which, said, which % 4, due_s=math.inf, give_up_s=0.1, calibrated=True, **shape)
        self.deliver_up(who, up)
        if len(self.flying) < 2:
            self.take_off()
        if lands and self.flying:
            self.land(fails=False)
        self.deliver_down(who, down)

    # ---- the way ----

    @rule(who=pick, fault=faults)
    def deliver_up(self, who: int, fault: str) -> None:
        target = self.targets[who % 2]
        for frame in taken(target.up, fault):
            answers = self.core.receive(target.id, frame, self.now)
            if answers:
                target.down.append(answers)

    @rule(who=pick, fault=faults)
    def deliver_down(self, who: int, fault: str) -> None:
        target = self.targets[who % 2]
        for frame in taken(target.down, fault):
            target.hear(frame)

    @rule(who=pick)
    def lose_stream(self, who: int) -> None:
        target = self.targets[who % 2]
        self.core.disconnect(target.id, self.now)
        target.connect()

    @rule()
    def kill_service(self) -> None:
        self.start_service()
        for target in self.targets:
            target.connect()

    # ---- the service ----

    @precondition(lambda self: len(self.flying) < 2)
    @rule()
    def take_off(self) -> None:
        batch = self.core.next_batch(self.now)
        self.hand_out(self.core.given_up())
        if batch is not None:
            self.flying.append((batch, self.device.run(batch)))

    @precondition(lambda self: self.flying)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def land(self, fails: bool) -> None:
        batch, trees = self.flying.pop(0)
        if fails:
            for row in batch.rows:
                self.device.kv[row.key][row.start :] = [-1] * len(row.tokens)
        answers = self.core.failed(batch, self.now) if fails else self.core.done(batch, trees, self.now)
        self.hand_out(answers)

    def hand_out(self, answers: Replies) -> None:
        for target in self.targets:
            target.down += [frame for target_id, frame in answers if target_id == target.id]

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.5, 70.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.core.expire(self.now)

    # ---- what holds ----

    @invariant()
    def kv_is_what_the_service_takes_it_to_be(self) -> None:
        sessions = {session.key: session for session in self.core.sessions}
        flying = {row.key: row for batch, _ in self.flying for row in batch.rows}
        assert set(self.pool.held) <= set(sessions) | set(flying)
        for key, session in sessions.items():
            kv = self.device.kv.get(key, [])
            until = min(session.computed, flying[key].start) if key in flying else session.computed
            assert session.text[:until].tolist() == kv[:until]
            assert session.computed <= session.length
            assert session.running == (key in flying)

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.finish()
            self.count()

    def finish(self) -> None:
        while self.flying:
            self.land(fails=False)
        for target in self.targets:
            self.settle(target)
        self.leave()

    def settle(self, target: ModelTarget) -> None:
        """Without faults every live session gets a tree soon."""
        if not target.is_welcome:
            self.core.disconnect(target.id, self.now)
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
            if not self.flying:
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
        self.core.disconnect("a", self.now)
        self.now += 61.0
        self.core.expire(self.now)
        assert self.core.num_sessions == 0 and self.core.num_holding == 0
        assert self.pool.held == {} and self.device.kv == {}
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
        max_examples=25, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestDraftServiceLong(DraftServiceMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=150, deadline=None, suppress_health_check=list(HealthCheck)
    )


def random_walk(steps: int, seed: int) -> Counter[str]:
    """Rules drawn evenly, which reaches further than what hypothesis finds worth trying; counters of all services."""
    random, machine, reached = np.random.default_rng(seed), DraftServiceMachine(), Counter[str]()
    machine.counters = reached
    number = lambda most=1000: int(random.integers(most + 1))  # noqa: E731
    said = lambda most: random.integers(4, size=number(most)).tolist()  # noqa: E731
    one_of = lambda *values: values[number(len(values) - 1)]  # noqa: E731
    fault = lambda: one_of("", "", "", "", "", "drop", "double", "swap")  # noqa: E731
    shape = lambda: {"depth": number(4), "width": 1 + number(2)}  # noqa: E731
    due = lambda: {"due_s": one_of(-1.0, 0.02, math.inf), "give_up_s": one_of(0.0, 0.03, 0.1, math.inf)}  # noqa: E731
    fly_home = lambda: machine.land(number(9) == 0) if machine.flying else None  # noqa: E731
    often = [
        lambda: machine.begin_session(number(), said(20), SAMPLINGS[number(1)]),
        *[
            lambda: machine.speak(
                number(), number(), said(6), number(3), **shape(), calibrated=one_of(True, False), **due()
            )
        ]
        * 4,
        lambda: machine.whole_round(number(), number(), said(6), fault(), "", is_new=False, lands=True, **shape()),
        *[lambda: machine.deliver_up(number(), fault())] * 6,
        *[lambda: machine.deliver_down(number(), fault())] * 4,
        *[lambda: machine.take_off() if len(machine.flying) < number(2) else fly_home()] * 6,
        lambda: machine.pass_time(one_of(0.01, 0.05)),
    ]
    seldom = [
        *[lambda: machine.rewrite(number(), number(), number(), said(20), one_of(True, False))] * 3,
        lambda: machine.end_session(number(), number()),
        lambda: machine.say_what_is_refused(number(), number(), number()),
        lambda: machine.lose_stream(number()),
        machine.kill_service,
        lambda: machine.pass_time(70.0),
    ]
    machine.begin(batching=True, timed=True, pages=14)
    for step in range(steps):
        one_of(*(seldom if step % 15 == 0 else often))()
        machine.kv_is_what_the_service_takes_it_to_be()
        if step % 500 == 499:
            machine.teardown()
            machine.begin(batching=bool(number(3)), timed=bool(number(1)), pages=12 + number(12))
    machine.teardown()
    return reached


def test_a_random_walk_meets_every_case():
    reached = random_walk(6000, seed=1)
    assert reached.pop("refused: invalid") > 0
    assert {name for name, count in reached.items() if count == 0} == set(), reached


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_random_walks(seed: int):
    random_walk(20_000, seed)


def test_a_target_that_says_hello_for_another_is_refused():
    core = DraftCore(limits(), ToyPages())
    (refused,) = core.receive("a", [hello("b")], 0.0)
    assert refused.code == "invalid" and "target a" in refused.message
