"""Watches one request to a URL: when it was sent, when each token was read, how it ended.

Connections call it on their event loop. It notes times first and looks at what was read on the loop's next turn, so
that other connections' bytes are stamped before anybody decodes anything.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from adaserve_jax.bench.http_connection import HttpConnection
from adaserve_jax.bench.http_requests import Prepared
from adaserve_jax.bench.http_served import served_metrics
from adaserve_jax.bench.http_sse import EventReader, EventTooLarge
from adaserve_jax.bench.http_tokens import Event, Seen, TokenSource, event_of, token_times
from adaserve_jax.bench.probe import AtPoint, Probe
from adaserve_jax.errors import SLO_INFEASIBLE
from adaserve_jax.results.records import RequestRecord, Status
from adaserve_jax.types import RequestMetrics

MAX_ERROR_BYTES = 2**16
MAX_ANSWER_BYTES = 2**26
_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DONE = b"[DONE]"


class UrlProbe(Probe):
    """One request and its answer; an `Answer` of its connection too.

    on_end: called once, when the request ended, however that was. resend(probe): a connection that had been idle was
    gone before a byte came back, as happens when a server closes it just then; called once at most. keep_texts: whether
    `texts` keeps what each event said, with its time.
    """

    def __init__(
        self, prepared: Prepared, due_at_s: float, on_end: Callable[[], None],
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
        self._seen: list[Seen] = []
        self._count: int | None = None
        self._prompt_tokens = 0
        self._served = RequestMetrics(0.0)
        self._finish_reason: str | None = None
        self._refusal: tuple[int, bytearray] | None = None
        self._size = 0
        self._outcome: tuple[Status, str | None] = ("unfinished", None)

    @property
    def outcome(self) -> tuple[Status, str | None]:
        """How it ended, and the code of what went wrong; unfinished until it did."""
        return self._outcome

    def send(self, connection: HttpConnection) -> None:
        """Onto the wire now."""
        if self.ended:  # cut off while its connection was opened
            connection.close()
            return
        self.connection = connection
        self.heard_at_s = time.monotonic()
        connection.send(self.prepared.message, self)

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        encoded = headers.get("content-encoding", "identity") != "identity"
        if status != 200 or encoded or kind != "text/event-stream":
            self._refusal = (status, bytearray())

    def on_body(self, at_s: float, part: bytes) -> None:
        self.heard_at_s = at_s
        self._loop.call_soon(self._read, at_s, part)

    def on_end(self, at_s: float) -> None:
        self._loop.call_soon(self._close, at_s, None)

    def on_lost(self, at_s: float, code: str, heard: bool) -> None:
        stale = self.connection is not None and self.connection.was_idle and not heard
        if stale and self._resend is not None and not self.ended:
            resend, self._resend = self._resend, None
            resend(self)
            return
        self._loop.call_soon(self._close, at_s, code)

    def fail(self, code: str) -> None:
        """End the request here: its connection could not be opened, or nothing was heard for too long."""
        done = self._finish_reason is not None
        self._end(time.monotonic(), *(("finished", None) if done else ("failed", code)))
        self._let_go()

    def cut_off(self) -> None:
        """Stop the request at the end of the run, by closing its connection."""
        if not self.ended:
            done = self._finish_reason is not None
            self._end(time.monotonic(), "finished" if done else "unfinished", None)
        self._let_go()

    def record(self, at: AtPoint) -> RequestRecord:
        """The request's record; times are those seen here, counts of verifications the server's where it says them."""
        status, code = self._outcome
        times = self.token_times_s
        slo = self.prepared.slo
        metrics = replace(
            self._served,
            arrival_s=self.submitted_at_s,
            first_scheduled_s=_later(self.submitted_at_s, self._served.first_scheduled_s),
            first_token_s=times[0] if times else None,
            last_token_s=times[-1] if times else None,
            prompt_tokens=self._prompt_tokens,
            output_tokens=len(times),
            tpot_slo_s=slo.tpot_s(at.baseline_s),
            ttft_slo_s=slo.ttft_s,
            slo_class=self.prepared.slo_class,
            slo_feasible=False if code == SLO_INFEASIBLE else self._served.slo_feasible,
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

    def _note(self, at_s: float, event: Event) -> None:
        if event.prompt_tokens is not None:
            self._prompt_tokens = event.prompt_tokens
        if event.served is not None:
            self._served = served_metrics(event.served)
        more = event.count is not None and event.count > (self._count or 0)
        counted = more and event.has_choice
        alone = event.finish_reason is not None and not self._seen  # a token without text
        if self._finish_reason is None and (event.text or counted or alone):
            self._seen.append(Seen(at_s, len(event.text), event.count))
            if self._keep_texts:
                self.texts.append((at_s, event.text))
        if more:
            self._count = event.count
        self._finish_reason = self._finish_reason or event.finish_reason

    def _close(self, at_s: float, lost: str | None) -> None:
        """The answer is over: as it should be, or by `lost`."""
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
        self.error = _message(error)
        self._end(at_s, status, _code(error) or otherwise)

    def _end(self, at_s: float, status: Status, code: str | None) -> None:
        if self.ended_at_s is not None:
            return
        self.ended_at_s = at_s
        self._outcome = (status, code)
        if self._seen or self._count is not None:
            self.token_times_s, self.token_source = token_times(self._seen, self._count)
        self._seen = []
        self._on_end()

    def _let_go(self) -> None:
        if self.connection is not None:
            self.connection.close_for(self)


def _later(at_s: float, wait_s: float | None) -> float | None:
    return None if wait_s is None else at_s + wait_s


def _error_in(raw: bytes | bytearray) -> object:
    """The error of a JSON body, in the shapes that servers have; the text of any other body."""
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


def _message(error: object, most: int = 300) -> str:
    found: Any = error.get("message", error) if isinstance(error, Mapping) else error
    return " ".join(str(found).split())[:most]
