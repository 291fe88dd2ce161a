"""The step loop under random submits, aborts and stops: every choice ends once and gets its own text, nothing leaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import GenerateRequest, OutputChunk
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.errors import QueueFullError, RequestError
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.sim.executor import VirtualClock
from adaserve_jax.types import SLO, DraftTrees, LogitEdits, SamplingParams, StepOutcome, StepPlan
from tests.engine.simulated import EOS, VOCAB, Expected, Spelling, costs_of, expected, limits_of
from tests.sim_kv import StrictExecutor

MAX_WAITING = 8
SLOS = (SLO(), SLO(tpot_ms=8), SLO(relative=1.5, ttft_ms=100), SLO(tpot_ms=0.1, ttft_ms=0.1))

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 2, 3, 7, 20, 1000]),
    seed=st.none() | st.integers(0, 3),
    n=st.sampled_from([1, 1, 1, 3]),
    stop=st.lists(st.text("abcxy", min_size=1, max_size=4), max_size=2).map(tuple),
    stop_token_ids=st.lists(st.integers(2, VOCAB - 1), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)


def core_of(policy: str, infeasible_slo: str = "best_effort", **changes: int) -> EngineCore:
    limits, clock = limits_of(**changes), VirtualClock()
    costs = costs_of(limits)
    config = EngineConfig(policy=policy, max_waiting=MAX_WAITING, infeasible_slo=infeasible_slo)
    executor = StrictExecutor(limits, costs, 0.7, clock, vocab_size=VOCAB)
    scheduler = Scheduler(config, limits, costs)
    return EngineCore(executor, scheduler, Spelling(), eos_ids=(EOS,), baseline_s=0.01, seed=5, clock=clock.now)


class Clients(RuleBasedStateMachine):
    """Clients that submit, abort and read; what each choice should get is known when it is submitted."""

    @initialize(policy=st.sampled_from(["ar", "spec:2", "adaserve"]), beside_device=st.booleans())
    def start(self, policy: str, beside_device: bool) -> None:
        self.core = core_of(policy)
        if beside_device:
            self.core.deliver_beside_device(self.take)
        self.expected: dict[tuple[str, int], Expected] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.text: dict[tuple[str, int], str] = defaultdict(str)
        self.ended: dict[tuple[str, int], str] = {}
        self.submitted = 0

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
        sampling=SAMPLING,
        slo=st.sampled_from(SLOS),
    )
    def submit(self, prompt: list[int], sampling: SamplingParams, slo: SLO) -> None:
        name = f"q{self.submitted}"
        request = GenerateRequest(name, prompt, sampling, slo, priority=self.submitted % 3)
        before = self.core.num_open
        try:
            self.core.add(request, self.core.clock())
        except QueueFullError:
            assert self.core.scheduler.stats.waiting + sampling.n > MAX_WAITING
            assert self.core.num_open == before
            return
        self.submitted += 1
        (seed,) = {self.core.scheduler._states[f"{name}/{choice}"].sequence.seed for choice in range(sampling.n)}
        assert sampling.seed in (None, seed)
        for choice in range(sampling.n):
            self.expected[name, choice] = expected(request, choice, seed, self.core.executor.limits.max_context)

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        """Running, waiting, ended, or never submitted."""
        chunks = self.core.abort(f"q{which}")
        self.take(chunks)
        assert all(chunk.finish_reason == "abort" for chunk in chunks)
        assert not [key for key in self.expected if key[0] == f"q{which}" and key not in self.ended]

    @rule(count=st.integers(1, 12))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.take(self.core.step())
            self.core.scheduler.check_integrity()

    @invariant()
    def open_choices_are_counted(self) -> None:
        if hasattr(self, "core"):
            self.core.scheduler.check_integrity()
            assert self.core.num_open == len(self.expected) - len(self.ended)
            assert self.core.has_work == (self.core.num_open > 0)

    def take(self, chunks: list[OutputChunk]) -> None:
        for chunk in chunks:
            key = chunk.request_id, chunk.choice
            assert key not in self.ended, "a chunk after the last"
            self.tokens[key] += chunk.token_ids
            self.text[key] += chunk.text
            assert (chunk.metrics is not None) == (chunk.finish_reason is not None)
            if chunk.metrics is not None:
                assert chunk.metrics.output_tokens == len(self.tokens[key])
                self.ended[key] = chunk.finish_reason or ""
            self.compare(key)

    def compare(self, key: tuple[str, int]) -> None:
        want, tokens, text = self.expected[key], self.tokens[key], self.text[key]
        if self.ended.get(key) in ("stop", "length"):
            assert (tokens, text, self.ended[key]) == (want.token_ids, want.text, want.finish_reason)
        elif self.ended.get(key) == "abort":
            assert tokens == want.token_ids[: len(tokens)]
            assert text == Spelling().decode(tokens)
        else:
            assert tokens == want.token_ids[: len(tokens)]
            assert want.text.startswith(text)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        while self.core.has_work:
            self.run(1)
        assert self.expected.keys() == self.ended.keys()
        stats = self.core.scheduler.stats
        assert (stats.pages_used, stats.running, stats.waiting) == (0, 0, 0)
        assert sum(stats.finished.values()) >= len(self.ended)


def test_random_clients() -> None:
    run_state_machine_as_test(Clients, settings=settings(max_examples=20, stateful_step_count=30, deadline=None))


@pytest.mark.slow
def test_many_random_clients() -> None:
    run_state_machine_as_test(Clients, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


def test_text_is_delivered_while_the_device_runs_the_next_step() -> None:
    """Two texts, one with a stop string, which the step must look for itself; the last chunks do not wait."""
    core, events = core_of("ar"), []
    core.deliver_beside_device(lambda chunks: events.extend((chunk.request_id, chunk.text) for chunk in chunks))
    verify = core.executor.verify

    def noted(
        plan: StepPlan, trees: DraftTrees, edits: LogitEdits | None, meanwhile: Callable[[], None]
    ) -> StepOutcome:
        events.append("device begins")
        outcome = verify(plan, trees, edits, meanwhile)
        events.append("device ends")
        return outcome

    core.executor.verify = noted  # type: ignore[method-assign]
    for name, stop in (("a", ()), ("b", ("never",))):
        sampling = SamplingParams(max_tokens=3, ignore_eos=True, seed=1, stop=stop)
        core.add(GenerateRequest(name, [7], sampling), 0.0)
    while core.has_work:
        assert core.step() == []
    chunks = [[event for event in events if event[0] == name] for name in "ab"]
    assert [len(each) for each in chunks] == [3, 3]
    assert chunks[0][0][1] and [text for _, text in chunks[0]] == [text for _, text in chunks[1]]
    step = ["device begins", *(each[0] for each in chunks), "device ends"]
    assert events[:6] == ["device begins", "device ends", *step]
    assert events[-2:] == [each[-1] for each in chunks]


@pytest.mark.parametrize("policy", ["ar", "spec:3", "adaserve"])
def test_a_seed_drawn_once_survives_preemption_and_policy(policy: str) -> None:
    """The engine's seed decides the seeds of requests without one, whatever runs beside them."""
    core = core_of(policy, num_pages=12)
    for index in range(6):
        core.add(GenerateRequest(f"q{index}", [7] * 9, SamplingParams(max_tokens=30, ignore_eos=True)), 0.0)
    tokens: dict[str, list[int]] = defaultdict(list)
    while core.has_work:
        for chunk in core.step():
            tokens[chunk.request_id] += chunk.token_ids
    assert core.scheduler.stats.preemptions > 0
    plain = core_of("ar")
    for index in range(6):
        request = GenerateRequest(f"q{index}", [7] * 9, SamplingParams(max_tokens=30, ignore_eos=True))
        plain.add(request, 0.0)
        alone: list[int] = []
        while plain.has_work:
            alone += [token for chunk in plain.step() for token in chunk.token_ids]
        assert tokens[f"q{index}"] == alone
    assert len({tuple(ids) for ids in tokens.values()}) == 6


def test_a_request_of_several_choices_is_queued_whole_or_not_at_all() -> None:
    core = core_of("ar")
    core.add(GenerateRequest("a", [3], SamplingParams(n=MAX_WAITING - 1)), 0.0)
    with pytest.raises(QueueFullError):
        core.add(GenerateRequest("b", [3], SamplingParams(n=2)), 0.0)
    assert core.num_open == MAX_WAITING - 1
    assert core.scheduler.stats.finished == {}
    assert core.abort("b") == []
    with pytest.raises(RequestError, match="'a/0' is in use"):
        core.add(GenerateRequest("a", [3]), 0.0)
    assert len(core.abort("a")) == MAX_WAITING - 1
    assert not core.has_work


def test_a_request_that_did_not_begin_within_its_own_wait_ends_with_its_own_error() -> None:
    """The server would let it wait longer; one that has begun is left alone however long it takes."""
    core = core_of("ar", num_pages=64)
    for name, tokens in (("a", 44), ("b", 44), ("c", 44), ("d", 44), ("late", 3), ("patient", 3)):
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        own_s = 0.0 if name == "patient" else 0.1
        core.add(GenerateRequest(name, [3], sampling, max_wait_s=9.0, max_queue_s=own_s), core.clock())
    ended = {}
    while core.has_work:
        ended |= {chunk.request_id: chunk for chunk in core.step() if chunk.finish_reason is not None}
    assert ended.pop("late").error_code == "queue_timeout"
    assert {chunk.finish_reason for chunk in ended.values()} == {"length"} and len(ended) == 5


def test_the_choices_of_a_request_that_has_begun_wait_for_their_turn() -> None:
    core = core_of("ar", num_pages=64)
    for name, tokens in (("a", 44), ("b", 44), ("c", 44), ("three", 30)):
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, n=3 if name == "three" else 1)
        core.add(GenerateRequest(name, [3], sampling, max_wait_s=0.2), core.clock())
    ended = [chunk for _ in iter(lambda: core.has_work, False) for chunk in core.step() if chunk.finish_reason]
    assert [chunk.finish_reason for chunk in ended] == ["length"] * 6


def test_a_choice_waits_for_its_turn_though_those_that_began_have_ended() -> None:
    """A slot is free for the first choice alone, and for the second one long after the wait that is allowed."""
    core = core_of("ar", num_pages=64)
    for name, tokens in (("a", 44), ("b", 44), ("c", 44)):
        core.add(GenerateRequest(name, [3], SamplingParams(max_tokens=tokens, ignore_eos=True)), core.clock())
    two = SamplingParams(max_tokens=1, ignore_eos=True, n=2)
    core.add(GenerateRequest("two", [3], two, max_wait_s=0.2), core.clock())
    ended = core.step()
    core.add(GenerateRequest("urgent", [3], SamplingParams(max_tokens=44, ignore_eos=True), priority=-9), core.clock())
    ended += [chunk for _ in iter(lambda: core.has_work, False) for chunk in core.step()]
    assert {chunk.finish_reason for chunk in ended if chunk.finish_reason} == {"length"}
    first, second = (chunk for chunk in ended if chunk.request_id == "two" and chunk.finish_reason)
    assert first.metrics is not None and first.metrics.last_token_s is not None and first.metrics.last_token_s < 0.2
    assert second.metrics is not None and second.metrics.queue_s is not None and second.metrics.queue_s > 0.2


def test_requests_that_ended_are_not_kept_until_their_longest_wait_is_over() -> None:
    core = core_of("ar", num_pages=64)
    for number in range(300):
        core.add(GenerateRequest(f"{number}", [3], SamplingParams(max_tokens=1), max_queue_s=1e6), core.clock())
        while core.has_work:
            core.step()
    assert len(core._latest_begins) < 80


def test_what_waited_as_long_as_it_may_ends_and_what_began_goes_on() -> None:
    """Four slots, of which one is free after half a second; the fifth choice may wait longer than the others."""
    core = core_of("ar", num_pages=64)
    for name, tokens in (("a", 44), ("b", 44), ("c", 44), ("d", 44), ("patient", 3), ("e", 3), ("two", 3)):
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, n=2 if name == "two" else 1)
        wait_s = {"a": 0.0}.get(name, 0.2)
        core.add(GenerateRequest(name, [3], sampling, max_wait_s=wait_s), core.clock())
        if name == "patient":  # asked again under the same id: the first one's wait is not its own
            core.abort(name)
            core.add(GenerateRequest(name, [3], sampling, max_wait_s=9.0), core.clock())
    ended: dict[tuple[str, int], tuple[OutputChunk, float]] = {}
    while core.has_work:
        for chunk in core.step():
            if chunk.finish_reason is not None:
                ended[chunk.request_id, chunk.choice] = chunk, core.clock()
    assert core.num_open == 0 and core.step() == []
    for name in ("a", "b", "c", "d", "patient"):
        assert ended[name, 0][0].finish_reason == "length"
    for key in (("e", 0), ("two", 0), ("two", 1)):
        chunk, at = ended[key]
        assert (chunk.finish_reason, chunk.error_code) == ("error", "overloaded")
        assert (chunk.metrics, chunk.token_ids) == (None, [])
        assert "waited 0.2 s for its turn, as long as this server lets it wait" in (chunk.error or "")
        assert 0.2 <= at < 0.25
