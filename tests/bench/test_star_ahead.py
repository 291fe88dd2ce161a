"""A draft service replayed along texts: its times, by hand, where everything that is drafted is taken, and nothing."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.bench.scripts import imported

ROOT = Path(__file__).parents[2]
SEARCH_S, BACK_S = 0.004, 0.020
PLACES = 20


@pytest.fixture(scope="module")
def scripts():
    with (
        imported("results_star", folder=ROOT / "scripts") as tables,
        imported("star_targets", "star_service", "star_runs", "star_ahead", "star_ahead_paced") as made,
    ):
        yield {**tables, **made}


def replayed(scripts, *, off_by: int, ahead: bool, n: int = 1):
    """Texts of 20 tokens and chains of one level, each `off_by` beside what comes. A search takes 4 ms, a target 20."""
    made = scripts["star_ahead"]
    output = tuple(range(100, 100 + PLACES))
    texts = [scripts["star_targets"].Text((1, 2, 3), output, seed, 0.0) for seed in range(n)]
    ahead_of = np.minimum(np.arange(PLACES)[:, None] + np.arange(made.LEVELS), PLACES - 1)
    token = np.broadcast_to(np.array(output, np.int32)[ahead_of] + off_by, (n, PLACES, made.LEVELS))
    times = made.Times({1: SEARCH_S * 5 / 2, 2: SEARCH_S * 5 / 2}, 4, BACK_S)
    return made.Replay(
        texts, token, np.zeros(token.shape, np.float32), times, n=n, depth=1, ahead=ahead, passes=1
    ).run()  # fmt: skip


def test_what_is_always_taken_is_always_there(scripts, monkeypatch):
    """Ten rounds of two tokens: 24 ms each, and with work ahead 20 after the first."""
    monkeypatch.setattr(scripts["star_ahead"], "SPREAD", 0.0)
    off, on = (replayed(scripts, off_by=0, ahead=ahead) for ahead in (False, True))
    assert off.tokens == on.tokens == 20 and off.core.stats.rounds == on.core.stats.rounds == 10
    assert off.end_s == pytest.approx(SEARCH_S + 9 * (SEARCH_S + BACK_S))
    assert on.end_s == pytest.approx(SEARCH_S + 9 * BACK_S)
    assert on.busy_s == pytest.approx(SEARCH_S) and on.core.stats.ahead_hits == 9
    assert off.busy_s == pytest.approx(10 * SEARCH_S) and off.ahead_s == 0.0
    row = scripts["star_ahead"].row_of(off, on, 1, 1)
    assert row.ratio == pytest.approx((SEARCH_S + 9 * (SEARCH_S + BACK_S)) / (SEARCH_S + 9 * BACK_S))
    assert row.hits == 0.9 and row.wait_on_s == 0.0


def test_what_is_never_taken_costs_one_target_nothing(scripts, monkeypatch):
    """Nineteen rounds of one token each, as long with it as without."""
    monkeypatch.setattr(scripts["star_ahead"], "SPREAD", 0.0)
    off, on = (replayed(scripts, off_by=1, ahead=ahead) for ahead in (False, True))
    assert off.tokens == on.tokens == 19 and on.core.stats.ahead_hits == 0
    assert off.end_s == pytest.approx(SEARCH_S + 18 * (SEARCH_S + BACK_S)) == on.end_s
    assert on.core.stats.ahead_misses == 19, "the last one when the session ended"


def test_the_page_shows_what_was_written(scripts, tmp_path, monkeypatch):
    tables = scripts["results_star"].ahead_tables
    path = tmp_path / "star-ahead.json"
    assert tables(path) == []
    monkeypatch.setattr(scripts["star_ahead"], "SPREAD", 0.0)
    row = scripts["star_ahead"].row_of(*(replayed(scripts, off_by=0, ahead=ahead) for ahead in (False, True)), 1, 1)
    times = {"service_s": {"1": 0.01}, "verify_s": 0.015, "network_s": 0.005, "commit": "b" * 40}
    about = {"command": "python it", "texts": 2, "target": "demo", "new_tokens": 20, "temperature": 0.7, "times": times}
    path.write_text(json.dumps(about | {"commit": "a" * 40, "rows": [vars(row)]}))
    table, said = tables(path)
    assert f"| 1 | 1 | {20 / 0.22:.1f} | {20 / 0.184:.1f} | {0.22 / 0.184:.3f} | 90% |" in table
    assert "1: 1.196 to 1.196" in said and "t_v = 15.0 ms" in said and "aaaaaaaaaaaa." in said


def paced_turns(scripts, tokens: dict[bool, list[int]]) -> list:
    """Turns of 10 s of one target at depth 2, by whether it is drafted ahead for; 100 rounds each, of which 40 hit."""
    made, service = scripts["star_ahead_paced"], scripts["star_service"]
    counts = service.Counts(10.0, 9.0, 1.0, 1.0, 100.0, 100.0, 0.5, 100.0)
    hit = dict.fromkeys(made.COUNTERS, 0.0) | {"rounds": 100.0, "loop_seconds": 10.0}
    hit |= {"ahead_hits": 40.0, "ahead_trees": 80.0, "ahead_seconds": 2.0}
    return [
        made.Turn(is_ahead, 2, scripts["star_runs"].Run(
            1, True, number, 10.0, counts, scripts["star_targets"].Tally(tokens=count), 0.1 * number
        ), hit)
        for is_ahead, counted in tokens.items() for number, count in enumerate(counted)
    ]  # fmt: skip


def test_a_row_is_the_median_of_pairs(scripts):
    """Ratios within rounds: 1.1, 1.5 and 0.9."""
    turns = paced_turns(scripts, {False: [100, 200, 300], True: [110, 300, 270]})
    row = scripts["star_ahead_paced"].row_of(turns, 1, 2)
    assert (row.n, row.depth, row.off_tokens_s, row.on_tokens_s) == (1, 2, 20.0, 27.0)
    assert (row.low, row.ratio, row.high) == pytest.approx((0.9, 1.1, 1.5))
    assert (row.off_rounds_s, row.on_rounds_s, row.ratio_rounds) == pytest.approx((10.0, 10.0, 1.0))
    assert (row.hits, row.made, row.hit_of_made, row.ahead_load) == pytest.approx((0.4, 0.8, 0.5, 0.2))
    assert (row.wait_off_s, row.wait_on_s, row.others_share) == pytest.approx((0.005, 0.005, 0.2))


def test_every_pair_is_measured_in_turns(scripts, monkeypatch):
    """Both services have the same processes of paced targets, and the other one goes first in every other round."""
    made, asked, ran = scripts["star_ahead_paced"], [], []

    class Targets:
        def run(self, at, count, seconds, **of):
            ran.append((at.pid, count, of["round"]))
            return paced_turns(scripts, {True: [100]})[0].run

    @contextmanager
    def targets_at(at, count, run, *args):
        asked.append((at.pid, count, run.__name__, args))
        yield Targets()

    class Service:
        def __init__(self, pid):
            self.pid = pid

        def read(self):
            return dict.fromkeys(made.COUNTERS, 7.0)

    monkeypatch.setattr(made, "targets_at", targets_at)
    monkeypatch.setattr(made, "DEPTHS", (2,))
    services = {False: Service(10), True: Service(11)}
    turns = made.measure(services, ["text"], 0.015, rounds=2, seconds=1.0, most=1)
    assert asked == [(pid, 1, "run_target", (["text"], made.Shape(2, 1, 0.015))) for pid in (10, 11)]
    assert ran == [(11, 1, 0), (10, 1, 0), (10, 1, 1), (11, 1, 1)]
    assert [turn.is_ahead for turn in turns] == [True, False, False, True]
    assert {value for turn in turns for value in turn.ahead.values()} == {0.0}
