"""The program as an operator runs it, over a scripted engine: a configuration file, TLS, keys, new keys, its end."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys

import httpx
import pytest

from tests.conftest import ROOT
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
PROGRAM = """
import sys
from functools import partial
from adaserve_jax.cli import main
from adaserve_jax.server import serve
from tests.server.scripted import ByteTokenizer
serve.ProcessEngine = partial(serve.ProcessEngine, factory="tests.server.scripted:ScriptedEngine")
serve.load_tokenizer = lambda target: ByteTokenizer()
main()
"""

FILE = """
[engine]
target = "scripted"
policy = "ar"

[server]
port = {port}
tls_cert = "{folder}/server.pem"
tls_key = "{folder}/server.key"

[[classes]]
name = "quick"
tpot_ms = 200

[[keys]]
name = "a"
key_env = "KEY_A"
min_slo_tpot_ms = 50
"""
MORE = """
[[keys]]
name = "b"
key = "b-secret"
requests_per_minute = 6
burst_s = 10
"""


@pytest.mark.slow
def test_it_serves_over_https_to_its_keys_and_takes_new_ones(tmp_path):
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-keyout", "server.key", "-out", "server.pem", "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", *curve, *names]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    port = 20_000 + os.getpid() % 20_000
    path = tmp_path / "adaserve.toml"
    path.write_text(FILE.format(port=port, folder=tmp_path))
    env = os.environ | {"PYTHONPATH": str(ROOT), "KEY_A": "a-secret"}
    command = [sys.executable, "-c", PROGRAM, "serve", "--config", str(path), "--served-model-name", "own"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        trusted = ssl.create_default_context(cafile=tmp_path / "server.pem")
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=30) as client:
            wait_while_it_lives(lambda: answers(client, "/ready", "a-secret") == 200, process)
            assert answers(client, "/ready", "b-secret") == 401
            body = {"model": "own", "prompt": "abc", "max_tokens": 8, "slo_tpot_ms": 1}
            made = client.post("/v1/completions", json=body, headers={"authorization": "Bearer a-secret"}).json()
            assert made["usage"]["completion_tokens"] == 8 and made["metrics"]["slo"]["tpot_target_ms"] == 50
            path.write_text(path.read_text() + MORE)
            process.send_signal(signal.SIGHUP)
            wait_while_it_lives(lambda: answers(client, "/ready", "b-secret") == 200, process)
            codes = [client.post("/v1/completions", json=body, headers={"authorization": "Bearer b-secret"}).status_code
                     for _ in range(2)]  # fmt: skip
            assert codes == [200, 429]
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert f"https://127.0.0.1:{port}" in out and "$ADASERVE_API_KEY" in out
        assert "the server has 2 API keys now" in err
        assert "a-secret" not in out + err and "b-secret" not in out + err
    finally:
        process.kill()
        process.communicate()


def answers(client: httpx.Client, path: str, secret: str) -> int | None:
    try:
        return client.get(path, headers={"authorization": f"Bearer {secret}"}).status_code
    except httpx.TransportError:
        return None


def wait_while_it_lives(condition, process: subprocess.Popen) -> None:
    def met() -> bool:
        assert process.poll() is None, process.communicate()
        return condition()

    wait_until(met, 0.1)
