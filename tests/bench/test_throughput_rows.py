"""Rows of the throughput benchmark: ratios of the same rounds, the aims they are held to, and their file."""

from dataclasses import replace

import pytest

from adaserve_jax.errors import ConfigError
from benchmarks.engine.throughput_rows import Aim, ThroughputRow, aims, interval_of, paired_ratio, read_rows, write_rows

ROW = ThroughputRow(
    commit="0" * 40, machine="m", device="cpu", jax_version="0.9", threads=2, target="demo", target_params=None,
    draft="demo", draft_params=None, dtype="f32", config={"seed": 0}, prompts="p", min_prompt_tokens=4,
    max_prompt_tokens=8, min_new_tokens=6, max_new_tokens=18, texts=4, repeats=2, slo_scale=None, seed=0, system="ar",
    requests=1, temperature=0.0, tps=[40.0, 60.0], tokens_per_step=1.0, acceptance_rate=None, drafting_share=0.0,
    depth=None, width=None, tree_tokens=1.0, steps=12.0, step_ms=1.0, draft_ms=0.0, verify_ms=0.9, deciding_ms=0.1,
    texts_compared=0, differing=0, equal_tokens=None, others_share=None,
)  # fmt: skip


def at(system: str, requests: int, tps: float) -> ThroughputRow:
    """One round."""
    return replace(ROW, system=system, requests=requests, tps=[tps])


def told(found: list[Aim]) -> list[tuple[int, str, str, float, float, bool]]:
    return [(aim.requests, aim.system, aim.against, aim.wanted, round(aim.found.median, 3), aim.met) for aim in found]


def test_ratios_are_of_the_same_round():
    """2, 3 and 1, round by round: the median is 2, though the medians of the figures are 25 and 10."""
    ratio = paired_ratio([20.0, 30.0, 25.0], [10.0, 10.0, 25.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.0, 3.0)
    one = paired_ratio([3.0], [2.0])
    assert (one.median, one.low, one.high) == (1.5, 1.5, 1.5)


def test_the_bootstrap_leaves_out_what_is_rarer_than_one_in_forty():
    """Of nine rounds 1, .., 9 the median of a resample is <= k with chance P(Binomial(9, k / 9) >= 5): 0.0014 for
    k = 1, 0.030 for k = 2. So the 2.5 % quantile is 2, and by symmetry the other 8. Of five rounds the least is the
    median with chance 0.058."""
    nine = paired_ratio([float(k) for k in range(1, 10)], [1.0] * 9)
    assert (nine.median, nine.low, nine.high) == (5.0, 2.0, 8.0)
    five = paired_ratio([5.0, 1.0, 4.0, 2.0, 3.0], [1.0] * 5)
    assert (five.median, five.low, five.high) == (3.0, 1.0, 5.0)
    assert interval_of(5) == "least and largest ratio of the 5 rounds in brackets"
    assert interval_of(6) == "95 % bootstrap intervals in brackets"


def test_aims_compare_with_the_best_of_what_could_be_chosen_and_hide_no_miss():
    one = [at("ar", 1, 40), at("spec:2", 1, 50), at("adaserve", 1, 60), at("nightjar", 1, 49)]
    many = [at("ar", 16, 200), at("spec:4", 16, 100), at("adaserve", 16, 190)]
    found = aims(one + many)
    assert told(found) == [
        (1, "adaserve", "spec:2", 0.99, 1.2, True),
        (1, "nightjar", "spec:2", 0.98, 0.98, True),
        (16, "adaserve", "ar", 0.99, 0.95, False),
    ]
    assert found[-1].text == ("16 at once, temperature 0: adaserve is 0.95 (0.95 to 0.95) times ar; the aim is 0.99")


def test_points_without_who_is_judged_or_compared_with_have_no_aim():
    assert aims([at("ar", 2, 40), at("spec:4", 2, 60)]) == aims([at("adaserve", 2, 60), at("slo", 2, 9)]) == []


def test_points_are_judged_by_themselves():
    """The same number of requests at another temperature is another point."""
    warm = [replace(each, temperature=0.8) for each in (at("ar", 8, 40), at("adaserve", 8, 39))]
    found = aims([*warm, at("adaserve", 8, 60), at("ar", 8, 40)])
    assert [(aim.temperature, aim.found.median, aim.met) for aim in found] == [(0.8, 0.975, False), (0.0, 1.5, True)]


def test_rows_are_read_as_they_were_written(tmp_path):
    path, rows = tmp_path / "rows.json", [ROW, at("spec:4", 4, 1)]
    write_rows(path, rows)
    assert read_rows(path) == rows and len(path.read_text().splitlines()) == 4, "a row a line"
    assert [ThroughputRow.join(row.conditions, row) for row in rows] == rows
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        write_rows(path, [replace(ROW, step_ms=float("nan"))])
    assert read_rows(path) == rows, "what cannot be written leaves the old file"


@pytest.mark.parametrize("text", ['[{"policy": "ar"}]', "[3]", "nothing", None])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "rows.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"rows\.json must be a file that benchmarks/engine/throughput\.py wrote"):
        read_rows(path)
