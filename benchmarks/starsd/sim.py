"""Many targets at one draft service, on a virtual clock: the service's own core, with devices that only take time.

Sessions, order and batches are those of `star.core.DraftCore`; a target asks for one tree per row, waits until all are
there, verifies, and asks again. What it accepts of a chain is drawn level by level. Imports no jax.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.star.messages import Draft, FromService, FromTarget, Hello, Open, SessionSampling, Tree, Welcome
from adaserve_jax.star.service.admission import ServiceTime
from adaserve_jax.star.service.core import DraftCore
from adaserve_jax.star.service.dispatch import DraftBatch
from adaserve_jax.star.service.limits import DraftLimits, Quotas
from adaserve_jax.types import CandidateTrees
from benchmarks.starsd.closed_forms import emitted_tokens, return_s, steady_state

WARM_UP = 0.25
"""Share of the rounds that are not counted: those in which phases still settle."""
PROMPT = np.zeros(8, np.int32)
FOREVER_S = 1e9
Act = Callable[[float], None]
"""act(now): what happens then."""


@dataclass(frozen=True)
class StarPlan:
    """targets: N, each with `rows` requests. verify_s, network_s: t_v and t_c, of one round; spread: relative standard
    deviation of t_v (log-normal; mean verify_s). acceptance, depth: b of each level of a chain, and d. max_rows: of one
    batch; 1: one request at a time. rounds: of each request, warm-up included. Raises ConfigError."""

    targets: int
    verify_s: float
    network_s: float
    acceptance: float
    depth: int
    rows: int = 1
    max_rows: int = 64
    spread: float = 0.0
    rounds: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        whole = (self.targets, self.depth, self.rows, self.max_rows, self.rounds)
        seconds_ok = math.isfinite(self.back_s) and min(self.verify_s, self.network_s, self.spread) >= 0
        if min(whole) < 1 or not seconds_ok or not 0 <= self.acceptance <= 1:
            raise ConfigError(
                "a plan of targets needs at least 1 of targets, depth, rows, max_rows and rounds, times of at least 0 "
                f"and an acceptance from 0 to 1, got {self}"
            )

    @property
    def back_s(self) -> float:
        """Z."""
        return return_s(self.network_s, self.verify_s)


@dataclass(frozen=True)
class StarRow:
    """Table 1 of StarSD for one number of targets n, as it was found. batched: whether requests are drafted together.
    throughput_tps, per_target_tps: emitted tokens; wait_s: of a request in the queue; idle_s: of the draft between two
    drafts; rounds_per_s: requests drafted; load: busy share of the draft."""

    n: int
    kind: Literal["measured", "simulated", "closed"]
    batched: bool
    throughput_tps: float
    per_target_tps: float
    wait_s: float
    idle_s: float
    rounds_per_s: float
    load: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def closed_row(plan: StarPlan, service_s: ServiceTime) -> StarRow:
    """By the closed forms, which know targets of one request each: the rows of one are drafted together, or one after
    the other. service_s: S(n), seconds of the draft for n requests at once."""
    together = plan.max_rows > 1

    def of_targets(targets: int) -> float:
        return service_s(targets * plan.rows) if together else plan.rows * service_s(1)

    tokens = plan.rows * emitted_tokens(plan.acceptance, plan.depth)
    most = max(plan.max_rows // plan.rows, 1) if together else 1
    found = steady_state(plan.targets, of_targets, plan.back_s, tokens, max_rows=most)
    return StarRow(
        plan.targets, "closed", together, found.throughput_tps, found.per_target_tps, found.wait_s, found.idle_s,
        found.rounds_per_s * plan.rows, found.load,
    )  # fmt: skip


def simulated_row(plan: StarPlan, service_s: ServiceTime) -> StarRow:
    """By running it."""
    return _Run(plan, service_s).run()


class _NoEnd:
    """Unlimited KV."""

    capacity = 2**31 - 1

    def reserve(self, key: int, tokens: int) -> bool:
        return True

    def release(self, key: int) -> None:
        return None


@dataclass
class _Target:
    """lengths: of each row's text. waits: rows whose trees are not there yet. round: of all rows."""

    name: str
    lengths: list[int]
    news: list[int]
    waits: int = 0
    round: int = -1


@dataclass
class _Counted:
    """Since the warm-up ended, at since_s. rounds: of requests; busy_s, batches: of the draft."""

    since_s: float = 0.0
    rounds: int = 0
    tokens: int = 0
    wait_s: float = 0.0
    busy_s: float = 0.0
    batches: int = 0


class _Run:
    def __init__(self, plan: StarPlan, service_s: ServiceTime):
        self._plan, self._service_s = plan, service_s
        self._rng = np.random.default_rng(plan.seed)
        limits = DraftLimits(
            draft_version="", vocabulary_hash="", cells_hash="", max_depth=plan.depth, max_width=1,
            max_context=2**31 - 1, max_rows=plan.max_rows, max_feed=plan.max_rows * (plan.depth + 1 + len(PROMPT)),
            lease_s=FOREVER_S,
        )  # fmt: skip
        sessions = plan.targets * plan.rows
        quotas = Quotas(plan.rows, sessions, plan.rows, FOREVER_S, 2**31)
        self._core = DraftCore(limits, _NoEnd(), quotas=quotas, batching=plan.max_rows > 1)
        self._targets = [
            _Target(str(index), [len(PROMPT)] * plan.rows, [0] * plan.rows) for index in range(plan.targets)
        ]
        self._events: list[tuple[float, int, Act]] = []
        self._added = 0
        self._batch: DraftBatch | None = None
        self._drafted = 0
        self._counted = _Counted()

    def run(self) -> StarRow:
        plan = self._plan
        for target in self._targets:
            answers = self._core.receive(target.name, [Hello(target.name, "", "")], 0.0)
            assert [type(each) for each in answers] == [Welcome], answers
            at_s = self._rng.uniform(0.0, plan.back_s + self._service_s(1))
            self._later(at_s, partial(self._ask, target))
        last = plan.targets * plan.rows * plan.rounds
        warm, now = math.ceil(last * WARM_UP), 0.0
        while self._drafted < last:
            now, _, act = heapq.heappop(self._events)
            was_warm = self._drafted >= warm
            act(now)
            if not was_warm and self._drafted >= warm:
                self._counted = _Counted(since_s=now)
            if self._batch is None and (not self._events or self._events[0][0] > now):
                self._begin(now)
        return self._row(now)

    # ---- the draft ----

    def _begin(self, now: float) -> None:
        """Begin the next batch, once all that comes at this instant is there."""
        self._batch = self._core.next_batch(now)
        if self._batch is not None:
            assert self._batch.depth, "texts never wait to be fed alone: each asks for a tree at once"
            ends_s = now + self._service_s(len(self._batch.rows))
            self._later(ends_s, self._end)

    def _end(self, now: float) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        counted = self._counted
        counted.busy_s += now - max(batch.started_s, counted.since_s)
        counted.batches += 1
        counted.rounds += len(batch.rows)
        self._drafted += len(batch.rows)
        for name, messages in self._core.done(batch, _no_trees(batch), now):
            target = self._targets[int(name)]
            self._later(now + self._plan.network_s / 2, partial(self._hear, target, messages))

    # ---- the targets ----

    def _ask(self, target: _Target, now: float) -> None:
        """Send one frame: a Draft for each row, behind its Open in the first."""
        target.round += 1
        frame: list[FromTarget] = []
        for row, (length, news) in enumerate(zip(target.lengths, target.news, strict=True)):
            if not target.round:
                frame.append(Open(row + 1, 1, PROMPT, SessionSampling(0, 0, 0.0, 0, 1.0, 0.0)))
            tokens = np.zeros(news, np.int32)
            frame.append(
                Draft(row + 1, 1, target.round, length - news, tokens, self._plan.depth, 1, True, math.inf, FOREVER_S)
            )
        target.waits = len(target.lengths)
        answers = self._core.receive(target.name, frame, now)
        assert not answers, f"nothing is to be said at once, got {answers}"

    def _hear(self, target: _Target, messages: list[FromService], now: float) -> None:
        for message in messages:
            assert isinstance(message, Tree) and message.round == target.round, f"expected a tree, got {message}"
            assert message.length == target.lengths[message.session - 1]
            self._counted.wait_s += message.queue_s
            target.waits -= 1
        if not target.waits:
            self._later(now + self._verify_s(), partial(self._verified, target))

    def _verified(self, target: _Target, now: float) -> None:
        plan = self._plan
        wrong = self._rng.random((plan.rows, plan.depth)) >= plan.acceptance
        accepted = np.where(wrong.any(axis=1), wrong.argmax(axis=1), plan.depth)
        target.news = (accepted + 1).tolist()
        target.lengths = [length + news for length, news in zip(target.lengths, target.news, strict=True)]
        self._counted.tokens += sum(target.news)
        self._later(now + plan.network_s / 2, partial(self._ask, target))

    def _verify_s(self) -> float:
        spread = self._plan.spread
        if not spread:
            return self._plan.verify_s
        variance = math.log1p(spread**2)
        return self._plan.verify_s * math.exp(math.sqrt(variance) * self._rng.standard_normal() - variance / 2)

    # ---- both ----

    def _later(self, at_s: float, act: Act) -> None:
        heapq.heappush(self._events, (at_s, self._added, act))
        self._added += 1

    def _row(self, now: float) -> StarRow:
        counted, plan = self._counted, self._plan
        seconds = now - counted.since_s
        throughput_tps = counted.tokens / seconds
        return StarRow(
            plan.targets, "simulated", plan.max_rows > 1, throughput_tps, throughput_tps / plan.targets,
            counted.wait_s / counted.rounds, (seconds - counted.busy_s) / counted.batches, counted.rounds / seconds,
            counted.busy_s / seconds,
        )  # fmt: skip


def _no_trees(batch: DraftBatch) -> CandidateTrees:
    """Return trees of the right shape, without a node: what of a chain is right is drawn where it is verified."""
    shape = (len(batch.rows), batch.depth * batch.width)
    absent = np.full(shape, -1, np.int32)
    level = np.repeat(np.arange(1, batch.depth + 1, dtype=np.int32), batch.width)
    return CandidateTrees(
        absent, absent, np.full(shape, -np.inf, np.float32), level, absent, np.zeros(shape, np.float32)
    )
