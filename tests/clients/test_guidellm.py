"""guidellm's command line: its report is what was asked for, and no more than the server counted."""

from __future__ import annotations

import json

import pytest

from tests.clients.conftest import TOKENIZER

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
PACKAGE = "guidellm"
REQUESTS, TOKENS = 12, 10


def test_its_report(clients):
    before = clients.generated()
    clients.run(
        "guidellm", "run", "--backend", f"kind=openai_http,target={clients.url}",
        "--profile", "kind=concurrent,streams=4",
        "--data", f"kind=synthetic_text,prompt_tokens=24,output_tokens={TOKENS}",
        "--constraint", f"kind=max_requests,count={REQUESTS}", "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
        "--output", "kind=json,path=found.json", "--disable-console",
    )  # fmt: skip
    (report,) = json.loads((clients.folder / "found.json").read_text())["benchmarks"]
    totals = report["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    assert {one["output_metrics"]["text_tokens"] for one in report["requests"]["successful"]} == {TOKENS}
    assert clients.generated() - before >= REQUESTS * TOKENS
