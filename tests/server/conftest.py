"""A real HTTP server on a loopback port over the scripted engine, shared by the tests of this folder."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineClient
from adaserve_jax.server.app import create_app
from adaserve_jax.server.connection import http_config
from adaserve_jax.server.serve import listen
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.state import ServerState, TextCodec
from tests.server.scripted import ByteTokenizer, ScriptedEngine


@dataclass(frozen=True)
class Running:
    """One server: its URL, engine, state, and a client."""

    url: str
    engine: Any
    state: ServerState
    http: httpx.Client

    def post(self, path: str = "/v1/completions", **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def openai_client(self) -> openai.OpenAI:
        """Return the official client of this server, which tries once; the caller closes it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)


@contextlib.contextmanager
def running(
    settings: ServerSettings | None = None, tokenizer: TextCodec | None = None, *, ready: bool = True,
    kv_tokens: int | None = None,
) -> Iterator[Running]:  # fmt: skip
    """Serve a scripted engine of its own. kv_tokens: what its KV cache holds, if that is less than the context."""
    engine = ScriptedEngine(EngineConfig(target="models/scripted", draft="demo"))
    engine.kv_tokens = kv_tokens
    engine.start()
    with serving(engine, (tokenizer or ByteTokenizer()) if ready else None, settings or ServerSettings()) as server:
        yield server
    engine.close()


@contextlib.contextmanager
def serving(engine: EngineClient, tokenizer: TextCodec | None, settings: ServerSettings) -> Iterator[Running]:
    """A server over an engine that the caller owns, in a thread of this process."""
    app = create_app(engine, tokenizer, settings)
    listener = listen(replace(settings, port=0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    quiet = replace(settings, log_level="critical")
    server = uvicorn.Server(http_config(app, quiet, lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)  # a failed test must not hang the end
    thread.start()
    with httpx.Client(base_url=url, timeout=30) as http:
        while not server.started:
            time.sleep(0.005)
        yield Running(url, engine, app.state.server, http)
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running() as shared:
        yield shared


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.openai_client() as made:
        yield made


@pytest.fixture(scope="session")
def start_server():
    """The context manager that starts one more server, with settings of its own."""
    return running


@pytest.fixture(scope="session")
def serve_engine():
    """The context manager that serves an engine which the test owns."""
    return serving
