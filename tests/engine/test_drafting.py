"""An engine whose draft is a service: its text is the target's own whatever comes back, and it starts without one."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adaserve_jax import LLM, DrafterConfig, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine import build as assembly
from adaserve_jax.engine import remote_draft as drafting
from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import ConfigError, RequestError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.runtime.compile import compile_all
from adaserve_jax.runtime.loading import CALIBRATION_FILE, find_chances, find_pair, load_drafter
from adaserve_jax.runtime.sizing import resolve
from adaserve_jax.scheduler.controllers.nightjar import SwitchTable
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.star.messages import Hello, Welcome, cells_hash
from adaserve_jax.stats import DrafterStats, ServiceState
from adaserve_jax.tree.acceptance_table import read_chances
from adaserve_jax.types import CandidateTrees, StepPlan
from tests.conftest import compiling
from tests.engine.simulated import Machine, Spelling, costs_of, limits_of
from tests.engines import EXACT

DRAFTER = DrafterConfig(("grpc://host:1",))
WELCOME = Welcome(
    draft_version="v1", max_depth=4, max_width=3, max_context=128, max_sessions=8, lease_s=60.0,
    level_s={(8, 1): 1e-3, (8, 3): 1e-3}, catchup_s={32: 1e-3},
)  # fmt: skip
PROMPTS = [[40, 41, 42], [7] * 20, [9, 300, 5, 6, 80], [11]]
TEXT = """class Node:
    def __init__(self, value, left=None, right=None):
        self.value = value
        self.left = left
        self.right = right

    def __repr__(self):
        return f"Node({self.value!r})"
"""
SAMPLING = [SamplingParams(max_tokens=24, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.7, 0.3, 1.0)]


class Service:
    """Answers as the local drafter would, on pages of its own, or less of it. fed: slots that it keeps something for.
    answers: of a row, whether its tree comes in time."""

    def __init__(self) -> None:
        config = EngineConfig(**EXACT | {"max_batch_tokens": 128})
        pair = find_pair(config)
        chances = find_chances(config, pair)
        local = load_drafter(pair, resolve(config, pair.target, pair.draft), chances, None)
        assert local is not None
        local.widths = local.widths[-1:]  # one program is enough
        local.model.compiled = compile_all(local.declare(), None)
        self.local = local
        self.hello: Hello | None = None
        self.welcome: Welcome | None = replace(WELCOME, max_depth=2)  # another may search deeper
        self.fed: set[int] = set()
        self.answers = lambda row: True
        self.wait_s = 0.0
        self.available = True
        self.closed = False
        self.counts = DrafterStats(services={"host:1": ServiceState(version="v1")})

    def connect(self, timeout_s: float) -> Welcome | None:
        return self.welcome

    def propose(self, plan: StepPlan) -> CandidateTrees:
        draft = plan.draft
        assert draft is not None
        self.fed |= set(plan.slots[draft.catchup_counts > 0].tolist())
        found = self.local.propose(plan)
        self.counts.rounds += draft.depth > 0
        late = [row for row in range(plan.num_decode) if not self.answers(row)]
        if len(late) == plan.num_decode:
            return CandidateTrees.empty(plan.num_decode)
        log_f = found.log_f.copy()
        log_f[late] = -np.inf
        return replace(found, log_f=log_f)

    def ended(self, slots: np.ndarray) -> None:
        self.fed -= set(slots.tolist())

    def stats(self) -> DrafterStats:
        return self.counts

    def count_anew(self) -> None: ...

    def close(self) -> None:
        self.closed = True
        self.local.model.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[LLM, Service]]:
    """Leave it idle."""
    service = Service()

    def build(config: DrafterConfig, chances: object, hello: Hello, max_rows: int, vocab_size: int) -> Service:
        assert (config, max_rows) == (DRAFTER, 8) and vocab_size > 300
        service.hello = hello
        return service

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "build_drafter", build)
        with compiling("deterministic"):
            llm = LLM(**EXACT, eq8_eq9=True, drafter=DRAFTER)
    with llm:
        yield llm, service
        assert llm.stats().compiles_after_ready == 0
    assert service.closed


@pytest.fixture(scope="module")
def expected(deterministic: LLM) -> list[list[int]]:
    """Return the texts of plain decoding."""
    deterministic.set_policy("ar")
    return [output.token_ids for output in deterministic.generate(PROMPTS, SAMPLING)]


@pytest.mark.parametrize(
    ("answers", "policy"),
    [
        ("all", "spec:4"),
        ("some", "adaserve"),
        pytest.param("none", "nightjar", marks=pytest.mark.slow),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in product(("some", "none"), ("spec:4", "specinfer"))),
        *(pytest.param("all", policy, marks=pytest.mark.slow) for policy in ("adaserve", "nightjar", "ucbspec")),
    ],
)
def test_the_text_is_that_of_plain_decoding(
    served: tuple[LLM, Service], expected: list[list[int]], answers: str, policy: str
) -> None:
    llm, service = served
    llm.set_policy(policy)
    service.answers = {"all": lambda row: True, "some": lambda row: row % 2 == 0, "none": lambda row: False}[answers]
    outputs = llm.generate(PROMPTS, SAMPLING)
    assert [output.token_ids for output in outputs] == expected
    drafted = sum(output.metrics.drafted_tokens for output in outputs)
    assert (drafted == 0) == (answers == "none") or policy in ("adaserve", "nightjar")
    assert not service.fed


def test_a_service_that_answers_as_a_draft_here_would_is_worth_as_much(
    served: tuple[LLM, Service], deterministic: LLM
) -> None:
    """Also where the prompt's pages are known already, which hold no draft of it. Its programs are of another size,
    so that near-ties of the draft may fall otherwise."""
    llm, service = served
    service.answers = lambda row: True
    prompt, accepted = llm.tokenizer.encode(TEXT)[:50], []
    for engine in (deterministic, llm):
        engine.set_policy("spec:4")
        metrics = [engine.generate([prompt], SAMPLING[:1], cache_salt="same")[0].metrics for _ in range(2)]
        accepted += [each.accepted_tokens for each in metrics]
        assert metrics[1].cached_tokens == 48
    assert min(accepted) > 5 and max(accepted) - min(accepted) <= 3


def test_what_an_aborted_request_left_is_given_up(served: tuple[LLM, Service]) -> None:
    llm, service = served
    service.answers = lambda row: True
    llm.set_policy("spec:4")
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert service.fed
    stream.close()
    llm.generate(PROMPTS[:1], SAMPLING[:1])
    assert not service.fed


def test_while_no_service_can_be_asked_none_is(served: tuple[LLM, Service]) -> None:
    llm, service = served
    llm.set_policy("spec:4")
    rounds, service.available = service.counts.rounds, False
    (output,) = llm.generate(PROMPTS[:1], SAMPLING[:1])
    service.available = True
    assert service.counts.rounds == rounds and output.metrics.drafted_tokens == 0
    (again,) = llm.generate(PROMPTS[:1], SAMPLING[:1])
    assert again.token_ids == output.token_ids and again.metrics.drafted_tokens > 0


def test_what_the_engine_says_of_itself(served: tuple[LLM, Service]) -> None:
    llm, service = served
    hello = service.hello
    assert hello is not None and hello.target_id
    tokenizer = Tokenizer.from_folder(llm._engine.executor.target_folder)
    assert hello.vocabulary_hash == tokenizer.vocabulary_hash(llm.info.vocab_size)
    assert hello.cells_hash == cells_hash(llm._engine.executor.chances)  # type: ignore[arg-type]
    assert 0 < hello.plain_s <= hello.verify_s < 10
    assert llm.info.draft == "remote" and llm.info.drafts == ()
    stats = llm.stats()
    assert stats.drafter is not None and stats.drafter.services["host:1"].version == "v1"
    assert stats.drafter.rounds > 0 and not stats.scheduler.draft_resident
    assert llm._engine.config.draft is None
    with pytest.raises(RequestError, match="this engine asks a draft service, which has one draft; got 'default'"):
        llm._engine.submit(GenerateRequest("r", [1], draft_tag="default"), print)


# ---- times, without a model ----

LIMITS = limits_of(max_context=64, max_depth=3, max_width=2)
SAMPLES = costs_of(LIMITS)
SAMPLES = replace(SAMPLES, catchup_s={}, draft_level_s={})
SAID = replace(
    WELCOME, max_depth=8, max_width=4, level_s={(1, 1): 1e-3, (1, 4): 2e-3, (8, 1): 4e-3, (8, 4): 5e-3},
    catchup_s={8: 1e-3, 64: 4e-3},
)  # fmt: skip


class Timed:
    """A service that takes so long for a round, on a clock of its own; None: it does not answer."""

    def __init__(self, welcome: Welcome | None, rounds_s: list[float | None]) -> None:
        self.welcome, self.rounds_s, self.now = welcome, rounds_s, 0.0
        self.plans: list[StepPlan] = []
        self.available = True
        self.ended_slots: list[int] = []
        self.wait_s = 0.0
        self.counted_anew = 0
        self.closed = False

    def connect(self, timeout_s: float) -> Welcome | None:
        self.waited_s = timeout_s
        return self.welcome

    def propose(self, plan: StepPlan) -> CandidateTrees:
        self.plans.append(plan)
        took_s = self.rounds_s[(len(self.plans) - 1) % len(self.rounds_s)]
        self.now += took_s or 1.0
        if took_s is None:
            return CandidateTrees.empty(1)
        one = np.zeros((1, 1), np.int32)
        return CandidateTrees(one, one - 1, np.zeros((1, 1), np.float32), np.ones(1, np.int32))

    def ended(self, slots: np.ndarray) -> None:
        self.ended_slots += slots.tolist()

    def stats(self) -> DrafterStats:
        return DrafterStats(services={"h:1": ServiceState(reason="connection refused"), "h:2": ServiceState("open")})

    def count_anew(self) -> None:
        self.counted_anew += 1

    def close(self) -> None:
        self.closed = True


def test_a_round_is_timed_with_a_session_that_is_thrown_away() -> None:
    """7 ms at least, of which the service works 2: one token fed, and one level."""
    service = Timed(SAID, [0.02, None, 0.007, 0.009])
    way_s = drafting.round_trip_s(service, LIMITS, 0.002, lambda: service.now)
    assert way_s == pytest.approx(0.005)
    assert service.ended_slots == [0]
    texts = [(plan.draft.draft_ctx.tolist(), plan.draft.catchup_counts.tolist()) for plan in service.plans]  # type: ignore[union-attr]
    assert texts == [([length], [1]) for length in range(drafting.TRIALS)]
    assert drafting.round_trip_s(Timed(SAID, [None]), LIMITS, 0.0) == drafting.GUESSED_ROUND_TRIP_S
    assert drafting.round_trip_s(Timed(SAID, [0.001]), LIMITS, 5.0) == 0.0


def test_times_of_drafting_are_the_service_s_and_the_way_to_it() -> None:
    found = drafting.with_drafting(SAMPLES, LIMITS, SAID, 0.005)
    assert found.draft_level_s == {(1, 1): 1e-3, (1, 2): 2e-3, (8, 1): 4e-3, (8, 2): 5e-3}
    assert found.catchup_s == {8: pytest.approx(0.006), 64: pytest.approx(0.009)}
    table = CostTable(found, LIMITS)
    assert table.max_catchup_tokens == 64
    assert table.level_s(4).tolist() == [4e-3, 5e-3]
    assert table.catchup_s(3) == pytest.approx(0.006)
    assert drafting.with_drafting(SAMPLES, LIMITS, replace(SAID, level_s={}), 0.0) == drafting.guess_times(
        SAMPLES, LIMITS
    )


def test_a_service_that_searches_less_is_told_of_and_timed_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    less = replace(SAID, max_depth=2, max_width=1, level_s={(1, 1): 1e-3, (8, 1): 4e-3})
    service = Timed(less, [1e-3])
    found = drafting.wait_for_service(service, SAMPLES, LIMITS)
    assert found.samples.draft_level_s == {(1, 1): 1e-3, (1, 2): 1e-3, (8, 1): 4e-3, (8, 2): 4e-3}
    assert "searches to depth 2 and width 1, in contexts of 128 tokens" in caplog.text
    assert service.counted_anew == 1
    caplog.clear()
    drafting.wait_for_service(Timed(SAID, [1e-3]), SAMPLES, LIMITS)
    assert not caplog.records


def test_a_drafter_is_closed_where_the_start_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Timed(SAID, [1e-3])

    def fails(plan: StepPlan) -> CandidateTrees:
        raise MemoryError

    monkeypatch.setattr(service, "propose", fails)
    monkeypatch.setattr(drafting, "build_drafter", lambda *_: service)
    monkeypatch.setattr(drafting, "hello_of", lambda *_: None)
    with pytest.raises(MemoryError):
        drafting.connect_drafter(DRAFTER, None, None, SAMPLES, LIMITS, 300)  # type: ignore[arg-type]
    assert service.closed


def test_files_that_cannot_be_read_are_told_before_anything_is_loaded(tmp_path: Any) -> None:
    for name in ("drafter_token_file", "drafter_ca"):
        with pytest.raises(ConfigError, match=name):
            LLM(drafter=replace(DRAFTER, **{name: str(tmp_path / "none")}), target="nothing that is there")


def test_without_an_answer_it_starts_on_a_guess_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    service = Timed(None, [1e-3])
    found = drafting.wait_for_service(service, SAMPLES, LIMITS)
    assert service.waited_s == drafting.CONNECT_S and not service.plans
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "(h:1: connection refused; h:2: open)" in warning.getMessage()
    table = CostTable(found.samples, LIMITS)
    plain_s = table.verify_s(1)[0]
    assert table.level_s(1).tolist() == pytest.approx([plain_s / 8] * 2, rel=0.3)
    assert 0.002 < table.catchup_s(1) < 0.002 + plain_s / 4


def test_a_guess_gives_way_to_what_the_first_service_says_that_answers(caplog: pytest.LogCaptureFixture) -> None:
    service = Timed(None, [1e-3])
    found = drafting.wait_for_service(service, SAMPLES, LIMITS)
    assert found.guessed and drafting.retime(found, LIMITS) is None and service.waited_s == 0.0
    caplog.clear()
    service.welcome = replace(SAID, max_depth=2)
    late = drafting.retime(found, LIMITS)
    assert late is not None and not late.guessed and late.drafter is service
    assert late.samples == drafting.with_drafting(SAMPLES, LIMITS, SAID, drafting.GUESSED_ROUND_TRIP_S)
    assert "searches to depth 2" in caplog.text, "as where it answers at the start"
    assert not service.plans, "requests run: no way is measured"
    assert not drafting.wait_for_service(Timed(SAID, [1e-3]), SAMPLES, LIMITS).guessed


class Connecting(Timed):
    """Answers once so many steps were planned without it. asked: how often it was greeted since the start."""

    def __init__(self, after: int) -> None:
        super().__init__(None, [1e-3])
        self.after, self.asked = after, -1
        self.available = False

    def connect(self, timeout_s: float) -> Welcome | None:
        self.asked += 1
        self.welcome = SAID if self.asked > self.after else None
        return self.welcome


def test_an_engine_that_started_first_plans_by_the_service_s_times_once_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a policy whose controller read the guess at the start, and another that is set later."""
    service, machines = Connecting(after=5), []

    def load(config: EngineConfig, _: object = None, **_options: object) -> Machine:
        machine = Machine(config)
        machine.chances = read_chances(resolve_folder("demo", "draft").parent / CALIBRATION_FILE)  # type: ignore[assignment]
        machines.append(machine)
        return machine

    monkeypatch.setattr(assembly, "load_executor", load)
    monkeypatch.setattr(assembly, "Tokenizer", SimpleNamespace(from_folder=lambda folder: Spelling()))
    monkeypatch.setattr(drafting, "hello_of", lambda *_: None)
    monkeypatch.setattr(drafting, "build_drafter", lambda *_: service)
    engine = LocalEngine(EngineConfig(drafter=DRAFTER, draft=None, policy="nightjar"))
    engine.start()
    try:
        limits, ends = machines[0].limits, queue.SimpleQueue()
        guessed = drafting.guess_times(costs_of(limits), limits)
        assert engine.assembly.samples == guessed
        engine.submit(GenerateRequest("r", [3, 4], SamplingParams(max_tokens=20, ignore_eos=True)), ends.put)
        while ends.get(timeout=30).finish_reason is None:
            pass
        said = drafting.with_drafting(costs_of(limits), limits, SAID, drafting.GUESSED_ROUND_TRIP_S)
        assert service.asked == 6, "nobody is greeted any more"
        assert engine.assembly.samples == said != guessed
        scheduler = engine._core.scheduler
        assert scheduler.costs.samples == said and scheduler.costs.catchup_s(8) == pytest.approx(0.003)
        switch = SwitchTable.of(CostTable(said, limits), limits)
        assert scheduler.controller._switch.switch_s(8, 1) == switch.switch_s(8, 1)  # type: ignore[attr-defined]
        engine.set_policy("spec:2")
        assert engine._core.scheduler.costs.samples == said
    finally:
        engine.close()
    assert service.closed


def test_what_is_missing_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^drafter needs grpc, which is missing: pip install 'adaserve-jax\[star\]'"):
        LLM(drafter=DRAFTER)

    def find(name: str) -> object:
        if name == "grpc":
            return SimpleNamespace()
        raise ModuleNotFoundError("No module named 'google'")

    monkeypatch.setattr(drafting, "find_spec", find)
    with pytest.raises(ConfigError, match=r"^drafter needs protobuf, "):
        drafting.check_packages()
