"""`adaserve simulate` and what it stands on: machines, traces, and runs of the real scheduler on a virtual clock."""

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaserve_jax.bench.simulate import simulate_all
from adaserve_jax.cli.app import app
from adaserve_jax.errors import ConfigError
from adaserve_jax.report.estimates import Estimates
from adaserve_jax.report.points import measured
from adaserve_jax.results.jsonl import append_rows, read_rows
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.run_folder import RunResults, key_of
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow
from adaserve_jax.sim.acceptance import AcceptanceRecord
from adaserve_jax.sim.machines import load_machine, packaged_machines
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from adaserve_jax.types import SLO, Limits
from adaserve_jax.workloads.traces import adjusted, load_trace
from tests.report.made import folder, point

MACHINE = load_machine("llama-70b")


def write_trace(
    folder: Path, *, rate: float = 2.0, count: int = 40, output: int = 24, name: str = "t.jsonl.gz"
) -> Path:
    """The mix of AdaServe's traces: code at 1.2 x baseline, chat at 50 ms, summaries at 150 ms."""
    rng = np.random.default_rng(0)
    due_ms = np.cumsum(rng.exponential(1e3 / rate, count)) - 1.0
    kinds = [("code", 1.2, 120), ("chat", -50.0, 20), ("summarization", -150.0, 700)]
    lines = []
    for index, at in enumerate(due_ms):
        kind, ratio, prompt = kinds[rng.choice(3, p=[0.6, 0.2, 0.2])]
        lines.append({
            "t_ms": float(at), "prompt_id": f"{kind}-{index:04d}", "slo_ratio": ratio, "output_length": output,
            "input_length": prompt,
        })  # fmt: skip
    path = folder / name
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_a_replica_has_no_texts_to_draft_from() -> None:
    """A profile has the limits of the engine that it was measured with, which drafts from text."""

    class Drafting:
        def limits(self, max_requests: int) -> Limits:
            return replace(MACHINE.limits(max_requests), suffix_depth=16)

    drafting: Any = Drafting()
    assert SimulationPlan(()).limits(drafting).suffix_depth == 0


def test_packaged_machines_have_the_published_times() -> None:
    limits = MACHINE.limits()
    samples = MACHINE.samples(limits)
    assert samples.verify_s[1, 64] == pytest.approx(0.030)
    assert samples.verify_s[128, 64] == pytest.approx(0.055)
    assert samples.verify_s[192, 64] == pytest.approx(0.070)  # half way from 55 to 85
    assert samples.draft_level_s[64, 3] == pytest.approx(0.005)
    assert (limits.max_requests, limits.max_tree_tokens, limits.max_depth) == (64, 512, 8)
    assert MACHINE.acceptance_of("code") == 0.8
    assert MACHINE.acceptance_of("other") == pytest.approx((0.8 + 0.64 + 0.58) / 3)


def test_packaged_machines_that_were_computed_say_so() -> None:
    published = {"llama-70b", "qwen-32b"}
    assert published < set(packaged_machines())
    for name in set(packaged_machines()) - published:
        machine = load_machine(name)
        assert "computed, not measured," in machine.about
        samples, rows = machine.samples(machine.limits()), machine.limits().max_requests
        assert 1e-3 < samples.verify_s[1, 1] < samples.verify_s[1024, rows] and machine.baseline_s > 1e-3


def test_a_trace_is_read_as_it_was_published(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text(
        '{"t_ms": 1500, "prompt_id": "chat-0001", "slo_ratio": -50.0, "output_length": 256, "input_length": 14}\n'
        '{"t_ms": 0, "prompt_id": "code-0002", "slo_ratio": 1.2, "output_length": 10, "input_length": 100}\n'
    )
    trace = adjusted(load_trace(path), ttft_slo_s=4.0, time_scale=2.0)
    first, second = trace.requests
    assert (first.slo_class, first.slo.relative, first.slo.ttft_s, first.prompt_tokens) == ("code", 1.2, 4.0, 100)
    assert (second.slo_class, second.slo.tpot_ms, second.due_s, second.output_tokens) == ("chat", 50.0, 3.0, 256)
    assert trace.rate_rps == pytest.approx(2 / 3.0)


def test_a_bad_machine_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no machine 'gone': give .*qwen-32b, .*or the path of a JSON file"):
        load_machine("gone")
    path = tmp_path / "machine.json"
    path.write_text('{"version": 1, "name": "m"}')
    with pytest.raises(ConfigError, match="field 'about' is missing"):
        load_machine(str(path))
    values = json.loads((Path(__file__).parents[2] / "adaserve_jax/sim/data/machines/llama-70b.json").read_text())
    path.write_text(json.dumps({**values, "acceptance": {"code": 1.4}}))
    with pytest.raises(ConfigError, match="acceptance between 0 and 1"):
        load_machine(str(path))
    path.write_text(json.dumps({**values, "token_step": 0}))
    with pytest.raises(ConfigError, match="token_step must be an integer above 0, got 0"):
        load_machine(str(path))
    path.write_text(json.dumps({**values, "token_step": 10}))
    with pytest.raises(ConfigError, match="max_batch_tokens must be a multiple of token_step, got 1024 and 10"):
        load_machine(str(path))
    path.write_text(json.dumps({**values, "max_batch_tokens": 2048}))
    with pytest.raises(ConfigError, match=r"verify_ms must reach max_batch_tokens, 2048, got a time of 1024 tokens"):
        load_machine(str(path))
    for decay in (0, 1.5):
        path.write_text(json.dumps({**values, "choice_decay": decay}))
        with pytest.raises(ConfigError, match=f"choice_decay must be above 0 and at most 1, got {decay}"):
            load_machine(str(path))
    path.write_text(json.dumps({**values, "choice_decay": 0.7, "token_step": 1}))
    assert load_machine(str(path)).choice_decay == 0.7
    assert load_machine(str(path)).limits().token_edges == tuple(range(1, 1025))
    path.write_text(json.dumps({**values, "max_depth": 2.5}))
    with pytest.raises(ConfigError, match=r"max_depth must be an integer, 0 or above, got 2\.5"):
        load_machine(str(path))
    path.write_text(json.dumps({**values, "draft_level_ms": -1.0}))
    with pytest.raises(ConfigError, match="times must be above 0"):
        load_machine(str(path))
    path.write_bytes(b"\x1f\x8b\xff")
    with pytest.raises(ConfigError, match=r"give .*llama-70b, .*or the path of a JSON file"):
        load_machine(str(path))


def test_plain_decoding_takes_the_time_that_the_machine_says(tmp_path: Path) -> None:
    """One request alone: 30 ms a token, and its prompt of 20 in one step of up to 24 tokens."""
    trace = load_trace(write_trace(tmp_path, count=1))
    trace = replace(trace, requests=(replace(trace.requests[0], due_s=0.0, prompt_tokens=20, output_tokens=11),))
    (record,) = simulate("ar", SimulationPlan(("ar",)), MACHINE, trace).records
    assert record.tpot_s == pytest.approx(0.030)
    assert record.ttft_s == pytest.approx(0.030 + 23 / 127 * 0.025)
    assert record.token_offsets_s == pytest.approx(0.03 * np.arange(11))


def test_policies_are_told_apart_and_every_request_is_accounted_for(tmp_path: Path) -> None:
    trace = load_trace(write_trace(tmp_path, rate=3.0, output=48), ttft_slo_s=4.0)
    rows = simulate_all(SimulationPlan(("ar", "spec:4", "adaserve")), MACHINE, [trace])
    overall = {row.policy: row for row in rows if row.slo_class == ALL_CLASSES}
    assert {row.requests for row in overall.values()} == {40}
    assert all(row.output_tokens == 40 * 48 and row.unfinished == 0 for row in overall.values())
    attained = {policy: row.attainment for policy, row in overall.items()}
    assert attained["ar"] < 0.9 < attained["adaserve"]
    assert attained["adaserve"] >= attained["spec:4"]
    by_class = {row.slo_class: row for row in rows if row.policy == "spec:4"}
    assert by_class["code"].acceptance_rate > by_class["summarization"].acceptance_rate + 0.1


def test_policies_over_one_trace_are_compared_request_by_request(tmp_path: Path) -> None:
    """Requests end in an order that differs by policy; they are those of one trace all the same."""
    trace = load_trace(write_trace(tmp_path, rate=6.0, output=48), ttft_slo_s=4.0)
    points = []
    for policy in ("ar", "adaserve"):
        done = simulate(policy, SimulationPlan((policy,)), MACHINE, trace)
        assert [each.request_id for each in done.records] == [f"{policy}-{i}" for i in range(len(trace.requests))]
        points.append(point(done.records, policy=policy, wall=done.wall_s))
    ours, theirs = measured([folder(*points)]).groups.values()
    assert Estimates().pairing(ours, theirs).paired


@pytest.mark.slow
def test_overload_costs_few_their_targets_and_not_all(tmp_path: Path) -> None:
    """More than the machine can serve, for a while: fixed chains lose most, `adaserve` those it must."""
    trace = load_trace(write_trace(tmp_path, rate=9.0, count=260, output=200), ttft_slo_s=4.0)
    rows = simulate_all(SimulationPlan(("spec:2", "adaserve")), MACHINE, [trace])
    overall = {row.policy: row for row in rows if row.slo_class == ALL_CLASSES}
    assert overall["adaserve"].attainment > overall["spec:2"].attainment + 0.15
    assert overall["adaserve"].unfinished == 0
    assert overall["adaserve"].output_tokens == 260 * 200


def test_the_same_seed_gives_the_same_run_and_another_one_does_not(tmp_path: Path) -> None:
    trace = load_trace(write_trace(tmp_path, count=12))
    runs = [simulate("adaserve", SimulationPlan((), seed=seed), MACHINE, trace).records for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("policy", ["ar", "adaserve"])
def test_a_request_stops_before_its_limit_and_no_scheduler_is_told_when(tmp_path: Path, policy: str) -> None:
    trace = load_trace(write_trace(tmp_path, count=12))

    def run(*output_tokens: int) -> dict[str, RequestRecord]:
        asked = zip(trace.requests, output_tokens, strict=True)
        slo = SLO(tpot_ms=100.0, e2e_ms=10_000.0)
        stopping = trace.derived("", [replace(r, output_tokens=n, max_tokens=200, slo=slo) for r, n in asked])
        return {r.request_id: r for r in simulate(policy, SimulationPlan((policy,)), MACHINE, stopping).records}

    short, long = run(*range(20, 32)), run(*range(40, 52))
    assert [(r.status, r.output_tokens) for r in short.values()] == [("finished", 20 + n) for n in range(12)]
    first = short[f"{policy}-0"].token_offsets_s
    assert first == long[f"{policy}-0"].token_offsets_s[: len(first)]


def test_what_the_drain_cuts_off_is_unfinished(tmp_path: Path) -> None:
    trace = load_trace(write_trace(tmp_path, count=6, output=400))
    records = simulate("ar", SimulationPlan((), drain_s=1.0), MACHINE, trace).records
    assert len(records) == 6
    assert {record.status for record in records} == {"unfinished"}


def test_the_command_takes_other_traces_with_targets_and_says_what_they_leave_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "azure.csv", tmp_path / "out"
    rows = "".join(f"2023-11-16 18:15:{second},20,{second % 12}\n" for second in range(10, 20))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    given = ("--slos", "default:tpot=50", "--policies", "ar", "--out", str(out))
    app(["simulate", str(path), *given], standalone_mode=False)
    (row,) = [row for row in read_rows(out / "results.jsonl", ResultRow) if row.slo_class == ALL_CLASSES]
    assert (row.workload, row.requests, row.attainment) == ("azure.csv targets default:tpot=50", 9, 1.0)
    assert "left out: 1 requests without a prompt or an answer" in " ".join(capsys.readouterr().err.split())


def test_the_command_writes_the_rows_of_a_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write_trace(tmp_path, count=8), tmp_path / "out"
    app(["simulate", str(path), "--policies", "ar,dsd", "--out", str(out), "--ttft-slo", "4"], standalone_mode=False)
    rows = read_rows(out / "results.jsonl", ResultRow)
    assert {(row.policy, row.device, row.workload) for row in rows} == {
        (policy, "simulated: llama-70b", "t.jsonl.gz") for policy in ("ar", "dsd")
    }
    assert "dsd" in capsys.readouterr().out
    assert len((out / "requests.jsonl").read_text().splitlines()) == 16
    with pytest.raises(ConfigError, match="unknown policy 'fast'"):
        app(["simulate", str(path), "--policies", "fast", "--out", str(out)], standalone_mode=False)


def rows_of(out: Path) -> list[ResultRow]:
    return [row for row in read_rows(out / "results.jsonl", ResultRow) if row.slo_class == ALL_CLASSES]


def test_the_command_sweeps_rates_scales_and_replicas_and_saves_its_traces(tmp_path: Path) -> None:
    path, out = write_trace(tmp_path, count=8, output=6), tmp_path / "out"
    arguments = [
        "--rates",
        "2,trace",
        "--slo-scale",
        "0.8,1.6",
        "--mix",
        "code=1",
        "--replicas",
        "1,2",
        "--save-traces",
    ]
    app(["simulate", str(path), "--policies", "spec:2", "--out", str(out), *arguments], standalone_mode=False)
    rows = rows_of(out)
    assert len(rows) == 2 * 2 * 2
    assert [row.replicas for row in rows[:2]] == [1, 2]
    assert [row.router for row in rows[:2]] == [None, "slo-aware"]
    assert [row.workload for row in rows[::2]] == [
        f"t.jsonl.gz mix code=1 seed 0{rate} scale {scale}" for rate in (" at 2/s", "") for scale in ("0.8", "1.6")
    ]
    assert rows[0].rate_rps == pytest.approx(2.0)
    saved = [load_trace(file) for file in sorted(out.glob("trace-*.jsonl.gz"))]
    assert [trace.requests[0].slo.relative for trace in saved] == [0.8, 1.6, 0.8, 1.6]
    assert [trace.rate_rps for trace in saved[:2]] == pytest.approx([2.0, 2.0])
    assert [row.point for row in rows[:4]] == [
        f"spec:2@2/s slo={scale} x{replicas}" for scale in ("0.8", "1.6") for replicas in (1, 2)
    ]
    assert len({row.point for row in rows}) == 8
    assert {(row.urgent_share, row.slo_scale) for row in rows} == {(1.0, 0.8), (1.0, 1.6)}
    folder = RunResults.load(out)
    assert folder.notes == () and {key_of(row) for row in rows} == set(folder.records)


def test_the_command_repeated_writes_the_same_but_for_when_it_ran(tmp_path: Path) -> None:
    path = write_trace(tmp_path, count=8)
    folders = []
    for name in ("one", "other"):
        arguments = [
            "simulate",
            str(path),
            "--policies",
            "adaserve,spec:2",
            "--mix",
            "code=1,chat=1",
            "--mix",
            "chat=1",
        ]
        app([*arguments, "--seed", "5", "--out", str(tmp_path / name)], standalone_mode=False)
        folders.append(RunResults.load(tmp_path / name))
    assert {row.urgent_share for row in folders[0].rows} == {0.5, 0.0}
    when = {"run_id": "", "started_at": ""}
    rows = [[replace(row, **when) for row in folder.rows] for folder in folders]
    assert rows[0] == rows[1] and len(rows[0][0].plan_hash) == 64
    for lines in ("records", "samples"):
        one, other = (
            {point: [replace(line, run_id="") for line in of] for (_, point), of in getattr(folder, lines).items()}
            for folder in folders
        )
        assert one == other and len(one) == 4


def test_the_command_adds_to_a_folder_only_when_asked_and_tells_versions_of_a_policys_file_apart(
    tmp_path: Path,
) -> None:
    path, out, mine = write_trace(tmp_path, count=4), tmp_path / "out", tmp_path / "mine.py"
    text = (
        "from adaserve_jax.scheduler.controllers.baselines import FixedController\n"
        "from adaserve_jax.scheduler.policies import Policy\n"
        "chains = Policy('chains', lambda parts: FixedController(parts.limits, {depth}, 1), selector='equal')\n"
    )
    arguments = ["simulate", str(path), "--policies", f"ar,{mine}", "--out", str(out)]
    mine.write_text(text.format(depth=1))
    app(arguments, standalone_mode=False)
    mine.write_text(text.format(depth=3))
    with pytest.raises(ConfigError, match="out holds the rows of another run; give another --out, or --append to add"):
        app(arguments, standalone_mode=False)
    app([*arguments, "--append"], standalone_mode=False)
    hashes = [hashlib.sha256(text.format(depth=depth).encode()).hexdigest() for depth in (1, 3)]
    rows = rows_of(out)
    assert [row.policy_hash for row in rows] == ["", hashes[0], "", hashes[1]]
    assert rows[0].plan_hash == rows[1].plan_hash != rows[2].plan_hash
    found = measured([RunResults.load(out)])
    assert found.policies == ("ar", *(f"{mine}@{each[:12]}" for each in hashes))
    assert {who: len(group.points) for (who, _), group in found.groups.items()} == dict(
        zip(found.policies, (2, 1, 1), strict=True)
    )


def test_what_has_no_column_of_its_own_is_in_the_hash_of_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"t_ms": 0, "prompt_id": "code-1", "slo_ratio": 1.2, "output_length": 2, "input_length": 3}\n')
    hashes = []
    for options in ((), ("--seed", "1"), ("--drain", "9"), ("--tau-low", "0.2"), ("--machine", "qwen-32b")):
        out = tmp_path / "-".join(["out", *options])
        app(["simulate", str(path), "--policies", "ar", "--out", str(out), *options], standalone_mode=False)
        hashes += [row.engine_hash for row in rows_of(out)]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 4


def test_the_command_makes_a_fluctuating_trace_and_takes_recorded_acceptance(tmp_path: Path, capsys) -> None:
    out, recorded = tmp_path / "out", tmp_path / "acceptance.jsonl"
    ranks = (0, 0, 0, -1) * 10
    place = tuple(range(40))
    append_rows(recorded, [AcceptanceRecord("r", "p", 1.0, "q", "code", place, ranks, (1,) * 40, (0.5,) * 40)])
    arguments = ["--fluctuating", "--rates", "0.2", "--requests", "6", "--seed", "4", "--no-token-times"]
    arguments += ["--acceptance", str(recorded), "--out", str(out), "--policies", "spec:2"]
    app(["simulate", *arguments], standalone_mode=False)
    (row,) = rows_of(out)
    assert row.workload == "fluctuating at 0.2/s seed 4 first 6"
    assert (row.machine, row.device) == ("llama-70b, simulated", "simulated: llama-70b")
    said = f"0.2 requests/s were asked for; the requests that are simulated come at {row.rate_rps:.4g}/s on average"
    found = " ".join(capsys.readouterr().err.split())
    assert f"{said}, because --requests keeps the first {row.duration_s:.0f} s alone; leave it out" in found
    assert row.itl_p50_s is None
    assert row.acceptance_rate == pytest.approx(0.65, abs=0.12)  # (0.75 + 0.75^2) / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to simulate: give trace files, or --fluctuating"),
        (["--fluctuating", "--policies", "spec:2@suffix"], "policy spec:2@suffix: simulated requests have no text"),
        (["--fluctuating", "--router", "fast"], "unknown router 'fast'"),
        (["--fluctuating", "--replicas", "2,4,2"], "--replicas must be different numbers, got '2,4,2'"),
        (["--fluctuating", "--replicas", "2,none"], "--replicas must be whole numbers above 0, .*got 'none'"),
        (["--fluctuating", "--mix", "code"], "--mix must be classes and shares such as code=0.6,chat=0.4, got 'code'"),
        (["--fluctuating", "--mix", "code =1, code=2"], "--mix gives class 'code' twice, got 'code =1, code=2'"),
        (["--fluctuating", "--slo-scale", "0"], "--slo-scale must be numbers above 0 or 'trace'"),
        (["--fluctuating", "--rates", "fast"], "--rates must be numbers above 0 or 'trace'"),
        (["--fluctuating", "--rates", ","], "--rates, --slo-scale, --replicas and --policies must not be empty"),
        (["--fluctuating", "--exhaustive"], "--exhaustive says how --tune looks for a setting; give --tune too"),
        (["--fluctuating", "--requests", "-1"], "--requests must not be below 0"),
        (["--fluctuating", "--seed", "-1"], "--seed, .* must not be below 0"),
        (["--fluctuating", "--lengths", "nonsense"], "--lengths: a generated trace has its own times"),
        (["--fluctuating", "--time-scale", "2", "t.csv"], "--time-scale: a generated trace has its own times"),
        (
            ["--fluctuating", "--machine", "h100-llama-8b", "--max-requests", "500"],
            "--max-requests must be at most 128, as many as were measured on h100-llama-8b; got 500",
        ),
        (["--fluctuating", "--acceptance", "none.jsonl"], "cannot read none.jsonl"),
    ],
)
def test_what_the_command_cannot_do_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    policies = [] if "--policies" in arguments else ["--policies", "ar"]
    with pytest.raises(ConfigError, match=message):
        app(["simulate", "--out", str(tmp_path), *policies, *arguments], standalone_mode=False)


def test_a_class_of_a_trace_is_not_called_as_the_rows_over_all_classes_are(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"t_ms": 0, "prompt_id": "all-1", "slo_ratio": 1.2, "output_length": 2, "input_length": 3}\n')
    with pytest.raises(ConfigError, match=r"t.jsonl: no SLO class may be called 'all'"):
        simulate_all(SimulationPlan(("ar",)), MACHINE, [load_trace(path)])
