"""The scheduler on a strict simulated machine, with few pages and prompts that begin alike, under a state machine:
requests come, end, are aborted between steps and in flight, are preempted, and draft and pages change places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adaserve_jax.types import SamplingParams, Sequence
from tests.scheduler.harness import VOCAB, Run, expected_text, limits_of

PAGE = 8
MAX_CONTEXT = 96
TEXTS = np.random.default_rng(0).integers(0, VOCAB, (3, MAX_CONTEXT)).astype(np.int32)
picks = st.integers(0, 10_000)
asks = st.tuples(
    st.integers(0, 2), st.sampled_from([40, 48, 24, 15, 0]), st.sampled_from([3, 0, 8, 20]),
    st.sampled_from([25, 9, 1]), st.sampled_from(["", "", "s"]), st.integers(0, 2),
)  # fmt: skip


class Draft:
    """What the scheduler asks whether there is a draft."""

    available = True

    def ended(self, slots: np.ndarray) -> None:
        pass


class Swaps:
    """What a swap does to scheduler and machine, part by part, so that it can fail between any two."""

    def __init__(self, run: Run, draft: Draft):
        self._batch, self._kv, self._draft = run.scheduler.batch, run.executor.kv, draft

    @property
    def extended(self) -> bool:
        return self._batch.pool.extended

    def expand(self) -> None:
        self._draft.available = False
        self._kv.drop_draft()
        self._batch.forget_draft()
        self._kv.add_extension()
        self._batch.pool.extend()

    def contract(self, fails: str) -> None:
        """fails: "moving", "trimming", or "no"."""
        pool = self._batch.pool
        migration = pool.plan_contraction()
        if migration is None:
            return
        if fails == "moving":
            half = len(migration.from_pages) // 2
            self._kv.move_pages(migration.from_pages[:half], migration.to_pages[:half])
            pool.abandon(migration)
            return
        self._kv.move_pages(migration.from_pages, migration.to_pages)
        self._batch.remap(pool.publish(migration))
        if fails == "no":
            self._kv.drop_extension()
            pool.trim()
            self._draft.available = True


class ServingMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["ar", "spec:3", "adaserve", "priority"]), num_pages=st.integers(12, 24),
        extension=st.integers(0, 12),
    )  # fmt: skip
    def begin(self, policy: str, num_pages: int, extension: int) -> None:
        limits = limits_of(
            max_requests=4, max_context=MAX_CONTEXT, page_size=PAGE, num_pages=num_pages, extension_pages=extension
        )
        draft = Draft()
        self.run = Run.of(limits, policy=policy, elastic="off", draft_sessions=draft)
        self.swaps = Swaps(self.run, draft) if extension else None  # they come when the machine wants them
        self.asked: dict[str, Sequence] = {}
        for text in range(3):  # so that there is something to find
            self.ask(text, 40, 1, 1, "", 0)
            self.run.serve([])

    def ask(self, text: int, begins: int, own: int, tokens: int, salt: str, priority: int) -> None:
        """A prompt that begins as one of three texts, and goes on in its own way."""
        if self.run.scheduler.stats.waiting > 6:
            return
        number = len(self.asked)
        ending = np.random.default_rng(number).integers(0, VOCAB, max(own, int(begins == 0))).astype(np.int32)
        prompt = np.concatenate([TEXTS[text][:begins], ending])
        request = Sequence(
            f"q{number}", prompt, SamplingParams(max_tokens=tokens), seed=number % 5, arrival_s=self.run.clock.now(),
            priority=priority, cache_salt=salt,
        )  # fmt: skip
        self.asked[request.sequence_id] = request
        self.run.add(request)

    @rule(asked=st.lists(asks, min_size=1, max_size=3), count=st.sampled_from([2, 1, 8]))
    def serve(self, asked: list[tuple], count: int) -> None:
        for arguments in asked:
            self.ask(*arguments)
        for _ in range(count):
            self.run.step()

    @rule(asked=asks, pick=picks)
    def step_while_one_is_aborted(self, asked: tuple, pick: int) -> None:
        self.ask(*asked)
        self.run.step(lambda _: self.abort(pick))

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        alive = sorted(set(self.asked) - set(self.run.last))
        if alive:
            update = self.run.scheduler.abort(alive[pick % len(alive)])
            self.run.take([update])

    @precondition(lambda self: self.run.scheduler.batch.running)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        running = self.run.scheduler.batch.running
        self.run.scheduler.batch.preempt(running[pick % len(running)])

    @precondition(lambda self: self.swaps is not None and not self.swaps.extended)
    @rule()
    def expand(self) -> None:
        self.swaps.expand()

    @precondition(lambda self: self.swaps is not None and self.swaps.extended)
    @rule(fails=st.sampled_from(["no", "moving", "trimming"]))
    def contract(self, fails: str) -> None:
        self.swaps.contract(fails)

    @rule()
    def lose_the_draft(self) -> None:
        self.run.scheduler.batch.forget_draft()
        self.run.executor.kv.drop_draft()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "run"):
            self.run.scheduler.check_integrity()

    def teardown(self) -> None:
        """Everything ends, with the text that plain decoding gives, and nobody holds a page."""
        if not hasattr(self, "run"):
            return
        self.run.serve([])
        assert set(self.run.last) == set(self.asked)
        for name, request in self.asked.items():
            text, reason = expected_text(request, MAX_CONTEXT)
            last = self.run.last[name]
            assert self.run.text[name] == text[: len(self.run.text[name])]
            assert last.finish_reason == "abort" or (
                last.finish_reason == reason and len(self.run.text[name]) == len(text)
            )
            assert last.metrics.cached_tokens < len(request.prompt_ids)
            assert last.metrics.cached_tokens % PAGE == 0
        assert self.run.scheduler.stats.pages_used == 0


class TestServing(ServingMachine.TestCase):
    settings = settings(
        max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestServingLong(ServingMachine.TestCase):
    settings = settings(
        max_examples=800, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )
