"""The prediction of waits: hand-computed, and against a queue with slots that is simulated on a virtual clock."""

from __future__ import annotations

import heapq
import random

import pytest

from adaserve_jax.engine.client import EngineStats
from adaserve_jax.errors import OverloadedError, QueueFullError
from adaserve_jax.scheduler.queue import due_s
from adaserve_jax.server.admission import (
    ARRIVALS_S,
    BURST_S,
    TTFT_SHARE,
    QueueAdmission,
    RecentArrivals,
    Reservation,
    Slots,
)
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.stats import StepStats
from adaserve_jax.types import RequestMetrics

SLOTS = 4


def held(seconds: float, first_s: float = 0.0) -> RequestMetrics:
    """Of a choice that held its slot so long."""
    return RequestMetrics(
        arrival_s=0.0, first_scheduled_s=10.0, first_token_s=10.0 + first_s, last_token_s=10.0 + seconds
    )


def test_the_wait_is_littles_law():
    admission = QueueAdmission(10.0)
    admission.observe_engine(4, 96, SLOTS)
    assert admission.wait_s(96, 4, False) == 0.0  # nothing has ended yet
    admission.learn(held(2.0))
    assert admission.wait_s(0, 3, False) == 0.0  # a slot is free
    assert admission.wait_s(0, 4, False) == pytest.approx(2.0 / 4)  # one must end; four end every 2 s
    assert admission.wait_s(9, 4, False) == pytest.approx(10 * 2.0 / 4)
    assert admission.wait_s(1, 2, False) == 0.0  # one of two free slots goes to the one ahead
    admission.learn(held(4.0))
    assert admission.hold_s == pytest.approx(0.95 * 2.0 + 0.05 * 4.0)
    admission.learn(RequestMetrics(arrival_s=0.0))  # never began
    assert admission.hold_s == pytest.approx(2.1)


def test_predictions_are_corrected_by_what_became_of_them():
    admission = QueueAdmission(10.0)
    admission.learn(held(2.0))
    admission.observe_engine(4, 1, SLOTS)
    for _ in range(400):
        admission.correct(admission.wait_s(9, 4, False), 15.0, False)
    admission.correct(0.0, 3.0, False)
    assert admission.wait_s(9, 4, False) == pytest.approx(15.0, rel=0.01)  # without what was seen: 5 s
    assert admission.wait_s(9, 4, True) == pytest.approx(5.0)
    admission.correct(1.0, 1000.0, True)
    assert admission.bias[True] == pytest.approx(4.0**0.05)


def test_those_who_will_overtake_are_waited_for():
    admission = QueueAdmission(10.0)
    admission.learn(held(2.0))
    admission.observe_engine(4, 1, SLOTS)  # two end per second
    assert admission.wait_s(3, 4, False, (1.0, 4.0)) == pytest.approx(4 / (2.0 - 1.0))
    assert admission.wait_s(7, 4, False, (1.0, 4.0)) == pytest.approx((8 + 1.0 * 4.0) / 2.0)  # then they come no more
    assert admission.wait_s(0, 4, False, (3.0, 4.0)) == pytest.approx((1 + 3.0 * 4.0) / 2.0)  # they alone are too many
    assert admission.wait_s(0, 3, False, (3.0, 4.0)) == 0.0  # a slot is free: nobody overtakes


def test_arrivals_tell_of_those_to_come():
    arrivals = RecentArrivals()
    assert arrivals.overtaking(0.0, 10.0) == (0.0, 0.0)
    arrivals.add(3.0, 5.0, 1)
    arrivals.add(4.0, 7.0, 3)
    arrivals.add(5.0, 15.0, 9)
    assert arrivals.overtaking(6.0, 16.0) == (pytest.approx(4 / ARRIVALS_S), pytest.approx((8.0 + 3 * 7.0) / 4))
    assert arrivals.overtaking(4.5, 14.5) == (pytest.approx(3 / BURST_S), pytest.approx((8.0 + 3 * 7.0) / 4))
    assert arrivals.overtaking(6.0, 8.0) == (0.0, 0.0)  # the equally patient come behind
    assert arrivals.overtaking(4.0 + ARRIVALS_S, 14.0 + ARRIVALS_S) == (
        pytest.approx(3 / ARRIVALS_S),
        pytest.approx(7.0),
    )


def test_slots_that_pages_do_not_allow_are_unlearned_and_a_dip_is_not_believed():
    admission = QueueAdmission(10.0)
    admission.learn(held(1.0))
    admission.observe_engine(0, 8, SLOTS)  # between two steps: hardly anything
    assert admission.wait_s(8, 0, True) == pytest.approx((9 - 3.92) / 3.92)
    for _ in range(300):
        admission.observe_engine(2, 6, SLOTS)
    assert admission.wait_s(6, 2, True) == pytest.approx((9 - 2) / 2, rel=0.02)
    admission.observe_engine(4, 0, SLOTS)  # four do run
    assert admission.wait_s(0, 4, False) == pytest.approx(1 / 4)


def test_who_is_due_sooner_comes_first_and_who_began_waits_no_longer():
    slots = Slots(8)
    late, early = slots.reserve(3, 20.0), slots.reserve(2, 10.0)
    assert (slots.ahead(5.0), slots.ahead(10.0), slots.ahead(30.0), slots.used) == (0, 2, 5, 5)
    late.begin()
    assert (slots.ahead(30.0), slots.used) == (4, 5)
    late.release(1)
    assert (slots.ahead(30.0), slots.used) == (4, 4)
    early.release()  # refused before it began
    assert slots.waiting == [20.0, 20.0] and slots.used == 2
    for _ in range(3):
        late.begin()
    assert slots.waiting == [] and slots.used == 2
    late.release()
    late.release()
    assert slots.used == 0
    with pytest.raises(QueueFullError, match="9 choices were asked for, 0 are in flight and at most 8 may be"):
        slots.reserve(9)


def test_a_request_is_refused_when_its_turn_comes_too_late():
    admission = QueueAdmission(3.0)
    admission.learn(held(2.0, first_s=0.1))
    admission.check(3.0, None)
    with pytest.raises(OverloadedError, match=r"would wait 3\.5 s for its turn, longer than the 3 s") as caught:
        admission.check(3.5, None)
    assert caught.value.code == "overloaded" and caught.value.retry_after_s == pytest.approx(0.5)
    allowed = TTFT_SHARE * 1.0 - 0.1
    admission.check(allowed - 0.01, 1.0)
    with pytest.raises(OverloadedError, match="its TTFT target allows") as caught:
        admission.check(allowed + 0.2, 1.0)
    assert caught.value.retry_after_s == pytest.approx(0.2)
    admission.check(2.9, 100.0)
    admission.check(2.9, 0.05)  # the first token alone takes 0.1 s: out of reach, so that max_wait_s alone counts
    with pytest.raises(OverloadedError, match="longer than the 3 s that this server lets"):
        admission.check(3.5, 0.05)
    admission.check(0.0, 0.01)  # on a free server even a target that will be missed is served
    QueueAdmission(0.0).check(1e9, 0.01)


class Queue:
    """SLOTS servers and a queue in the order of due times, with `admission` before it, on a clock of its own."""

    def __init__(self, admission: QueueAdmission, seed: int):
        self.admission = admission
        self.slots = Slots(10**6)
        self.draws = random.Random(seed)
        self.now = 0.0
        self.waiting: list[tuple[float, float, float, float | None, Reservation]] = []  # due, lot, arrival, target
        self.running: list[tuple[float, float, Reservation]] = []  # end, begin
        self.waits: list[tuple[float, float | None]] = []

    def advance(self, until: float) -> None:
        while self.running and self.running[0][0] <= until:
            self.now, begin, room = heapq.heappop(self.running)
            room.release()
            self.admission.learn(held(self.now - begin))
            self.fill()
        self.now = until

    def fill(self) -> None:
        while self.waiting and len(self.running) < SLOTS:
            _, _, arrival, target, room = heapq.heappop(self.waiting)
            room.begin()
            self.admission.correct(room.predicted_s, self.now - arrival, target is not None)
            self.waits.append((self.now - arrival, target))
            heapq.heappush(self.running, (self.now + self.draws.expovariate(1.0), self.now, room))

    def arrive(self, target: float | None) -> OverloadedError | None:
        due = due_s(self.now, 0, target)
        self.admission.observe_engine(len(self.running), len(self.waiting), SLOTS)
        overtaking = self.admission.arrivals.overtaking(self.now, due)
        predicted = self.admission.wait_s(self.slots.ahead(due), len(self.running), target is not None, overtaking)
        try:
            self.admission.check(predicted, target)
        except OverloadedError as error:
            return error
        room = self.slots.reserve(1, due, predicted)
        self.admission.arrivals.add(self.now, due, 1)
        heapq.heappush(self.waiting, (due, self.draws.random(), self.now, target, room))
        self.fill()
        return None


@pytest.mark.parametrize("seed", range(3))
def test_at_three_times_the_capacity_the_admitted_begin_in_time(seed):
    """Half carry a TTFT target of 4 s; they go before the others, of whom few are let in."""
    queue = Queue(QueueAdmission(5.0), seed)
    offered, refused = 3 * SLOTS * 500, {4.0: 0, None: 0}
    for i in range(offered):
        queue.advance(queue.now + queue.draws.expovariate(3.0 * SLOTS))
        target = (4.0, None)[i % 2]
        refused[target] += queue.arrive(target) is not None
    settled = queue.waits[len(queue.waits) // 5 :]
    targeted = [wait for wait, target in settled if target is not None]
    assert sum(wait > 4.0 for wait in targeted) <= 0.02 * len(targeted)
    assert len(targeted) > 0.25 * len(settled)
    assert max(wait for wait, target in queue.waits if target is None) < 12.0  # 5 s were allowed them, 10 their due
    assert 0.6 < sum(refused.values()) / offered < 0.72  # two thirds cannot be served


def test_who_comes_again_after_the_time_told_is_let_in():
    queue = Queue(QueueAdmission(5.0), 1)
    queue.admission.learn(held(1.0))
    told = next(error for _ in range(1000) if (error := queue.arrive(None)) is not None)
    queue.advance(queue.now + told.retry_after_s + 1.0)
    assert queue.arrive(None) is None


def test_a_full_server_says_429_and_when_to_come_again(start_server):
    with start_server(ServerSettings(max_queue_wait=2.0)) as server:
        server.state.admission.learn(held(64.0))  # 64 slots: one is free every second
        steps = StepStats(running=64, waiting=9)
        server.engine.stats = lambda: EngineStats(steps)
        server.state.slots.used, server.state.slots.waiting = 64 + 9, [0.0] * 9
        refused = server.post(prompt="x", slo_class="interactive")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "8")
        assert refused.json()["error"]["code"] == "overloaded"
        text = server.http.get("/metrics").text
        assert 'adaserve_slo_requests_total{class="interactive",metric="tpot",outcome="rejected"} 1.0' in text
        server.state.slots.used, server.state.slots.waiting = 65, [0.0]
        assert server.post(prompt="x").status_code == 200
        assert (
            server.post(prompt="x", n=2).status_code == 429
        )  # the second would begin after the one ahead and the first
        assert server.post(prompt="x", slo_ttft_ms=3000).status_code == 429
        server.state.slots.used, server.state.slots.waiting = 0, []
        assert server.post(prompt="x", slo_ttft_ms=1).status_code == 200
