"""Prometheus metrics of a draft service (docs/prometheus.md), and the HTTP port of `/metrics` and `/health`.

No label ever holds anything that a target sent.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from socket import AF_INET6, SHUT_RDWR, socket
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from adaserve_jax.errors import ConfigError
from adaserve_jax.star.service.server import Audit
from adaserve_jax.star.service.stats import ROWS_EDGES
from adaserve_jax.star.service.worker import Worker
from adaserve_jax.star.settings import host_port
from adaserve_jax.stats import metrics_of

if TYPE_CHECKING:
    from adaserve_jax.star.service.model import DraftModel

PREFIX = "adaserve_draft_service_"
TIMEOUT_S = 5.0
"""Longest time of an HTTP connection, which serves one request."""
MAX_CONNECTIONS = 16
"""HTTP connections at once; further ones are closed unanswered."""
_log = logging.getLogger(__name__)


class ServiceCollector(Collector):
    """Collects worker, audit and model at each scrape; the numbers are at most a moment old."""

    def __init__(self, worker: Worker, audit: Audit, model: DraftModel) -> None:
        self._worker, self._audit, self._model = worker, audit, model

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield self._rows()

    def _gauges(self) -> Iterator[Metric]:
        seen, audit, pool = self._worker.snapshot, self._audit, self._model.pool
        compiled = self._model.compiles_after_ready
        for name, text, value in (
            ("load", "Share of the last 2 seconds that the device worked.", seen.load.busy),
            ("backlog_seconds", "Waiting work, by the service's measured times.", seen.load.queue_s),
            ("sessions", "Requests that are drafted for, of all targets.", seen.load.sessions),
            ("sessions_with_kv", "Those of them that hold KV.", seen.holding),
            ("targets", "Targets that are connected and admitted.", seen.load.targets),
            ("streams", "Connections, admitted or not.", audit.streams),
            ("waiting_drafts", "Drafts that wait for a batch.", seen.waiting),
            ("kv_pages", "KV pages.", pool.pages_in_force),
            ("kv_pages_used", "KV pages that sessions hold.", pool.num_used),
            ("compiles_after_ready", "Programs compiled after ready: 0, or there is a bug.", compiled),
        ):  # fmt: skip
            yield GaugeMetricFamily(PREFIX + name, text, value=value)

    def _counters(self) -> Iterator[Metric]:
        seen = self._worker.snapshot
        for stats in (seen.core, seen.worker):
            for field, spec in metrics_of(stats).items():
                yield _counter(spec.name, spec.text, getattr(stats, field), *spec.labels)
        yield _counter("streams_opened", "Accepted connections.", self._audit.opened)
        refused = "Connections refused, or ended for their behaviour."
        yield _counter("streams_refused", refused, self._audit.refused(), "why")

    def _rows(self) -> Metric:
        worker = self._worker.snapshot.worker
        edges = [*map(str, ROWS_EDGES), "+Inf"]
        counts = [worker.rows[edge] for edge in (*ROWS_EDGES, float("inf"))]
        return HistogramMetricFamily(
            PREFIX + "batch_rows", "Requests of a batch that searched.",
            buckets=list(zip(edges, accumulate(counts), strict=True)), sum_value=worker.rows_searched,
        )  # fmt: skip


def _counter(name: str, text: str, value: float | Mapping[str, int], *labels: str) -> Metric:
    """Return a counter, by its one label where it has one."""
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for key, count in sorted(value.items()) if isinstance(value, Mapping) else [("", value)]:
        family.add_metric([key] * len(labels), count)
    return family


class StatusServer:
    """HTTP server of `/health` and `/metrics`, running from its creation until `close`.

    prometheus_client serves `/metrics`. The server around it is not prometheus_client's, because that one has neither a
    time limit nor a limit on connections, and this port may be open to a network.

    health: returns whether the service is worth keeping, and the fields of `/health`. Raises ConfigError when the
    address is in use.
    """

    def __init__(
        self, address: str, health: Callable[[], tuple[bool, dict[str, Any]]], *, timeout_s: float = TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:  # fmt: skip
        self.health = health
        self._metrics: Callable[..., Iterable[bytes]] | None = None
        host, port = host_port("http", address)
        try:
            self._server = _StatusHTTPServer((host, port), timeout_s, max_connections)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror}; choose another address with --http, or '' for none"
            ) from error
        self._server.set_app(self._respond)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="draft-http", daemon=True).start()

    def serve_metrics(self, collector: Collector) -> None:
        """Serve the collector's metrics at `/metrics`, which is 404 until then."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        self._metrics = make_wsgi_app(registry)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request: a WSGI application."""
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        body: Iterable[bytes] = []
        try:
            if method not in ("GET", "HEAD"):
                start_response("405 Method Not Allowed", [("Allow", "GET, HEAD")])
            elif path == "/health":
                well, fields = self.health()
                status = "200 OK" if well else "503 Service Unavailable"
                start_response(status, [("Content-Type", "application/json")])
                body = [json.dumps(fields).encode()]
            elif path == "/metrics" and self._metrics is not None:
                body = self._metrics(environ | {"REQUEST_METHOD": "GET"}, start_response)
            else:
                start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
                body = [b"/health and /metrics\n"]
        except Exception as error:
            _log.error("/health or /metrics failed: %s", type(error).__name__, exc_info=error)
            start_response("500 Internal Server Error", [])
        return [] if method == "HEAD" else body


class _StatusHTTPServer(ThreadingMixIn, WSGIServer):
    """WSGI server with a thread per connection, a limit on connections, and a time limit for each."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], timeout_s: float, max_connections: int) -> None:
        self._timeout_s = timeout_s
        self._free = threading.BoundedSemaphore(max_connections)
        if ":" in address[0]:
            self.address_family = AF_INET6
        super().__init__(address, _QuietHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        timer = threading.Timer(self._timeout_s, _cut, (request,))
        timer.daemon = True
        try:
            timer.start()
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # a client that left is no error
            _log.error("an HTTP request failed: %s", type(error).__name__, exc_info=error)


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line per scrape is useless."""


def _cut(connection: socket) -> None:
    with suppress(OSError):
        connection.shutdown(SHUT_RDWR)
