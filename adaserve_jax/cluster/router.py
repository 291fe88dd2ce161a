"""HTTP application of the router: forwards requests to targets, but answers /health, /ready, /ping, /metrics, /cluster.

`python -m adaserve_jax.cluster.router DESCRIPTOR` runs it in a process of its own. Its settings come as JSON in an
environment variable, where other users do not see an API key; DESCRIPTOR is an inherited listening socket.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import signal
import socket
import sys
from dataclasses import asdict
from typing import Any

from prometheus_client.exposition import generate_latest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from adaserve_jax.cluster.forwarding import Forwarder, RouterMetrics, unavailable
from adaserve_jax.cluster.router_client import json_object
from adaserve_jax.cluster.settings import RouterSettings, checked_urls
from adaserve_jax.cluster.targets import Balancer, TargetPoller, TargetSet
from adaserve_jax.errors import AdaServeError, ConfigError
from adaserve_jax.logs import log_to_stderr
from adaserve_jax.server.auth import Keyring
from adaserve_jax.server.connection import ABORT_GRACE_S, DrainingServer, http_config
from adaserve_jax.server.errors import ApiError
from adaserve_jax.server.middleware import BodyLimitMiddleware, HeaderLimitMiddleware, RequestBoundaryMiddleware
from adaserve_jax.server.serve import listen, reload_certificate
from adaserve_jax.server.settings import ServerSettings

UNROUTED_PATHS = (
    "/dashboard", "/v1/files", "/v1/batches", "/v1/uploads", "/v1/assistants", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)  # fmt: skip
"""Paths, with all below them, whose state belongs to one server."""
SETTINGS_VARIABLE = "ADASERVE_ROUTER_SETTINGS"
_log = logging.getLogger(__name__)


class RouterApp:
    """ASGI application of a router, created, used and closed on one event loop.

    Raises ConfigError for a wrong profile, token file or keys.
    """

    def __init__(self, settings: RouterSettings):
        self.settings: ServerSettings = settings.server
        self.phase = "starting"
        self.targets = TargetSet(settings.targets)
        self.metrics = RouterMetrics(self.targets)
        self._router_settings = settings
        self._token = settings.token()
        self._keyring = Keyring(self.settings)
        balancer = Balancer(settings.router, settings.profile)
        self._poller = TargetPoller(
            self.targets, balancer,
            every_s=settings.poll_every, timeout_s=settings.poll_timeout, key=settings.target_key,
        )  # fmt: skip
        self._forwarder = Forwarder(
            self.targets, balancer, self.metrics, lambda: self._poller.classes, most_wait_s=settings.most_wait
        )
        self._polling: asyncio.Task[None] | None = None

    def app(self) -> ASGIApp:
        """Return this application inside the server's middleware."""
        limited = BodyLimitMiddleware(self, self.settings.max_body_bytes)
        return RequestBoundaryMiddleware(HeaderLimitMiddleware(limited, self.settings.max_header_bytes))

    async def start(self) -> None:
        self.phase = "ok"
        self._polling = asyncio.ensure_future(self._poller.run())

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
        await self.targets.close()

    # ---- called by DrainingServer ----

    def drain(self) -> None:
        self.phase = "draining"

    @property
    def is_busy(self) -> bool:
        return self._forwarder.in_flight > 0

    def abort_all(self) -> None:
        self._forwarder.abort_all()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # lifespan and websockets are not supported
        try:
            answer = await self._own_answer(scope, receive)
            if answer is None and (refused := self._refusal(scope["path"])) is not None:
                self.metrics.count_answer(refused.status_code)
                answer = refused.response()
            if answer is None:
                await self._forwarder(scope, receive, send)
                return
        except ClientDisconnect:
            return
        except ApiError as error:
            answer = error.response()
        except AdaServeError as error:
            answer = ApiError(400, str(error), code="invalid_request").response()
        await answer(scope, receive, send)

    def _refusal(self, path: str) -> ApiError | None:
        """Return the answer to a request that is not forwarded; None for any other."""
        if any(path == known or path.startswith(f"{known}/") for known in UNROUTED_PATHS):
            return ApiError(
                404, f"{path} is not routed: what it shows or keeps is one server's; ask that server", code="not_routed"
            )
        if self.phase == "draining":
            return unavailable("the router finishes what it has and takes nothing new", "shutting_down")
        most = self._router_settings.most_requests
        if self._forwarder.in_flight >= most:
            return ApiError(
                429, f"{most} requests are in flight, the most that this router takes; retry in a moment",
                code="queue_full", headers={"retry-after": "1"},
            )  # fmt: skip
        return None

    async def _own_answer(self, scope: Scope, receive: Receive) -> Response | None:
        """Answer a route of the router itself; return None for any other. Raises ApiError."""
        path, method = scope["path"], scope["method"]
        if path in ("/health", "/ready", "/ping"):
            status, detail = self._health()
            return JSONResponse(
                {"status": status, "detail": detail}, 200 if path == "/health" or status == "ok" else 503
            )
        if path == "/metrics":
            self._authorize(scope, api_key_suffices=True)
            return Response(
                generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8"
            )
        if path != "/cluster" and not path.startswith("/cluster/"):
            return None
        if path in ("/cluster", "/cluster/targets") and method in ("GET", "HEAD"):
            self._authorize(scope, api_key_suffices=True)
            return JSONResponse(self.status() if path == "/cluster" else self.scrape_targets())
        self._authorize(scope, api_key_suffices=False)
        if method != "POST":
            raise ApiError(405, "expected POST", code="method_not_allowed", headers={"allow": "POST"})
        fields = json_object(await Request(scope, receive).body())
        if fields is None:
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        self._change_targets(path.removeprefix("/cluster/"), fields)
        return JSONResponse(self.status())

    def _health(self) -> tuple[str, str]:
        if self.phase == "draining":
            return "draining", "the router finishes what it has and takes nothing new"
        if any(target.available for target in self.targets):
            return "ok", "requests are routed"
        if not self.targets.ever_available:
            return "starting", "no server has become ready yet"
        return "no_target", "no server can take requests now; the router looks for them"

    def status(self) -> dict[str, Any]:
        """Return the answer of /cluster: no keys, no prompts."""
        status, detail = self._health()
        return {
            "status": status, "detail": detail, "router": self._router_settings.router,
            "in_flight": self._forwarder.in_flight, "targets": [target.status() for target in self.targets],
        }  # fmt: skip

    def scrape_targets(self) -> list[dict[str, Any]]:
        """Return the answer of GET /cluster/targets, in the format of Prometheus' HTTP service discovery."""
        return [
            {"targets": [target.name], "labels": {"__scheme__": target.url.partition("://")[0]}}
            for target in self.targets
        ]

    def _change_targets(self, order: str, fields: dict[str, Any]) -> None:
        """Carry out an order. Raises ApiError, ConfigError."""
        if order in ("drain", "resume"):
            self.targets.drain(self.targets.find(str(fields.get("target"))), order == "drain")
        elif order == "targets":
            urls = fields.get("targets")
            if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
                raise ConfigError(f"targets must be a list of URLs, got {urls!r}")
            self.targets.replace(checked_urls(tuple(urls)))
        else:
            raise ApiError(404, "expected /cluster/drain, /cluster/resume or /cluster/targets", code="not_found")
        _log.warning("order %s: %s", order, fields.get("targets" if order == "targets" else "target"))

    def _authorize(self, scope: Scope, *, api_key_suffices: bool) -> None:
        """Raise ApiError unless the request has the cluster's token.

        With `api_key_suffices` an API key of the router is enough, and none is needed if the router has none.
        """
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, secret = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        secret = secret.strip() if scheme.lower() == b"bearer" else b""
        if self._token is not None and hmac.compare_digest(secret, self._token.encode()):
            return
        if api_key_suffices and (not self._keyring or self._keyring.find(secret) is not None):
            return
        raise ApiError(
            401 if self._token is not None or api_key_suffices else 403,
            "expected the header 'Authorization: Bearer TOKEN' with the cluster's token"
            + (" or an API key of the router" if api_key_suffices else "")
            + ("" if self._token is not None else "; this router was started without a token"),
            code="invalid_api_key", headers={"www-authenticate": "Bearer"},
        )  # fmt: skip


async def run_router(settings: RouterSettings, listener: socket.socket | None = None) -> None:
    """Route until SIGTERM or SIGINT, then drain. SIGHUP reads the certificate and its key again.

    listener: a bound socket to use instead of the port in the settings. Raises ConfigError.
    """
    router = RouterApp(settings)
    config = http_config(router.app(), router.settings, lifespan="off", timeout_graceful_shutdown=int(ABORT_GRACE_S))
    own = listener or listen(router.settings)
    await router.start()

    def hang_up() -> None:
        if config.ssl is not None:
            reload_certificate(config.ssl, router.settings)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
    targets = ", ".join(settings.targets) or "no target yet"
    print(f"adaserve routes on {url_of(own, router.settings)} to {targets}", flush=True)
    try:
        await DrainingServer(config, router).serve(sockets=[own])
    finally:
        await router.close()
        own.close()


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """Return the URL by which this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{port}"


def router_command(settings: RouterSettings, descriptor: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return command and environment of a router process. descriptor: a bound socket that the process inherits."""
    command = (sys.executable, "-m", "adaserve_jax.cluster.router", str(descriptor))
    return command, {SETTINGS_VARIABLE: json.dumps(asdict(settings))}


def main() -> None:
    log_to_stderr()
    values = json.loads(os.environ.pop(SETTINGS_VARIABLE))
    values["targets"] = tuple(values["targets"])
    try:
        asyncio.run(run_router(RouterSettings(**values), socket.socket(fileno=int(sys.argv[1]))))
    except AdaServeError as error:
        print(f"adaserve: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
