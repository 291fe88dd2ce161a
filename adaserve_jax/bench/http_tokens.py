"""How many tokens each event of a stream brought, and so when each token came. Knows nothing of connections.

Servers differ: some say the count so far in every event (this package, vLLM, SGLang, on `continuous_usage_stats`;
llama.cpp in its `timings`), most say it once at the end, some never. An event may hold several tokens, or part of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

TokenSource = Literal["usage", "usage_spread", "events"]
SOURCES: tuple[TokenSource, ...] = ("usage", "usage_spread", "events")
"""From the surest to the least sure: the count so far in the events; the final count, spread over the events by the
length of their texts; one token for each event with text, which is a lower bound."""
MOST_TOKENS = 2**20
"""A count above it is no count."""
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


@dataclass(frozen=True, slots=True)
class Event:
    """What one event says of the first choice. count: output tokens so far, where it says so. error: an object that a
    failure brings, or its text. served: what a server of this package says of the request in its last event."""

    text: str = ""
    finish_reason: str | None = None
    count: int | None = None
    prompt_tokens: int | None = None
    error: object = None
    has_choice: bool = False
    served: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """An event that brought text, or a count above the one before. at_s: when its bytes were read."""

    at_s: float
    length: int
    count: int | None


def event_of(body: object) -> Event:
    """The event whose JSON is `body`; whatever is not as expected counts as absent, as servers send more than they
    document."""
    if not isinstance(body, Mapping):
        return Event()
    usage, timings = _object(body.get("usage")), _object(body.get("timings"))
    choice = _first(body.get("choices"))
    reason = choice.get("finish_reason")
    count = _count(usage.get("completion_tokens"))
    return Event(
        text=_text(choice),
        finish_reason=reason if isinstance(reason, str) else None,
        count=_count(timings.get("predicted_n")) if count is None else count,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        error=body.get("error"),
        has_choice=bool(choice),
        served=body["metrics"] if isinstance(body.get("metrics"), Mapping) else None,
    )


def token_times(seen: Sequence[Seen], total: int | None) -> tuple[list[float], TokenSource]:
    """When each output token came, and how that is known. seen: in the order of reading. total: the final count, None
    where the server did not say.

    Tokens of one event share its time. With a count in every event the tokens are those between two counts; a final
    count is spread in proportion to the texts, each event with text having one at least while there are enough.
    """
    if not seen:
        return [], "events" if total is None else "usage"
    if all(each.count is not None for each in seen) and (len(seen) > 1 or total is None or seen[0].count == total):
        return _by_counts(seen, total), "usage"
    if total is not None:
        return _spread(seen, total), "usage_spread"
    return [each.at_s for each in seen if each.length], "events"


def worst(sources: Sequence[TokenSource]) -> TokenSource | None:
    """The least sure of them; None of nothing."""
    return max(sources, key=SOURCES.index, default=None)


def _by_counts(seen: Sequence[Seen], total: int | None) -> list[float]:
    times: list[float] = []
    for each in seen:
        times += [each.at_s] * ((each.count or 0) - len(times))
    return times + [seen[-1].at_s] * ((total or 0) - len(times))


def _spread(seen: Sequence[Seen], total: int) -> list[float]:
    texts = [each for each in seen if each.length] or [seen[-1]]
    if total <= len(texts):  # parts of characters, or of words that a stop text held back: the first one is the first
        step = (len(texts) - 1) / max(1, total - 1)
        return [texts[round(i * step)].at_s for i in range(total)]
    extra, whole = total - len(texts), sum(each.length for each in texts) or 1
    shares, so_far = [0], 0
    for each in texts:
        so_far += each.length
        shares.append(round(extra * so_far / whole))
    shares[-1] = extra
    return [each.at_s for each, (low, high) in zip(texts, pairwise(shares), strict=True) for _ in range(1 + high - low)]


def _text(choice: Mapping[str, Any]) -> str:
    text = choice.get("text")
    if isinstance(text, str):
        return text
    delta = _object(choice.get("delta"))
    return "".join(part for name in _TEXTS if isinstance(part := delta.get(name), str))


def _first(choices: object) -> Mapping[str, Any]:
    listed = choices if isinstance(choices, list) else []
    return next((_object(each) for each in listed if _object(each).get("index", 0) == 0), {})


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MOST_TOKENS else None
