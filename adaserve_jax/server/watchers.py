"""What a server's settings ask to watch its requests with: a file of records, a collector of traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from adaserve_jax.results.record_store import RecordStore
from adaserve_jax.server.records import Recorder, Retention
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.state import ServerState
from adaserve_jax.server.traces import Tracer, open_exporter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

DAY_S = 86_400.0


class Watchers:
    """Opened before the port, so that a file that cannot be written is refused first; attached once there is a server.

    A context manager. Its end writes and sends what still waits.
    """

    def __init__(self, settings: ServerSettings):
        """Raises ConfigError: the file cannot be written or is not ours, or OpenTelemetry is not installed."""
        self._retention = Retention(settings.records_days * DAY_S, settings.records_max_mib * 2**20)
        self._exporter: SpanExporter | None = None
        if settings.otlp_endpoint is not None:
            self._exporter = open_exporter(settings.otlp_endpoint)
        self._store = RecordStore.open(Path(settings.records)) if settings.records is not None else None
        self._attached: list[Recorder | Tracer] = []

    def attach(self, state: ServerState) -> None:
        """Watch this server from now on."""
        if self._store is not None:
            self._attached.append(Recorder(state, self._store, self._retention))
            self._store = None
        if self._exporter is not None:
            self._attached.append(Tracer(state, self._exporter))
        state.observers += [each.observe for each in self._attached]

    def __enter__(self) -> Watchers:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._attached:
            each.close()
        if self._store is not None:
            self._store.close()
