"""Running the server: opens the port at once, starts the engine beside it, tells its progress, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import socket
import threading
from collections.abc import Callable
from ipaddress import ip_address
from typing import TypeVar

from rich.console import Console

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.by_name import local_engine
from adaserve_jax.engine.client import EngineClient
from adaserve_jax.engine.process import ProcessEngine
from adaserve_jax.engine.supervision import SupervisedEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.folders import resolve_folder
from adaserve_jax.server.app import create_app
from adaserve_jax.server.connection import http_config
from adaserve_jax.server.draining import ABORT_GRACE_S, DrainingServer
from adaserve_jax.server.reload import Reread, reload_on_hangup
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.state import ServerState, TextCodec
from adaserve_jax.server.warm_up import WarmUpBar
from adaserve_jax.server.watchers import Watchers

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
        client: EngineClient = local_engine()(engine_config, bar.update)
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
