"""aiperf's command line: its records are what was asked for and what the server counted."""

from __future__ import annotations

import json

import pytest

from tests.clients.conftest import TOKENIZER

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
PACKAGE = "aiperf"
REQUESTS, TOKENS = 12, 10


def test_its_report(clients):
    before = clients.generated()
    clients.run(
        "aiperf", "profile", "-m", "demo", "--tokenizer", TOKENIZER, "--url", clients.url, "--endpoint-type", "chat",
        "--streaming", "--use-server-token-count", "--concurrency", "4", "--request-count", str(REQUESTS),
        "--isl", "24", "--osl", str(TOKENS), "--osl-stddev", "0", "--extra-inputs", "ignore_eos:true",
        "--artifact-dir", "found", "--ui", "none", offline=False,
    )  # fmt: skip
    (file,) = (clients.folder / "found").rglob("profile_export.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == REQUESTS and not [one for one in records if one.get("error")]
    assert {one["metrics"]["output_sequence_length"]["value"] for one in records} == {TOKENS}
    assert clients.generated() - before == REQUESTS * TOKENS
