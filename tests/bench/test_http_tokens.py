"""How many tokens each event brought: by hand, for each way that servers say it."""

from __future__ import annotations

import pytest

from adaserve_jax.bench.http_probe import CompletionEvent, SeenEvent, event_of, token_times, worst


def seen(*events: tuple[float, int, int | None]) -> list[SeenEvent]:
    return [SeenEvent(*each) for each in events]


def test_counts_in_every_event_are_exact():
    events = seen((1.0, 4, 1), (2.0, 9, 4), (3.0, 0, 5))
    assert token_times(events, 5) == ([1.0, 2.0, 2.0, 2.0, 3.0], "usage")
    assert token_times(events, 6) == ([1.0, 2.0, 2.0, 2.0, 3.0, 3.0], "usage")  # counted after the last text
    assert token_times(events[:1], None) == ([1.0], "usage")


def test_a_final_count_is_spread_by_the_length_of_the_texts():
    # one token each, and the three that are left to 2 : 6 : 4 letters, rounded so that they stay three
    events = seen((1.0, 2, None), (2.0, 6, None), (3.0, 4, None))
    assert token_times(events, 6) == ([1.0, 2.0, 2.0, 2.0, 3.0, 3.0], "usage_spread")
    assert token_times(events, 3) == ([1.0, 2.0, 3.0], "usage_spread")


def test_fewer_tokens_than_texts_keep_the_first_and_the_last():
    events = seen(*((float(i), 1, None) for i in range(5)))
    assert token_times(events, 3) == ([0.0, 2.0, 4.0], "usage_spread")
    assert token_times(events, 1) == ([0.0], "usage_spread")
    assert token_times(events, 0) == ([], "usage_spread")


def test_a_count_with_the_last_event_only_is_spread_too():
    events = seen((1.0, 3, None), (2.0, 3, None), (3.0, 0, 4))
    assert token_times(events, 4) == ([1.0, 1.0, 2.0, 2.0], "usage_spread")


def test_without_counts_each_text_is_a_token():
    assert token_times(seen((1.0, 3, None), (2.0, 0, None), (4.0, 1, None)), None) == ([1.0, 4.0], "events")
    assert token_times([], None) == ([], "events") and token_times([], 0) == ([], "usage")


@pytest.mark.parametrize("events", [seen((1.0, 3, None), (2.0, 7, None), (5.0, 1, None)), seen((1.0, 0, None))])
@pytest.mark.parametrize("total", range(40))
def test_any_total_is_kept_in_order(events, total):
    times, _ = token_times(events, total)
    assert len(times) == total and times == sorted(times)
    assert set(times) <= {each.at_s for each in events}


def test_events_of_the_servers_that_there_are():
    usage = {"prompt_tokens": 7, "completion_tokens": 2}
    completion = {"choices": [{"index": 0, "text": "ab", "finish_reason": None}], "usage": usage}
    assert event_of(completion) == CompletionEvent("ab", None, 2, 7, has_choice=True)
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    assert event_of(role) == CompletionEvent("", has_choice=True)
    thinking = {"choices": [{"index": 0, "delta": {"content": None, "reasoning_content": "so"}}]}
    assert event_of(thinking).text == "so"
    timings = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": {"predicted_n": 9}}
    assert event_of(timings) == CompletionEvent("", "stop", 9, has_choice=True)
    assert event_of({"choices": [], "usage": usage}) == CompletionEvent(count=2, prompt_tokens=7)
    other = {"choices": [{"index": 1, "text": "of another choice"}]}
    assert event_of(other) == CompletionEvent()
    assert event_of({"error": {"message": "no"}}).error == {"message": "no"}


@pytest.mark.parametrize(
    "body",
    [
        *(None, 3, [], {}, {"choices": None}, {"choices": [None]}, {"choices": {}}, {"choices": [3], "usage": []}),
        *({"usage": {"completion_tokens": count}} for count in (True, -1, 10**30, "5")),
        *({"usage": 4}, {"timings": {"predicted_n": 1.5}}),
    ],
)
def test_what_is_not_as_expected_says_nothing(body):
    assert event_of(body) == CompletionEvent()


def test_the_least_sure_source_counts():
    assert worst(["usage", "events", "usage_spread"]) == "events"
    assert worst(["usage", "usage_spread"]) == "usage_spread" and worst([]) is None
