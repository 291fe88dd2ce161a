"""Deadlines of the last token: the pace that they ask for, the order of admission, and what is given up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.errors import RequestError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.scheduler.controllers.base import Decision, Load
from adaserve_jax.scheduler.planner import Pace
from adaserve_jax.types import Sequence
from tests.scheduler.harness import Run, expected_text, limits_of, request_of


def pace_of(
    now: float, deadline_s: float, left: int, tpot_slo_s: float = np.inf, decoded: int = 0
) -> tuple[float, float]:
    """Rate and due time of one row whose first token came at 0."""
    pace = Pace(
        np.array([0.0]), np.array([tpot_slo_s]), np.array([0.99 * tpot_slo_s]), np.array([decoded]), np.array([10]),
        np.array([deadline_s]), np.array([left]),
    )  # fmt: skip
    return float(pace.need_rate(now)[0]), float(pace.due_s(now)[0])


def test_a_deadline_asks_for_what_is_left_in_the_time_that_is_left() -> None:
    assert pace_of(2.0, 7.0, 50) == (10.0, pytest.approx(0.1))
    assert pace_of(2.0, np.inf, 50) == (0.0, np.inf)
    assert pace_of(8.0, 7.0, 50) == (np.inf, 0.0), "nothing helps any more"


def test_the_stricter_of_pace_and_deadline_counts() -> None:
    tpot_slo_s = 0.05
    own = 10 / (0.99 * tpot_slo_s * (30 + 10) - 1.0)  # h / ((1 - r) tpot (o + h) - l)
    rate, due_s = pace_of(1.0, 100.0, 50, tpot_slo_s, decoded=30)
    assert rate == pytest.approx(own) and due_s == pytest.approx(31 * tpot_slo_s - 1.0)
    rate, due_s = pace_of(1.0, 2.0, 50, tpot_slo_s, decoded=30)
    assert rate == pytest.approx(50.0) and due_s == pytest.approx(0.02)


def crowd(deadline_s: float | None, others: int = 7) -> list[Sequence]:
    """A request of 60 tokens among others without a target."""
    load = [request_of(f"other{number}", tokens=120) for number in range(others)]
    return [*load, request_of("urgent", tokens=60, e2e_slo_s=deadline_s)]


def taught(run: Run) -> None:
    """Let outputs of 60 tokens end, so that lengths are known."""
    run.serve([request_of(f"seen{number}", tokens=60, arrival_s=run.clock.now()) for number in range(16)])


def served(load: list[Sequence], **limits) -> Run:
    run = Run.of(limits_of(**limits), policy="adaserve", knee=8)
    taught(run)
    now = run.clock.now()
    load = [replace(each, arrival_s=now) for each in load]
    run.serve(load)
    for each in load:
        assert run.text[each.sequence_id] == expected_text(each, 256)[0]
    return run


def e2e_s(run: Run, name: str) -> float:
    metrics = run.last[name].metrics
    assert metrics is not None and metrics.e2e_s is not None
    return metrics.e2e_s


def test_a_request_with_a_deadline_is_served_just_fast_enough() -> None:
    free = e2e_s(served(crowd(None)), "urgent")
    within = 0.75 * free
    run = served(crowd(within))
    metrics = run.last["urgent"].metrics
    assert metrics is not None and metrics.e2e_met and metrics.slo_met
    assert e2e_s(run, "urgent") > 0.6 * within, "and no sooner than needed by much"


def test_a_deadline_out_of_reach_takes_nothing_from_others() -> None:
    """A request that needs what no step can bring is served like one without a target."""
    reachable = replace(request_of("paced", tokens=60), tpot_slo_s=0.012)
    alone = served([*crowd(None), reachable])
    beside = served([*crowd(0.2), reachable])
    assert beside.last["urgent"].metrics.e2e_met is False  # type: ignore[union-attr]
    assert beside.last["paced"].metrics.tpot_met == alone.last["paced"].metrics.tpot_met is True  # type: ignore[union-attr]


def test_a_deadline_counts_until_it_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pacing keeps a twentieth of its time in reserve, or half of what is left: no instant asks for all at once."""
    run = Run.of(limits_of(), policy="adaserve")
    begun_s = run.clock.now()
    run.add(request_of("urgent", tokens=60, e2e_slo_s=2.0, arrival_s=begun_s))
    run.step()
    rates: list[float] = []
    decide = run.scheduler.controller.decide

    def noted(load: Load) -> Decision:
        rates.append(float(load.need_rate[0]))
        return decide(load)

    monkeypatch.setattr(run.scheduler.controller, "decide", noted)
    for left_s in (0.5, 0.101, 0.099, 0.05, -0.01):
        run.clock.advance(begun_s + 2.0 - left_s - run.clock.now())
        run.step()
    assert 0 < rates[0] < rates[1] < 1.5 * rates[2] and rates[2] < 1.5 * rates[3] < np.inf == rates[4]


def test_admission_goes_by_the_latest_time_to_start() -> None:
    """With one place, the request whose deadline is nearer goes first, whatever came first."""
    run = Run.of(limits_of(max_requests=1), policy="adaserve")
    taught(run)
    now = run.clock.now()
    load = [request_of("first", tokens=60, arrival_s=now), request_of("far", tokens=60, arrival_s=now, e2e_slo_s=9.0)]
    run.serve([*load, request_of("near", tokens=60, arrival_s=now, e2e_slo_s=3.0)])
    begun = {name: run.last[name].metrics.first_scheduled_s for name in ("first", "near", "far")}  # type: ignore[union-attr]
    assert begun["near"] < begun["far"] and begun["near"] < begun["first"]  # type: ignore[operator]


def test_a_deadline_shorter_than_the_prompt_takes_is_refused() -> None:
    run = Run.of(limits_of(), policy="adaserve", infeasible_slo="refuse")
    with pytest.raises(RequestError, match=r"slo_e2e_ms must be at least .* got 1 ms") as error:
        run.add(request_of("late", prompt=100, e2e_slo_s=0.001))
    assert error.value.param == "slo_e2e_ms" and error.value.code == "slo_infeasible"
    run.add(request_of("fine", prompt=100, e2e_slo_s=5.0))


@pytest.mark.parametrize(
    ("last_s", "ttft_slo_s", "met", "all_met"),
    [(5.0, None, True, True), (5.1, None, False, False), (4.0, 0.5, True, False)],
)
def test_a_deadline_is_a_target_like_the_others(last_s, ttft_slo_s, met, all_met) -> None:
    metrics = RequestMetrics(
        1.0, first_token_s=2.0, last_token_s=1.0 + last_s, output_tokens=9, e2e_slo_s=5.0, ttft_slo_s=ttft_slo_s
    )
    assert (metrics.e2e_met, metrics.slo_met) == (met, all_met)
    assert RequestMetrics(1.0, e2e_slo_s=5.0).e2e_met is False
    assert RequestMetrics(1.0).e2e_met is None
