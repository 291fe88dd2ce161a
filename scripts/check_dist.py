"""Installs what `make dist` built into a new environment outside the checkout, and uses it there as a newcomer would.

`python scripts/check_dist.py dist/*.whl` and the same with the `.tar.gz`. Needs a package index; takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

INSTALL_S = 1800.0
COMMAND_S = 900.0
READY_S = 600.0
ANSWER_S = 120.0
"""Nothing takes as long, on a slow machine with a slow index: what hangs is ended and said."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path, help="wheel or source distribution to install, with its server extra")
    package = parser.parse_args().package.resolve(strict=True)
    with tempfile.TemporaryDirectory() as folder:
        check(package, Path(folder))
    print(f"{package.name}: installed and used")


def check(package: Path, folder: Path) -> None:
    """Check the installed package. Raises CalledProcessError, TimeoutExpired or AssertionError for what does not work.
    folder: empty, outside the checkout."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=INSTALL_S)
    install = [folder / "venv/bin/pip", "install", "--quiet", f"{package}[server]"]
    subprocess.run(install, check=True, timeout=INSTALL_S)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str | Path, program: str = "adaserve") -> str:
        command = [folder / "venv/bin" / program, *words]
        done = subprocess.run(
            command, cwd=folder, env=environment, check=True, text=True, stdout=subprocess.PIPE, timeout=COMMAND_S
        )
        return done.stdout

    where = run("-c", "import adaserve_jax; print(adaserve_jax.__file__)", program="python").strip()
    assert Path(where).is_relative_to(folder), f"expected the installed package, got {where}"
    assert "adaserve-jax" in run("version") and "serve" in run("--help")
    assert run("generate", "def add(a, b):", "--max-tokens", "8").strip()
    run("bench", "--policies", "ar,adaserve", "--rates", "2", "--duration", "3", "--out", "run")
    run("report", "run", "-o", "report.md")
    assert (folder / "report.md").read_text().startswith("# ")
    run("config", "--example")
    serve(folder, environment)


def serve(folder: Path, environment: dict[str, str]) -> None:
    """Send one request with a target to a server of the installed package."""
    with (folder / "serve.log").open("w") as log:
        command = [folder / "venv/bin/adaserve", "serve", "--port", "0", "--dashboard"]
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = ready_url(folder / "serve.log", server)
        body = {"prompt": "def add(a, b):", "max_tokens": 8, "slo_tpot_ms": 1000}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            metrics = json.load(answer)["metrics"]
        assert metrics["slo"]["tpot_target_ms"] == 1000, metrics
        for page in ("/metrics", "/dashboard", "/docs", "/openapi.json"):
            with urllib.request.urlopen(f"{url}{page}", timeout=ANSWER_S) as answer:
                assert answer.status == 200 and answer.read()
    finally:
        server.terminate()
        try:
            assert server.wait(ANSWER_S) == 0, "the server did not end by itself"
        finally:
            server.kill()


def ready_url(log: Path, server: subprocess.Popen[bytes]) -> str:
    """Return the URL that the server prints, once it answers."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < READY_S and server.poll() is None:
        urls = [word.rstrip(".,;") for word in log.read_text().split() if word.startswith("http://")]
        if urls:
            try:
                with urllib.request.urlopen(f"{urls[0]}/ready", timeout=ANSWER_S):
                    return urls[0]
            except OSError:
                pass
        time.sleep(0.5)
    raise TimeoutError(f"the server was not ready: {log.read_text()}")


if __name__ == "__main__":
    main()
