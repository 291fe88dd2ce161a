"""The file of chances: what is written is read, what is broken is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.tree.acceptance_table import ChanceTable, Learned, read_chances, write_chances

SHIPPED = resolve_folder("demo", "draft").parent / "calibration.json"


def learned_table() -> ChanceTable:
    """Greedy has one bin fewer than coupled."""
    rng = np.random.default_rng(0)
    shape = (2, 3, 2, 4)
    outcomes = rng.integers(0, 50, shape).astype(float)
    outcomes[0, :, :, 3] = 0
    learned = Learned(rng.random(shape), outcomes, np.floor(outcomes * 0.6))
    edges = np.array([[-2, -1, np.inf], [-1, 0, 1]], np.float32)
    return ChanceTable(np.sort(rng.random(shape), axis=-1).astype(np.float32), edges, learned)


def test_round_trip(tmp_path: Path) -> None:
    path, table = tmp_path / "learned.json", learned_table()
    write_chances(path, table)
    write_chances(path, table)  # over the old one
    found = read_chances(path)
    np.testing.assert_array_equal(found.edges, table.edges)
    np.testing.assert_allclose(found.chance[0, :, :, :3], table.chance[0, :, :, :3], atol=1e-6)
    np.testing.assert_allclose(found.chance[1], table.chance[1], atol=1e-6)
    assert found.learned is not None and table.learned is not None
    np.testing.assert_allclose(found.learned.prior[1], table.learned.prior[1], atol=1e-6)
    np.testing.assert_array_equal(found.learned.outcomes, table.learned.outcomes)
    np.testing.assert_array_equal(found.learned.accepted, table.learned.accepted)
    assert os.listdir(tmp_path) == ["learned.json"], "no file is left over"


def test_the_shipped_table_and_its_copy_are_the_same(tmp_path: Path) -> None:
    shipped = read_chances(SHIPPED)
    assert shipped.learned is None and shipped.chance.shape == (2, 8, 4, 24)
    write_chances(tmp_path / "copy.json", shipped)
    copy = read_chances(tmp_path / "copy.json")
    np.testing.assert_array_equal(copy.chance, shipped.chance)
    np.testing.assert_array_equal(copy.edges, shipped.edges)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "learned.json"
    write_chances(path, learned_table())
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_chances(path, learned_table())
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["learned.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "expected an acceptance table of version 1, got 2"),
        ({"greedy": None}, "section 'greedy' must hold numeric 'edges' and 'table'"),
        ({"coupled.edges": [1.0, 0.0, 2.0]}, "section 'coupled' must hold increasing edges"),
        ({"greedy.table": [[[0.5, 1.5, 0.2]]]}, r"section 'greedy' must hold increasing edges .* in \[0, 1\]"),
        ({"greedy.table": [[[0.5, 0.6]]]}, r"got shapes \(2,\) and \(1, 1, 2\)"),
        ({"greedy.edges": ["a", "b"]}, "section 'greedy' must hold numeric"),
        ({"greedy.learned": {"prior": 1}}, "of section 'greedy' must hold numeric 'prior', 'outcomes' and 'accepted'"),
        ({"coupled.learned.outcomes": [[[1.0, 2.0]]]}, r"of the table's shape \(3, 2, 4\), got .* delete the file"),
        ({"coupled.learned.accepted": "more"}, "'learned' of section 'coupled' must count from 0 to 'outcomes'"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "learned.json"
    write_chances(path, learned_table())
    data = json.loads(path.read_text())
    (name, value), *_ = change.items()
    *above, last = name.split(".")
    part = data
    for key in above:
        part = part[key]
    part[last] = (np.asarray(part["outcomes"]) + 1).tolist() if value == "more" else value
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=message):
        read_chances(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_what_is_no_table_at_all_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"learned\.json: (cannot read|expected an acceptance table)"):
        read_chances(path)
