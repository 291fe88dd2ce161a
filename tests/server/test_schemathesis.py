"""The OpenAPI document, taken at its word: right and wrong requests made from it, and every answer checked against it.

No 5xx, documented statuses and content types, bodies and each event of a stream as the document describes them, wrong
requests refused. Ranges, vocabularies and what excludes what are for the server to judge: it may refuse requests of the
right shape.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaserve_jax.server.settings import ServerSettings
from tests.server.conftest import Running


@pytest.fixture(scope="module")
def fuzzed(start_server) -> Iterator[Running]:
    """A server of its own, which still serves when all is done."""
    with start_server(ServerSettings(max_choices=4)) as running:
        yield running
        answer = running.post(prompt="abc", max_tokens=3)
        assert answer.json()["choices"][0]["text"] == "abc"
        assert running.state.slots.used == 0 and not running.state.in_flight and running.http.get("/ready").is_success


def fuzz(server: Running, folder: Path, *options: str, timeout_s: float) -> int:
    """Make requests from the server's document and check the answers; how many there were."""
    command = [
        Path(sys.executable).parent / "schemathesis", "run", f"{server.url}/openapi.json", "--url", server.url,
        "--exclude-checks", "positive_data_acceptance", "--suppress-health-check", "all", "--continue-on-failure",
        "--generation-deterministic", "--no-color", *options,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    (count,) = re.findall(r"(\d+) generated", done.stdout)
    return int(count)


@pytest.mark.slow
def test_the_document_holds(fuzzed, tmp_path):
    assert fuzz(fuzzed, tmp_path, "--phases", "examples,fuzzing", "--max-examples", "3", timeout_s=60) >= 15


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_document_holds_in_thousands_of_cases(fuzzed, tmp_path):
    assert fuzz(fuzzed, tmp_path, "--phases", "examples,coverage", timeout_s=300) >= 300
    assert fuzz(fuzzed, tmp_path, "--phases", "fuzzing", "--max-examples", "400", timeout_s=600) >= 2000
