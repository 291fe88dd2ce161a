"""The prediction of waits: hand-computed, and against a queue with slots that is simulated on a virtual clock."""

from __future__ import annotations

import contextlib
import heapq
import random
from dataclasses import dataclass, field

import pytest

from adaserve_jax.engine.client import EngineStats
from adaserve_jax.errors import OverloadedError, QueueFullError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.scheduler.queue import deadline_key_s
from adaserve_jax.server.admission import REFUSE_AT, TTFT_SHARE, QueueAdmission, Reservation, Slots
from adaserve_jax.server.auth import Account
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.stats import StepStats
from adaserve_jax.types import SLO

SLOTS = 4
LIMIT_S = 5.0


def ended(tokens: int, first_s: float = 0.0) -> RequestMetrics:
    return RequestMetrics(
        arrival_s=0.0, first_scheduled_s=10.0, first_token_s=10.0 + first_s, last_token_s=99.0, output_tokens=tokens
    )


def known(max_wait_s: float = 10.0, token_s: float = 0.1) -> QueueAdmission:
    """An admission in front of SLOTS slots in use, each of which brings a token in `token_s`."""
    admission = QueueAdmission(max_wait_s, clock=lambda: 0.0)
    admission.observe_engine(SLOTS, 1, SLOTS)
    admission.observe_tokens(10 * token_s, 10)
    return admission


def test_the_queue_is_played_forward() -> None:
    admission, slots = known(), Slots(99)
    assert admission.wait_s(slots, 0.0, 50) == 0.0  # all slots are free
    assert admission.wait_s(slots, 0.0, 50, count=3 * SLOTS) == 0.0  # nobody else makes them wait
    running = slots.reserve(Account(), SLOTS, 0.0, 20)
    for choice in range(SLOTS):
        running.received(choice, 2 * choice)  # which leaves 20, 18, 16 and 14 tokens
    assert admission.wait_s(slots, 0.0, 50) == pytest.approx(1.4)
    assert admission.wait_s(slots, 0.0, 50, count=3) == pytest.approx(1.8)
    assert admission.wait_s(slots, 0.0, 50, count=5) == pytest.approx(1.4)  # the fifth would wait for the first
    slots.reserve(Account(), 1, 5.0, 30)
    assert admission.wait_s(slots, 6.0, 50) == pytest.approx(1.6)  # the one ahead takes the slot of the first
    assert admission.wait_s(slots, 4.0, 50) == pytest.approx(1.4)  # which this one does instead
    running.release([3])
    assert admission.wait_s(slots, 4.0, 50) == 0.0  # a slot is free
    assert admission.wait_s(slots, 6.0, 50) == pytest.approx(1.6)
    assert QueueAdmission(9.0).wait_s(slots, 6.0, 50) == 0.0  # nothing is known


def test_texts_that_end_early_are_expected_to() -> None:
    admission = known()
    assert admission.expected_tokens(64) == 64
    for _ in range(9):
        admission.learn(ended(8), stopped=False)
    assert admission.expected_tokens(64) == 64  # short because little was asked for
    for _ in range(400):
        admission.learn(ended(20), stopped=True)
    assert admission.expected_tokens(10_000) == pytest.approx(20, rel=0.01)
    assert 9 < admission.expected_tokens(14) < 14
    admission.learn(RequestMetrics(arrival_s=0.0), stopped=True)  # never began


def test_the_speed_is_that_of_the_last_seconds() -> None:
    now = [0.0]
    admission, slots = QueueAdmission(9.0, clock=lambda: now[0]), Slots(99)
    admission.observe_engine(1, 1, 1)
    slots.reserve(Account(), 1, 0.0, 10).received(0, 0)
    for token_s in (0.1, 0.5):
        for _ in range(200):
            now[0] += token_s
            admission.observe_tokens(token_s, 1)
        assert admission.wait_s(slots, 0.0, 1) == pytest.approx(10 * token_s, rel=0.01)


def test_slots_that_pages_do_not_allow_are_unlearned_and_a_dip_is_not_believed() -> None:
    admission, slots = known(token_s=1.0), Slots(99)
    running = slots.reserve(Account(), SLOTS, 0.0, 1)
    for choice in range(SLOTS):
        running.received(choice, 0)
    admission.observe_engine(0, 8, SLOTS)  # between two steps
    assert admission.wait_s(slots, 0.0, 1) == pytest.approx(1.0)
    running.release([0, 1])
    assert admission.wait_s(slots, 0.0, 1) == 0.0
    for _ in range(300):
        admission.observe_engine(2, 6, SLOTS)
    assert admission.wait_s(slots, 0.0, 1) == pytest.approx(1.0)  # two slots are all there are
    admission.observe_engine(4, 0, SLOTS)  # four do run
    assert admission.wait_s(slots, 0.0, 1) == 0.0


def test_who_began_waits_no_longer_and_room_is_given_back_once() -> None:
    slots = Slots(8)
    late, early = slots.reserve(Account(), 3, 20.0, 1), slots.reserve(Account(), 2, 10.0, 1)
    assert [place.deadline_key_s for place in slots.waiting] == [10.0, 10.0, 20.0, 20.0, 20.0]
    late.received(0, 1)
    late.received(0, 1)
    assert (len(slots.waiting), slots.used) == (4, 5)
    late.release([0])
    late.received(0, 1)  # too late
    early.release()  # refused before it began
    early.release()
    assert [place.deadline_key_s for place in slots.waiting] == [20.0, 20.0] and slots.used == 2
    late.release()
    assert slots.used == 0
    with pytest.raises(QueueFullError, match="9 choices were asked for, 0 are in flight and at most 8 may be"):
        slots.reserve(Account(), 9, 0.0, 1)


def test_a_request_is_refused_when_its_turn_comes_too_late() -> None:
    admission = known(3.0)
    admission.learn(ended(9, first_s=0.1), stopped=True)
    admission.check(3.0 * REFUSE_AT, None)
    with pytest.raises(OverloadedError, match=r"would wait 7 s for its turn, longer than the 6 s") as caught:
        admission.check(7.0, None)
    assert caught.value.code == "overloaded" and caught.value.retry_after_s == pytest.approx(1.0)
    allowed = TTFT_SHARE * 1.0 - 0.1
    admission.check(allowed - 0.01, 1.0)
    with pytest.raises(OverloadedError, match="its TTFT target allows") as caught:
        admission.check(allowed + 0.2, 1.0)
    assert caught.value.retry_after_s == pytest.approx(0.2)
    admission.check(2.9, 0.05)  # the first token alone takes 0.1 s: out of reach, so that max_wait_s alone counts
    with pytest.raises(OverloadedError, match=r"longer than the 6 s that this server lets"):
        admission.check(7.0, 0.05)
    admission.check(0.0, 0.01)  # on a free server even a target that will be missed is served
    QueueAdmission(0.0).check(1e9, 0.01)


@dataclass(order=True)
class Waiting:
    due_s: float
    lot: float
    arrival_s: float = field(compare=False)
    tokens: int = field(compare=False)
    room: Reservation = field(compare=False)
    refused: bool = field(compare=False)


@dataclass
class Engine:
    """SLOTS slots that each bring a token per step, and a queue in the order of due times. The step takes `step_s`.

    A choice that waited LIMIT_S ends. What admission refuses is queued all the same, outside of its sight and behind
    what it admitted, to see how long it would have waited; it takes a slot without holding it.
    """

    seed: int
    step_s: float = 0.01
    now: float = 0.0
    waits: list[float] = field(default_factory=list)
    late: int = 0
    refused_waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admission = QueueAdmission(LIMIT_S, clock=lambda: self.now)
        self.slots = Slots(10**6)
        self.draws = random.Random(self.seed)
        self.queue: list[Waiting] = []
        self.running: list[list] = []  # tokens left, room

    def arrive(self, max_tokens: int, tokens: int, ttft_s: float | None = None) -> bool:
        """Return whether a request of `max_tokens`, which will end after `tokens`, is admitted."""
        due = deadline_key_s(self.now, 0, ttft_s)
        self.admission.observe_engine(len(self.running), len(self.queue), SLOTS)
        wait_s = self.admission.wait_s(self.slots, due, max_tokens)
        try:
            self.admission.check(wait_s, ttft_s)
        except OverloadedError:
            heapq.heappush(
                self.queue,
                Waiting(due, self.draws.random(), self.now, tokens, Slots(1).reserve(Account(), 1, due, tokens), True),
            )
            return False
        room = self.slots.reserve(Account(), 1, due, max_tokens)
        heapq.heappush(self.queue, Waiting(due, self.draws.random(), self.now, tokens, room, False))
        return True

    def step(self) -> None:
        for each in [each for each in self.queue if not each.refused and self.now - each.arrival_s > LIMIT_S]:
            self.queue.remove(each)
            heapq.heapify(self.queue)
            each.room.release()
            self.late += 1
        while self.queue and len(self.running) < SLOTS:
            each = heapq.heappop(self.queue)
            if each.refused:
                self.refused_waits.append(self.now - each.arrival_s)
                continue
            self.waits.append(self.now - each.arrival_s)
            self.running.append([each.tokens, each.tokens, each.room])
        self.now += self.step_s
        for row in list(self.running):
            row[0] -= 1
            row[2].received(0, 1)
            self.admission.observe_tokens(self.step_s, 1)
            if not row[0]:
                self.running.remove(row)
                row[2].release()
                self.admission.learn(ended(row[1]), stopped=False)

    def drain(self) -> None:
        while self.queue or self.running:
            self.step()


@pytest.mark.parametrize(("first", "then"), [(8, 64), (64, 8), (8, 8), (200, 3)])
def test_bursts_of_short_and_long_texts(first: int, then: int) -> None:
    """300 of one length, then 300 of another: nobody admitted waits past the limit, and nobody is refused who would
    have waited less than half of it."""
    engine = Engine(0)
    for tokens in (first, then):
        for _ in range(300):
            engine.arrive(tokens, tokens)
        for _ in range(100):
            engine.step()
    engine.drain()
    assert len(engine.waits) + engine.late + len(engine.refused_waits) == 600
    assert max(engine.waits) <= LIMIT_S + engine.step_s
    assert min(engine.refused_waits, default=LIMIT_S) >= LIMIT_S / 2


def test_an_engine_that_becomes_slow() -> None:
    """Ten times as slow from one step to the next: whom it cannot serve in time it tells so, and soon at once."""
    engine, admitted = Engine(1), []
    while engine.now < 60.0:
        engine.step_s = 0.01 if engine.now < 20.0 else 0.1
        while len(admitted) * 0.05 <= engine.now:
            admitted.append(engine.arrive(16, 16))
        engine.step()
    engine.drain()
    assert all(admitted[:400]) and engine.late and not all(admitted[440:])
    assert engine.late < 0.3 * len(admitted)
    assert max(engine.waits) <= LIMIT_S + engine.step_s


def test_at_three_times_the_capacity_the_admitted_begin_in_time() -> None:
    """Half carry a TTFT target of 4 s; they go before the others. Texts of 40 tokens on average end when they like."""
    engine, offered, refused = Engine(2), 0, 0
    for _ in range(10_000):
        while engine.draws.random() < 0.23:  # 0.3 in a step of SLOTS tokens
            tokens = 1 + int(engine.draws.expovariate(1 / 39))
            offered += 1
            refused += not engine.arrive(400, tokens, 4.0 if offered % 2 else None)
        engine.step()
    assert max(engine.waits) <= LIMIT_S + engine.step_s
    assert 0.6 < (refused + engine.late) / offered < 0.72  # two thirds cannot be served


def test_a_full_server_says_429_and_when_to_come_again(start_server) -> None:
    with start_server(ServerSettings(max_queue_wait=2.0)) as server:
        engine = server.engine
        engine.stats = lambda: EngineStats(StepStats(running=64, waiting=9))
        server.state.admission.observe_tokens(1.0, 1)
        held = server.state.slots.reserve(Account(), 64 + 9, 0.0, 10)
        for choice in range(64):
            held.received(choice, 0)
        refused = server.post(prompt="x", slo_class="interactive")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "6")
        assert refused.json()["error"]["code"] == "overloaded"
        text = server.http.get("/metrics").text
        assert 'adaserve_slo_requests_total{class="interactive",metric="tpot",outcome="rejected"} 1.0' in text
        held.release(range(60))
        assert server.post(prompt="x").status_code == 200
        assert engine.submitted[-1].max_wait_s == 2.0
        held.release()
        assert server.post(prompt="x", slo_ttft_ms=1).status_code == 200


def test_of_a_list_of_prompts_the_first_alone_must_begin_in_time(start_server) -> None:
    """The others wait for their turn, as the choices of one prompt do: the error of any of them would end them all."""
    with start_server(ServerSettings(max_queue_wait=2.0)) as server:
        for prompt in (["a", "b", "c"], "d"):
            assert server.post(prompt=prompt, max_queue_ms=1000, max_tokens=1).status_code == 200
        told = {bytes(r.prompt_ids): (r.max_wait_s, r.max_queue_s) for r in server.engine.submitted}
    assert told == {b"a": (2.0, 1.0), b"b": (0.0, 0.0), b"c": (0.0, 0.0), b"d": (2.0, 1.0)}


@pytest.mark.parametrize("preparing", [30, 0])
def test_requests_that_have_not_reached_the_scheduler_say_nothing_of_its_room(start_server, preparing: int) -> None:
    """Thirty that wait in the scheduler while slots are free mean that pages are short; thirty grammars do not."""
    with start_server(ServerSettings(max_queue_wait=2.0)) as server:
        server.engine.stats = lambda: EngineStats(StepStats(running=30, waiting=30, preparing=preparing))
        server.state.admission.observe_tokens(1.0, 1)
        held = server.state.slots.reserve(Account(), 30, 0.0, 10)
        for choice in range(30):
            held.received(choice, 0)

        def admit() -> None:
            server.state.admit(Account(), 10, 8, SLO(), 0).release()

        for _ in range(100):
            with contextlib.suppress(OverloadedError):
                admit()
        with contextlib.nullcontext() if preparing else pytest.raises(OverloadedError, match="would wait"):
            admit()
        held.release()


def test_a_deadline_comes_before_a_request_without_targets(start_server) -> None:
    with start_server(ServerSettings()) as server:
        state = server.state
        patient = state.admit(Account(), 1, 8, SLO(), 0)
        urgent = state.admit(Account(), 1, 8, SLO(e2e_ms=500), 0)
        dues = [place.deadline_key_s for place in state.slots.waiting]
        urgent.release()
        assert [place.deadline_key_s for place in state.slots.waiting] == dues[1:], "the deadline stood first"
        patient.release()


def test_a_wait_past_the_deadline_or_far_beyond_the_longest_wait_is_refused() -> None:
    """The first token takes 0.1 s: a deadline of 1 s leaves 0.9 s to wait. A longest wait of 0.4 s counts twice."""
    admission = known(max_wait_s=10.0)
    admission.learn(RequestMetrics(0.0, first_scheduled_s=1.0, first_token_s=1.1, last_token_s=2.0), stopped=False)
    admission.check(0.89, None, 1.0)
    with pytest.raises(OverloadedError, match=r"longer than the 0\.9 s that its deadline allows"):
        admission.check(0.91, None, 1.0)
    admission.check(0.79, None, 1.0, 0.4)
    with pytest.raises(OverloadedError, match=r"longer than the 0\.8 s that its max_queue_ms allows"):
        admission.check(0.81, None, 1.0, 0.4)
    admission.check(5.0, None, 0.05)  # a deadline that the empty server would miss too does not count
