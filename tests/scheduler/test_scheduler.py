"""The scheduler's contract, step by step: limits, ends of requests, draft lag, preemption, errors."""

import subprocess
import sys

import numpy as np
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError, IntegrityError, QueueFullError, RequestError
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.types import CandidateTrees, SamplingParams, StepOutcome
from tests.conftest import ROOT
from tests.scheduler.harness import Run, costs_of, expected_text, limits_of, request_of


def scheduler_of(limits=None, **config):
    limits = limits or limits_of()
    return Scheduler(EngineConfig(**config), limits, costs_of(limits))


def outcome_for(plan, trees, tokens):
    """An outcome in which every row emits `tokens` (a list per row)."""
    table = np.zeros((plan.num_rows, 8), np.int32)
    for row, ids in enumerate(tokens):
        table[row, : len(ids)] = ids
    counts = np.array([len(ids) for ids in tokens], np.int32)
    return StepOutcome(table, counts, trees.parent < 0, 0.0, 0.01, 0.0, 8)


def run_step(scheduler, tokens, now=1.0, stop_check=None):
    plan = scheduler.plan(now)
    candidates = CandidateTrees.empty(plan.num_decode)
    trees = scheduler.select(plan, candidates, now)
    return scheduler.commit(plan, trees, candidates, outcome_for(plan, trees, tokens), now, stop_check)


@pytest.mark.slow
def test_numba_is_imported_for_policies_that_value_options():
    made = "from tests.scheduler.test_scheduler import scheduler_of; scheduler_of(policy={!r}); "
    code = f"import sys; {made.format('ar')}print('numba' in sys.modules); {made.format('adaserve')}"
    code += "print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_the_time_between_two_steps_is_overhead_of_the_second_unless_the_engine_was_idle_or_did_other_work():
    run = Run.of(limits_of(), policy="ar")

    def overhead_s(before_s: float, pauses: bool = False) -> float:
        """What one more step adds that begins so long after the last."""
        served = run.scheduler.costs.served
        known_s = sum(times.seconds for times in served.overhead.values())
        if pauses:
            run.scheduler.pause()
        run.clock.advance(before_s)
        run.step()
        return sum(times.seconds for times in served.overhead.values()) - known_s

    run.add(request_of("first", tokens=6))
    assert overhead_s(0.002) == 0.0, "nothing ran before"
    assert overhead_s(0.002) == pytest.approx(0.002)
    assert overhead_s(0.0) == pytest.approx(0.0)
    assert overhead_s(0.5, pauses=True) == pytest.approx(0.0)
    while run.scheduler.has_work:
        run.step()
    run.add(request_of("second", tokens=6))
    assert overhead_s(3.0) == pytest.approx(0.0), "it was idle"


@pytest.mark.parametrize("policy", ["ar", "spec:4", "adaserve"])
def test_every_plan_keeps_the_limits(policy):
    run = Run.of(limits_of(max_tree_tokens=20), policy=policy)
    for index in range(14):
        run.scheduler.add(request_of(f"q{index}", prompt=1 + 11 * index, tokens=30))
    seen_mixed = False
    while run.scheduler.has_work:
        plan, trees = run.step()
        limits = run.executor.limits
        assert plan.num_rows <= limits.max_requests
        assert trees.num_nodes + plan.num_prefill_tokens <= limits.max_tokens
        assert trees.num_nodes + plan.prefill_final.sum() <= limits.max_tree_tokens
        assert trees.num_nodes <= plan.tree_token_cap
        assert len(plan.prefill_counts) == plan.num_rows - plan.num_decode
        seen_mixed |= plan.num_decode > 0 and plan.num_prefill_tokens > 0
        if policy == "ar":
            assert plan.draft is None
        if policy == "spec:4" and plan.draft is not None:
            assert (plan.draft.depth, plan.draft.width) in ((4, 1), (0, 1))
    assert seen_mixed


def test_adaserve_fills_the_bucket_it_pays_for():
    run = Run.of(limits_of(), policy="adaserve", knee=32)
    for index in range(5):
        run.scheduler.add(request_of(f"q{index}", tokens=50, tpot_slo_s=0.01, ttft_slo_s=10.0))
    sizes = set()
    for _ in range(15):
        plan, trees = run.step()
        if plan.draft is not None and plan.draft.depth:
            sizes.add(trees.num_nodes + plan.num_prefill_tokens)
    assert sizes
    assert sizes <= {8, 16, 32, 64}


def test_need_is_read_after_drafting():
    """The same step, the clock read later: the request that fell behind gets nodes that it did not get before."""
    wanted = {}
    for delay_s in (0.0, 0.25):
        run = Run.of(limits_of(token_edges=(5,), max_tree_tokens=5), policy="adaserve")
        run.scheduler.add(request_of("loose", prompt=1, tokens=100))
        run.scheduler.add(request_of("tight", prompt=1, tokens=100, tpot_slo_s=0.018, ttft_slo_s=10.0))
        run.step()
        plan = run.scheduler.plan(run.clock.now())
        chain = np.tile(np.log([0.9, 0.8, 0.7, 0.6]).astype(np.float32), (2, 1))
        chain[1] = np.log([0.6, 0.4, 0.3, 0.2])
        assert plan.draft is not None and plan.draft.depth
        depth = plan.draft.depth
        parent = np.tile(np.arange(-1, depth - 1, dtype=np.int32), (2, 1))
        candidates = CandidateTrees(parent, parent, chain[:, :depth], np.arange(1, depth + 1, dtype=np.int32))
        trees = run.scheduler.select(plan, candidates, run.clock.now() + delay_s)
        wanted[delay_s] = int((trees.row == 1).sum())
    assert wanted[0.25] > wanted[0.0]


def test_draft_follows_the_prompt_chunks_and_what_was_accepted():
    run = Run.of(limits_of(), policy="spec:2")
    run.scheduler.add(request_of("a", prompt=100, tokens=30))
    fed = 0
    while run.scheduler.has_work:
        plan, _ = run.step()
        if plan.draft is not None:
            assert plan.draft.draft_ctx[0] == fed
            fed += int(plan.draft.catchup_counts[0])
            if plan.num_decode and plan.draft.speculates.any():
                assert fed == plan.ctx_len[0] + 1
                assert plan.draft.catchup_counts[0] <= 4, "the draft follows prefill, so that nothing is left to repair"


def test_a_head_is_fed_one_token_beyond_what_the_target_has_computed():
    run = Run.of(limits_of(token_edges=(1, 16, 64), draft_is_head=True), policy="spec:2")
    run.scheduler.add(request_of("a", prompt=100, tokens=30))
    fed, drafted = 0, False
    while run.scheduler.has_work:
        plan, _ = run.step()
        if plan.draft is not None:
            assert plan.draft.draft_ctx[0] == fed
            fed += int(plan.draft.catchup_counts[0])
            assert fed <= plan.ctx_len[0] + 1
            drafted |= bool(plan.draft.speculates.any())
    assert drafted


def test_a_head_begins_at_the_second_token_of_a_text():
    run = Run.of(limits_of(draft_is_head=True), policy="spec:2")
    run.scheduler.add(request_of("a", prompt=1, tokens=30))
    first, second = (run.step()[0].draft for _ in range(2))
    assert first is None or not first.speculates.any()
    assert second is not None and second.speculates.all()


def test_a_lagging_draft_catches_up_in_chunks_before_the_row_speculates():
    run = Run.of(limits_of(token_edges=(1, 16, 64)), policy="spec:2")
    run.scheduler.add(request_of("a", prompt=200, tokens=40))
    while "a" not in run.text:
        run.step()
    run.scheduler.batch.forget_draft()  # as after a reload of the draft
    counts = []
    for _ in range(6):
        plan, _ = run.step()
        counts.append((int(plan.draft.catchup_counts[0]), bool(plan.draft.speculates[0]), plan.draft.depth))
    assert counts[:3] == [(64, False, 0)] * 3
    assert counts[3][1:] == counts[4][1:] == (True, 2)


def test_a_lagging_draft_leaves_half_of_the_room_to_prompts():
    """64 tokens a step are fed: without prompts all to the one that lags."""
    run = Run.of(limits_of(token_edges=(1, 16, 64)), policy="spec:2")
    run.scheduler.add(request_of("a", prompt=200, tokens=40))
    while "a" not in run.text:
        run.step()
    run.scheduler.batch.forget_draft()
    run.scheduler.add(request_of("b", prompt=150))
    plan, _ = run.step()
    assert (plan.num_decode, plan.num_rows) == (1, 2)
    assert plan.draft.catchup_counts.tolist() == [32, 32]


def test_adaserve_catches_a_draft_up_that_lags_by_more_than_one_step_holds():
    """Without it a request whose draft was off for long would decode plainly to its end."""
    run = Run.of(limits_of(token_edges=(1, 16, 64)), policy="adaserve")
    run.scheduler.add(request_of("a", prompt=200, tokens=50, tpot_slo_s=0.012))
    while "a" not in run.text:
        run.step()
    run.scheduler.batch.forget_draft()  # as after many steps without a draft
    for _ in range(8):
        plan, _ = run.step()
    assert plan.draft is not None
    assert plan.draft.speculates.all()
    assert plan.draft.depth > 0


def test_no_catch_up_for_a_request_that_ends_before_it_could_draft():
    run = Run.of(limits_of(token_edges=(1, 16, 64)), policy="spec:2")
    run.scheduler.add(request_of("a", prompt=200, tokens=4))
    while "a" not in run.text:
        run.step()
    run.scheduler.batch.forget_draft()
    plan, _ = run.step()
    assert plan.draft is None


def test_speculation_reaches_the_end_of_the_context():
    run = Run.of(limits_of(max_context=24), policy="spec:4", acceptance=0.98)
    run.scheduler.add(request_of("a", prompt=20, tokens=100))
    run.step()
    plan, trees = run.step()
    assert (plan.ctx_len[0], plan.draft.depth) == (20, 4)
    assert trees.depth.tolist() == [0, 1, 2]
    while run.scheduler.has_work:
        run.step()
    assert len(run.text["a"]) == 4


def test_a_failed_drafter_is_fed_again():
    run = Run.of(limits_of(), policy="spec:2")
    run.scheduler.add(request_of("a", prompt=4, tokens=30))
    run.step()
    plan = run.scheduler.plan(run.clock.now())
    candidates = CandidateTrees.empty(1)
    trees = run.scheduler.select(plan, candidates, run.clock.now())
    assert trees.num_nodes == 1
    outcome = run.executor.verify(plan, trees)
    run.take(run.scheduler.commit(plan, trees, candidates, outcome, run.clock.now()))
    again = run.scheduler.plan(run.clock.now())
    assert again.draft.draft_ctx.tolist() == plan.draft.draft_ctx.tolist()
    assert again.draft.catchup_counts[0] == plan.draft.catchup_counts[0] + 1


def test_nodes_beyond_the_last_token_are_not_verified():
    run = Run.of(limits_of(), policy="spec:4")
    run.scheduler.add(request_of("a", prompt=4, tokens=9))
    while run.scheduler.has_work:
        remaining = 9 - len(run.text.get("a", []))
        _, trees = run.step()
        if trees.num_nodes:
            assert trees.depth.max() <= remaining - 1


def test_preemption_keeps_arrival_tokens_and_text():
    limits = limits_of(num_pages=8, max_context=64)
    run = Run.of(limits, policy="ar")
    load = [request_of("early", prompt=8, tokens=50), request_of("late", prompt=8, tokens=50, arrival_s=0.001)]
    run.serve(load)
    early, late = run.last["early"].metrics, run.last["late"].metrics
    assert (early.preemptions, late.preemptions) == (0, 1)
    assert late.arrival_s == 0.001
    for request in load:
        assert run.text[request.sequence_id] == expected_text(request, 64)[0]


def test_lower_priority_is_preempted_first():
    run = Run.of(limits_of(num_pages=8, max_context=64), policy="ar")
    run.serve([request_of("low", prompt=8, tokens=50, priority=3), request_of("high", prompt=8, tokens=50)])
    assert run.last["high"].metrics.preemptions == 0
    assert run.last["low"].metrics.preemptions == 1


def test_priorities_beyond_the_bound_are_alike():
    """So the one that came first runs, and is not preempted for the other."""
    run = Run.of(limits_of(max_requests=1), policy="priority")
    run.serve([request_of("first", priority=300), request_of("second", priority=200)])
    assert [run.last[name].metrics.preemptions for name in ("first", "second")] == [0, 0]


@pytest.mark.parametrize(("prompt", "tokens"), [(0, 20), (256, 20), (200, 57)])
def test_prompts_that_can_never_be_served(prompt, tokens):
    """The engine's client refuses them first; tests/engine/test_client.py checks that."""
    limits = limits_of(num_pages=30)
    scheduler = scheduler_of(limits)
    with pytest.raises(IntegrityError, match=f"sequence 'a' of {prompt} prompt tokens can never run"):
        scheduler.add(request_of("a", prompt=prompt, tokens=tokens))
    assert scheduler.stats.waiting == 0


def test_an_id_in_use_is_refused():
    scheduler = scheduler_of(limits_of())
    scheduler.add(request_of("taken"))
    with pytest.raises(RequestError, match="request id 'taken' is in use; choose another") as caught:
        scheduler.add(request_of("taken"))
    assert (caught.value.param, caught.value.code) == ("request_id", "invalid_request")


def test_max_tokens_is_clipped_to_the_context():
    run = Run.of(limits_of(max_context=32), policy="adaserve")
    request = request_of("a", prompt=20, sampling=SamplingParams(max_tokens=10**9))
    run.serve([request])
    assert (len(run.text["a"]), run.last["a"].finish_reason) == (12, "length")


def test_full_queue():
    scheduler = scheduler_of(max_waiting=2)
    scheduler.add(request_of("a"))
    scheduler.add(request_of("b"))
    with pytest.raises(QueueFullError, match="2 requests wait already; retry later or raise max_waiting"):
        scheduler.add(request_of("c"))


def test_preempted_requests_take_no_room_in_the_queue():
    """They come back whenever pages run out; a request that the front end let in must not be refused for that."""
    run = Run.of(limits_of(num_pages=8, max_context=64), policy="ar", max_waiting=1)
    run.scheduler.add(request_of("early", prompt=8, tokens=50))
    run.step()
    run.scheduler.add(request_of("late", prompt=8, tokens=50, arrival_s=0.001))
    while not run.scheduler.stats.preemptions:
        run.step()
    assert run.scheduler.stats.waiting == 1
    run.scheduler.add(request_of("new", arrival_s=1.0))
    with pytest.raises(QueueFullError):
        run.scheduler.add(request_of("too many", arrival_s=1.0))


def test_abort_of_waiting_running_and_unknown():
    scheduler = scheduler_of(limits_of(max_requests=1), policy="ar")
    scheduler.add(request_of("running", prompt=1))
    scheduler.add(request_of("waiting"))
    run_step(scheduler, [[1]])
    for name in ("waiting", "running"):
        update = scheduler.abort(name)
        assert (update.sequence_id, update.token_ids, update.finish_reason) == (name, (), "abort")
        scheduler.check_integrity()
    assert scheduler.abort("running") is None
    assert not scheduler.has_work
    assert scheduler.plan(2.0) is None


def test_steps_out_of_turn_are_refused():
    scheduler = scheduler_of(policy="ar")
    scheduler.add(request_of("a", prompt=1))
    old, plan = scheduler.plan(0.0), scheduler.plan(0.0)
    with pytest.raises(IntegrityError, match="step 0 is not the one in flight"):
        scheduler.select(old, CandidateTrees.empty(1), 0.0)
    trees = scheduler.select(plan, CandidateTrees.empty(1), 0.0)
    scheduler.commit(plan, trees, CandidateTrees.empty(1), outcome_for(plan, trees, [[3]]), 0.0)
    with pytest.raises(IntegrityError, match="step 1 is not"):
        scheduler.commit(plan, trees, CandidateTrees.empty(1), outcome_for(plan, trees, [[3]]), 0.0)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (
            "spec:4@sufix",
            "unknown draft sources in policy 'spec:4@sufix'; after the @ of a policy may stand none, model",
        ),
        ("fast", "unknown policy 'fast'; known policies are adaserve, adaserve-paper, adaserve-code, spec:<k>, "),
        ("adaserve:3", "unknown policy 'adaserve:3'"),
        ("spec", "policy spec:<k> needs an integer k of at least 1, got 'spec'; for example spec:4"),
        ("spec:", "needs an integer k of at least 1, got 'spec:'; for example spec:4"),
        ("spec:-1", "needs an integer k"),
        ("spec:" + "9" * 5000, "needs an integer k"),
        ("spec:9", "spec:9 needs max_depth of at least 9, but it is 4; raise it"),
    ],
)
def test_unknown_policies(policy, text):
    with pytest.raises(ConfigError, match=text):
        scheduler_of(policy=policy)


def test_speculative_policy_without_a_draft():
    with pytest.raises(ConfigError, match="there is none; load one, or choose ar or spec:4@suffix"):
        scheduler_of(limits_of(max_depth=0, max_width=0), policy="spec:4")


def test_asking_how_things_are_changes_nothing():
    """Another thread asks while steps are taken: only who asks for the totals themselves changes them."""
    scheduler = scheduler_of()
    totals = scheduler.totals
    held = dict(vars(totals))
    scheduler.add(request_of("a", prompt=4))
    assert scheduler.stats.waiting == 1 and vars(totals) == held
    run_step(scheduler, [[7]])
    held = dict(vars(totals))
    asked = scheduler.stats
    assert (asked.running, asked.waiting, asked.pages_used) == (1, 0, 1) and vars(totals) == held
    assert totals is scheduler.totals
    assert (totals.running, totals.waiting, totals.pages_used) == (1, 0, 1)


def test_pages_smaller_than_a_draft_are_taken_several_at_a_time():
    """A draft of 4 tokens reaches over pages of one token, and two rows ask for theirs together."""
    load = [request_of(name, tokens=30, prompt=5) for name in "abc"]
    run = Run.of(limits_of(page_size=1, num_pages=512, max_context=64), policy="spec:4")
    run.serve(load)
    assert run.text == {request.sequence_id: expected_text(request, 64)[0] for request in load}
    assert run.steps < 30, "drafts were of use"


def test_rows_speculate_only_with_pages_for_what_they_may_accept():
    run, whole = Run.of(limits_of(num_pages=8, max_context=64), policy="spec:4"), 58
    speculate, without = run.executor.speculate, []

    def watched(plan):
        rows = np.flatnonzero(plan.draft.speculates)
        room = run.scheduler.batch.table.num_pages[plan.slots[rows]] * 8
        assert (room >= np.minimum(plan.ctx_len[rows] + 1 + plan.draft.depth, whole - 1)).all()
        without.append(plan.num_decode - len(rows))
        return speculate(plan)

    run.executor.speculate = watched
    prompts = {"a": 8, "b": 12, "c": 14}
    run.serve([request_of(name, prompt=size, tokens=whole - size) for name, size in prompts.items()])
    assert any(without), "pages were short"
