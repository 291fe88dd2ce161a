"""Swaps of the draft and KV pages under load, in the simulator that knows what every KV slot holds, and what failures
of each of their parts leave. Texts are held to plain decoding's own definition.
"""

from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ElasticError, IntegrityError
from adaserve_jax.memory.page_pool import PagePool
from adaserve_jax.memory.residency import ElasticRule
from adaserve_jax.scheduler.controllers.nightjar import NightjarController
from adaserve_jax.scheduler.elastic import bring_back_draft, contract, expand_or_contract, may_expand
from adaserve_jax.types import Limits, Sequence, StepPlan
from tests.scheduler.harness import Run, expected_text, limits_of, random_load, request_of
from tests.sim_kv import StrictExecutor
from tests.slow import slow_after

QUICK = ElasticRule(persist_steps=4, min_stay_steps=8)
LIMITS = limits_of(num_pages=40, extension_pages=24)
"""Pages are short with 4 of the load's requests, which take 10 on average."""


class Watched(StrictExecutor):
    """Notes what plans bring, and fails where `failing` says, so many times."""

    failing: str = ""
    failures = 0

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.deepest: list[int] = []
        """Depth of each step's draft."""
        self.highest_page = 0
        self.moved = 0
        self.failed: list[str] = []

    def verify(self, plan: StepPlan, trees, edits=None, meanwhile=None):
        self.deepest.append(plan.draft.depth if plan.draft is not None else 0)
        self.highest_page = max(self.highest_page, int(plan.page_table.max()))
        return super().verify(plan, trees, edits, meanwhile)

    def expand(self) -> None:
        if self._fails("expand"):
            self.kv.drop_draft()
            raise ElasticError("no room for the slab")
        super().expand()

    def move_pages(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        if self._fails("move_pages"):
            self.kv.move_pages(to_pages[::-1], to_pages)  # what they hold now is nobody's business
            raise ElasticError("the copy was cut off")
        self.moved += len(from_pages)
        super().move_pages(from_pages, to_pages)

    def contract(self) -> None:
        if self._fails("contract"):
            raise ElasticError("the slab is still there")
        super().contract()

    def draft_ready(self) -> bool:
        if self._fails("draft_ready"):
            raise ElasticError("the host copy could not be read")
        return super().draft_ready()

    def _fails(self, part: str) -> bool:
        if part != self.failing or len(self.failed) >= self.failures:
            return False
        self.failed.append(part)
        return True


def crowd_and_calm(seed: int, **changes) -> list[Sequence]:
    """More than 40 pages hold for some seconds, then few, then a crowd again."""
    parts = [("", 24, 12.0, 0.0), ("-calm", 6, 2.0, 10.0), ("-again", 12, 12.0, 20.0)]
    return [
        replace(request, sequence_id=request.sequence_id + name, arrival_s=request.arrival_s + after_s, **changes)
        for number, (name, count, rate, after_s) in enumerate(parts)
        for request in random_load(seed + number, count, rate)
    ]


def watched(
    policy: str = "nightjar", limits: Limits = LIMITS, failing: str = "", rule: ElasticRule = QUICK, **config
) -> Run:
    """A draft that is of use to one request alone, and of none to several."""
    kind = type("Failing", (Watched,), {"failing": failing, "failures": 2})
    return Run.of(limits, acceptance=0.2, knee=1, policy=policy, elastic_rule=rule, executor=kind, **config)


def check_texts(run: Run, load: list[Sequence]) -> None:
    for request in load:
        reason = run.last[request.sequence_id].finish_reason
        assert (run.text[request.sequence_id], reason) == expected_text(request, 256), request.sequence_id


def test_text_drafts_while_the_drafts_memory_serves_as_pages() -> None:
    """Every request of the crowd is asked twice; those that repeat find their text in what was kept."""
    run = watched("nightjar@suffix+model", replace(LIMITS, suffix_depth=8))
    load = random_load(3, 24, 12.0)
    load += [replace(each, sequence_id=f"{each.sequence_id}-again", arrival_s=each.arrival_s + 3.0) for each in load]
    accepted: dict[bool, list[int]] = {True: [0], False: [0]}

    def note(step: int) -> None:
        stats = run.scheduler.totals
        accepted[stats.draft_resident].append(stats.suffix_accepted_tokens - sum(map(sum, accepted.values())))

    run.serve(sorted(load, key=lambda each: each.arrival_s), note)
    check_texts(run, load)
    assert run.scheduler.stats.elastic_moves["expand"] >= 1
    assert sum(accepted[False]) > 40


@pytest.mark.parametrize(("policy", "seed"), [("nightjar", 1), ("adaserve", 2)])
def test_swaps_under_load_change_no_token_and_use_the_pages_of_both_slabs(policy: str, seed: int) -> None:
    run, load = watched(policy), crowd_and_calm(seed, tpot_slo_s=None)
    away: list[int] = []
    run.serve(load, lambda step: away.extend([] if run.scheduler.stats.draft_resident else [step]))
    check_texts(run, load)
    bring_back_draft(run.scheduler.elastic_memory, run.executor, run.clock.now, lambda: run.clock.advance(0.1))
    stats = run.scheduler.stats
    assert stats.elastic_moves["expand"] == stats.elastic_moves["contract"] == stats.elastic_moves["reload"] >= 2
    assert run.executor.highest_page >= 40, "pages of the extension were used"
    assert run.executor.moved > 0, "and what lived there moved when it went"
    depths = run.executor.deepest
    assert not any(depths[step] for step in away), "nobody drafts while the draft is away or loading"
    assert any(depths[: away[0]]) and any(depths[away[0] : away[-1]]), "they do before, and when it was back"
    assert stats.draft_resident and stats.extension_total == stats.extension_used == stats.pages_used == 0


def test_prefixes_that_requests_share_are_found_before_and_after_pages_moved() -> None:
    """The record of KV slots knows every request's text, and would see one that finds another's pages."""
    shared = np.arange(40, dtype=np.int32)
    load = [
        replace(request, prompt_ids=np.concatenate([shared[: 8 * (1 + index % 5)], request.prompt_ids[:40]]))
        for index, request in enumerate(crowd_and_calm(3))
    ]
    run = watched()
    run.serve(load)
    check_texts(run, load)
    stats = run.scheduler.stats
    assert stats.elastic_moves["contract"] >= 1 and run.executor.moved > 0
    assert stats.cache_hit_tokens > 500


def test_adaserve_keeps_the_draft_while_targets_need_it() -> None:
    """Plain steps take 16 ms and more."""
    load = [replace(request, tpot_slo_s=0.02, ttft_slo_s=None) for request in random_load(2, 16, 12.0)]
    run = watched("adaserve")
    run.serve(load)
    check_texts(run, load)
    assert run.scheduler.stats.elastic_moves == {}


@pytest.mark.parametrize("part", slow_after(3, ["expand", "contract", "move_pages", "draft_ready"]))
def test_a_part_that_fails_leaves_what_was_there_and_is_done_later(part: str) -> None:
    """Twice each; the record of KV slots would see a page, or the draft's KV, that is not what the scheduler thinks."""
    run, load = watched(failing=part), crowd_and_calm(1)
    states: list[tuple[str, int]] = []
    residency = run.scheduler.elastic_memory.residency
    run.serve(load, lambda _: states.append((residency.state, len(run.executor.failed))))
    check_texts(run, load)
    assert run.executor.failed == [part, part]
    stats = run.scheduler.stats
    assert stats.elastic_moves["failed"] == 2 and stats.elastic_moves["reload"] >= 1
    stays = {"expand": "resident", "move_pages": "expanded", "contract": "expanded", "draft_ready": "loading"}
    first = next(index for index, (_, failed) in enumerate(states) if failed)
    second = next(index for index, (_, failed) in enumerate(states) if failed == 2)
    assert {state for state, _ in states[first:second]} == {stays[part]}
    assert second - first >= QUICK.min_stay_steps, "the second try waits"


def test_a_contraction_without_room_changes_nothing_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, refused = PagePool.plan_contraction, []

    def refuse_twice(pool: PagePool):
        if len(refused) == 2:
            return plan(pool)
        refused.append(pool.extension_used)
        return None

    monkeypatch.setattr(PagePool, "plan_contraction", refuse_twice)
    run, load = watched(), crowd_and_calm(1)
    run.serve(load)
    check_texts(run, load)
    assert len(refused) == 2 and run.scheduler.stats.elastic_moves["failed"] == 2
    assert run.scheduler.stats.elastic_moves["contract"] >= 1


class TestWhereSwapsHappen:
    @pytest.mark.parametrize(
        ("elastic", "num_pages", "extension", "policy", "swaps"),
        [
            ("on", 40, 24, "nightjar", True),
            ("auto", 40, 24, "adaserve", True),
            ("off", 40, 24, "nightjar", False),
            ("on", 40, 0, "nightjar", False),
            ("on", 40, 24, "dsd", False),
            ("on", 40, 24, "ar", False),
        ],
    )
    def test_by_option_pages_and_policy(self, elastic, num_pages, extension, policy, swaps) -> None:
        run = watched(policy, limits_of(num_pages=num_pages, extension_pages=extension), elastic=elastic)
        assert (run.scheduler.elastic_memory is not None) == swaps

    def test_not_without_a_draft(self) -> None:
        limits = limits_of(num_pages=40, extension_pages=24, max_depth=0, max_width=0)
        run = watched("adaserve", limits)
        assert run.scheduler.elastic_memory is None and not run.scheduler.stats.draft_resident

    def test_a_draft_that_stays_is_resident_all_the_time(self) -> None:
        run, load = watched(elastic="off"), random_load(1, 16, 12.0)
        run.serve(load)
        check_texts(run, load)
        assert run.scheduler.stats.draft_resident and run.scheduler.stats.elastic_moves == {}
        assert may_expand(True, LIMITS, EngineConfig()) and not may_expand(False, LIMITS, EngineConfig())


def expanded(rule: ElasticRule = QUICK) -> Run:
    """With three requests that run or wait, and `nightjar` held to no speculation."""
    run = watched(rule=rule)
    controller = run.scheduler.controller
    assert isinstance(controller, NightjarController)
    controller._last, controller.choose = 0, lambda bucket, load: 0  # type: ignore[method-assign]
    for index in range(3):
        run.add(request_of(f"r{index}", prompt=90, tokens=60))
    while run.scheduler.stats.draft_resident:
        assert run.scheduler.has_work
        run.step()
    return run


def test_the_draft_is_sent_for_when_the_last_request_has_ended_however_short_the_stay_was() -> None:
    run = expanded(ElasticRule(persist_steps=4, min_stay_steps=1000))
    while run.scheduler.has_work:
        assert run.scheduler.elastic_memory.residency.state == "expanded"
        run.step()
    assert run.scheduler.elastic_memory.residency.state == "loading"


def test_a_contraction_needs_a_free_page_below_for_each_that_lives_above() -> None:
    run = expanded()
    pool = run.scheduler.elastic_memory.batch.pool
    pool.alloc(pool.num_free)
    assert pool.extension_used > 0
    with pytest.raises(ElasticError, match="too few base pages are free to take in those of the extension"):
        contract(run.scheduler.elastic_memory.batch, run.executor)
    assert run.executor.moved == 0 and pool.extension_used > 0


class TestBringBackDraft:
    def test_contracts_and_waits_for_the_load(self) -> None:
        run, asked = expanded(), []
        for sequence_id in ("r0", "r1", "r2"):
            run.scheduler.abort(sequence_id)

        def wait() -> None:
            asked.append(run.clock.now())
            run.clock.advance(0.05)

        bring_back_draft(run.scheduler.elastic_memory, run.executor, run.clock.now, wait)
        assert len(asked) == 3, "0.125 s by 0.05"
        assert run.scheduler.stats.draft_resident and run.scheduler.stats.elastic_moves["reload"] == 1

    @pytest.mark.parametrize(
        ("part", "message"),
        [
            ("contract", "the KV pages in the draft's memory could not be given up; try again later"),
            ("draft_ready", "the draft could not be loaded again; try again later"),
        ],
    )
    def test_says_so_when_it_cannot(self, part: str, message: str) -> None:
        run = expanded()
        for sequence_id in ("r0", "r1", "r2"):
            run.scheduler.abort(sequence_id)
        run.executor.failing = part
        with pytest.raises(ElasticError, match=message):
            bring_back_draft(run.scheduler.elastic_memory, run.executor, run.clock.now, lambda: run.clock.advance(0.1))
        run.executor.failing = ""
        bring_back_draft(run.scheduler.elastic_memory, run.executor, run.clock.now, lambda: run.clock.advance(0.1))
        assert run.scheduler.stats.draft_resident

    def test_has_nothing_to_do_where_the_draft_stays(self) -> None:
        run = watched(elastic="off")
        bring_back_draft(run.scheduler.elastic_memory, run.executor, run.clock.now, lambda: pytest.fail("waited"))


def test_a_swap_while_a_step_is_in_flight_is_refused() -> None:
    run = watched()
    for index in range(3):
        run.add(request_of(f"r{index}", prompt=90, tokens=60))
    swapping = run.scheduler.elastic_memory
    run.step()
    run.scheduler.plan(run.clock.now())
    swapping.residency.succeeded("expand")
    swapping.residency.succeeded("contract")
    with pytest.raises(IntegrityError, match="while a step is in flight"):
        expand_or_contract(run.scheduler.elastic_memory, run.executor, run.clock.now)


def test_seconds_of_swaps_are_counted_by_kind() -> None:
    """143.9 ms and 11.9 ms of the loop for each, and none while the draft loads beside it."""
    run = watched()
    run.serve(random_load(1, 40, 12.0))
    stats = run.scheduler.stats
    expected = {
        "expand": 0.1439 * stats.elastic_moves["expand"],
        "contract": 0.0119 * stats.elastic_moves["contract"],
        "reload": 0.0,
    }
    assert stats.elastic_s == pytest.approx({kind: expected[kind] for kind in stats.elastic_s})
    overhead_s = sum(times.seconds for times in run.scheduler.costs.served.overhead.values())
    assert overhead_s == pytest.approx(0.0, abs=1e-9), "no step is slower for them"
