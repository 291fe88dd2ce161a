"""`make coverage` counts what no test imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("coverage", reason="coverage is not installed; `make test` installs it")
from coverage import CoverageData

from scripts import coverage_check

SEEN = ROOT / "adaserve_jax" / "scheduler" / "queue.py"


def test_a_file_that_nothing_imported_counts_with_all_its_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of two files of a package one was run, by one of its branches."""
    other = SEEN.with_name("step.py")
    monkeypatch.setattr(coverage_check, "absent", lambda seen, patterns: [str(other)])
    monkeypatch.chdir(ROOT)
    data = CoverageData(basename=str(tmp_path / "data"))
    data.add_arcs({str(SEEN): [(-1, 1), (1, 3), (11, -9)]})
    data.write()
    files = coverage_check.measured([str(tmp_path / "data")])
    assert set(files) == {str(path.relative_to(ROOT)) for path in (SEEN, other)}
    summary = files[str(other.relative_to(ROOT))]["summary"]
    assert summary["num_branches"] > 0 and summary["covered_branches"] == 0 and summary["covered_lines"] == 0
    every, taken = coverage_check.by_package(files)["scheduler"]
    assert every > summary["num_branches"] and taken < every


def test_every_file_of_the_packages_is_seen_or_absent():
    patterns = ["*/adaserve_jax/scheduler/*"]
    files = {str(path) for path in SEEN.parent.rglob("*.py")}
    assert set(coverage_check.absent([str(SEEN)], patterns)) == files - {str(SEEN)}
    assert coverage_check.absent(files, patterns) == []
