"""`adaserve bench` from its options to its folder, its table and its exit status, on a scripted engine."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adaserve_jax.bench.plan import default_rates
from adaserve_jax.cli import bench as bench_module
from adaserve_jax.config import EngineConfig
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.report.points import measured
from adaserve_jax.results.run_folder import RunResults
from adaserve_jax.results.schema import ALL_CLASSES
from adaserve_jax.workloads.workload import load_workload
from tests.bench.conftest import BASELINE_S, Script, ScriptedBench, ScriptedEngine
from tests.program import run_program

ANY_LATENESS = ("--max-late-ms", "60000")
"""The machine that runs the tests may do much else."""
QUICK = ("--policies", "ar,spec:4", "--rates", "60", "--duration", "0.15", "--warmup-requests", "0", *ANY_LATENESS)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """bench(*arguments): exit status of `adaserve bench`, in a folder of its own. `configs`: what engines were opened
    with; `script`: how the next one behaves; `on_submit`: called before each request."""
    engines: list[ScriptedEngine] = []

    def open_bench_engine(config: EngineConfig, *, record: bool = False) -> ScriptedBench:
        run.configs.append(config)
        engine = ScriptedEngine(run.script)
        engines.append(engine)
        submit = engine.submit

        def watched(request, sink) -> None:
            run.on_submit(request)
            submit(request, sink)

        engine.submit = watched
        return ScriptedBench(engine)

    def run(*arguments: str) -> int:
        return run_program("bench", *arguments)

    run.configs, run.script, run.on_submit = [], Script(), lambda request: None
    monkeypatch.setattr(bench_module, "open_bench_engine", open_bench_engine)
    monkeypatch.chdir(tmp_path)
    yield run
    for engine in engines:
        assert engine.closed
        engine.close()


def test_the_plan_and_the_engines_options_are_passed_on(bench, tmp_path: Path, capsys):
    arguments = ("--policies", "adaserve, spec:4", "--rates", "50,80", "--duration", "0.1", "--seed", "4", "--out", "o")
    assert bench(*arguments, "--max-requests", "3", "--repeats", "2", *ANY_LATENESS) == 0
    assert bench.configs == [EngineConfig(policy="adaserve", seed=4, max_requests=3)]  # that may give the draft away
    plan = json.loads((tmp_path / "o" / "plan.json").read_text())["plan"]
    assert (plan["policies"], plan["rates"], plan["repeats"]) == (["adaserve", "spec:4"], [50.0, 80.0], 2)
    assert (plan["duration_s"], plan["max_late_s"], plan["seed"], plan["max_requests"]) == (0.1, 60.0, 4, 3)
    assert "policy" not in plan and "compile_cache" not in plan
    folder = RunResults.load(tmp_path / "o")
    assert len({row.point for row in folder.rows}) == 2 * 2 * 2
    printed, told = capsys.readouterr()
    assert "joint" in printed and "spec:4" in printed
    assert "adaserve report o -o report.html" in " ".join(told.split())


def test_what_a_format_does_not_say_is_given_and_what_is_left_out_is_told(bench, tmp_path: Path, capsys):
    (tmp_path / "q.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": ["One.", "Two.", "Three."]}\n')
    limits: set[tuple[int, float]] = set()
    bench.on_submit = lambda request: limits.add((request.sampling.max_tokens, request.sampling.temperature))
    given = ("--workload", "q.jsonl", "--max-tokens", "9", "--temperature", "0", "--slos", "qa:tpot=50")
    assert bench(*QUICK, *given, "--max-late-ms", "500", "--out", "o") == 0
    assert limits == {(9, 0.0)}
    rows = RunResults.load(tmp_path / "o").rows
    assert {row.workload for row in rows} == {"q.jsonl max tokens 9 temperature 0.0 targets qa:tpot=50"}
    assert "left out: 2 later turns of conversations" in " ".join(capsys.readouterr().err.split())


def test_without_any_option_three_policies_run_at_two_rates_into_a_dated_folder(bench, tmp_path: Path, monkeypatch):
    seen = {}

    def run_bench(plan, workload, open_engine, out, watch, **more):
        seen.update(plan=plan, workload=workload, out=out, use=more["use"])
        return []

    monkeypatch.setattr(bench_module, "run_bench", run_bench)
    assert bench() == 0
    plan = seen["plan"]
    assert plan.policies == ("ar", "spec:4", "adaserve")
    assert plan.rates == default_rates(load_workload(), BASELINE_S)
    assert re.fullmatch(r"bench-\d{8}-\d{6}", seen["out"].name) and seen["use"] == "new"
    assert 60 <= len(plan.points) * plan.duration_s <= 120


def test_default_rates_offer_multiples_of_what_one_request_alone_gets():
    """The packaged workload asks for 51.2 tokens on average: 24 x 64, 24 x 48, 12 x 32."""
    assert default_rates(load_workload(), 0.01) == (0.98, 2.9)  # 0.5 and 1.5 times 1 / (0.01 * 51.2) = 1.953


def test_a_late_client_is_refused_in_table_and_status(bench, capsys):
    bench.script = Script(submit_s=0.03)
    assert bench(*QUICK, "--out", "o", "--max-late-ms", "10") == 1
    printed, told = capsys.readouterr()
    assert "spec:4" not in printed
    told = " ".join(told.split())
    assert "not reported, because they were not measured as they must be: 2 of 2 points" in told
    assert re.search(r"ar@60/s: client was late: p99 \d+ ms, allowed 10 ms", told)


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(bench, tmp_path: Path, capsys):
    def interrupt(request) -> None:
        if request.request_id == "spec:4@60/s-2":
            raise KeyboardInterrupt

    bench.on_submit = interrupt
    assert bench(*QUICK, "--out", "o dir") == 130
    told = capsys.readouterr().err
    command = shlex.split(told.partition("to go on: ")[2].strip())
    assert command[:2] == ["adaserve", "bench"] and command[-1] == "--resume"
    overall = [row for row in RunResults.load(tmp_path / "o dir").rows if row.slo_class == ALL_CLASSES]
    ended = [(row.point, row.valid, row.invalid_reason) for row in overall]
    assert ended == [("ar@60/s", True, None), ("spec:4@60/s", False, "interrupted")]
    bench.on_submit = lambda request: None
    assert bench(*command[2:]) == 0
    folder = RunResults.load(tmp_path / "o dir")
    overall = [row for row in folder.rows if row.slo_class == ALL_CLASSES]
    assert [(row.point, row.valid) for row in overall] == [("ar@60/s", True), ("spec:4@60/s", True)]
    assert folder.notes == () and len({row.run_id for row in overall}) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "1 of 2 points are there already; relative targets stay those of their baseline latency, 4 ms" in told


def test_ctrl_c_while_the_engine_opens_is_no_traceback(bench, monkeypatch, capsys):
    def interrupted(config, record):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_module, "open_bench_engine", interrupted)
    assert bench(*QUICK, "--out", "o") == 130
    assert "interrupted; to go on: adaserve bench" in capsys.readouterr().err


def test_rates_of_a_resumed_run_are_those_it_had(bench, tmp_path: Path, monkeypatch):
    arguments = ("--policies", "ar", "--duration", "0.1", "--warmup-requests", "0", "--out", "o", "--drain", "5",
                 *ANY_LATENESS)  # fmt: skip
    monkeypatch.setattr(bench_module, "default_rates", lambda *_: (60.0,))
    assert bench(*arguments) == 0
    monkeypatch.setattr(bench_module, "default_rates", lambda *_: pytest.fail("measured anew"))
    rows = (tmp_path / "o" / "results.jsonl").read_text()
    assert bench(*arguments, "--resume") == 0
    assert (tmp_path / "o" / "results.jsonl").read_text() == rows
    assert len(bench.configs) == 1, "nothing was left to measure"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--resume",), "--resume needs the run's folder; give it as --out"),
        (("--append",), "--append needs the run's folder; give it as --out"),
        (("--resume", "--append", "--out", "o"), "--resume goes on with a run and --append adds one; give one of them"),
        (("--rates", "0"), "--rates must be numbers above 0 or 'trace', separated by commas, got '0'"),
        (("--duration", "0", "--rates", "trace"), "duration must be a finite number of seconds above 0, got 0.0"),
        (("--max-late-ms", "nan"), "max_late must be a finite time of at least 0, got nan s"),
        (("--rates", "2,2.0"), "every point must be measured once, ar@2/s is there twice"),
        (("--urgent-shares", "1.5"), "--urgent-shares must be numbers from 0 to 1, separated by commas, got '1.5'"),
        (("--slo-scales", "tight"), "--slo-scales must be numbers above 0, separated by commas, got 'tight'"),
        (("--arrivals", "rain"), "'rain'"),
        (("--repeats", "0"), "at least one policy, rate, urgent share, SLO scale, arrival process and repeat"),
        (("--model", "m"), "--model says how a server is measured; give its --url too"),
        (
            ("--url", "http://h:1", "--max-requests", "3"),
            "--max-requests is of an engine in this process; leave it out",
        ),
        (("--url", "http://h:1", "--learn"), "--learn is of an engine in this process; leave it out with --url"),
        (("--learn", "--draft", "none"), "learning needs a draft that learns, and draft is none"),
        (("--learn", "--learn-loss", "mse"), "learn_loss must be one of kl, reverse_kl, jsd, got 'mse'"),
        (
            ("--url", "http://h:1", "--policies", "ar,adaserve"),
            "--policies names the one policy that a server at --url runs, got 'ar,adaserve'",
        ),
        (
            ("--url", "http://h:1", "--policies", "ladder"),
            "--policies names the one policy that a server at --url runs, got 'ladder'",
        ),
        (("--url", "http://h:1", "--record"), "--record needs an engine in this process; leave it out with --url"),
        (
            ("--record", "--synthetic-acceptance", "1.5"),
            "--record keeps the draft's own acceptance; leave it out with --synthetic-acc",
        ),
    ],
)
def test_what_cannot_be_is_said(bench, capsys, arguments: tuple[str, ...], message: str):
    assert bench(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert bench.configs == []


def test_a_run_on_an_engine_that_learns_says_so_and_can_be_resumed(bench, capsys):
    learning = ("--learn", "--learn-every", "2")
    assert bench(*QUICK, "--out", "o", *learning) == 0
    assert bench.configs[0].learning == LearnConfig(learn_every=2)
    assert bench(*QUICK, "--out", "o", "--resume", *learning) == 0
    assert bench(*QUICK, "--out", "o", "--resume") == 2
    assert "learning" in capsys.readouterr().err


def test_a_folder_with_rows_is_not_added_to_unasked(bench, tmp_path: Path, capsys):
    arguments = ("--policies", "ar", *QUICK[2:], "--out", "o")
    assert bench(*arguments) == 0
    assert bench(*arguments) == 2
    assert "o holds the rows of another run; give another --out, or --append" in " ".join(
        capsys.readouterr().err.split()
    )
    assert bench(*arguments, "--append") == 0
    assert len({row.run_id for row in RunResults.load(tmp_path / "o").rows}) == 2
    assert bench(*arguments[:-2], "--duration", "0.2", "--out", "o", "--resume") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "cannot resume o: duration_s was 0.15, is 0.2; give the options of that run, or another --out" in told


def test_a_command_that_is_shown_has_no_keys(monkeypatch):
    given = ["bench", "--url", "http://h", "--header", "Authorization: Bearer abc", "--header=X-Key: abc", "--append"]
    monkeypatch.setattr(sys, "argv", ["adaserve", *given])
    command = bench_module._resume_command(Path("o"))
    assert "abc" not in command
    assert shlex.split(command) == [
        "adaserve", "bench", "--url", "http://h", "--header", "Authorization: ...", "--header=X-Key: ...", "--out", "o",
        "--resume",
    ]  # fmt: skip


POLICY = """
from adaserve_jax.scheduler.controllers.baselines import FixedController
from adaserve_jax.scheduler.policies import Policy

mine = Policy("no speculation", lambda parts: FixedController(parts.limits, 0), selector="equal", uses_draft=False)
"""


def test_versions_of_a_policys_file_are_told_apart_and_not_mixed(bench, tmp_path: Path, capsys):
    arguments = ("--policies", "ar,mine.py", *QUICK[2:], "--out", "o")
    texts = (POLICY, POLICY + "# edited\n")
    one, other = (hashlib.sha256(text.encode()).hexdigest() for text in texts)
    (tmp_path / "mine.py").write_text(texts[0])
    assert bench(*arguments) == 0
    (tmp_path / "mine.py").write_text(texts[1])
    assert bench(*arguments, "--resume") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"cannot resume o: policy_files was {{'mine.py': '{one}'}}, is {{'mine.py': '{other}'}}; give the" in told
    assert bench(*arguments, "--append") == 0
    folder = RunResults.load(tmp_path / "o")
    assert {(row.policy, row.policy_hash) for row in folder.rows} == {
        ("ar", ""), ("mine.py", one), ("mine.py", other),
    }  # fmt: skip
    assert measured([folder]).policies == ("ar", f"mine.py@{one[:12]}", f"mine.py@{other[:12]}")


def test_a_policys_file_that_is_edited_meanwhile_ends_the_run(bench, tmp_path: Path, capsys):
    (tmp_path / "mine.py").write_text(POLICY)
    bench.on_submit = lambda request: (tmp_path / "mine.py").write_text(POLICY + "# edited\n")
    assert bench("--policies", "ar,mine.py", *QUICK[2:], "--out", "o") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "the file of policy mine.py is not the one that the run began with; put that back and --resume" in told
    assert {row.policy for row in RunResults.load(tmp_path / "o").rows} == {"ar"}


BRIEF = ("--duration", "0.03", "--warmup-requests", "0", "--drain", "1")
SUITE = ("--suite", "multi-slo", "--workload", "w.jsonl", *BRIEF, *ANY_LATENESS)


@pytest.fixture
def short_requests(tmp_path: Path) -> None:
    """Write w.jsonl, whose requests are so short that a suite asks for many in a second."""
    lines = [
        {"prompt": "abc", "max_tokens": 3, "slo_class": name} for name in ("code", "code", "code", "chat", "summary")
    ]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.usefixtures("short_requests")
def test_a_suite_writes_a_file_for_each_policy_and_prints_the_rates(bench, tmp_path: Path, capsys):
    bench.script = Script(capacity=2)
    assert bench(*SUITE, "--policies", "ar,spec:4", "--out", "o") == 0
    printed, told = capsys.readouterr()
    assert "requests/s at 90%" in printed and "spec:4" in printed
    assert f"targets: chat (20%): TPOT {BASELINE_S * 1e3 * 5 / 3:.3f} ms" in told
    files = [f"o/{name}/multi-slo.json" for name in ("ar", "spec-4")]
    assert run_program("report", *files, "-o", "page.md") == 0
    assert "Highest rates" in (tmp_path / "page.md").read_text()
    bench.script = Script(capacity=0)
    assert bench(*SUITE, "--policies", "ar,spec:4", "--out", "o", "--resume") == 0, "every load is there"
    assert bench(*SUITE, "--policies", "ar", "--out", "o") == 2


@pytest.mark.usefixtures("short_requests")
def test_an_invalid_load_ends_a_suite(bench, capsys):
    bench.script = Script(submit_s=0.02)
    late = [text if text != ANY_LATENESS[1] else "5" for text in SUITE]
    assert bench(*late, "--policies", "ar", "--out", "o") == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "INVALID: client was late" in told
    assert "to measure again what is not valid: adaserve" in told and told.endswith("--resume")


@pytest.mark.usefixtures("short_requests")
def test_ctrl_c_in_a_suite_says_how_to_go_on(bench, capsys):
    def interrupt(request) -> None:
        raise KeyboardInterrupt

    bench.on_submit = interrupt
    assert bench(*SUITE, "--policies", "ar", "--out", "o") == 130
    assert "interrupted; to go on: adaserve" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suite", "multi-slo", "--rates", "2"), "--rates is chosen by --suite; leave it out"),
        (("--suite", "multi-slo", "--slo-scales", "1"), "--slo-scales is chosen by --suite; leave it out"),
        (("--suite", "multi-slo", "--by-class"), "--by-class is chosen by --suite; leave it out"),
        (("--preset", "workload"), "--preset and --class-requests are of --suite; give it too"),
        (("--class-requests", "100"), "--preset and --class-requests are of --suite; give it too"),
        (("--suite", "multi-slo", "--class-requests", "0"), "--class-requests must be at least 1, got 0"),
    ],
)
def test_options_that_do_not_go_with_a_suite_are_refused(bench, capsys, arguments, message):
    assert bench(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
