"""benchmarks/engine/draft_vocabulary.py: the drafts that it writes, and the table of what it measures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.models.vocabulary_map import map_vocabulary
from tests.bench.scripts import imported
from tests.conftest import ROOT

RESULT = ROOT / "benchmarks" / "results" / "draft-vocabulary-demo-cpu.json"


@pytest.mark.parametrize("removed", [0.0, 0.25])
def test_a_draft_loses_so_many_merged_tokens(tmp_path: Path, removed: float) -> None:
    target = Tokenizer.from_folder(resolve_folder("demo", "target"))
    with imported("engine.draft_vocabulary") as found:
        folder = found["draft_vocabulary"].write_draft(tmp_path, removed, seed=0)
    draft, rows = Tokenizer.from_folder(folder), ModelConfig.from_folder(folder).vocab_size
    merged = len(json.loads(draft.backend_json())["model"]["merges"])
    assert draft.vocab_size == rows and merged <= rows - 256
    found = map_vocabulary(target, draft, target.vocab_size, rows)
    assert found.kind == "intersection" and found.num_covered == rows
    assert target.vocab_size - rows == pytest.approx(removed * (target.vocab_size - 259), abs=1)
    covered = np.flatnonzero(found.covered)
    assert [draft.spelled(int(found.to_draft[i])) for i in covered] == [target.spelled(int(i)) for i in covered]


def test_the_committed_run_lost_no_text_and_the_permuted_draft_nothing() -> None:
    points = json.loads(RESULT.read_text())["points"]
    assert all(point["differing"] == 0 for point in points)
    same, permuted, *fewer = points
    assert (same["mapping"], permuted["mapping"]) == ("same", "intersection")
    assert same["accepted"] == permuted["accepted"]
    for before, after in zip([permuted, *fewer], fewer, strict=False):
        assert after["covered_text"] < before["covered_text"] and after["accepted"]["0.0"] < before["accepted"]["0.0"]
