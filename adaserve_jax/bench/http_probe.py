"""One request of a bench run to a URL: its bytes, the times of its tokens, and how it ended.

The bytes are made before the run. Connections call the probe on their event loop. It notes times first and parses what
was read on the loop's next turn, so that other connections' bytes get their time stamps before anything is decoded.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeGuard

from adaserve_jax.bench.engine import Ask, AtPoint, Probe
from adaserve_jax.errors import SLO_INFEASIBLE, ConfigError
from adaserve_jax.http_client.connection import STALE_S, Headers, HttpConnection
from adaserve_jax.http_client.settings import UrlSettings
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.records import RequestRecord, Status
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import WorkloadItem

USAGE_LADDER: tuple[Mapping[str, Any], ...] = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
"""Ways to ask for token counts in a stream, the best first; a server that refuses one gets the next."""
MAX_MS = 1e9
"""Upper bound of a reported wait."""
TokenSource = Literal["usage", "usage_spread", "events"]
SOURCES: tuple[TokenSource, ...] = ("usage", "usage_spread", "events")
"""Sources of token times, the surest first: the count so far in the events; the final count, spread over the events by
the length of their texts; one token for each event with text, which is a lower bound."""
MAX_TOKENS = 2**20
"""A larger count is ignored."""
MAX_EVENT_BYTES = 2**22
MAX_ERROR_BYTES = 2**16
MAX_ANSWER_BYTES = 2**26
MOST_LETTERS = 300
"""Letters kept of a server's error."""
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DONE = b"[DONE]"


@dataclass(frozen=True)
class ServerDialect:
    """Request fields that one server accepts.

    usage: one of USAGE_LADDER. own: a server of this package, which knows SLO targets, salts and all sampling
    parameters.
    """

    model: str
    usage: Mapping[str, Any]
    own: bool
    baseline_s: float


@dataclass(frozen=True)
class PreparedRequest:
    """Bytes of a request and what its record needs. slo: the targets by which the client judges it."""

    request_id: str
    message: bytes
    slo: SLO
    slo_class: str
    max_tokens: int


def prepare(ask: Ask, settings: UrlSettings, dialect: ServerDialect, written: str = "") -> PreparedRequest:
    """Build a request. written: prompt of an item that is known by its lengths only.

    Raises ConfigError if this server cannot be asked for the item.
    """
    if ask.slo.relative is not None and dialect.baseline_s <= 0:
        raise ConfigError("a relative target needs a baseline, and none could be measured; give baseline_s")
    body = request_body(ask, settings, dialect, written)
    return PreparedRequest(ask.request_id, _message(settings, *body), ask.slo, ask.item.slo_class, ask.max_tokens)


def request_body(ask: Ask, settings: UrlSettings, dialect: ServerDialect, written: str) -> tuple[str, dict[str, Any]]:
    """Return route and body, with standard sampling parameters given explicitly instead of left to the server."""
    route, content = _content(ask.item, ask.item.prompt or written, settings.endpoint)
    body: dict[str, Any] = {
        "model": dialect.model, **content, "stream": True, **dialect.usage, "max_tokens": ask.max_tokens,
        "temperature": ask.item.temperature, "top_p": 1.0, "seed": ask.seed,
    }  # fmt: skip
    if dialect.own:
        body |= {"top_k": 0, "min_p": 0.0, "cache_salt": ask.cache_salt}
        if ask.item.by_length:
            body["ignore_eos"] = True
    if dialect.own if settings.send_slo is None else settings.send_slo:
        tpot_s = ask.slo.tpot_s(dialect.baseline_s)
        targets = {
            "slo_tpot_ms": None if tpot_s is None else 1e3 * tpot_s, "slo_ttft_ms": ask.slo.ttft_ms,
            "slo_e2e_ms": ask.slo.e2e_ms,
        }  # fmt: skip
        body |= {name: value for name, value in targets.items() if value is not None}
    return route, body | dict(settings.extra_body)


def headers_of(settings: UrlSettings) -> dict[str, str]:
    """Return the headers of every request; names in small letters."""
    headers = {
        "host": settings.authority,
        "accept": "text/event-stream, application/json",
        "accept-encoding": "identity",
        "user-agent": "adaserve-bench",
    }
    if settings.api_key is not None:
        headers["authorization"] = f"Bearer {settings.api_key}"
    if not settings.spare_connections:
        headers["connection"] = "close"
    return headers | {name.lower(): value for name, value in settings.headers}


def _message(settings: UrlSettings, route: str, body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a whole HTTP request."""
    content = json.dumps(body, separators=(",", ":")).encode()
    own = {"content-type": "application/json", "content-length": str(len(content))}
    lines = [f"POST {settings.route(route)} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in (own | headers_of(settings)).items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + content


def _content(item: WorkloadItem, prompt: str, endpoint: str) -> tuple[str, dict[str, Any]]:
    if not prompt and not item.messages:
        raise ConfigError("a request known by its lengths only needs a made prompt before it is sent to a URL")
    if item.messages or endpoint == "chat":
        turns = [{"role": m.role, "content": m.content} for m in item.messages]
        if endpoint == "completions":
            raise ConfigError(
                "a request with messages cannot be sent to completions; leave the endpoint at auto, or make it chat"
            )
        return "v1/chat/completions", {"messages": turns or [{"role": "user", "content": prompt}]}
    return "v1/completions", {"prompt": prompt}


def served_metrics(said: Mapping[str, Any]) -> RequestMetrics:
    """Return verification counts and queue time that a server of this package reports in its last event.

    `first_scheduled_s` counts from an arrival at 0. Values of a wrong type count as absent.
    """
    speculative = said.get("speculative")
    speculative = speculative if isinstance(speculative, Mapping) else {}
    counted = said.get("speculative_decoding")
    drafted = counted.get("num_draft_tokens") if isinstance(counted, Mapping) else 0
    slo = said.get("slo")
    feasible = slo.get("feasible") if isinstance(slo, Mapping) else None
    queue_ms = said.get("queue_time_ms")
    return RequestMetrics(
        0.0,
        first_scheduled_s=queue_ms / 1e3 if _is_time(queue_ms) else None,
        verify_steps=_count(speculative.get("verify_steps")),
        drafted_tokens=_count(drafted),
        accepted_tokens=_count(speculative.get("accepted_tokens")),
        slo_feasible=feasible if isinstance(feasible, bool) else None,
    )


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_MS


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


@dataclass(frozen=True, slots=True)
class CompletionEvent:
    """Content of one event for the first choice.

    count: output tokens so far, if given. error: object or text of a failure. served: metrics in the last event of a
    server of this package.
    """

    text: str = ""
    finish_reason: str | None = None
    count: int | None = None
    prompt_tokens: int | None = None
    error: object = None
    has_choice: bool = False
    served: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SeenEvent:
    """Time, text length and count of an event that brought text or a higher count. at_s: when its bytes were read."""

    at_s: float
    length: int
    count: int | None


def event_of(body: object) -> CompletionEvent:
    """Parse the JSON of an event; fields of an unexpected type count as absent, as servers send undocumented ones."""
    if not isinstance(body, Mapping):
        return CompletionEvent()
    usage, timings = _object(body.get("usage")), _object(body.get("timings"))
    choice = _first(body.get("choices"))
    reason = choice.get("finish_reason")
    count = _token_count(usage.get("completion_tokens"))
    return CompletionEvent(
        text=_text(choice),
        finish_reason=reason if isinstance(reason, str) else None,
        count=_token_count(timings.get("predicted_n")) if count is None else count,
        prompt_tokens=_token_count(usage.get("prompt_tokens")),
        error=body.get("error"),
        has_choice=bool(choice),
        served=body["metrics"] if isinstance(body.get("metrics"), Mapping) else None,
    )


def token_times(seen: Sequence[SeenEvent], total: int | None) -> tuple[list[float], TokenSource]:
    """Return the time of each output token, and the source of that knowledge. total: the final count, if given.

    Servers differ: some give the count so far in every event (this package, vLLM and SGLang with
    `continuous_usage_stats`, llama.cpp in its `timings`), most give it once at the end, some never. An event may hold
    several tokens, or part of one. Tokens of one event share its time. With a count in every event, an event's tokens
    are the difference to the count before. A final count is spread in proportion to the lengths of the texts; each
    event with text gets at least one token while there are enough.
    """
    if not seen:
        return [], "events" if total is None else "usage"
    if all(each.count is not None for each in seen) and (len(seen) > 1 or total is None or seen[0].count == total):
        return _by_counts(seen, total), "usage"
    if total is not None:
        return _spread(seen, total), "usage_spread"
    return [each.at_s for each in seen if each.length], "events"


def worst(sources: Sequence[TokenSource]) -> TokenSource | None:
    """Return the least sure source; None if there is none."""
    return max(sources, key=SOURCES.index, default=None)


def _by_counts(seen: Sequence[SeenEvent], total: int | None) -> list[float]:
    times: list[float] = []
    for each in seen:
        times += [each.at_s] * ((each.count or 0) - len(times))
    return times + [seen[-1].at_s] * ((total or 0) - len(times))


def _spread(seen: Sequence[SeenEvent], total: int) -> list[float]:
    texts = [each for each in seen if each.length] or [seen[-1]]
    if total <= len(texts):  # events hold parts of a token; the first token is in the first event
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


def _token_count(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MAX_TOKENS else None


class EventTooLarge(ValueError):
    """An event is longer than MAX_EVENT_BYTES."""


class EventReader:
    """Incremental parser of server-sent events, which yields the `data` of each event.

    Follows the HTML standard: lines end with LF, CR or CRLF, even mixed; data lines of one event are joined; comments
    and other fields are ignored. An incomplete line waits for its rest.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, part: bytes) -> list[bytes]:
        """Return the events that `part` completes. Raises EventTooLarge."""
        if not part:
            return []
        if self._after_cr and part[:1] == b"\n":
            part = part[1:]
        self._after_cr = part.endswith(b"\r")
        self._size += len(part)
        if b"\n" not in part and b"\r" not in part:
            self._rest.append(part)
            self._check()
            return []
        *lines, rest = _LINE_END.split(b"".join((*self._rest, part)))
        self._rest = [rest] if rest else []
        events = [event for line in lines if (event := self._line(line)) is not None]
        self._size = len(rest) + sum(map(len, self._data))
        self._check()
        return events

    def close(self) -> list[bytes]:
        """Return the event that the end of the stream completes: some servers omit the last empty line."""
        if self._rest:  # an empty line would end the event
            self._line(b"".join(self._rest))
        left, self._data, self._rest = self._data, [], []
        return [b"\n".join(left)] if left else []

    def _line(self, line: bytes) -> bytes | None:
        if self._at_start:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        if not line:
            event = b"\n".join(self._data) if self._data else None
            self._data.clear()
            return event
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None

    def _check(self) -> None:
        if self._size > MAX_EVENT_BYTES:
            raise EventTooLarge(f"one event of the stream has more than {MAX_EVENT_BYTES} bytes")


class UrlProbe(Probe):
    """One request and its answer; also the `ResponseHandler` of its connection.

    on_end: called once, when the request has ended in any way. resend: called at most once, with the probe, when the
    server closed an idle connection just as the request was sent on it. keep_texts: whether `texts` keeps the text of
    each event with its time.
    """

    def __init__(
        self, prepared: PreparedRequest, due_at_s: float, on_end: Callable[[], None],
        resend: Callable[[UrlProbe], None] | None = None, *, keep_texts: bool = False,
    ):  # fmt: skip
        super().__init__(due_at_s)
        self.prepared = prepared
        self.heard_at_s = due_at_s
        self.token_source: TokenSource | None = None
        self.texts: list[tuple[float, str]] = []
        self.error: str | None = None
        self.connection: HttpConnection | None = None
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._resend = resend
        self._keep_texts = keep_texts
        self._events = EventReader()
        self._seen: list[SeenEvent] = []
        self._count: int | None = None
        self._prompt_tokens = 0
        self._served = RequestMetrics(0.0)
        self._finish_reason: str | None = None
        self._refusal: tuple[int, bytearray] | None = None
        self._size = 0
        self.outcome: tuple[Status, str | None] = ("unfinished", None)
        """Status and error code; the status is unfinished until the request has ended."""

    def send(self, connection: HttpConnection) -> None:
        """Send the request now."""
        if self.ended:  # it was cut off while its connection was opened
            connection.close()
            return
        self.connection = connection
        self.heard_at_s = time.monotonic()
        connection.send(self.prepared.message, self)

    def on_head(self, status: int, headers: Headers) -> None:
        by_name = dict(headers)
        kind = by_name.get("content-type", "").partition(";")[0].strip().lower()
        encoded = by_name.get("content-encoding", "identity") != "identity"
        if status != 200 or encoded or kind != "text/event-stream":
            self._refusal = (status, bytearray())

    def on_body(self, at_s: float, part: bytes) -> None:
        self.heard_at_s = at_s
        self._loop.call_soon(self._read, at_s, part)

    def on_end(self, at_s: float) -> None:
        self._loop.call_soon(self._close, at_s, None)

    def on_lost(self, at_s: float, code: str, heard: bool) -> None:
        stale = self.connection is not None and self.connection.was_idle and not heard
        stale = stale and at_s - self.heard_at_s <= STALE_S
        if stale and self._resend is not None and not self.ended:
            resend, self._resend = self._resend, None
            resend(self)
            return
        self._loop.call_soon(self._close, at_s, code)

    def fail(self, code: str) -> None:
        """End the request because its connection cannot be opened or has been silent for too long."""
        done = self._finish_reason is not None
        self._end(time.monotonic(), *(("finished", None) if done else ("failed", code)))
        self._close_connection()

    def cut_off(self) -> None:
        """Stop the request at the end of the run by closing its connection."""
        if not self.ended:
            done = self._finish_reason is not None
            self._end(time.monotonic(), "finished" if done else "unfinished", None)
        self._close_connection()

    def record(self, at: AtPoint) -> RequestRecord:
        """Return the request's record: times as seen here, verification counts as the server reports them."""
        status, code = self.outcome
        reported, wait_s = self._served, self._served.first_scheduled_s
        if wait_s is not None:
            reported = replace(reported, first_scheduled_s=self.submitted_at_s + wait_s)
        prepared = self.prepared
        metrics = self._observed(
            prepared.slo, prepared.slo_class, at, code, prompt_tokens=self._prompt_tokens, reported=reported
        )
        return self._record_of(metrics, at, self.prepared.request_id, status, code)

    def _read(self, at_s: float, part: bytes) -> None:
        if self.ended:
            return
        self._size += len(part)
        if self._refusal is not None:
            self._refusal[1].extend(part[: MAX_ERROR_BYTES - len(self._refusal[1])])
            return
        if self._size > MAX_ANSWER_BYTES:
            self.fail("answer_too_large")
            return
        try:
            for event in self._events.feed(part):
                self._take(at_s, event)
        except EventTooLarge:
            self.fail("answer_too_large")

    def _take(self, at_s: float, data: bytes) -> None:
        if self.ended:
            return
        if data.strip() == _DONE:
            self._end(at_s, "finished", None)
            return
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            self.fail("malformed_event")
            return
        event = event_of(body)
        if event.error is not None:
            status: Status = "rejected" if _code(event.error) == SLO_INFEASIBLE else "failed"
            self._refuse(at_s, status, event.error, "error_event")
            return
        self._note(at_s, event)

    def _note(self, at_s: float, event: CompletionEvent) -> None:
        if event.prompt_tokens is not None:
            self._prompt_tokens = event.prompt_tokens
        if event.served is not None:
            self._served = served_metrics(event.served)
        more = event.count is not None and event.count > (self._count or 0)
        counted = more and event.has_choice
        alone = event.finish_reason is not None and not self._seen  # a token without text
        if self._finish_reason is None and (event.text or counted or alone):
            self._seen.append(SeenEvent(at_s, len(event.text), event.count))
            if self._keep_texts:
                self.texts.append((at_s, event.text))
        if more:
            self._count = event.count
        self._finish_reason = self._finish_reason or event.finish_reason

    def _close(self, at_s: float, lost: str | None) -> None:
        """Note that the answer is over. lost: error code, or None if it ended properly."""
        if self.ended:
            return
        if self._refusal is not None:
            status, raw = self._refusal
            refused = 400 <= status < 500 or status == 503
            code = "not_a_stream" if status == 200 else f"http_{status}"
            self._refuse(at_s, "rejected" if refused else "failed", _error_in(raw), code)
            return
        for event in self._events.close() if lost is None else ():
            if event.strip().startswith((b"{", b"[")) and event.strip().endswith((b"}", b"]")):
                self._take(at_s, event)
        if not self.ended:
            whole = self._finish_reason is not None
            self._end(at_s, *(("finished", None) if whole else ("failed", lost or "truncated")))

    def _refuse(self, at_s: float, status: Status, error: object, otherwise: str) -> None:
        found = error.get("message", error) if isinstance(error, Mapping) else error
        self.error = " ".join(str(found).split())[:MOST_LETTERS]
        self._end(at_s, status, _code(error) or otherwise)

    def _end(self, at_s: float, status: Status, code: str | None) -> None:
        if self.ended_at_s is not None:
            return
        self.ended_at_s = at_s
        self.outcome = (status, code)
        if self._seen or self._count is not None:
            self.token_times_s, self.token_source = token_times(self._seen, self._count)
        self._seen = []
        self._on_end()

    def _close_connection(self) -> None:
        if self.connection is not None:
            self.connection.close_for(self)


def _error_in(raw: bytes | bytearray) -> object:
    """Return the error of a JSON body in the forms that servers use, or else the body's text."""
    text = raw.decode(errors="replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(body, Mapping):
        return next((body[name] for name in ("error", "detail", "message") if body.get(name)), text)
    return text


def _code(error: object) -> str | None:
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if isinstance(code, str) and _CODE.fullmatch(code) else None
