"""The health check of containers: status 0 for 200, else 1 and what was found."""

from __future__ import annotations

import subprocess
import sys

import pytest

from adaserve_jax.server import probe
from adaserve_jax.server.settings import ServerSettings


def ask(monkeypatch, server, path: str, **variables: str) -> object:
    monkeypatch.setenv("ADASERVE_PORT", server.url.rsplit(":", 1)[1])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["probe", path])
    with pytest.raises(SystemExit) as ended:
        probe.main()
    return ended.value.code


def test_it_says_whether_the_server_answers(monkeypatch, start_server):
    with start_server(ServerSettings(api_key="k")) as server:
        assert ask(monkeypatch, server, "/health") is None
        assert str(ask(monkeypatch, server, "/ready")).endswith("answered 401")
        assert ask(monkeypatch, server, "/ready", ADASERVE_PROBE_KEY="k", ADASERVE_TLS_CERT="none") is None
        server.state.drain()
        assert str(ask(monkeypatch, server, "/ready")).endswith("answered 503")
        assert ask(monkeypatch, server, "/health") is None
    assert "refused" in str(ask(monkeypatch, server, "/health"))


def test_it_starts_without_the_packages_that_a_server_needs():
    """It is run every few seconds beside the engine."""
    code = "import sys, adaserve_jax.server.probe; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"numpy", "pydantic", "typer", "jax"} & set(done.stdout.split())
