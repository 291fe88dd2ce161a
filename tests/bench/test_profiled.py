"""A profile as a machine, what is proposed from it, the search of c1 and c2, and the picture. No model is loaded."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.bench.profile import acceptance_of_chains, generated_traces, knee, propose, search_offsets
from adaserve_jax.bench.profile_plot import need_matplotlib, plot_profile
from adaserve_jax.cli.app import app
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.jsonl import read_rows
from adaserve_jax.results.profile import ServingFactors, write_profile
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.sim.executor import SimExecutor, VirtualClock
from adaserve_jax.sim.machines import ProfiledMachine, load_machine
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from adaserve_jax.types import SLO, CostSamples, Limits, SamplingParams, Sequence
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace
from tests.results.test_profile import profile, timings
from tests.scheduler.harness import run_step


def machine(**changes) -> ProfiledMachine:
    return ProfiledMachine.of(profile(**changes), "p.json")


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    """requests: due_s, prompt and output tokens."""
    made = [TraceRequest(due_s, prompt, output, SLO(relative=3.0), "default") for due_s, prompt, output in requests]
    return Trace("made", "", tuple(made))


def test_a_profile_file_is_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, profile(c1=4, c2=-1))
    loaded = load_machine(str(path))
    assert isinstance(loaded, ProfiledMachine)
    assert (loaded.name, loaded.baseline_s, loaded.offsets) == ("small", 0.011, (4, -1))
    assert loaded.limits() == profile().identity.limits
    assert (loaded.limits(4).max_requests, loaded.limits(99).max_requests) == (4, 16)
    assert loaded.samples(loaded.limits()) == profile().timings.samples()
    assert loaded.acceptance_of("code") == 0.7
    write_profile(path, profile(acceptance=None))
    expected = r"p.json has no acceptance, which a simulation draws from; measure it with more .*--check-seconds"
    with pytest.raises(ConfigError, match=expected):
        load_machine(str(path))


def test_steps_take_the_profiles_times_by_tokens_and_context() -> None:
    """One request of 64 prompt tokens, alone: a step of one token costs that of 4, and 2 us a token of context."""
    (record,) = simulate("ar", SimulationPlan(()), machine(), trace_of((0.0, 64, 11))).records
    assert record.ttft_s == pytest.approx(0.01 + 64e-4)
    expected = np.cumsum([0.01 + 4e-4 + 2e-6 * context for context in range(64, 74)])
    assert record.token_offsets_s[1:] == pytest.approx(expected)


def test_what_serving_adds_is_in_every_step() -> None:
    """The same request where verification takes half as long again, and a step a millisecond beside it."""
    slow = machine(serving=ServingFactors(verify=1.5, draft=1.0, overhead_s=0.001))
    (record,) = simulate("ar", SimulationPlan(()), slow, trace_of((0.0, 64, 11))).records
    assert record.ttft_s == pytest.approx(1.5 * (0.01 + 64e-4) + 0.001)
    expected = np.cumsum([1.5 * (0.01 + 4e-4 + 2e-6 * context) + 0.001 for context in range(64, 74)])
    assert record.token_offsets_s[1:] == pytest.approx(expected)


def test_what_serving_adds_is_that_of_the_kind_of_step() -> None:
    """The first token comes of a step of 64 tokens, the others of 4 each; a step that drafts loses half a second."""
    by_kind = {"verify_by_size": {(64, 16): 2.0}, "overhead_by_kind_s": {(0, 16): 0.003, (1, 16): 0.5}}
    slow = machine(serving=ServingFactors(verify=1.5, draft=1.0, overhead_s=0.001, **by_kind))
    (record,) = simulate("ar", SimulationPlan(()), slow, trace_of((0.0, 64, 11))).records
    assert record.ttft_s == pytest.approx(2 * (0.01 + 64e-4) + 0.003)
    expected = np.cumsum([1.5 * (0.01 + 4e-4 + 2e-6 * context) + 0.003 for context in range(64, 74)])
    assert record.token_offsets_s[1:] == pytest.approx(expected)
    (drafted,) = simulate("spec:1", SimulationPlan(()), slow, trace_of((0.0, 64, 3))).records
    assert drafted.token_offsets_s[-1] > 0.5


def test_a_draft_costs_its_levels_and_contexts() -> None:
    """spec:2 of one request: two levels of width 1, a catch-up, and the verification, each with its context."""
    (record,) = simulate("spec:2", SimulationPlan(()), machine(acceptance=0.99), trace_of((0.0, 64, 4))).records
    catch_up, level = 1e-3 + 16e-5, 5e-4
    step_s = 0.01 + 4e-4 + 2e-6 * 64 + 2 * (level + 2e-7 * 64) + catch_up + 1e-7 * 64
    assert record.token_offsets_s[-1] == pytest.approx(step_s, rel=0.02)  # levels were timed with 16 rows


def test_a_level_is_searched_for_every_row_of_the_step() -> None:
    """As the drafter does: rows that only compute their prompts are among them. Levels timed for 1 row and for 16."""
    limits, samples = machine().limits(), machine().samples(machine().limits())
    dear = replace(samples, draft_level_s={(1, 1): 0.001, (16, 1): 0.5}, level_per_context_s={})
    clock = VirtualClock()
    executor = SimExecutor(limits, dear, 0.5, clock)
    scheduler = Scheduler(EngineConfig(policy="spec:1"), limits, dear)
    seconds = []
    for number, prompt in enumerate((4, 200, 4)):
        scheduler.add(Sequence(str(number), np.zeros(prompt, np.int32), SamplingParams(max_tokens=30), number, 0.0))
    while scheduler.has_work and len(seconds) < 40:
        result = run_step(scheduler, executor, clock.now)
        assert result is not None
        plan, outcome = result.step.plan, result.step.outcome
        if plan.draft is not None and plan.draft.depth:
            seconds.append((plan.num_rows, outcome.draft_s > 0.4))
    assert {rows > 1 for rows, _ in seconds} == {True, False} or all(rows > 1 for rows, _ in seconds)
    assert all(dear_level == (rows > 1) for rows, dear_level in seconds)


def test_the_command_simulates_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(tmp_path / "p.json", profile(c1=2))
    line = {"t_ms": 0.0, "prompt_id": "chat-1", "slo_ratio": 3.0, "output_length": 8, "input_length": 20}
    (tmp_path / "t.jsonl").write_text(json.dumps(line) + "\n")
    files = [str(tmp_path / "t.jsonl"), "--machine", str(tmp_path / "p.json"), "--out", str(tmp_path / "out")]
    app(["simulate", *files, "--policies", "ar,adaserve-paper,adaserve"], standalone_mode=False)
    rows = read_rows(tmp_path / "out" / "results.jsonl", ResultRow)
    assert {row.device for row in rows} == {"simulated: small"} and {row.baseline_s for row in rows} == {0.011}
    assert "adaserve-paper" in capsys.readouterr().out


def test_the_knee_is_where_tokens_take_as_long_as_the_first_edge() -> None:
    edges = (1, 8, 64, 128)
    assert knee(edges, np.array([0.02, 0.02, 0.03, 0.062])) == pytest.approx(0.02 / 0.0005)
    assert knee(edges, np.full(4, 0.02)) == 128
    assert knee((16,), np.array([0.02])) == 16


def test_proposals_are_the_best_of_every_choice() -> None:
    """Free tokens up to 32 and dear ones beyond: one request takes the deepest tree that pays, 32 requests none."""
    limits = Limits(32, (1, 8, 32, 64), 64, 512, 16, 512, 4, 2)
    verify = {(edge, rows): 0.02 + max(0, edge - 32) * 0.002 for edge in limits.token_edges for rows in (1, 32)}
    samples = CostSamples(verify, {64: 0.001}, {(rows, width): 0.001 for rows in (1, 32) for width in (1, 2)})
    alone, crowd = propose(samples, limits, 0.7).by_rows
    # by hand: all 8 nodes of depth 4, width 2: 1 + sum of 0.7^d (1 + 0.3) tokens in 20 + 4 + 1 ms
    emitted = 1 + 1.3 * sum(0.7**depth for depth in (1, 2, 3, 4))
    assert (alone.rows, alone.depth, alone.width) == (1, 4, 2)
    assert alone.budget == 32
    assert alone.tokens_per_s == pytest.approx(emitted / 0.025)
    assert alone.plain_tokens_per_s == pytest.approx(1 / 0.02)
    assert (crowd.rows, crowd.budget, crowd.depth) == (32, 32, 0)
    assert crowd.tokens_per_s == crowd.plain_tokens_per_s == pytest.approx(32 / 0.02)
    plain = propose(samples, limits, None)
    assert (plain.max_depth, plain.max_width, plain.max_tree_tokens) == (0, 0, 32)


def test_one_edge_that_also_holds_prompts_is_what_every_step_costs() -> None:
    """64 tokens a step, of which 16 may be of trees."""
    limits = Limits(16, (64,), 16, 512, 16, 512, 2, 1)
    levels = {(rows, 1): 0.001 for rows in (1, 16)}
    samples = CostSamples({(64, 1): 0.02, (64, 16): 0.04}, {64: 0.001}, levels)
    found = propose(samples, limits, None).by_rows
    assert [(each.rows, each.budget) for each in found] == [(1, 16), (16, 16)]
    assert [each.plain_tokens_per_s for each in found] == pytest.approx([1 / 0.02, 16 / 0.04])


def test_the_search_tells_how_far_it_is() -> None:
    told: list[tuple[str, int, int]] = []
    traces = [trace_of((0.0, 20, 4))]
    search_offsets(machine(acceptance=0.9), traces, lambda *said: told.append(said), c1=(0, 12), c2=(0,))
    assert told == [("searching c1, c2", 1, 2), ("searching c1, c2", 2, 2)]


def test_the_search_finds_the_pair_that_serves_best() -> None:
    """Against every pair, searched alone. 16 requests share 64 tree tokens: c1 = 0 gives each three levels."""
    traces = [trace_of(*[(0.01 * index, 20, 24) for index in range(24)])]
    pairs = [(c1, c2) for c1 in (0, 12) for c2 in (0, 1)]
    every = [search_offsets(machine(acceptance=0.9), traces, c1=(c1,), c2=(c2,)) for c1, c2 in pairs]
    assert [(each.c1, each.c2) for each in every] == pairs
    assert len({each.goodput_tps for each in every}) > 1, "the pairs must make a difference"
    found = search_offsets(machine(acceptance=0.9), traces, c1=(0, 12), c2=(0, 1))
    assert found == max(every, key=lambda each: (each.attainment, each.goodput_tps))


def test_generated_workloads_have_the_loads_that_they_say() -> None:
    low, high = generated_traces(machine(), 300.0)
    outputs = sum(request.output_tokens for request in low.requests)
    assert [r.output_tokens for r in low.requests] == [r.output_tokens for r in high.requests]
    assert low.duration_s / high.duration_s == pytest.approx(0.9 / 0.6)
    assert outputs / low.duration_s == pytest.approx(0.6 * 300.0, rel=0.4)  # as far as 32 arrivals are regular
    assert max(r.prompt_tokens + r.output_tokens for r in low.requests) < 1024


def test_acceptance_is_what_explains_the_chains() -> None:
    """0.6 + 0.36 + 0.216 accepted tokens per verification of chains of 3."""

    def metrics(accepted: int) -> RequestMetrics:
        return RequestMetrics(
            arrival_s=0.0, first_scheduled_s=0.0, first_token_s=0.0, last_token_s=1.0, prompt_tokens=1, output_tokens=9,
            verify_steps=1000, accepted_tokens=accepted, tpot_slo_s=None, ttft_slo_s=None,
        )  # fmt: skip

    assert acceptance_of_chains([metrics(1000), metrics(1352)], 3) == pytest.approx(0.6)
    assert acceptance_of_chains([], 3) is None


def test_the_picture_is_written_and_a_wrong_name_is_refused_first(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    need_matplotlib(path)
    plot_profile(profile(), path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
    plain = tmp_path / "plain.svg"
    plot_profile(profile(timings=replace(timings(), search={}, catchup={})), plain)
    assert "<!-- no draft -->" in plain.read_text()
    with pytest.raises(ConfigError, match=r"--plot must end in .png or .svg, got .*roofline.gif"):
        need_matplotlib(tmp_path / "roofline.gif")
    with pytest.raises(ConfigError, match=r"cannot write .*png/p\.svg: Not a directory; choose another --plot"):
        plot_profile(profile(), path / "p.svg")
