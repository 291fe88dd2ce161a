"""A whole draft service: the model loaded, the loop begun, the ports opened; ended by a signal or by its device."""

from __future__ import annotations

import gc
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, SHUT_RDWR, socket
from typing import Any

from adaserve_jax.errors import ConfigError
from adaserve_jax.star.messages import cells_hash
from adaserve_jax.star.service.admission import Admission
from adaserve_jax.star.service.core import DraftCore
from adaserve_jax.star.service.limits import DraftLimits, Quotas
from adaserve_jax.star.service.metrics import ServiceCollector, exposition
from adaserve_jax.star.service.model import DraftModel, load
from adaserve_jax.star.service.server import Audit, DraftServer, check_free, check_secured
from adaserve_jax.star.service.worker import Worker
from adaserve_jax.star.settings import DraftServiceSettings, host_port
from adaserve_jax.star.wire import Caps
from adaserve_jax.types import Progress

# `/health` and `/metrics` of a draft service, over plain HTTP and from a port of their own.

TIMEOUT_S = 5.0
"""Of a connection, from its beginning to its end: one request."""
MOST_CONNECTIONS = 16
"""At once; more are closed unanswered."""
_log = logging.getLogger(__name__)
TEXT = "text/plain; version=0.0.4; charset=utf-8"


class StatusServer:
    """Answers from the moment it is made. health: whether the service is worth keeping, and what to say of it; metrics:
    the exposition, once there is one. Raises ConfigError: the address is not to be had."""

    def __init__(self, address: str, health: Callable[[], tuple[bool, dict[str, Any]]]) -> None:
        self.health = health
        self.metrics: Callable[[], bytes] | None = None
        host, port = host_port("http", address)
        kind = type("Server", (_Server,), {})
        if ":" in host:
            kind.address_family = AF_INET6
        try:
            self._server = kind((host, port), type("Handler", (_Handler,), {"status": self}))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror}; choose another address with --http, or '' for none"
            ) from error
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="draft-http", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """A thread for each connection, of which there are few, for a short time."""

    daemon_threads = True

    def __init__(self, *given: Any) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        deadline = threading.Timer(TIMEOUT_S, _cut, (request,))
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # an asker that has left is nobody's fault
            _log.error("/health or /metrics failed: %s", type(error).__name__, exc_info=error)


def _cut(connection: socket) -> None:
    with suppress(OSError):
        connection.shutdown(SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    status: StatusServer
    server_version = "adaserve"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            well, said = self.status.health()
            self._answer(
                HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, json.dumps(said), "application/json"
            )
        elif path == "/metrics" and self.status.metrics is not None:
            self._answer(HTTPStatus.OK, self.status.metrics(), TEXT)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "/health and /metrics\n", TEXT)

    do_HEAD = do_GET

    def _answer(self, code: HTTPStatus, body: str | bytes, kind: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line per scrape helps nobody."""


DEAD_STATUS = 70
"""Exit status of a service that ended because its device failed (EX_SOFTWARE)."""
LAST_BATCH_S, GRACE_S = 5.0, 2.0
"""At the end: how long to wait for the batch on the device, then for connections to end."""
LEAST_TOKENS = 2**16
"""Of a message, that are read at any rate: a text that is somewhat too long is told so."""


class DraftService:
    """A ready model behind open ports. Raises ConfigError: an address is not to be had."""

    def __init__(
        self, settings: DraftServiceSettings, model: DraftModel, on_death: Callable[[], None] = lambda: None
    ) -> None:
        self.model = model
        core = DraftCore(
            limits_of(settings, model),
            model,
            quotas=quotas_of(settings),
            batching=not settings.one_by_one,
            admission=Admission(1 if settings.one_by_one else model.limits.max_requests),
        )
        self.audit = Audit()
        self.worker = Worker(core, model, on_death=on_death)
        tokens = max(2 * model.limits.max_context, LEAST_TOKENS)
        self._server = DraftServer(settings, self.worker, Caps(tokens, model.vocabulary), self.audit)
        self.port = self._server.port
        self.worker.start()
        self._server.start()

    def metrics(self) -> bytes:
        """In Prometheus' text format."""
        return exposition(ServiceCollector(self.worker, self.audit, self.model))

    def close(self) -> bool:
        """Let nobody in any more, tell all targets that the service ends, and end it; False: a batch does not end, and
        its model is still used."""
        self._server.shut()
        ended = self.worker.stop(LAST_BATCH_S)
        self._server.stop(GRACE_S).wait()
        return ended


def limits_of(settings: DraftServiceSettings, model: DraftModel) -> DraftLimits:
    """What the model can do, as the core asks it."""
    limits, samples = model.limits, model.samples
    return DraftLimits(
        draft_version=model.version, vocabulary_hash=model.vocabulary_hash, cells_hash=cells_hash(model.table),
        vocabulary_size=model.vocabulary, max_depth=limits.max_depth, max_width=limits.max_width,
        max_context=limits.max_context, max_rows=limits.max_requests, max_feed=limits.max_tokens,
        lease_s=settings.lease_s, level_s=samples.draft_level_s, catchup_s=samples.catchup_s,
    )  # fmt: skip


def quotas_of(settings: DraftServiceSettings) -> Quotas:
    """What one target may have."""
    sessions = settings.max_sessions_per_target or settings.max_sessions
    return Quotas(
        max_sessions=min(sessions, settings.max_sessions), max_sessions_in_all=settings.max_sessions,
        max_waiting=min(sessions, settings.max_sessions), messages_per_s=settings.max_messages_per_s,
        messages_at_once=max(1, int(settings.max_messages_per_s)),
    )  # fmt: skip


def run(settings: DraftServiceSettings, progress: Progress | None, ready: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT and return 0; DEAD_STATUS when the device's end was the reason. ready: told in a
    line where and what. From the main thread. Raises ConfigError, CheckpointError."""
    check_secured(settings)
    check_free(settings)
    with _status(settings) as status:
        model = load(settings, progress)
        ended = threading.Event()
        service = DraftService(settings, model, ended.set)
        try:
            if status is not None:
                status.metrics = service.metrics
                status.health = lambda: _health(service)
            gc.collect()
            gc.freeze()  # what is there now stays: collections need not go through it while targets wait
            with _signals(ended):
                ready(_line(settings, service, status))
                ended.wait()
        finally:
            if service.close():
                model.close()
    return DEAD_STATUS if service.worker.died else 0


def _health(service: DraftService) -> tuple[bool, dict[str, Any]]:
    well, load = service.worker.alive, service.worker.snapshot.load
    said = {
        "status": "ok" if well else "dead", "draft_version": service.model.version, "load": round(load.busy, 4),
        "sessions": load.sessions, "targets": load.targets,
    }  # fmt: skip
    return well, said


@contextmanager
def _status(settings: DraftServiceSettings) -> Iterator[StatusServer | None]:
    """Answers that the service starts, until it is told better."""
    if not settings.http:
        yield None
        return
    status = StatusServer(settings.http, lambda: (False, {"status": "starting"}))
    try:
        yield status
    finally:
        status.close()


@contextmanager
def _signals(ended: threading.Event) -> Iterator[None]:
    """Either signal sets the event; what they did before comes back."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(kind, lambda *_: ended.set()) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def _line(settings: DraftServiceSettings, service: DraftService, status: StatusServer | None) -> str:
    host, _ = host_port("listen", settings.listen)
    where = f"grpc://{f'[{host}]' if ':' in host else host}:{service.port}"
    also = "" if status is None else f", metrics on http://{settings.http.rpartition(':')[0]}:{status.port}/metrics"
    return f"ready: {where} drafts with {settings.model}, draft version {service.model.version}{also}"
