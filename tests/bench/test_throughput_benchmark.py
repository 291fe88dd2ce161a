"""benchmarks/engine/throughput.py on the embedded pair, tiny; and its prompts."""

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO
from benchmarks.engine.throughput_rows import read_rows
from tests.bench.scripts import modules_of

NAMES = ("engine.throughput", "engine.throughput_figures", "engine.throughput_prompts", "engine.throughput_systems")
POLICIES = ("ar", "spec:4", "adaserve")
CONFIG = EngineConfig(  # the programs of the `demo_engine` fixture, so that they are compiled once
    max_requests=16, max_context=512, page_size=16, num_pages=64, max_depth=4, max_width=3, max_tree_tokens=64,
    token_edges=(16, 64), row_edges=(16,), elastic="off",
)  # fmt: skip


modules = modules_of(*NAMES, left_out="throughput")


@pytest.fixture(scope="module")
def measured(modules, tmp_path_factory):
    """(out, plan, rows): two rounds of 2 requests, greedy and not."""
    out = tmp_path_factory.mktemp("throughput") / "rows.json"
    plan = modules["main"].Plan((2,), (0.0, 0.8), POLICIES, repeats=2, new_tokens=12, texts=4)
    return out, plan, modules["main"].run(CONFIG, plan, out, target_name="demo")


@pytest.mark.slow
def test_every_policy_has_a_row_at_every_point(measured):
    _, _, rows = measured
    assert [(row.requests, row.temperature, row.system) for row in rows] == [
        (2, temperature, policy) for temperature in (0.0, 0.8) for policy in POLICIES
    ]
    for row in rows:
        assert len(row.tps) == 2 and min(row.tps) > 0
        assert (row.target, row.draft, row.dtype, row.repeats) == ("demo", "demo", "f32", 2)
        assert (row.min_new_tokens, row.max_new_tokens) == (6, 18)
        assert row.config["token_edges"] == [16, 64] and row.config["compile_cache"] is None
        assert row.step_ms >= row.draft_ms + row.verify_ms + row.deciding_ms > 0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_text_under_every_policy(measured):
    """Seven requests a round; the one that still runs at the end is compared as far as both came."""
    _, _, rows = measured
    assert [row.differing for row in rows] == [0] * 6
    assert all(row.texts_compared == 0 for row in rows[::3])
    assert all(12 <= row.texts_compared <= 14 for row in (*rows[1:3], *rows[4:]))
    assert {row.equal_tokens for row in rows} == {None}


@pytest.mark.slow
def test_steps_are_those_of_the_policy(measured):
    _, _, rows = measured
    plain, chain, adaptive = rows[:3]
    assert (plain.tokens_per_step, plain.acceptance_rate, plain.drafting_share, plain.depth) == (1.0, None, 0.0, None)
    assert (chain.depth, chain.width) == (4.0, 1.0)
    assert plain.tree_tokens == 1.0 < chain.tree_tokens <= 5.0
    assert 1.0 < chain.tokens_per_step < 5.0 and 0 < chain.acceptance_rate < 1
    assert adaptive.tokens_per_step >= 1.0 and adaptive.steps >= 1


@pytest.mark.slow
def test_points_that_were_measured_are_not_measured_again(measured, modules, monkeypatch):
    out, plan, rows = measured
    written = out.read_text()
    assert read_rows(out) == rows
    monkeypatch.setattr(modules["main"], "measure_point", lambda *_: pytest.fail("measured again"))
    assert modules["main"].run(CONFIG, plan, out, target_name="demo") == rows
    assert out.read_text() == written
    with pytest.raises(ConfigError, match=r"holds rows of another run; choose another --out, or remove it"):
        modules["main"].run(CONFIG, plan, out, target_name="another")


@pytest.mark.slow
def test_more_requests_than_the_engine_runs_at_once_are_refused(modules, tmp_path):
    plan = modules["main"].Plan((17,), (0.0,), ("ar",))
    with pytest.raises(ConfigError, match="--requests up to 17 need --max-requests of at least as many"):
        modules["main"].run(CONFIG, plan, tmp_path / "rows.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ()}, "--policies must name at least one value, got none"),
        ({"requests": (0, 1)}, "--requests must be at least 1"),
        ({"repeats": 0}, "--repeats must be at least 1"),
        ({"new_tokens": 1}, "--new-tokens must be at least 2"),
        ({"texts": 0}, "--texts must be at least 1"),
    ],
)
def test_plans_that_measure_nothing_are_refused(modules, changes, message):
    with pytest.raises(ConfigError, match=message):
        modules["main"].Plan(**{"requests": (1,), "temperatures": (0.0,), "policies": ("ar",)} | changes)


def test_prompts_are_cut_by_seed_from_lines_that_hold_something(modules):
    cut = modules["prompts"]
    prompts = cut.Prompts(["\n" + "abc = 1\n" * 40, "short\n"], lambda text: list(text.encode()))
    first = prompts.cut(20, (0, 1))
    assert first == prompts.cut(20, (0, 1)) != prompts.cut(20, (0, 2))
    assert {bytes(ids)[:8] for ids in first} == {b"abc = 1\n"}
    assert min(map(len, first)) >= cut.MIN_TOKENS and max(map(len, first)) <= cut.MAX_TOKENS


def test_decode_throughput_leaves_prefill_out(modules):
    """Two prompts; the second one ends with the second step, at 3.0 s. Then 2 + 1 tokens come in 1.5 s."""
    systems = modules["systems"]
    steps = [(0, 90, 0, 1.0), (1, 80, 1, 3.0), (2, 0, 2, 4.0), (1, 0, 1, 4.5)]
    made = tuple(systems.Step(rows, prefill, 0, 0, rows, emitted, at) for rows, prefill, emitted, at in steps)
    measured = systems.Measured([[1, 2, 3], [4, 5, 6]], wall_s=5.0, steps=made)
    assert (measured.decode_tps, measured.whole_tps) == (2.0, 1.2)
    assert systems.Measured([[1]], wall_s=1.0).decode_tps is None


@pytest.mark.slow
def test_a_closed_loop_keeps_as_many_requests_running(modules):
    """Every step of the measured part has both rows or computes prompts in place of those that ended, and its tokens
    are those that its requests got."""
    systems, main = modules["systems"], modules["main"]
    engine = systems.Engine(CONFIG, SLO())
    try:
        plan = main.Plan((2,), (0.0,), ("ar",), new_tokens=12, texts=6)
        prompts = modules["prompts"].Prompts(["abc = 1\n" * 40], engine.llm.tokenizer.encode)
        load = main.load_of(prompts, plan, 2, 0.0, 0)
        looped = engine.loop("ar", load)
    finally:
        engine.close()
    assert len(load.prompts) == 2 + 6 + 1
    assert all(step.rows == 2 or (step.rows < 2 and step.prefill_tokens > 0) for step in looped.steps)
    assert looped.tokens >= sum(step.emitted for step in looped.steps) > 0 and looped.seconds > 0
    ended = [len(ids) == length for ids, length in zip(looped.token_ids, load.lengths, strict=True)]
    assert ended.count(True) in (8, 9), "all but what still ran at the end"


def test_tokens_are_counted_until_the_first_difference(modules):
    equal = modules["figures"].equal_tokens
    assert (equal([1, 2, 3], [1, 2, 3]), equal([1, 2, 3], [1, 5, 3]), equal([1, 2], [1, 2, 3])) == (3, 1, 2)
