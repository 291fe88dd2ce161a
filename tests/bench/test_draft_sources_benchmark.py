"""benchmarks/engine/draft_sources.py: heads changed no text in the committed runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT

RUNS = sorted((ROOT / "benchmarks" / "results").glob("draft-heads-*.json"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_committed_runs_changed_no_text_and_compare_the_same_requests(path: Path) -> None:
    rows = json.loads(path.read_text())["rows"]
    assert {row["texts_differ"] for row in rows} == {0}
    asked: dict[tuple[str, float], set[tuple[int, ...]]] = {}
    for row in rows:
        asked.setdefault((row["task"], row["temperature"]), set()).add(tuple(row["request_tokens"]))
    assert all(len(tokens) == 1 for tokens in asked.values())
