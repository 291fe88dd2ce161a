"""A whole draft service: loads the model, starts the worker, opens the ports, and ends on a signal or a dead device."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from adaserve_jax.star.messages import cells_hash
from adaserve_jax.star.service.admission import TargetAdmission
from adaserve_jax.star.service.core import DraftCore
from adaserve_jax.star.service.limits import DraftLimits, Quotas
from adaserve_jax.star.service.metrics import ServiceCollector, StatusServer
from adaserve_jax.star.service.model import DraftModel, load
from adaserve_jax.star.service.server import Audit, DraftServer, check_free, check_secured
from adaserve_jax.star.service.worker import Worker
from adaserve_jax.star.settings import DraftServiceSettings, host_port
from adaserve_jax.star.wire import Caps
from adaserve_jax.types import Progress

DEAD_STATUS = 70
"""Exit status of a service that ended because its device failed (EX_SOFTWARE)."""
BATCH_WAIT_S, GRACE_S = 5.0, 2.0
"""At the end: longest wait for the running batch, then for the connections."""
MIN_CAP_TOKENS = 2**16
"""Least cap on the tokens of a message, so that a text slightly too long is refused as `too_long`."""


class DraftService:
    """A ready model behind open ports. Raises ConfigError when an address is in use."""

    def __init__(
        self, settings: DraftServiceSettings, model: DraftModel, on_death: Callable[[], None] = lambda: None
    ) -> None:
        self.model = model
        rate = settings.max_messages_per_s
        sessions = min(settings.max_sessions_per_target or settings.max_sessions, settings.max_sessions)
        core = DraftCore(
            limits_of(settings, model),
            model,
            quotas=Quotas(
                max_sessions=sessions, max_sessions_in_all=settings.max_sessions, max_waiting=sessions,
                messages_per_s=rate, messages_at_once=max(1, int(rate)),
            ),
            batching=not settings.one_by_one,
            admission=TargetAdmission(1 if settings.one_by_one else model.limits.max_requests),
        )  # fmt: skip
        self.audit = Audit()
        self.worker = Worker(core, model, on_death=on_death)
        limits = model.limits
        tokens = max(2 * limits.max_context, MIN_CAP_TOKENS)
        caps = Caps(tokens, model.vocabulary, limits.max_depth, limits.max_width)
        self._server = DraftServer(settings, self.worker, caps, self.audit)
        self.port = self._server.port
        self.worker.start()
        self._server.start()

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the service is worth keeping, and the fields of `/health`."""
        alive, hangs, load = self.worker.alive, self.worker.hangs, self.worker.snapshot.load
        fields = {
            "status": "dead" if not alive else "stalled" if hangs else "ok", "draft_version": self.model.version,
            "load": round(load.busy, 4), "sessions": load.sessions, "targets": load.targets,
        }  # fmt: skip
        return alive and not hangs, fields

    def close(self) -> bool:
        """Accept no more streams, refuse all targets and end; return False if a batch still runs and uses the model."""
        self._server.shut()
        ended = self.worker.stop(BATCH_WAIT_S)
        self._server.stop(GRACE_S).wait()
        return ended


def limits_of(settings: DraftServiceSettings, model: DraftModel) -> DraftLimits:
    """Return the core's limits for the model."""
    limits, samples = model.limits, model.samples
    return DraftLimits(
        draft_version=model.version, vocabulary_hash=model.vocabulary_hash, cells_hash=cells_hash(model.table),
        max_depth=limits.max_depth, max_width=limits.max_width,
        max_context=limits.max_context, max_rows=limits.max_requests, max_feed=limits.max_tokens,
        lease_s=settings.lease_s, level_s=samples.draft_level_s, catchup_s=samples.catchup_s,
    )  # fmt: skip


def run(settings: DraftServiceSettings, progress: Progress | None, ready: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT and return 0, or DEAD_STATUS if the device failed. Called from the main thread.

    ready: called with one line that says where the service listens, and with which draft. Raises ConfigError when a
    setting, an address or a certificate is unusable, and CheckpointError when the draft cannot be loaded.
    """
    check_secured(settings)
    check_free(settings)
    with _status_server(settings) as status:
        model = load(settings, progress)
        ended = threading.Event()
        service = DraftService(settings, model, ended.set)
        try:
            if status is not None:
                status.serve_metrics(ServiceCollector(service.worker, service.audit, model))
                status.health = service.health
            gc.collect()
            gc.freeze()  # what exists now stays, so collections need not go through it while targets wait
            with _signals(ended):
                ready(_ready_line(settings, service, status))
                ended.wait()
        finally:
            if service.close():
                model.close()
    return DEAD_STATUS if service.worker.died else 0


@contextmanager
def _status_server(settings: DraftServiceSettings) -> Iterator[StatusServer | None]:
    """Run the HTTP port, if there is one; `/health` answers "starting" until the caller changes it."""
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
    """Let SIGTERM and SIGINT set the event; restore their handlers at the end."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(kind, lambda *_: ended.set()) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def _ready_line(settings: DraftServiceSettings, service: DraftService, status: StatusServer | None) -> str:
    host, _ = host_port("listen", settings.listen)
    where = f"grpc://{f'[{host}]' if ':' in host else host}:{service.port}"
    also = "" if status is None else f", metrics on http://{settings.http.rpartition(':')[0]}:{status.port}/metrics"
    return f"ready: {where} drafts with {settings.model}, draft version {service.model.version}{also}"
