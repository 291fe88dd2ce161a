"""Sends a span of every choice that ends to an OpenTelemetry collector. Nothing waits for the collector."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from adaserve_jax.errors import ConfigError
from adaserve_jax.server.batches import Batches
from adaserve_jax.server.observers import EndedChoice
from adaserve_jax.server.served import Noted, Notes, Served
from adaserve_jax.server.state import ServerState

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

EVERY_S = 1.0
LIMIT = 4096
"""Spans that wait while the collector does not answer."""
SPANS_PER_POST = 512
TIMEOUT_S = 5.0
CLOSE_S = 5.0
CLOSE_FAILING_S = 0.5
"""Nobody waits long for a collector that did not answer before."""
TRACES_PATH = "/v1/traces"
_log = logging.getLogger(__name__)


def open_exporter(endpoint: str) -> SpanExporter:
    """OTLP over HTTP to a collector, or to its path for traces. Raises ConfigError: OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-endpoint needs the package {error.name!r}, which is not installed; run: pip install "
            "'adaserve-jax[otel]'"
        ) from error
    logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)  # it would repeat itself; we say it once
    path = "" if endpoint.endswith(TRACES_PATH) else TRACES_PATH
    return OTLPSpanExporter(endpoint=endpoint.rstrip("/") + path, timeout=TIMEOUT_S)


class Tracer:
    """An observer. The exporter is its own from now on: one thread uses it, and `close` shuts it down.

    Spans that the collector does not take, or that find no room, are counted as dropped.
    """

    def __init__(self, state: ServerState, exporter: SpanExporter, *, every_s: float = EVERY_S, limit: int = LIMIT):
        from adaserve_jax.server.spans import SpanMaker  # imports OpenTelemetry

        self._spans = SpanMaker()
        self._exporter = exporter
        self._notes = Notes(state)
        self._served = Served()
        self._failing = False
        self._dropped = state.metrics.spans_dropped.inc
        self._batches: Batches[Noted] = Batches("traces", self._send, self._dropped, every_s=every_s, limit=limit)

    def observe(self, ended: EndedChoice) -> None:
        self._batches.put(self._notes.of(ended))

    def close(self) -> None:
        """Send what waits, within a few seconds."""
        self._batches.close(CLOSE_FAILING_S if self._failing else CLOSE_S)
        self._exporter.shutdown()

    def _send(self, notes: list[Noted]) -> list[Noted]:
        spans = [span for note in notes if (span := self._span(note)) is not None]
        for start in range(0, len(spans), SPANS_PER_POST):
            self._export(spans[start : start + SPANS_PER_POST])
        return []

    def _span(self, note: Noted) -> ReadableSpan | None:
        ended = note.ended
        return self._spans.of(self._served.of(note), operation=ended.operation, traceparent=ended.traceparent)

    def _export(self, spans: Sequence[ReadableSpan]) -> None:
        try:
            result = self._exporter.export(spans)
            sent, reason = result.name == "SUCCESS", "no answer, or a refusal"
        except Exception as error:
            sent, reason = False, str(error)
        if not sent:
            self._dropped(len(spans))
        if self._failing == sent:
            self._failing = not sent
            if sent:
                _log.warning("spans reach the collector again")
            else:
                _log.warning(
                    "no spans reach the collector (%s); the server goes on, adaserve_spans_dropped_total counts losses",
                    reason,
                )
