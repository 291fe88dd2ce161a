"""A draft that is a service: what plans feed it and tell it, whose KV is whose, and what rounds without trees teach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.scheduler.commit import rows_with_drafts
from adaserve_jax.scheduler.controllers.base import Feedback
from adaserve_jax.types import CandidateTrees, Sequence, StepPlan
from tests.scheduler.harness import Run, expected_text, limits_of, random_load, request_of
from tests.sim_kv import StrictExecutor

DRAFTER = DrafterConfig(("grpc://host:1",))
SERVICE_S = 0.004


class Sessions:
    """Sessions that note the slots whose end they were told of."""

    def __init__(self) -> None:
        self.available = True
        self.told: list[list[int]] = []
        self.forget: Callable[[int], object] = lambda slot: None

    def ended(self, slots: np.ndarray) -> None:
        self.told.append(slots.tolist())
        for slot in slots.tolist():
            self.forget(slot)


class Service(StrictExecutor):
    """A target whose draft is elsewhere: it knows a text for each slot, from what it was fed alone. answers: whether a
    row gets its tree; took_s: seconds of a round."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.texts: dict[int, list[int]] = {}
        self.answers = lambda row: True
        self.took_s = SERVICE_S
        self.plans: list[StepPlan] = []
        self.sessions = Sessions()

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        draft = plan.draft
        assert draft is not None and draft.due_s is not None and len(draft.due_s) == plan.num_decode
        self.plans.append(plan)
        ends = draft.catchup_counts.cumsum()
        for row, slot in enumerate(plan.slots.tolist()):
            tokens = draft.catchup_tokens[ends[row] - draft.catchup_counts[row] : ends[row]].tolist()
            known = int(draft.draft_ctx[row])
            if tokens:
                text = [] if known == 0 else self.texts[slot]
                assert known <= len(text), "a gap"
                self.texts[slot] = [*text[:known], *tokens]
        if draft.depth == 0:
            return CandidateTrees.empty(plan.num_decode)
        for row in np.flatnonzero(draft.speculates).tolist():
            text = self.texts[int(plan.slots[row])]
            assert len(text) == plan.ctx_len[row] + 1 and text[-1] == plan.root_token[row]
        self._draft_s = self.took_s
        self._clock.advance(self.took_s)
        found = self._candidates(plan, draft)
        silent = [row for row in range(plan.num_decode) if not self.answers(row)]
        if len(silent) == plan.num_decode:
            return CandidateTrees.empty(plan.num_decode)
        log_f = found.log_f.copy()
        log_f[silent] = -np.inf
        return replace(found, log_f=log_f)


def run_of(**changes: Any) -> Run:
    limits = limits_of(**changes.pop("limits", {}))
    sessions = Sessions()
    options = {"policy": "spec:3", **changes}
    run = Run.of(limits, executor=Service, drafter=DRAFTER, draft_sessions=sessions, **options)
    service = service_of(run)
    service.sessions, sessions.forget = sessions, lambda slot: service.texts.pop(slot, None)
    return run


def service_of(run: Run) -> Service:
    assert isinstance(run.executor, Service)
    return run.executor


def alike(name: str, prompt: np.ndarray, **changes: Any) -> Sequence:
    return replace(request_of(name, **changes), prompt_ids=prompt)


def test_cached_pages_hold_no_draft_so_the_service_gets_the_whole_prompt() -> None:
    run = run_of()
    prompt = np.arange(1, 41, dtype=np.int32)
    run.serve([alike("first", prompt)])
    service = service_of(run)
    service.plans.clear()
    second = alike("second", prompt)
    run.serve([replace(second, arrival_s=run.clock.now())])
    assert run.last["second"].metrics.cached_tokens >= 32
    begun = service.plans[0].draft
    assert begun is not None
    assert begun.draft_ctx.tolist() == [0]
    assert begun.catchup_tokens[:40].tolist() == prompt.tolist()
    assert run.text["second"] == expected_text(second, 256)[0]


def test_a_long_text_is_fed_beside_a_step_that_does_not_wait_for_it() -> None:
    """The service was timed up to 64 tokens: a draft that lacks more than that is waited for in the step after."""
    run = run_of(limits={"max_tree_tokens": 16})
    run.add(request_of("long", prompt=200, tokens=12))
    table = run.scheduler.batch.table
    while not service_of(run).plans:
        run.step()
    while run.scheduler.batch.running and table.num_tokens[0] - table.num_computed[0] > 1:
        run.step()
    table.draft_computed[0] = 0  # as where nothing drafted so far
    service = service_of(run)
    service.plans.clear()
    run.step()
    run.step()
    fed, drafted = (plan.draft for plan in service.plans)
    assert fed is not None and drafted is not None
    assert (fed.depth, fed.speculates.tolist(), fed.draft_ctx.tolist()) == (0, [False], [0])
    assert fed.catchup_counts.tolist() == [len(fed.catchup_tokens)] and len(fed.catchup_tokens) > 200
    assert (drafted.depth, drafted.speculates.tolist(), drafted.catchup_counts.tolist()) == (3, [True], [1])
    assert (fed.waited_tokens, drafted.waited_tokens) == (0, 1)


def test_who_is_due_when() -> None:
    """The first token at f, and n after it: the next one is due at f + (n + 1) targets."""
    run = run_of()
    for name, slo in (("fast", 0.01), ("slow", 5.0), ("none", None)):
        run.add(request_of(name, tokens=30, tpot_slo_s=slo))
    seen = 0
    while run.scheduler.has_work:
        now = run.clock.now()
        plan, _ = run.step()
        if plan is None or plan.draft is None:
            continue
        states = {state.slot: state for state in run.scheduler.batch.running}
        for row, slot in enumerate(plan.slots[: plan.num_decode].tolist()):
            state, due_s = states.get(slot), plan.draft.due_s[row]
            if state is None or state.first_token_s is None:
                continue
            slo = state.sequence.tpot_slo_s
            decoded = int(plan.ctx_len[row]) + 1 - len(state.sequence.prompt_ids) - 1
            expected = np.inf if slo is None else max(state.first_token_s + (decoded + 1) * slo - now, 0.0)
            assert due_s == pytest.approx(expected)
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("policy", ["spec:3", "adaserve", "nightjar", "ucbspec"])
def test_texts_are_the_target_s_whatever_comes_back(policy: str) -> None:
    """Trees of all rows, of some, or none; prompts that begin alike, preemption, slots that others take over."""
    run = run_of(policy=policy, limits={"num_pages": 40})
    service = service_of(run)
    rng = np.random.default_rng(3)
    load = random_load(5, 15, rate=40.0)

    def before_step(step: int) -> None:
        mood = rng.integers(0, 3)
        service.answers = [lambda row: True, lambda row: row % 2 == 0, lambda row: False][mood]
        service.took_s = float(rng.choice([0.0, SERVICE_S, 0.1]))

    run.serve(load, before_step)
    for request in load:
        assert (run.text[request.sequence_id], run.last[request.sequence_id].finish_reason) == expected_text(
            request, 256
        )
    assert run.scheduler.stats.accepted_tokens > 0 or policy == "nightjar"


def test_slots_that_are_given_back_are_named_once() -> None:
    run = run_of(limits={"max_requests": 2})
    run.add(request_of("a", tokens=4))
    run.add(request_of("b", tokens=40))
    run.step()
    slots = {state.sequence.sequence_id: state.slot for state in run.scheduler.batch.running}
    told = service_of(run).sessions.told
    assert told == []
    while "a" not in run.last:
        run.step()
    assert told == [[slots["a"]]]
    run.scheduler.abort("b")
    assert told == [[slots["a"]], [slots["b"]]]


def drafted(run: Run, count: int) -> None:
    """So many steps in which the draft is asked."""
    service = service_of(run)
    service.plans.clear()
    while len([plan for plan in service.plans if plan.draft.depth]) < count:
        run.step()


def test_a_service_that_is_left_alone_does_not_make_drafts_look_cheap() -> None:
    run = run_of(limits={"max_context": 2048, "num_pages": 600})
    service, cost = service_of(run), run.scheduler.costs
    run.add(request_of("a", tokens=1500))
    drafted(run, 30)
    known, chance = cost.level_s(1)[0], run.scheduler._acceptance.expected()[0, 0]
    service.answers, service.took_s = (lambda row: False), 0.0
    drafted(run, 1)
    assert cost.level_s(1)[0] == pytest.approx(known, rel=0.02)
    drafted(run, 200)
    assert cost.level_s(1)[0] > 0.7 * known  # back towards what was measured at the start
    assert run.scheduler._acceptance.expected()[0, 0] > 0.5 * chance


def test_waiting_in_vain_costs_what_it_took_and_is_forgotten_in_time() -> None:
    run = run_of(limits={"max_context": 2048, "num_pages": 600})
    service, cost = service_of(run), run.scheduler.costs
    run.add(request_of("a", tokens=1500))
    drafted(run, 30)
    known = cost.level_s(1)[0]
    service.answers, service.took_s = (lambda row: False), 0.1
    drafted(run, 3)
    waited = cost.level_s(1)[0]
    assert waited > 1.5 * known
    service.took_s = 0.0
    drafted(run, 400)
    assert cost.level_s(1)[0] < 0.7 * waited


def test_a_controller_learns_of_rows_that_got_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(policy="ucbspec")
    service, told = service_of(run), list[Feedback]()
    for name in "abcd":
        run.add(request_of(name, tokens=40))
    drafted(run, 1)
    monkeypatch.setattr(run.scheduler.controller, "learn", told.append)
    service.answers = lambda row: row < 2
    plan, trees = run.step()
    assert plan.num_decode == 4 and (told[0].rows, told[0].decode_rows) == (2, 4)
    assert set(trees.row[trees.candidate >= 0].tolist()) <= {0, 1}
    assert told[0].emitted <= told[0].decoded - 2
    service.answers = lambda row: False
    run.step()
    assert (told[1].rows, told[1].drafted, told[1].emitted, told[1].decoded) == (0, 0, 0, 4)


@pytest.mark.parametrize("policy", ["adaserve", "spec:3", "nightjar"])
def test_while_no_service_can_be_asked_plans_have_no_draft(policy: str) -> None:
    """And the first one after has all that the service lacks."""
    run = run_of(policy=policy, limits={"max_context": 512, "num_pages": 100})
    service = service_of(run)
    run.add(request_of("a", tokens=300))
    drafted(run, 3)
    service.plans.clear()
    service.sessions.available = False
    for _ in range(90):
        plan, trees = run.step()
        assert plan.draft is None and trees.num_nodes == 1
    assert not service.plans
    service.sessions.available = True
    drafted(run, 3)
    fed = service.plans[0].draft
    assert fed is not None and fed.depth == 0 and len(fed.catchup_tokens) > 80
    while run.scheduler.has_work:
        run.step()
    assert run.text["a"] == expected_text(request_of("a", tokens=300), 512)[0]


@pytest.mark.parametrize("policy", ["adaserve", "nightjar@suffix+model"])
def test_text_drafts_while_no_service_can_be_asked(policy: str) -> None:
    """The second request writes what the first one wrote, and finds it in the texts that were kept."""
    run = run_of(policy=policy, limits={"suffix_depth": 8})
    service = service_of(run)
    service.sessions.available = False
    first, second = request_of("a", tokens=80), replace(request_of("a", tokens=80), sequence_id="again")
    run.serve([first])
    assert run.steps >= 80 and run.scheduler.stats.suffix_accepted_tokens < 8, "numbers at random do not repeat"
    run.serve([second])
    assert not service.plans
    assert run.steps < 80 + 40
    assert run.scheduler.stats.suffix_accepted_tokens > 40
    assert run.text["a"] == run.text["again"] == expected_text(first, 256)[0]


def test_whose_tree_came() -> None:
    run = run_of()
    run.add(request_of("a", tokens=40))
    drafted(run, 1)
    plan = service_of(run).plans[-1]
    log_f = np.full((1, 3), -np.inf, np.float32)
    trees = CandidateTrees(np.zeros((1, 3), np.int32), np.zeros((1, 3), np.int32), log_f, np.array([1, 2, 3]))
    assert rows_with_drafts(plan, trees) is None
    assert rows_with_drafts(plan, CandidateTrees.empty(1)) is None
    log_f[0, 0] = -0.1
    found = rows_with_drafts(plan, trees)
    assert found is not None and found.tolist() == [True]
    assert rows_with_drafts(replace(plan, draft=None), trees) is None


def test_nothing_changes_for_a_draft_of_ones_own() -> None:
    run = Run.of(limits_of(), policy="spec:3")
    run.add(request_of("a"))
    plan, _ = run.step()
    while plan is not None and plan.draft is None:
        plan, _ = run.step()
    assert plan.draft.due_s is None and plan.draft.waited_tokens == len(plan.draft.catchup_tokens)
