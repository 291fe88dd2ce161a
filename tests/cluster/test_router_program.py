"""The router as a program of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.waiting import wait_until


@pytest.mark.parametrize("tls", [False, True])
def test_a_hangup_reads_the_certificate_again_and_ends_nothing(tmp_path: Path, tls: bool) -> None:
    command = [
        sys.executable,
        "-m",
        "adaserve_jax",
        "cluster",
        "route",
        "--targets",
        "http://127.0.0.1:9",
        "--port",
        "0",
    ]
    if tls:
        made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9 -subj /CN=localhost"
        files = tmp_path / "tls.key", tmp_path / "tls.pem"
        written = ["-keyout", str(files[0]), "-out", str(files[1])]
        subprocess.run([*made.split(), *written], check=True, capture_output=True)
        command += ["--tls-key", str(files[0]), "--tls-cert", str(files[1])]
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as program,
    ):
        try:
            assert program.stdout is not None
            url = program.stdout.readline().split()[3]
            program.send_signal(signal.SIGHUP)
            if tls:
                wait_until(lambda: "has read its certificate again" in (tmp_path / "log").read_text())
            assert httpx.get(f"{url}/health", verify=False).status_code == 200 and program.poll() is None
        finally:
            program.terminate()
        assert program.wait(30) == 0
