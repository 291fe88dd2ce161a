"""Traces: an OpenTelemetry span of each ended choice, by the GenAI conventions, sent to a collector on a thread.

A span holds no text. docs/records.md lists its attributes and events. It is imported only where traces are asked for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import adaserve_jax
from adaserve_jax.results.records import ServedRecord
from adaserve_jax.server.observers import EndedChoice
from adaserve_jax.server.records import BatchThread, ChoiceStamper, RecordMaker, StampedChoice
from adaserve_jax.server.state import ServerState

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SEND_EVERY_S = 1.0
MAX_WAITING = 4096
"""Spans that wait while the collector does not answer; more are dropped."""
SPANS_PER_POST = 512
POST_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
CLOSE_FAILING_TIMEOUT_S = 0.5
"""Timeout of `close` where the collector did not answer before."""
TRACES_PATH = "/v1/traces"
_TRACE_ID = re.compile("(?!0{32})[0-9a-f]{32}")
Attribute = str | bool | int | float | tuple[str, ...]
_log = logging.getLogger(__name__)


def open_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter to a collector by OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)  # else every failure
    endpoint = endpoint.rstrip("/")
    path = "" if endpoint.endswith(TRACES_PATH) else TRACES_PATH
    return OTLPSpanExporter(endpoint=endpoint + path, timeout=POST_TIMEOUT_S)


class Tracer:
    """Observer that sends a span of each choice through `exporter`, which it owns from now on.

    Spans that the collector does not take, or that find no room, are counted as dropped.
    """

    def __init__(
        self, state: ServerState, exporter: SpanExporter, *, every_s: float = SEND_EVERY_S, limit: int = MAX_WAITING
    ):
        self._spans = SpanMaker()
        self._exporter = exporter
        self._stamper = ChoiceStamper(state)
        self._maker = RecordMaker()
        self._failing = False
        self._dropped = state.metrics.spans_dropped.inc
        self._thread: BatchThread[StampedChoice] = BatchThread(
            "traces", self._send, self._dropped, every_s=every_s, limit=limit
        )

    def observe(self, ended: EndedChoice) -> None:
        self._thread.put(self._stamper.stamp(ended))

    def close(self) -> None:
        """Send the waiting spans, within a few seconds."""
        self._thread.close(CLOSE_FAILING_TIMEOUT_S if self._failing else CLOSE_TIMEOUT_S)
        self._exporter.shutdown()

    def _send(self, choices: list[StampedChoice]) -> list[StampedChoice]:
        spans = [span for each in choices if (span := self._span(each)) is not None]
        for start in range(0, len(spans), SPANS_PER_POST):
            self._export(spans[start : start + SPANS_PER_POST])
        return []

    def _span(self, choice: StampedChoice) -> ReadableSpan | None:
        origin = choice.ended.origin
        return self._spans.make(self._maker.make(choice), operation=origin.operation, traceparent=origin.traceparent)

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


class SpanMaker:
    """Make the spans of ended choices. Used from one thread.

    Their resource is this server with OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES; they are sampled by their
    callers' flags and OTEL_TRACES_SAMPLER.
    """

    def __init__(self) -> None:
        own = Resource({"service.name": "adaserve", "service.version": adaserve_jax.__version__})
        self._ids = _TraceIds()
        self._last = _LastSpan()
        provider = TracerProvider(
            resource=own.merge(OTELResourceDetector().detect()), id_generator=self._ids, shutdown_on_exit=False
        )
        provider.add_span_processor(self._last)
        self._tracer = provider.get_tracer("adaserve_jax", adaserve_jax.__version__)

    def make(self, choice: ServedRecord, *, operation: str, traceparent: str) -> ReadableSpan | None:
        """Return the span of a choice, from its arrival to its end; None where it is not sampled.

        traceparent: header of the caller; without one the span begins a trace, with the request id as its id where that
        is a valid one.
        """
        request_id = choice.request_id
        self._ids.trace_id = int(request_id, 16) if _TRACE_ID.fullmatch(request_id) else None
        span = self._tracer.start_span(
            f"{operation} {choice.model}",
            context=TraceContextTextMapPropagator().extract({"traceparent": traceparent}),
            kind=SpanKind.SERVER,
            attributes=_attributes(choice, operation),
            start_time=_ns(choice.arrival_unix_s),
        )
        for name, unix_s in _phases(choice):
            span.add_event(name, timestamp=_ns(unix_s))
        if choice.ending in ("error", "rejected"):
            span.set_status(Status(StatusCode.ERROR, choice.error_code))
        span.end(_ns(choice.ended_unix_s))
        return self._last.take()


class _TraceIds(RandomIdGenerator):
    """Random ids, but for a trace whose id is given."""

    trace_id: int | None = None

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.trace_id is None else self.trace_id


class _LastSpan(SpanProcessor):
    """Keep the span that ended last."""

    _span: ReadableSpan | None = None

    def on_start(self, span: Span, parent_context: object = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        self._span = span

    def take(self) -> ReadableSpan | None:
        span, self._span = self._span, None
        return span


def _phases(record: ServedRecord) -> Iterator[tuple[str, float]]:
    """Yield the events that a choice reached with their Unix times."""
    reached = {"first_scheduled": record.queue_s, "first_token": record.ttft_s, "last_token": record.e2e_s}
    yield "queued", record.arrival_unix_s
    for name, offset_s in reached.items():
        if offset_s is not None:
            yield name, record.arrival_unix_s + offset_s
    yield "ended", record.ended_unix_s


def _attributes(record: ServedRecord, operation: str) -> dict[str, Attribute]:
    run = record.run
    finished = record.status == "finished"
    every: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "adaserve",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": (record.ending,) if finished else None,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "error.type": None if finished else record.error_code or record.ending,
        "adaserve.request_id": record.request_id,
        "adaserve.choice": record.choice,
        "adaserve.key": record.key,
        "adaserve.policy": run.policy,
        "adaserve.queue_s": record.queue_s,
        "adaserve.ttft_s": record.ttft_s,
        "adaserve.tpot_s": record.tpot_s,
        "adaserve.thinking_tpot_s": record.thinking_tpot_s,
        "adaserve.answer_tpot_s": record.answer_tpot_s,
        "adaserve.verify_steps": record.verify_steps,
        "adaserve.drafted_tokens": record.drafted_tokens,
        "adaserve.accepted_tokens": record.accepted_tokens,
        "adaserve.preemptions": record.preemptions,
        "adaserve.slo.class": record.slo_class,
        "adaserve.slo.tpot_target_s": record.tpot_slo_s,
        "adaserve.slo.thinking_tpot_target_s": record.thinking_tpot_slo_s,
        "adaserve.slo.ttft_target_s": record.ttft_slo_s,
        "adaserve.slo.e2e_target_s": record.e2e_slo_s,
        "adaserve.slo.tpot_met": record.tpot_met,
        "adaserve.slo.ttft_met": record.ttft_met,
        "adaserve.slo.e2e_met": record.e2e_met,
        "adaserve.slo.met": record.slo_met,
        "adaserve.slo.feasible": record.slo_feasible,
        "adaserve.slo.cause": record.cause,
    }
    return {name: value for name, value in every.items() if value is not None}


def _ns(unix_s: float) -> int:
    return round(unix_s * 1e9)
