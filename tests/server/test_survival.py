"""`adaserve serve` on the embedded pair, as a program: killed engines, stops under load, overload, an unkind hour in
short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.bench.scripts import imported
from tests.conftest import ROOT
from tests.waiting import wait_until

with imported("server.http_load") as modules:
    adaserve, sample, served = (getattr(modules["http_load"], name) for name in ("adaserve", "sample", "served"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OPTIONS = {"max_requests": 8, "token_edges": (16, 64), "row_edges": (8,)}


@pytest.fixture(autouse=True)
def this_tree(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def body(seed: int, **more) -> dict:
    return {"prompt": "def add(a, b):", "max_tokens": 400, "seed": seed, "ignore_eos": True} | more


def running(port: int) -> float:
    return sample(port, "adaserve_requests_running")


def test_a_killed_engine_comes_back_and_a_stop_under_load_loses_nothing():
    with served(adaserve(**OPTIONS)) as server, ThreadPoolExecutor(8) as pool:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=None) as http:
            first = http.post("/v1/completions", json=body(0, max_tokens=24)).json()["choices"][0]["text"]
            cut = [pool.submit(http.post, "/v1/completions", json=body(i, stream=i % 2 == 0)) for i in range(8)]
            wait_until(lambda: running(server.port) == 8)
            killed_s = time.monotonic()
            os.kill(server.engine_pid, signal.SIGKILL)
            for answer in cut:
                assert "engine_restarting" in answer.result().text
            assert http.get("/health").json()["status"] == "restarting"
            wait_until(lambda: http.get("/ready").status_code == 200)
            print(f"started in {server.start_s:.1f} s, back after {time.monotonic() - killed_s:.1f} s")
            assert http.post("/v1/completions", json=body(0, max_tokens=24)).json()["choices"][0]["text"] == first
            whole = [pool.submit(http.post, "/v1/completions", json=body(i, stream=i % 2 == 0)) for i in range(8)]
            wait_until(lambda: running(server.port) == 8)
            server.process.send_signal(signal.SIGTERM)
            for i, answer in enumerate(whole):
                assert '"finish_reason":"length"' in answer.result().text
                assert i % 2 or answer.result().text.endswith("data: [DONE]\n\n")
        assert server.process.wait() == 0


def run(module: str, out: Path, *options: str) -> dict:
    command = [sys.executable, "-m", f"benchmarks.{module}", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert out.exists(), done.stderr
    return json.loads(out.read_text()) | {"stderr": done.stderr}


def test_a_short_soak_loses_and_leaks_nothing(tmp_path):
    report = run("server.soak", tmp_path / "soak.json", "--minutes", "0.7")
    assert report["failures"] == [], report["stderr"]
    assert report["did"]["tokens compared"] > 1000 and report["did"]["leave_midway"] > 5


def test_three_times_the_capacity_is_refused_politely(tmp_path):
    """Times are for the benchmark; here: everything is answered, and refusals say when to come again."""
    overload = run("adaserve.overload", tmp_path / "overload.json", "--seconds", "12")["overload"]
    assert overload["refused"] > 0 and overload["refused_without_retry_after"] == 0
    assert overload["others"] == {} and overload["admitted"] > 0
