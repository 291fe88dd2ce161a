"""Nobody waits for ever: the bounds that docs/architecture/scheduler.md states, under more load than can be served.

R slots, C most tokens of a request, D = 2 R C steps: within D steps without a new admission all that run, and all that
were preempted, have ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from adaserve_jax.scheduler import planner
from adaserve_jax.scheduler.batch import Batch
from adaserve_jax.scheduler.queue import PROMOTION_PERIOD
from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.types import SamplingParams, Sequence, StepPlan
from tests.scheduler.harness import VOCAB, Run, limits_of, request_of

INFEASIBLE_S = 1e-4


@dataclass
class Seen:
    """What a request found when it came, and how it went on. Steps and admissions are counted over the whole run."""

    waiting_before: int
    admissions_before: int
    admissions: int = 0
    admitted_step: int | None = None
    first_token_step: int | None = None


def overload(seed: int, count: int, rate: float) -> list[Sequence]:
    """Targets that can be met, that are out of reach, that are lost on the way, and none; prompts of all lengths."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Sequence(
            f"r{index}",
            rng.integers(0, VOCAB, int(rng.integers(1, 80))).astype(np.int32),
            SamplingParams(max_tokens=int(rng.integers(1, 40))),
            seed=index,
            arrival_s=float(arrival),
            tpot_slo_s=[None, INFEASIBLE_S, 0.012, 0.1][int(rng.integers(0, 4))],
            ttft_slo_s=[None, INFEASIBLE_S, 0.15, 3.0][int(rng.integers(0, 4))],
            priority=int(rng.integers(-1, 2)),
        )
        for index, arrival in enumerate(arrivals)
    ]


class Watched:
    """Runs a load to its end and checks, at every step, the progress that the bounds are made of."""

    def __init__(self, run: Run, drain_steps: int):
        self.run = run
        self.drain_steps = drain_steps
        self.seen: dict[str, Seen] = {}
        self.most_waiting = 0
        self.late_admission = 0
        queue = run.scheduler.batch.queue
        self.ranks: dict[str, tuple] = {}
        self.admit, queue.take = queue.take, self.take

    def take(self, state: SequenceState, now: float) -> None:
        """Note an admission, in place of the queue's own method."""
        self.admit(state, now)
        self.ranks.setdefault(state.sequence.sequence_id, state.rank)
        seen = self.seen.get(state.sequence.sequence_id)
        if seen is not None and seen.admitted_step is None:
            seen.admitted_step = self.run.steps
            seen.admissions = self.run.scheduler.batch.queue.admissions - seen.admissions_before

    def add(self, request: Sequence) -> None:
        queue = self.run.scheduler.batch.queue
        self.seen[request.sequence_id] = Seen(queue.num_new, queue.admissions)
        self.run.scheduler.add(request)
        self.most_waiting = max(self.most_waiting, queue.num_new)

    def step(self) -> None:
        run, batch = self.run, self.run.scheduler.batch
        first, admissions = _lowest(batch), batch.queue.admissions
        before = {name: len(text) for name, text in run.text.items()}
        decoding: list[str] = []

        def planned(plan: StepPlan) -> None:
            ids = set(run.scheduler.sequence_ids(plan))
            decode = [state for state in batch.running if state.pending == 1]
            assert first is None or first.is_running, "the running request of lowest rank was preempted"
            assert _lowest(batch).sequence.sequence_id in ids, "the running request of lowest rank was left out"
            decoding.extend(state.sequence.sequence_id for state in decode)
            assert set(decoding) <= ids, "a row that decodes was left out"

        plan, _ = run.step(in_flight=planned)
        if plan is None:
            return
        assert all(len(run.text[name]) > before.get(name, 0) for name in decoding), "a step brought a row no token"
        self.note_progress(admissions)

    def note_progress(self, admissions: int) -> None:
        run, queue = self.run, self.run.scheduler.batch.queue
        for name, seen in self.seen.items():
            if seen.first_token_step is None and name in run.text:
                seen.first_token_step = run.steps
        self.late_admission = 0 if queue.admissions > admissions or not queue.num_new else self.late_admission + 1
        assert self.late_admission <= self.drain_steps


def _lowest(batch: Batch) -> SequenceState | None:
    return min(batch.running, key=lambda state: state.rank, default=None)


@pytest.mark.parametrize(
    ("policy", "seed", "num_pages"), [("adaserve", 0, 256), ("adaserve", 1, 20), ("spec:2", 1, 20)]
)
def test_every_request_ends_within_the_stated_bounds(policy: str, seed: int, num_pages: int) -> None:
    limits = limits_of(max_requests=4, max_context=128, num_pages=num_pages)
    drain_steps = 2 * limits.max_requests * limits.max_context
    run, load = Run.of(limits, policy=policy), overload(seed, 60, 30.0)
    watched, waiting = Watched(run, drain_steps), list(load)
    ended: dict[str, int] = {}
    while waiting or run.scheduler.has_work:
        while waiting and waiting[0].arrival_s <= run.clock.now():
            watched.add(waiting.pop(0))
        watched.step()
        if not run.scheduler.has_work and waiting:
            run.clock.advance(max(waiting[0].arrival_s - run.clock.now(), 1e-3))
        ended |= {name: run.steps for name in run.last if name not in ended}
    assert set(ended) == {request.sequence_id for request in load}
    assert watched.most_waiting > 20, "not an overload"
    for name, end in ended.items():
        seen, metrics = watched.seen[name], run.last[name].metrics
        before = sum(rank < watched.ranks[name] for rank in watched.ranks.values())
        if policy == "adaserve":
            assert seen.admissions <= PROMOTION_PERIOD * (seen.waiting_before + 1)
        else:
            assert seen.admissions <= before + 1
        assert end - seen.admitted_step <= (before + 1) * (drain_steps + limits.max_context)
        if not metrics.preemptions:
            assert end - seen.first_token_step < metrics.output_tokens
    if policy == "adaserve":
        assert {update.metrics.slo_feasible for update in run.last.values()} == {True, False, None}
    assert (run.scheduler.stats.preemptions > 0) == (num_pages == 20)


@pytest.mark.parametrize("tpot_slo_s", [None, INFEASIBLE_S])
def test_best_effort_is_admitted_while_better_ones_keep_coming(tpot_slo_s: float | None) -> None:
    """It finds every slot taken and nobody before it, is late at once, and never has the first due time again."""
    run = Run.of(limits_of(max_requests=4), policy="adaserve", prefix_cache=False)
    for index in range(4):
        run.scheduler.add(request_of(f"runs{index}", tokens=16, tpot_slo_s=0.05))
    run.step()
    watched, added = Watched(run, drain_steps=2 * 4 * 256), 0
    watched.add(request_of("late", prompt=30, arrival_s=run.clock.now(), ttft_slo_s=0.03, tpot_slo_s=tpot_slo_s))
    while "late" not in run.last:
        while 0.02 * added < run.clock.now():
            targets = {"ttft_slo_s": 9.0, "tpot_slo_s": 0.05}
            run.scheduler.add(request_of(f"q{added}", tokens=8, arrival_s=run.clock.now(), priority=-1, **targets))
            added += 1
        watched.step()
    assert run.scheduler.stats.waiting > 10, "not an overload"
    assert 8 < watched.seen["late"].admissions <= PROMOTION_PERIOD


def test_a_preempted_request_is_never_asked_again_whether_it_may_start() -> None:
    """Not even one that had a slot, and lost it before its prompt was begun."""
    batch = Batch(limits_of(), "deadline")

    def state_of(name: str, sequence: int) -> SequenceState:
        return SequenceState(request_of(name, tpot_slo_s=0.02), max_total=30, order_key=0.0, number=sequence)

    first, second, new = (state_of(name, index) for index, name in enumerate(("first", "second", "new")))
    for state in (first, second):
        batch.queue.add(state)
    batch.admit(0.0, lambda state: True)
    batch.preempt(second)
    batch.queue.add(new)
    asked = []
    batch.admit(0.0, lambda state: bool(asked.append(state)))
    assert batch.running == [first, second]
    assert asked == [new]


@pytest.mark.parametrize("targets", [{"ttft_slo_s": 1.0}, {"e2e_slo_s": 2.0}])
def test_a_request_that_may_wait_keeps_none_from_starting_whose_wait_is_bounded(targets: dict[str, float]) -> None:
    """The head of the queue has no TTFT target and a prompt too long beside the pace of the one that runs; the other
    came later."""
    run = Run.of(limits_of(), policy="adaserve")
    run.scheduler.add(request_of("runs", tokens=40, tpot_slo_s=0.013))
    run.step()
    run.scheduler.add(request_of("waits", prompt=150, arrival_s=0.0, priority=-1, tpot_slo_s=0.013))
    run.scheduler.add(request_of("due", arrival_s=run.clock.now(), tpot_slo_s=0.1, **targets))
    while run.scheduler.has_work:
        run.step()
    started = {name: run.last[name].metrics.first_scheduled_s for name in ("waits", "due")}
    assert started["due"] < started["waits"]


@pytest.mark.parametrize(
    ("tpot_slo_s", "thinking_s", "passes"), [(0.0065, None, True), (0.009, None, False), (0.009, 0.0065, True)]
)
def test_only_behind_a_demanding_request_another_may_start_first(
    tpot_slo_s: float, thinking_s: float | None, passes: bool
) -> None:
    """One alone takes 6 ms per token on this machine. While a request waits for its pace, those behind it wait too,
    unless its pace takes most of that speed."""
    run = Run.of(limits_of(), policy="adaserve")
    for index in range(2):
        run.scheduler.add(request_of(f"runs{index}", tokens=40, tpot_slo_s=0.007, ttft_slo_s=1.0))
    run.step()
    now = run.clock.now()
    targets = {"tpot_slo_s": tpot_slo_s, "thinking_tpot_slo_s": thinking_s, "ttft_slo_s": 9.0}
    run.scheduler.add(request_of("first", arrival_s=now, priority=-1, **targets))
    run.scheduler.add(request_of("second", arrival_s=now, tpot_slo_s=0.1, ttft_slo_s=9.0))
    while run.scheduler.has_work:
        run.step()
    started = {name: run.last[name].metrics.first_scheduled_s for name in ("first", "second")}
    assert all(run.last[name].metrics.slo_feasible for name in started)
    assert (started["second"] < started["first"]) is passes


def test_a_start_without_targets_counts_beside_those_that_are_asked_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run, others = Run.of(limits_of(), policy="adaserve"), []
    sustains = run.scheduler.controller.sustains

    def noted(need_rate: np.ndarray, beside: int, *rest, **options) -> bool:
        others.append(beside)
        return sustains(need_rate, beside, *rest, **options)

    monkeypatch.setattr(run.scheduler.controller, "sustains", noted)
    run.scheduler.add(request_of("runs", tokens=40, tpot_slo_s=0.1, ttft_slo_s=1.0))
    run.step()
    others.clear()
    now = run.clock.now()
    run.scheduler.add(request_of("first", arrival_s=now, priority=-2, tpot_slo_s=0.1, ttft_slo_s=9.0))
    run.scheduler.add(request_of("free", arrival_s=now, priority=-1))
    run.scheduler.add(request_of("second", arrival_s=now, tpot_slo_s=0.1, ttft_slo_s=9.0))
    run.step()
    assert len(run.scheduler.batch.running) == 4
    assert others == [0, 1]


def test_a_preempted_request_is_not_among_those_that_never_ran() -> None:
    run = Run.of(limits_of(), policy="ar")
    run.scheduler.add(request_of("runs"))
    run.step()
    (state,) = run.scheduler.batch.running
    run.scheduler.batch.preempt(state)
    run.scheduler.add(request_of("new"))
    stats = run.scheduler.stats
    assert (stats.waiting, stats.waiting_new) == (2, 1)


def test_a_request_that_is_late_leaves_room_for_those_that_have_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the share of those that can still meet their target it would start sooner."""
    late, due, started_s = planner.LATE_SHARE, planner.DUE_SHARE, {}
    for share in (late, due):
        monkeypatch.setattr(planner, "LATE_SHARE", share)
        run = Run.of(limits_of(), policy="adaserve")
        for index in range(3):
            run.scheduler.add(request_of(f"runs{index}", tokens=40, tpot_slo_s=0.02, ttft_slo_s=1.0))
        run.step()
        run.scheduler.add(request_of("late", arrival_s=run.clock.now() - 2.0, tpot_slo_s=0.02, ttft_slo_s=1.0))
        while run.scheduler.has_work:
            run.step()
        assert run.last["late"].metrics.slo_feasible
        started_s[share] = run.last["late"].metrics.first_scheduled_s
    assert started_s[due] < started_s[late]


def test_requests_without_a_ttft_target_start_where_their_prompts_fit_beside_the_others_pace() -> None:
    """A short prompt fits at once, a longer one when those before it are computed, a long one when others ended."""

    def waited(prompt: int, seen: bool = False) -> float:
        run = Run.of(limits_of(), policy="adaserve")
        if seen:
            run.serve([request_of("seen", prompt=prompt, tokens=1)])
        for index in range(3):
            run.add(request_of(f"runs{index}", tokens=60, tpot_slo_s=0.02, ttft_slo_s=1.0, arrival_s=run.clock.now()))
        run.step()
        arrival_s = run.clock.now()
        run.add(request_of("waits", prompt=prompt, arrival_s=arrival_s, tpot_slo_s=0.2))
        while run.scheduler.has_work:
            run.step()
        return run.last["waits"].metrics.first_scheduled_s - arrival_s

    assert waited(20) == 0.0
    assert 0.0 < waited(36) < 0.05
    assert waited(150) > 0.2
    assert waited(150, seen=True) == 0.0, "of a prompt that is cached, only its last page is to be computed"


def test_a_request_without_a_ttft_target_waits_for_the_others_pace_no_longer_than_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It starts while the others still run; without the bound it starts behind them."""
    started_s = {}
    for bound_s in (0.1, 1e9):
        monkeypatch.setattr(planner, "MOST_PATIENT_S", bound_s)
        run = Run.of(limits_of(), policy="adaserve")
        for index in range(3):
            run.scheduler.add(request_of(f"runs{index}", tokens=60, tpot_slo_s=0.02, ttft_slo_s=1.0))
        run.step()
        arrival_s = run.clock.now()
        run.scheduler.add(request_of("waits", prompt=150, arrival_s=arrival_s, tpot_slo_s=0.02))
        while run.scheduler.has_work:
            run.step()
        started_s[bound_s] = run.last["waits"].metrics.first_scheduled_s - arrival_s
    assert 0.1 <= started_s[0.1] < 0.15 < started_s[1e9]
