"""A request that missed its TTFT target is not kept on its TPOT target at the cost of others; its metrics keep both."""

import numpy as np
import pytest

from tests.scheduler.harness import Run, limits_of, request_of


def without_infeasible(run: Run) -> dict[str, float]:
    """TPOT target of each running request, as it is planned for."""
    table = run.scheduler.batch.table
    return {state.sequence.sequence_id: float(table.tpot_slo_s[state.slot]) for state in run.scheduler.batch.running}


def questions_of(run: Run) -> list[tuple[list[float], int]]:
    """Rates and other rows of each question whether one more may start, from now on; the answer is yes."""
    asked: list[tuple[list[float], int]] = []

    def sustains(need_rate: np.ndarray, others: int, *_: object, **__: object) -> bool:
        asked.append((need_rate.tolist(), others))
        return True

    run.scheduler.controller.sustains = sustains
    return asked


@pytest.mark.parametrize(("policy", "after"), [("adaserve", np.inf), ("adaserve-paper", 0.05)])
def test_a_late_first_token_ends_the_pursuit(policy, after):
    run = Run.of(limits_of(), policy=policy)
    run.scheduler.add(request_of("late", prompt=120, tokens=30, tpot_slo_s=0.05, ttft_slo_s=0.15))
    run.scheduler.add(request_of("in time", prompt=4, tokens=60, tpot_slo_s=0.05, ttft_slo_s=5.0))
    run.clock.advance(0.1)
    run.step()
    assert without_infeasible(run)["late"] == 0.05, "nothing is lost yet"
    while len(run.text) < 2:
        run.step()
    assert without_infeasible(run) == {"late": after, "in time": 0.05}
    while run.scheduler.has_work:
        run.step()
    metrics = run.last["late"].metrics
    assert (metrics.tpot_slo_s, metrics.ttft_slo_s, metrics.ttft_met, metrics.slo_met) == (0.05, 0.15, False, False)


def test_it_stays_given_up_through_preemption():
    run = Run.of(limits_of(), policy="adaserve")
    run.scheduler.add(request_of("late", prompt=120, tokens=30, tpot_slo_s=0.05, ttft_slo_s=0.15))
    run.clock.advance(0.1)
    while not run.text.get("late"):
        run.step()
    batch = run.scheduler.batch
    batch.preempt(batch.running[0])
    run.step()
    assert without_infeasible(run) == {"late": np.inf}


def test_a_prompt_that_is_late_already_holds_nobody_back():
    """Nor does one whose target was given up before it was preempted: both count by their roots only."""
    run = Run.of(limits_of(), policy="adaserve")
    run.scheduler.add(request_of("late", prompt=200, tokens=30, tpot_slo_s=0.05, ttft_slo_s=0.3))
    run.clock.advance(0.2)
    run.step()
    asked = questions_of(run)
    run.scheduler.add(request_of("a", tpot_slo_s=0.04))
    run.scheduler.plan(0.29)
    run.scheduler.add(request_of("b", tpot_slo_s=0.04))
    run.scheduler.plan(0.31)
    assert asked == [([20.0, 25.0], 0), ([25.0, 25.0], 1)]
    while not run.text.get("late"):
        run.step()
    run.scheduler.batch.preempt(
        next(state for state in run.scheduler.batch.running if state.sequence.sequence_id == "late")
    )
    run.scheduler.add(request_of("c", tpot_slo_s=0.04))
    run.step()
    (first, second, new), others = asked[-1]
    assert (new, others) == (25.0, 1) and 25.0 < first == second < 27.0, "those that run keep a reserve"


def test_a_deadline_that_was_given_up_takes_no_room_after_preemption():
    run = Run.of(limits_of(), policy="adaserve", prefix_cache=False)
    run.scheduler.add(request_of("late", prompt=200, tokens=30, ttft_slo_s=0.3, e2e_slo_s=60.0))
    run.clock.advance(0.2)
    while not run.text.get("late"):
        run.step()
    asked = questions_of(run)
    run.scheduler.batch.preempt(run.scheduler.batch.running[0])
    run.scheduler.add(request_of("in time", tpot_slo_s=0.04))
    run.step()
    assert asked == [([25.0], 1)]
