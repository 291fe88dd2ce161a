"""Spare time: slack by hand, against what standing still costs in a run, and none of it under load."""

from __future__ import annotations

import math

import numpy as np
import pytest

from adaserve_jax.scheduler.slack import CROWDED_SHARE, HOLD_S, SLACK_SHARE, TARGET_SHARE, SlackTracker, row_slack_s
from adaserve_jax.scheduler.slo import need_rate
from tests.scheduler.harness import Run, limits_of, random_load, request_of


def test_slack_by_hand():
    """10 tokens in 0.3 s at 50 ms: 42 are due in 2.1 s, the next 32 take 0.64 s at 20 ms, 1.16 s are left over."""
    slack = row_slack_s(
        np.array([0.3, 0.3, 5.0]), np.array([0.05, np.inf, 0.05]), np.array([10, 10, 10]), np.full(3, 32), 0.02
    )
    assert slack[:2].tolist() == [pytest.approx(1.16), math.inf]
    assert slack[2] < 0


def test_after_the_slack_the_needed_rate_is_the_rate_there_is():
    rng = np.random.default_rng(0)
    time_s, slo_s, decoded = rng.uniform(0, 1, 50), rng.uniform(0.03, 0.1, 50), rng.integers(8, 60, 50)
    horizon = rng.integers(1, 33, 50)
    slack = row_slack_s(time_s, slo_s, decoded, horizon, 0.012)
    late_by = np.where(slack > 0, slack, 0.0)
    rate = need_rate(time_s + late_by, slo_s, decoded, horizon)
    assert rate[slack > 0] == pytest.approx(1 / 0.012)
    assert (rate[slack < 0] > 1 / 0.012).all()


def running(run: Run, *names: str, **changes) -> None:
    """Add requests and run until each has decoded for a while."""
    for name in names:
        run.add(request_of(name, tokens=60, **changes))
    while not (run.text.keys() >= set(names) and all(len(run.text[name]) > 5 for name in names)):
        run.step()


def test_nothing_runs():
    assert Run.of(limits_of()).scheduler.slack_s(0.0) == math.inf


def test_a_waiting_request_and_a_prompt_leave_none():
    run = Run.of(limits_of(), policy="ar", max_prefill_tokens=8)
    running(run, "one")
    assert run.scheduler.slack_s(run.clock.now()) == math.inf  # no target
    run.add(request_of("two", prompt=40))
    assert run.scheduler.slack_s(run.clock.now()) == 0.0  # it waits
    run.step()
    assert run.scheduler.num_waiting == 0 and "two" not in run.text
    assert run.scheduler.slack_s(run.clock.now()) == 0.0  # its prompt is computed


def test_more_than_half_of_the_rows_leave_none_for_a_while():
    run = Run.of(limits_of(max_requests=4), policy="ar")
    running(run, "one", "two")
    assert not run.scheduler.is_loaded(run.clock.now())
    running(run, "three")
    assert run.scheduler.is_loaded(run.clock.now())
    assert run.scheduler.slack_s(run.clock.now()) == 0.0
    run.scheduler.abort("three")
    run.step()  # two of four: half, not more
    now = run.clock.now()
    assert run.scheduler.slack_s(now) == 0.0
    assert run.scheduler.slack_s(now + HOLD_S) == math.inf


def test_those_left_without_a_slot_are_load():
    spare = SlackTracker(4)
    spare.observe(1.0, 2, 0, 0.01, np.array([1, 1]))
    assert not spare.is_loaded(1.0)
    spare.observe(1.0, 2, 1, 0.01, np.array([1, 1]))
    assert spare.is_loaded(1.0 + HOLD_S - 1e-6) and not spare.is_loaded(1.0 + HOLD_S)
    spare.observe(9.0, int(CROWDED_SHARE * 4) + 1, 0, 0.01, np.array([1, 1]))
    assert spare.is_loaded(9.0)


def test_the_slack_of_a_running_target_by_hand():
    """SoloSpeed and plain, a token takes 16 ms. 36 of the target's 40 ms may be used, by o tokens 36 o ms."""
    run = Run.of(limits_of(), policy="ar")
    running(run, "one", tpot_slo_s=0.04)
    now, decoded = run.clock.now(), len(run.text["one"]) - 1
    slack = TARGET_SHARE * 0.04 * (decoded + 32) - 0.016 * decoded - 32 * 0.016
    assert run.scheduler.slack_s(now) == pytest.approx(SLACK_SHARE * slack, rel=0.05)
    assert run.scheduler.slack_s(now + slack + 1e-6) == 0.0


def test_a_late_target_leaves_none():
    run = Run.of(limits_of(), policy="ar")
    running(run, "late", tpot_slo_s=0.02)
    running(run, "free")
    run.clock.advance(2.0)
    assert run.scheduler.slack_s(run.clock.now()) == 0.0


@pytest.mark.parametrize("policy", ["ar", "adaserve"])
@pytest.mark.parametrize("tpot_slo_s", [0.02, 0.03, 0.2])
def test_who_spends_all_spare_time_misses_no_target(policy: str, tpot_slo_s: float):
    """After every step the loop stands still for as long as it may, up to a piece of 50 ms."""
    run = Run.of(limits_of(max_requests=8), policy=policy)
    spent = 0.0
    for name in ("a", "b", "c"):
        run.add(request_of(name, tokens=60, tpot_slo_s=tpot_slo_s))
    while run.scheduler.has_work:
        run.step()
        if run.scheduler.has_work:
            pause_s = min(run.scheduler.slack_s(run.clock.now()), 0.05)
            run.clock.advance(pause_s)
            spent += pause_s
    assert spent > 0
    assert all(update.metrics and update.metrics.slo_met for update in run.last.values())


@pytest.mark.slow
def test_a_full_machine_has_none_at_all():
    run = Run.of(limits_of(max_requests=4), policy="adaserve")
    load, spare = random_load(3, 120, rate=40.0), []

    def ask(_: int) -> None:
        spare.append(run.scheduler.slack_s(run.clock.now()))

    run.serve(load, before_step=ask)
    full = spare[40 : len(spare) // 2]
    assert len(full) > 100
    assert not any(full)


def test_asking_changes_nothing():
    """A run that asks after every step gives the same texts and metrics as one that does not."""
    runs = [Run.of(limits_of(), policy="adaserve") for _ in range(2)]
    runs[0].serve(random_load(5, 12, rate=10.0))

    def ask(_: int) -> None:
        runs[1].scheduler.slack_s(runs[1].clock.now())

    runs[1].serve(random_load(5, 12, rate=10.0), before_step=ask)
    assert runs[0].last == runs[1].last
    assert runs[0].text == runs[1].text


def test_tokens_per_row_shorten_the_time_of_a_token():
    """Steps of 30 ms with 3 tokens a row: as good as 10 ms steps with one."""
    run = Run.of(limits_of(), policy="ar")
    running(run, "one", tpot_slo_s=0.04)
    pace = run.scheduler._planner.pace(run.clock.now())
    assert pace is not None
    seconds = []
    for step_s, tokens in ((0.03, 3), (0.01, 1)):
        spare = SlackTracker(8)
        spare.observe(0.0, 1, 0, step_s, np.array([tokens]))
        seconds.append(spare.seconds(pace, run.clock.now()))
    assert seconds[0] == pytest.approx(seconds[1])
