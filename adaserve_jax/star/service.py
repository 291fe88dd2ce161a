"""A whole draft service: the model loaded, the loop begun, the ports opened; ended by a signal or by its device."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from adaserve_jax.star.admission import Admission
from adaserve_jax.star.cells import cells_hash
from adaserve_jax.star.core import DraftCore
from adaserve_jax.star.http import StatusServer
from adaserve_jax.star.limits import DraftLimits, Quotas
from adaserve_jax.star.metrics import ServiceCollector, exposition
from adaserve_jax.star.model import DraftModel, load
from adaserve_jax.star.security import Audit, check_secured
from adaserve_jax.star.server import DraftServer, check_free
from adaserve_jax.star.settings import DraftServiceSettings, host_port
from adaserve_jax.star.wire import Caps
from adaserve_jax.star.worker import Worker
from adaserve_jax.types import Progress

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
