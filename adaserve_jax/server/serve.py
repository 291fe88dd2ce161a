"""Run the server: open the port, start the engine beside it, show its progress, reload on SIGHUP, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import shlex
import signal
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from adaserve_jax.config import EngineConfig
from adaserve_jax.constraints.reasoning_formats import marks_of
from adaserve_jax.engine.client import EngineClient
from adaserve_jax.engine.process_engine import ProcessEngine
from adaserve_jax.engine.supervisor import SupervisedEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.results.record_store import RecordStore
from adaserve_jax.server.app import create_app
from adaserve_jax.server.connection import ABORT_GRACE_S, DrainingServer, http_config, tls_options
from adaserve_jax.server.daemon_thread import in_thread
from adaserve_jax.server.records import Recorder, Retention
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.state import ServerState, TextCodec

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from adaserve_jax.server.tracing import Tracer

BACKLOG = 2048
DEAD_STATUS = 70
"""Exit status of a server that ended because its engine did (EX_SOFTWARE)."""
DEAD_POLL_S = 0.5
DAY_S = 86_400.0
WARM_UP_LINES = 10
"""Lines of progress per kind of work where there is no terminal."""
Reread = Callable[[], ServerSettings]
"""Function that reads the settings again from their file. Raises ConfigError."""
_log = logging.getLogger(__name__)


def run(
    settings: ServerSettings, engine_config: EngineConfig, in_process: bool = False, reread: Reread | None = None
) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Return 0, or DEAD_STATUS when its engine ended the server.

    Raises ConfigError, also for errors in keys or certificates and a port in use, and what loading the engine raises.
    in_process: run the engine in a thread of this process, which cannot be started again. reread: reads the settings
    again on SIGHUP, for new API keys.
    """
    served = settings.served_model_name or PurePath(engine_config.target).name
    if served in engine_config.lora_folders:
        raise ConfigError(f"lora must have other names than the served model, got {served!r}; rename the adapter")
    bar = WarmUpBar(Console(stderr=True))
    with contextlib.ExitStack() as on_exit:
        if in_process:
            from adaserve_jax.engine.thread_engine import LocalEngine  # imports jax

            client: EngineClient = LocalEngine(engine_config, bar.update)
        else:
            warm_folder = on_exit.enter_context(tempfile.TemporaryDirectory(prefix="adaserve-warm-"))
            client = SupervisedEngine(
                lambda on_death: ProcessEngine(engine_config, bar.update, warm_folder=warm_folder, on_death=on_death),
                max_restarts=settings.max_restarts,
                window_s=settings.restart_window,
                backoff_s=settings.restart_backoff,
            )
        return serve(settings, client, lambda: load_tokenizer(engine_config.target), bar, reread)


def load_tokenizer(target: str) -> TextCodec:
    """Return the tokenizer of a target. Raises CheckpointError."""
    from adaserve_jax.models.tokenizer import Tokenizer  # a second of imports, paid after the port is open

    return Tokenizer.from_folder(resolve_folder(target, "target"))


def serve(
    settings: ServerSettings,
    client: EngineClient,
    tokenizer: Callable[[], TextCodec],
    bar: WarmUpBar,
    reread: Reread | None = None,
) -> int:
    """Start `client` behind an open port, serve it until a signal and close it. Return the exit status of `run`."""
    with Observability(settings) as observability:
        app = create_app(client, None, settings)
        observability.attach(app.state.server)
        config = http_config(app, settings, lifespan="on", timeout_graceful_shutdown=int(ABORT_GRACE_S))
        listener = listen(settings)  # last: what is wrong with keys and certificates is said before the port opens
        warn_if_open(app.state.server, listener)
        try:
            server = DrainingServer(config, app.state.server)
            return asyncio.run(_serve(server, listener, tokenizer, bar, reread))
        finally:
            client.close()
            listener.close()
            bar.close()


def listen(settings: ServerSettings) -> socket.socket:
    """Return a socket that listens on the port. Raises ConfigError.

    IPPROTO_TCP is given because asyncio turns Nagle's algorithm off only for such sockets; with it, a body or an event
    waits up to 40 ms for the client to acknowledge the packet before.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; choose another with "
            f"{'--host' if is_host else '--port'}"
        ) from error
    listener.listen(BACKLOG)
    return listener


def warn_if_open(state: ServerState, listener: socket.socket) -> None:
    """Log a warning when other machines can reach a server that asks for no key."""
    if not state.keyring and not ip_address(listener.getsockname()[0]).is_loopback:
        _log.warning("whoever reaches port %d may use this server: it asks for no API key", listener.getsockname()[1])


async def _serve(
    server: DrainingServer[ServerState],
    listener: socket.socket,
    tokenizer: Callable[[], TextCodec],
    bar: WarmUpBar,
    reread: Reread | None,
) -> int:
    """Run the HTTP server and the engine's start together. Return the exit status; raise what the start raised."""
    state = server.state
    if reread is not None or state.settings.tls_cert is not None:
        reload_on_hangup(state, reread, lambda: server.config.ssl)

    def load() -> TextCodec:
        loaded = tokenizer()  # first: it says within a second that a checkpoint is not one
        marks_of(state.settings.reasoning_parser, loaded)
        state.client.start()
        return loaded

    loading = in_thread(load, "engine-start")
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    await asyncio.wait({loading, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        await serving  # stopped while loading
        loading.cancel()
        return 0
    error = loading.exception()
    if error is None:
        state.become_ready(loading.result())
        bar.close()
        _announce(state, listener)
    else:
        server.should_exit = True
    ending = asyncio.ensure_future(_end_with_engine(server)) if state.settings.exit_when_dead else None
    await serving
    if error is not None and state.phase == "starting":
        raise error
    if ending is None:
        return 0
    return DEAD_STATUS if not ending.cancel() else 0


async def _end_with_engine(server: DrainingServer[ServerState]) -> None:
    """Begin to drain the server once the engine has ended while it serves."""
    while server.state.phase != "ok" or server.state.health().status != "dead":
        await asyncio.sleep(DEAD_POLL_S)
    _log.error("the engine ended and is not started again: the server ends too")
    server.begin_drain()


def _announce(state: ServerState, listener: socket.socket) -> None:
    """Print the URL and a request that can be pasted into a shell."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"{'https' if state.settings.tls_cert else 'http'}://{host}:{port}"
    pages = f"API: {url}/docs" + (f", dashboard: {url}/dashboard" if state.settings.dashboard else "")
    about = f"draft: {state.info.draft or 'none'}, {pages}"
    print(f"adaserve serves {state.model_name} on {url}  ({about})\n{example(url, state)}", flush=True)


def example(url: str, state: ServerState) -> str:
    """Return a curl command whose TPOT target leaves an idle server room to spare."""
    # In tens, as on the start page. Four times: the baseline is the device's step without the host's part.
    target_ms = max(10 * math.ceil(4 * state.info.baseline_s * 1e3 / 10), state.settings.min_slo_tpot_ms)
    body = {"prompt": "def add(a, b):", "max_tokens": 32, "slo_tpot_ms": target_ms}
    key = ' -H "Authorization: Bearer $ADASERVE_API_KEY"' if state.keyring else ""
    return f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


class Observability:
    """Records and traces that the settings ask for: a context manager whose end writes and sends what still waits.

    Open it before the port, so that a file that cannot be written is refused first; attach it once there is a server.
    Raises ConfigError when the file cannot be written or is not a file of records, or OpenTelemetry is not installed.
    """

    def __init__(self, settings: ServerSettings):
        self._retention = Retention(settings.records_days * DAY_S, settings.records_max_mib * 2**20)
        self._exporter: SpanExporter | None = None
        if settings.otlp_endpoint is not None:
            try:
                from adaserve_jax.server.tracing import open_exporter  # OpenTelemetry is optional

                self._exporter = open_exporter(settings.otlp_endpoint)
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"--otlp-endpoint needs the package {error.name!r}, which is not installed; run: pip install "
                    "'adaserve-jax[otel]'"
                ) from error
        self._store = RecordStore.open(Path(settings.records)) if settings.records is not None else None
        self._attached: list[Recorder | Tracer] = []

    def attach(self, state: ServerState) -> None:
        """Observe this server from now on."""
        if self._store is not None:
            self._attached.append(Recorder(state, self._store, self._retention))
            self._store = None
        if self._exporter is not None:
            from adaserve_jax.server.tracing import Tracer

            self._attached.append(Tracer(state, self._exporter))
        state.observers += [each.observe for each in self._attached]

    def __enter__(self) -> Observability:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._attached:
            each.close()
        if self._store is not None:
            self._store.close()


def reload_on_hangup(
    state: ServerState, reread: Reread | None, tls: Callable[[], ssl.SSLContext | None] = lambda: None
) -> None:
    """Install a handler of SIGHUP that reloads API keys and certificate. Call it on the main thread's event loop.

    reread: reads the settings; None: keys stay. tls: returns the context that gets the certificate, if any.
    """

    def hang_up() -> None:
        if reread is not None:
            reload_keys(state, reread)
        context = tls()
        if context is not None:
            reload_certificate(context, state.settings)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)


def reload_keys(state: ServerState, reread: Reread) -> None:
    """Take the API keys that `reread` returns; on an error, which is logged, the old ones stay."""
    try:
        settings = reread()
        if not state.keyring:
            raise ConfigError("the server was started without API keys, so that it asks for none; restart it")
        if not settings.all_keys():
            raise ConfigError("at least one API key must be left; to ask for none, restart the server")
        state.keyring.replace(settings)
    except ConfigError as error:
        _log.error("the API keys are as before: %s", error)
        return
    _log.warning("the server has %d API keys now", len(settings.all_keys()))


def reload_certificate(context: ssl.SSLContext, settings: ServerSettings) -> None:
    """Load the certificate and its key again for new connections; on an error, which is logged, the old ones stay."""
    try:
        tls_options(settings)  # first into another context: a pair that does not match must not be loaded by half
        assert settings.tls_cert is not None
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (ConfigError, OSError) as error:
        _log.error("the certificate is as before: %s", error)
        return
    _log.warning("the server has read its certificate again")


class WarmUpBar:
    """Progress of the engine's warm-up: a bar on a terminal, a line per tenth of the work in a log file.

    Call it from any thread.
    """

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = console
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._lines: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    def update(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` parts of `what` are ready."""
        with self._lock:
            if self._closed:
                return
            if self._console.is_terminal:
                if what not in self._tasks:
                    self._progress.start()
                    self._tasks[what] = self._progress.add_task(what, total=total)
                self._progress.update(self._tasks[what], completed=done, total=total)
                return
            tenth = WARM_UP_LINES * done // max(total, 1)
            if tenth > self._lines.get(what, -1):
                self._lines[what] = tenth
                self._console.print(f"{what} {done}/{total}", highlight=False)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._progress.stop()
