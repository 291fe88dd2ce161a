"""The pace of texts that think: what each plan holds due and what metrics say, beside the definition told token by
token from the times of the tokens and the places of the marks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.errors import RequestError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.sampling import Thinking
from adaserve_jax.types import SamplingParams, Sequence
from tests.scheduler.harness import Run, expected_text, limits_of, request_of
from tests.scheduler.test_remote_draft import run_of, service_of

NEVER = 10**9
TARGETS = (None, 0.00811, 0.02013, 0.05017, 0.50019)


@dataclass(frozen=True)
class Places:
    """Indices in a text of the marks around its thinking; NEVER for one that is not there."""

    opening: int
    closing: int

    @classmethod
    def of(cls, request: Sequence, text: list[int]) -> Places:
        marks = request.sampling.thinking
        if marks is None:
            return cls(NEVER, NEVER)
        opening = -1
        if not marks.started:
            opening = next((at for at, token in enumerate(text) if token not in marks.blanks), NEVER)
            if opening == NEVER or text[opening] != marks.opening:
                return cls(NEVER, NEVER)
        closing = [at for at, token in enumerate(text) if at > opening and token == marks.closing]
        return cls(opening, min(closing, default=NEVER))


def due_s(request: Sequence, text: list[int], times: list[float]) -> float:
    """When the next token is due; `times` are those of the tokens so far."""
    places, count = Places.of(request, text), len(times)
    base, target = 0, request.tpot_slo_s
    if request.thinking_tpot_slo_s is not None:
        if count > places.closing:
            base = places.closing
        elif count > places.opening:
            target = request.thinking_tpot_slo_s
    return np.inf if target is None else times[base] + (count - base) * target


def told(request: Sequence, text: list[int], times: list[float]) -> tuple[float | None, float | None, bool | None]:
    """TPOT of thinking and answer, and whether all targets are met, from the gaps of each."""
    places = Places.of(request, text)
    last = -1 if places.opening >= len(text) else min(places.closing, len(text) - 1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    thought, answered = gaps[: max(last, 0)], gaps[max(last, 0) :]
    means = [sum(part) / len(part) if part else None for part in (thought, answered)]
    targets = (request.thinking_tpot_slo_s, request.tpot_slo_s)
    met = [mean is None or mean <= target for mean, target in zip(means, targets, strict=True) if target]
    return means[0], means[1], all(met) if met else None


@st.composite
def thinkers(draw: st.DrawFn, name: str) -> Sequence:
    """A request whose marks, blanks and stop token are tokens of the text that it will get, or of no text."""
    request = request_of(
        name, prompt=draw(st.integers(1, 40)), tokens=draw(st.integers(1, 50)),
        seed=draw(st.integers(0, 2**32)), arrival_s=draw(st.floats(0, 0.3)),
    )  # fmt: skip
    text, _ = expected_text(request, 256)
    opening = draw(st.integers(0, min(3, len(text) - 1)))
    closing = draw(st.integers(0, len(text) + 3))
    marks = Thinking(
        opening=text[opening] if draw(st.booleans()) else 1001,
        closing=text[closing] if closing < len(text) and text[closing] != text[opening] else 1002,
        started=draw(st.booleans()),
        blanks=tuple(text[:opening]),
    )
    stop = draw(st.integers(0, 2 * len(text)))
    return replace(
        request,
        sampling=SamplingParams(max_tokens=request.sampling.max_tokens, thinking=marks),
        tpot_slo_s=draw(st.sampled_from(TARGETS)),
        thinking_tpot_slo_s=draw(st.sampled_from(TARGETS)),
        stop_token_ids=frozenset(text[stop : stop + 1]),
    )


def serve(run: Run, load: list[Sequence]) -> tuple[dict[str, list[float]], int, int]:
    """Run a load, comparing what every plan holds due with the definition. Returns the times of all tokens, the number
    of rows compared, and of commits that had tokens of both sides of a closing mark."""
    waiting, known = sorted(load, key=lambda each: each.arrival_s), {each.sequence_id: each for each in load}
    times: dict[str, list[float]] = {each.sequence_id: [] for each in load}
    service, compared, divided = service_of(run), 0, 0
    while waiting or run.scheduler.has_work:
        while waiting and waiting[0].arrival_s <= run.clock.now():
            run.add(waiting.pop(0))
        made_s, before, rows = run.clock.now(), len(service.plans), []

        def in_flight(_: object, before: int = before, rows: list = rows) -> None:
            if len(service.plans) > before:
                rows += run.scheduler.sequence_ids(service.plans[-1])

        plan, _ = run.step(in_flight)
        if plan is None:
            run.clock.advance(0.01)
            continue
        if rows:
            assert plan.draft is not None and plan.draft.due_s is not None
            for name, due in zip(rows[: plan.num_decode], plan.draft.due_s, strict=True):
                if times[name]:
                    text = run.text[name][: len(times[name])]
                    expected = max(due_s(known[name], text, times[name]) - made_s, 0.0)
                    assert due == pytest.approx(expected, abs=1e-9), (name, len(text), Places.of(known[name], text))
                    compared += 1
        for name, text in run.text.items():
            new = len(text) - len(times[name])
            closing = Places.of(known[name], text).closing
            divided += len(times[name]) <= closing < len(text) - 1 and new > 2 and closing > len(times[name])
            times[name] += [run.clock.now()] * new
    return times, compared, divided


def compare(request: Sequence, run: Run, times: list[float]) -> None:
    metrics, text = run.last[request.sequence_id].metrics, run.text[request.sequence_id]
    assert isinstance(metrics, RequestMetrics)
    assert text == expected_text(request, 256)[0] and len(times) == len(text)
    assert (metrics.first_token_s, metrics.last_token_s) == (times[0], times[-1])
    if request.thinking_tpot_slo_s is None:
        assert (metrics.thinking_tpot_s, metrics.answer_tpot_s, metrics.thinking_tpot_met) == (None, None, None)
        request = replace(request, sampling=replace(request.sampling, thinking=None))
        _, tpot_s, met = told(request, text, times)
        assert metrics.tpot_s == pytest.approx(tpot_s) and metrics.tpot_met == met
        return
    thinking_s, answer_s, met = told(request, text, times)
    assert metrics.thinking_tpot_s == pytest.approx(thinking_s)
    assert metrics.answer_tpot_s == pytest.approx(answer_s)
    assert metrics.tpot_met == met
    assert metrics.thinking_tpot_met == (thinking_s is None or thinking_s <= request.thinking_tpot_slo_s)


@given(st.data())
@pytest.mark.slow
def test_every_plan_and_all_metrics_keep_to_the_definition(data: st.DataObject) -> None:
    run = run_of(limits={"num_pages": 40})
    load = [data.draw(thinkers(f"r{number}")) for number in range(data.draw(st.integers(1, 6)))]
    times, _, _ = serve(run, load)
    for request in load:
        compare(request, run, times[request.sequence_id])


def test_marks_within_an_accepted_path_and_preemption() -> None:
    """All texts close at one place or another of their paths, and few pages make them wait."""
    run = run_of(limits={"num_pages": 24}, acceptance=0.95)
    load = []
    for number in range(20):
        request = request_of(f"r{number}", prompt=20, tokens=60, arrival_s=0.01 * number)
        closing = expected_text(request, 256)[0][7 + number]
        sampling = SamplingParams(max_tokens=60, thinking=Thinking(1001, closing, started=True))
        load.append(replace(request, sampling=sampling, tpot_slo_s=0.05, thinking_tpot_slo_s=0.02))
    times, compared, divided = serve(run, load)
    for request in load:
        compare(request, run, times[request.sequence_id])
    preempted = [run.last[request.sequence_id].metrics.preemptions for request in load]
    assert compared > 200 and divided > 5 and sum(preempted) > 5


def test_marks_change_nothing_without_a_target_of_the_thinking() -> None:
    """Nor does a target of the thinking where the text has no marks."""
    found = []
    for thinking, thinking_s in ((None, None), (Thinking(1001, 5, started=True), None), (None, 0.001)):
        run = Run.of(limits_of(), policy="adaserve")
        for number in range(12):
            request = request_of(f"r{number}", prompt=10 * number + 1, tokens=40, tpot_slo_s=0.02)
            sampling = SamplingParams(max_tokens=40, thinking=thinking)
            run.add(replace(request, sampling=sampling, thinking_tpot_slo_s=thinking_s))
        while run.scheduler.has_work:
            run.step()
        metrics = [run.last[f"r{number}"].metrics for number in range(12)]
        found.append([(each.first_token_s, each.last_token_s, each.verify_steps) for each in metrics])
    assert found[0] == found[1] == found[2]


def test_a_tight_target_of_the_thinking_speeds_up_the_thinking_alone() -> None:
    """On a crowded machine: one text thinks under a target that it can only meet at the cost of the others."""
    measured = {}
    for thinking_s in (1.0, 0.01):
        run = Run.of(limits_of(max_requests=8), policy="adaserve", knee=4)
        request = request_of("thinks", prompt=8, tokens=120)
        closing = expected_text(request, 256)[0][60]
        sampling = SamplingParams(max_tokens=120, thinking=Thinking(1001, closing, started=True))
        run.add(replace(request, sampling=sampling, thinking_tpot_slo_s=thinking_s, tpot_slo_s=1.0))
        for number in range(7):
            run.add(request_of(f"other{number}", prompt=8, tokens=200, tpot_slo_s=1.0))
        while "thinks" not in run.last:
            run.step()
        measured[thinking_s] = run.last["thinks"].metrics
    slow, fast = measured[1.0], measured[0.01]
    assert fast.thinking_tpot_s < 0.9 * slow.thinking_tpot_s
    assert fast.answer_tpot_s > fast.thinking_tpot_s


def test_what_was_given_up_stays_so_behind_the_mark() -> None:
    run = run_of(policy="adaserve")
    request = request_of("late", prompt=120, tokens=40, ttft_slo_s=0.15)
    closing = expected_text(request, 256)[0][10]
    sampling = SamplingParams(max_tokens=40, thinking=Thinking(1001, closing, started=True))
    run.add(replace(request, sampling=sampling, tpot_slo_s=0.05, thinking_tpot_slo_s=0.05))
    run.clock.advance(0.3)
    while run.scheduler.has_work:
        run.step()
    due = [float(each) for plan in service_of(run).plans if run.text for each in plan.draft.due_s]
    metrics = run.last["late"].metrics
    assert due and set(due) == {np.inf} and metrics.ttft_met is False
    assert metrics.thinking_tokens == 11 and metrics.thinking_tpot_slo_s == 0.05


def test_a_target_out_of_reach_leaves_that_of_the_answer() -> None:
    """While it thinks nothing is due; behind the mark the answer is on its own pace from there."""
    run = run_of(policy="adaserve")
    request = request_of("q", tokens=40)
    closing = expected_text(request, 256)[0][15]
    sampling = SamplingParams(max_tokens=40, thinking=Thinking(1001, closing, started=True))
    run.add(replace(request, sampling=sampling, tpot_slo_s=5.0, thinking_tpot_slo_s=1e-4))
    times: list[float] = []
    while run.scheduler.has_work:
        made_s = run.clock.now()
        plan, _ = run.step()
        if times and plan is not None and plan.draft is not None and plan.draft.due_s is not None:
            answered = len(times) - 16
            expected = times[15] + (answered + 1) * 5.0 - made_s if answered >= 0 else np.inf
            assert plan.draft.due_s.tolist() == [pytest.approx(expected)]
        times += [run.clock.now()] * (len(run.text.get("q", [])) - len(times))
    metrics = run.last["q"].metrics
    assert (metrics.slo_feasible, metrics.thinking_tpot_met, metrics.tpot_met) == (False, False, False)


@pytest.mark.parametrize(
    ("tpot_s", "thinking_s", "feasible"),
    [(None, 0.0145, True), (None, 0.0143, False), (0.0145, 0.0143, False), (0.0143, 0.0145, False), (0.02, 0.02, True)],
)
def test_both_targets_are_judged(tpot_s: float | None, thinking_s: float, feasible: bool) -> None:
    """One token takes 16 ms: the border is at 14.4 ms."""
    sampling = SamplingParams(max_tokens=6, thinking=Thinking(1001, 1002, started=True))
    request = request_of("q", sampling=sampling, tpot_slo_s=tpot_s, thinking_tpot_slo_s=thinking_s)
    run = Run.of(limits_of(), policy="ar")
    run.serve([request])
    metrics = run.last["q"].metrics
    assert (metrics.slo_feasible, metrics.tpot_slo_s, metrics.thinking_tpot_slo_s) == (feasible, tpot_s, thinking_s)
    assert metrics.tpot_met is (thinking_s >= 0.016), "it never answered"
    strict = Run.of(limits_of(), policy="ar", infeasible_slo="refuse")
    if feasible:
        strict.serve([request])
        return
    with pytest.raises(RequestError, match="must be at least 16 ms, which is what this request would get") as caught:
        strict.add(request)
    assert caught.value.param == ("slo_thinking_tpot_ms" if thinking_s < 0.0144 else "slo_tpot_ms")
