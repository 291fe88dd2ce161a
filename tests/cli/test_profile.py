"""`adaserve profile` on the demo pair, and an engine that starts from what it wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from adaserve_jax.bench import profile as profiling
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.llm import LLM
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.profile import read_profile, write_profile
from adaserve_jax.runtime import executor as executor_module
from adaserve_jax.runtime.loading import plan_shapes
from adaserve_jax.runtime.warmup import Effort, measure
from adaserve_jax.types import SamplingParams
from tests.program import run_program
from tests.results.test_profile import profile as some_profile

BRIEF = Effort((0, 300), passes=1, repeats=1, repeats_beyond=1, all_depths=False)
CONFIG = EngineConfig(
    max_requests=16, max_context=512, page_size=16, num_pages=64, max_depth=4, max_width=3, max_tree_tokens=64,
    token_edges=(16, 64), row_edges=(16,),
)  # fmt: skip
OPTIONS = [
    "--max-requests=16", "--max-context=512", "--page-size=16", "--num-pages=64", "--max-depth=4", "--max-width=3",
    "--max-tree-tokens=64", "--token-edges=16,64", "--row-edges=16",
]  # fmt: skip


def no_timing(*_: object, **__: object) -> None:
    raise AssertionError("a profile was given: nothing is to be timed")


@pytest.mark.slow
def test_a_measured_profile_is_what_an_engine_starts_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(profiling, "measure", lambda executor, _, progress: measure(executor, BRIEF, progress))
    path = tmp_path / "profile.json"
    assert run_program("profile", "--out", str(path), "--check-seconds", "1.5", "--acceptance", "0.6", *OPTIONS) == 0
    table = capsys.readouterr().out
    assert all(text in table for text in ("verify, ms by context", "draft, ms by depth", "proposed", "knee"))
    assert "error of predicted step time" in table and "0.60" in table
    profile = read_profile(path)
    assert set(profile.timings.verify) == {(tokens, 16, context) for tokens in (16, 64) for context in (0, 300)}
    assert {(depth, width) for _, width, depth, _ in profile.timings.search} == {(1, 1), (1, 3), (4, 1), (4, 3)}
    _, resolved = plan_shapes(CONFIG)  # xla reads 8 rows together on a CPU, the kernel each by itself
    assert profile.timings.context_rows == {"xla": 8, "cpu": 1}[resolved.attention]
    switching = profile.timings.switching
    assert set(switching) == {(lag, rows) for lag in (1, 4, 16, 64, 256, 512) for rows in (1, 4, 16)}
    assert 0 < switching[1, 1] < switching[512, 16]
    assert profile.identity.limits.max_depth == 4 and profile.identity.settings["dtype"] == "f32"
    assert profile.errors is not None and profile.errors["step"]["steps"] > 10

    write_profile(path, replace(profile, c1=3, c2=-1))
    monkeypatch.setattr(executor_module, "measure", no_timing)
    engine = LocalEngine(replace(CONFIG, profile=str(path)))
    engine.start()
    try:
        assert (engine.config.eq8_c1, engine.config.eq9_c2) == (3, -1)
        assert engine.assembly.samples == profile.timings.samples()
        (output,) = LLM.over(engine).generate("def", SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        assert len(output.token_ids) == 8
        assert engine.stats().compiles_after_ready == 0
    finally:
        engine.close()

    monkeypatch.setattr(executor_module.ModelExecutor, "compile", no_timing)
    for changes, message in [({"max_depth": 3}, "max_depth is 4 in it, and 3 now"), ({"draft": None}, "and None now")]:
        with pytest.raises(ConfigError, match=message):
            LocalEngine(replace(CONFIG, profile=str(path), **changes)).start()


def test_a_search_that_fails_leaves_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The machine is too small for the trace, which shows only when it is simulated."""
    measured = some_profile(proposal={"by_rows": [{"tokens_per_s": 100.0}]})
    monkeypatch.setattr(profiling, "measure_profile", lambda *_, **__: measured)
    path, trace = tmp_path / "profile.json", tmp_path / "trace.jsonl"
    line = {"t_ms": 0.0, "prompt_id": "chat-1", "slo_ratio": 3.0, "output_length": 8, "input_length": 100_000}
    trace.write_text(json.dumps(line) + "\n")
    assert run_program("profile", "--out", str(path), "--search", "--trace", str(trace)) == 2
    assert "has a prompt of 100000 tokens" in capsys.readouterr().err and read_profile(path) == measured


@pytest.mark.parametrize(("acceptance", "told"), [(0.7, "first choice: 0.70"), (None, "acceptance is not known: ")])
def test_a_profile_says_whether_it_knows_acceptance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, acceptance: float | None,
    told: str,
) -> None:  # fmt: skip
    measured = some_profile(acceptance=acceptance, proposal={"by_rows": []})
    monkeypatch.setattr(profiling, "measure_profile", lambda *_, **__: measured)
    assert run_program("profile", "--out", str(tmp_path / "profile.json")) == 0
    out = capsys.readouterr().out
    assert told in out and out.count("acceptance") == 1 + (acceptance is None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--check-seconds", "-1"], "--check-seconds must not be below 0"),
        (["--acceptance", "1.0"], "--acceptance must be from 0 to below 1"),
        (["--search", "--check-seconds", "0"], "--search needs a draft, and --check-seconds or --acceptance"),
        (["--search", "--draft", "none"], "--search needs a draft"),
        (["--search", "--trace", "gone.jsonl"], "cannot read workload gone.jsonl"),
        (["--plot", "roofline.gif"], "--plot must end in .png or .svg, got roofline.gif"),
        (["--policy", "fast"], "unknown policy 'fast'"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(profiling, "load_executor", partial(pytest.fail, "nothing must be loaded"))
    assert run_program("profile", "--out", "p.json", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
