"""A run's folder is read by point, also an old one and one whose run was killed; and so is a server's file."""

from pathlib import Path

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import append_rows
from adaserve_jax.results.run_folder import RunResults, key_of, point_of
from tests.results.made import OTHER_RUN, RUN, made, records_file
from tests.results.points import record, row, sample


def test_lines_are_found_by_run_and_point(tmp_path: Path):
    rows = [row(run_id=run, point=point) for run in ("a", "b") for point in ("ar@2/s", "ar@2/s #1")]
    append_rows(tmp_path / "results.jsonl", rows)
    append_rows(
        tmp_path / "requests.jsonl", [record(run_id=r.run_id, point=r.point, request_id=i) for r in rows for i in "12"]
    )
    append_rows(tmp_path / "samples.jsonl", [sample(run_id="b", point="ar@2/s #1", t_s=t) for t in (0.1, 0.2)])
    folder = RunResults.load(tmp_path)
    assert folder.rows == tuple(rows) and folder.notes == ()
    assert set(folder.records) == {key_of(r) for r in rows}
    assert [r.request_id for r in folder.records["a", "ar@2/s #1"]] == ["1", "2"]
    assert [s.t_s for s in folder.samples["b", "ar@2/s #1"]] == [0.1, 0.2]
    assert ("a", "ar@2/s") not in folder.samples


def test_an_old_folder_is_read_by_policy_and_rate(tmp_path: Path):
    append_rows(tmp_path / "results.jsonl", [row(run_id="r", policy="spec:4", rate_rps=2.5, point="")])
    append_rows(tmp_path / "requests.jsonl", [record(run_id="r", policy="spec:4", rate_rps=2.5, point="")])
    folder = RunResults.load(tmp_path)
    assert point_of(folder.rows[0]) == "spec:4@2.5/s"
    assert len(folder.records["r", "spec:4@2.5/s"]) == 1
    assert folder.notes == ("samples.jsonl is not there",)


def test_what_a_killed_run_left_is_noted(tmp_path: Path):
    append_rows(tmp_path / "results.jsonl", [row(run_id="r", point="p")])
    append_rows(tmp_path / "requests.jsonl", [record(run_id="r", point="p"), record(run_id="r", point="unfinished")])
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"run_id":"r","poi')
    folder = RunResults.load(tmp_path)
    assert len(folder.rows) == len(folder.records) == 1
    half, orphans, no_samples = folder.notes
    assert half.endswith("results.jsonl:2: left out: the line was not written to its end")
    assert orphans == "requests.jsonl: unfinished of run r has no result rows, its lines are left out"
    assert no_samples == "samples.jsonl is not there"


def test_a_folder_without_results_is_one_clear_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"expected a folder that `adaserve bench` or .* no results.jsonl in"):
        RunResults.load(tmp_path / "none")


def test_each_start_of_an_engine_in_a_servers_file_is_a_point(tmp_path: Path):
    found = RunResults.load(records_file(tmp_path))
    assert found.notes == () and found.samples == {}
    first, second = (rows for rows in found.rows if rows.slo_class == "all")
    assert (first.run_id, first.policy, first.draft, first.baseline_s) == ("r1", "adaserve", RUN.draft, RUN.baseline_s)
    assert (second.run_id, second.policy, second.device) == ("r2", "ar", OTHER_RUN.device)
    assert (first.requests, first.wall_s, first.rate_rps) == (3, 4.0, 0.75)  # from 1000 to 1004
    assert (second.requests, second.wall_s, second.duration_s) == (3, 3.0, 3.0)  # from 1005 to 1008
    assert first.throughput_tps == 8 / 4 and first.attainment == pytest.approx(1 / 3)
    assert first.started_at == "1970-01-01T00:16:40+00:00" and first.valid
    assert [row.slo_class for row in found.rows if row.run_id == "r2"] == ["all", "batch", "chat"]
    assert found.records == {key_of(first): tuple(made()[:3]), key_of(second): tuple(made()[3:])}


def test_a_file_of_something_else_is_refused(tmp_path: Path):
    append_rows(tmp_path / "results.jsonl", [row()])
    with pytest.raises(ConfigError, match="as a file that a server wrote with --records: file is not a database"):
        RunResults.load(tmp_path / "results.jsonl")
