"""Running the server: opens the port at once, starts the engine beside it, tells its progress, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineClient
from adaserve_jax.engine.process_engine import ProcessEngine
from adaserve_jax.engine.supervisor import SupervisedEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.results.served import RecordStore
from adaserve_jax.server.app import create_app
from adaserve_jax.server.connection import ABORT_GRACE_S, DrainingServer, check_tls, http_config
from adaserve_jax.server.records import Recorder, Retention
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.state import ServerState, TextCodec
from adaserve_jax.server.tracing import Tracer, open_exporter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

# The progress of the engine's warm-up: a bar on a terminal, a line per tenth of the work in a log file.

LINES = 10


class WarmUpBar:
    """Shows each kind of work on a console; callable from any thread."""

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = console
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._lines: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    def update(self, what: str, done: int, total: int) -> None:
        """`done` of `total` parts of `what` are ready."""
        with self._lock:
            if self._closed:
                return
            if self._console.is_terminal:
                self._draw(what, done, total)
            else:
                self._tell(what, done, total)

    def _draw(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._progress.start()
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)

    def _tell(self, what: str, done: int, total: int) -> None:
        tenth = LINES * done // max(total, 1)
        if tenth > self._lines.get(what, -1):
            self._lines[what] = tenth
            self._console.print(f"{what} {done}/{total}", highlight=False)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._progress.stop()


# New API keys and certificates without a restart: on SIGHUP the configuration file is read again, of which only
# the keys are taken, and the files of the certificate and its key.

Reread = Callable[[], ServerSettings]
"""The settings as they are now in their file. Raises ConfigError."""


def reload_on_hangup(
    state: ServerState, reread: Reread | None, tls: Callable[[], ssl.SSLContext | None] = lambda: None
) -> None:
    """From now on SIGHUP takes the file's keys, where there is a file, and the certificate's files into what `tls`
    gives. Call it on the event loop of the main thread."""

    def hang_up() -> None:
        if reread is not None:
            reload_keys(state, reread)
        context = tls()
        if context is not None:
            reload_certificate(context, state.settings)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)


def reload_keys(state: ServerState, reread: Reread) -> None:
    """Take the keys that `reread` has; what is wrong with them is logged, and then the old ones stay."""
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
    """Take what the files of the certificate and its key hold now, for connections to come; what is wrong with them is
    logged, and then the old ones stay."""
    try:
        check_tls(settings)  # loads them elsewhere first: a pair that does not fit must not be taken in halves
        assert settings.tls_cert is not None
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (ConfigError, OSError) as error:
        _log.error("the certificate is as before: %s", error)
        return
    _log.warning("the server has read its certificate again")


# What a server's settings ask to watch its requests with: a file of records, a collector of traces.

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


BACKLOG = 2048
DEAD_STATUS = 70
"""Exit status of a server that ended because its engine did (EX_SOFTWARE)."""
DEAD_POLL_S = 0.5
_log = logging.getLogger(__name__)
T = TypeVar("T")


def run(
    settings: ServerSettings, engine_config: EngineConfig, in_process: bool = False, reread: Reread | None = None
) -> int:
    """Serve until SIGTERM or SIGINT, then drain and return 0; DEAD_STATUS when the engine's end was the reason.

    in_process: run the engine in a thread of this process, which cannot be started again. reread: where new API keys
    come from on SIGHUP. Raises ConfigError (keys, certificates, the port is taken) and what loading the engine raises.
    """
    bar = WarmUpBar(Console(stderr=True))
    if in_process:
        from adaserve_jax.engine.thread_engine import LocalEngine  # imports jax

        client: EngineClient = LocalEngine(engine_config, bar.update)
    else:
        client = SupervisedEngine(
            lambda on_death: ProcessEngine(engine_config, bar.update, on_death=on_death),
            max_restarts=settings.max_restarts,
            window_s=settings.restart_window,
        )
    return serve(settings, client, lambda: load_tokenizer(engine_config.target), bar, reread)


def load_tokenizer(target: str) -> TextCodec:
    """The tokenizer of a target as the configuration names it. Raises CheckpointError."""
    from adaserve_jax.models.tokenizer import Tokenizer  # a second of imports, paid after the port is open

    return Tokenizer.from_folder(resolve_folder(target, "target"))


def serve(
    settings: ServerSettings,
    client: EngineClient,
    tokenizer: Callable[[], TextCodec],
    bar: WarmUpBar,
    reread: Reread | None = None,
) -> int:
    """Start `client` behind an open port and serve it until a signal; closes it in any case. Returns as `run`."""
    with Watchers(settings) as watchers:
        return _serve_watched(settings, client, tokenizer, bar, reread, watchers)


def _serve_watched(
    settings: ServerSettings, client: EngineClient, tokenizer: Callable[[], TextCodec], bar: WarmUpBar,
    reread: Reread | None, watchers: Watchers,
) -> int:  # fmt: skip
    app = create_app(client, None, settings)
    watchers.attach(app.state.server)
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
    """Bind the port. Raises ConfigError saying why not.

    The protocol is named because asyncio turns Nagle's algorithm off for such sockets only; with it, a body or an event
    waits up to 40 ms for the client to acknowledge what was sent before.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; choose another with --port"
        ) from error
    listener.listen(BACKLOG)
    return listener


def warn_if_open(state: ServerState, listener: socket.socket) -> None:
    """Say so when others than this machine may reach a server that asks for no key."""
    if not state.keyring and not ip_address(listener.getsockname()[0]).is_loopback:
        _log.warning("whoever reaches port %d may use this server: it asks for no API key", listener.getsockname()[1])


async def _serve(
    server: DrainingServer[ServerState],
    listener: socket.socket,
    tokenizer: Callable[[], TextCodec],
    bar: WarmUpBar,
    reread: Reread | None,
) -> int:
    """Run the HTTP server and the engine's start together. Returns what `run` does; raises what the start raised."""
    state = server.state
    if reread is not None or state.settings.tls_cert is not None:
        reload_on_hangup(state, reread, lambda: server.config.ssl)
    loading = in_thread(lambda: _load(state.client, tokenizer))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    await asyncio.wait({loading, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        await serving  # stopped while loading
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
    """Wait for the engine's end while the server serves, then stop that as a signal does; returns when it has begun."""
    while server.state.phase != "ok" or server.state.health().status != "dead":
        await asyncio.sleep(DEAD_POLL_S)
    _log.error("the engine ended and is not started again: the server ends too")
    server.begin_drain()


def _load(client: EngineClient, tokenizer: Callable[[], TextCodec]) -> TextCodec:
    """Load the tokenizer, then start the engine. Returns the tokenizer; raises what either raised."""
    loaded = tokenizer()
    client.start()
    return loaded


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a daemon thread, which does not hold up the end of the program; its result as a future."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def target() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=target, name="engine-start", daemon=True).start()
    return future


def _announce(state: ServerState, listener: socket.socket) -> None:
    """Print the URL and a request that can be pasted into a shell."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"{'https' if state.settings.tls_cert else 'http'}://{host}:{port}"
    pages = f"API: {url}/docs" + (f", dashboard: {url}/dashboard" if state.settings.dashboard else "")
    print(f"adaserve serves {state.model_name} on {url}  ({pages})\n{example(url, state)}", flush=True)


def example(url: str, state: ServerState) -> str:
    """A curl command that asks for a speed target a little tighter than what the target model does alone."""
    target_ms = max(round(0.8 * state.info.baseline_s * 1e3, 1), state.settings.min_slo_tpot_ms)
    body = {"prompt": "def add(a, b):", "max_tokens": 32, "slo_tpot_ms": target_ms}
    key = ' -H "Authorization: Bearer $ADASERVE_API_KEY"' if state.keyring else ""
    return f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
