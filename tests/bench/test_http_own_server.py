"""The URL client against the server of this package: over a scripted engine, from the command line too, and over the
embedded pair, whose tokens it must count as the engine does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from adaserve_jax.bench.engine import Ask, AtPoint, BenchEngine, Due
from adaserve_jax.bench.http_load import UrlEngine
from adaserve_jax.bench.http_probe import served_metrics
from adaserve_jax.bench.local_client import ClientEngine
from adaserve_jax.config import EngineConfig
from adaserve_jax.http_client.settings import UrlSettings
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.run_folder import RunResults
from adaserve_jax.results.schema import ALL_CLASSES
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import WorkloadItem
from tests.program import run_program
from tests.server.conftest import Running, running, serving
from tests.server.scripted import BASELINE_S, ByteTokenizer, ScriptedEngine
from tests.waiting import wait_until

KEY = "a-long-enough-secret-key"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as shared:
        yield shared


@pytest.fixture(scope="module")
def engine(server: Running) -> Iterator[UrlEngine]:
    made = UrlEngine(UrlSettings(server.url))
    yield made
    made.close()


def item(prompt: str, tokens: int = 10, slo: SLO | None = None) -> WorkloadItem:
    return WorkloadItem(prompt, (), tokens, "chat", slo or SLO(), 0.0, None, None)


def driven(engine: BenchEngine, items: list[WorkloadItem], drain_s: float = 20.0) -> list[RequestRecord]:
    asks = [Ask(f"r{i}", each, each.seed or i, each.slo, "salt", each.max_tokens) for i, each in enumerate(items)]
    loop = engine.drive([Due(0.0, engine.prepare(ask)) for ask in asks], drain_s=drain_s)
    about = {"run_id": "run", "point": "p", "policy": "a", "rate_rps": 1.0, "baseline_s": engine.about.baseline_s}
    return [probe.record(AtPoint(start_s=loop.start_s, **about)) for probe in loop.probes]


def test_a_server_says_what_it_is(engine):
    about = engine.about
    assert (about.system, about.policies, about.baseline_s) == ("adaserve_jax", ("scripted",), BASELINE_S)
    assert (about.max_context, about.max_requests, about.device) == (512, 64, "cpu")


def test_a_server_of_synthetic_acceptance_says_so():
    scripted = ScriptedEngine(EngineConfig(target="models/scripted", draft="demo", synthetic_acceptance="1.5"))
    scripted.start()
    with (
        serving(scripted, ByteTokenizer(), ServerSettings()) as server,
        closing(UrlEngine(UrlSettings(server.url))) as remote,
        closing(scripted),
    ):
        local = ClientEngine(scripted, lambda *_: [1], lambda _: None)
        assert [each.about.columns()["synthetic_acceptance"] for each in (remote, local)] == ["1.5", "1.5"]


@pytest.mark.parametrize(
    ("prompt", "status", "code"),
    [("abc", "finished", None), ("refuse", "rejected", "invalid_value"), ("full", "rejected", "queue_full"),
     ("late-full", "rejected", "queue_full"), ("late-refuse", "rejected", "invalid_value"),
     ("fail", "failed", "engine_error"), ("bug", "failed", "internal_error")],
)  # fmt: skip
def test_each_end_is_the_one_that_the_server_says(engine, prompt, status, code):
    (record,) = driven(engine, [item(prompt)])
    assert (record.status, record.error_code) == (status, code)


@pytest.mark.parametrize(("said", "drafted"), [({"num_draft_tokens": 12}, 12), ({"num_draft_tokens": "x"}, 0), (7, 0)])
def test_drafted_tokens_are_those_that_the_server_counts_as_vllm_does(said, drafted):
    counts = {"verify_steps": 4, "accepted_tokens": 6, "mean_accepted": 1.5}
    metrics = served_metrics({"speculative": counts, "speculative_decoding": said})
    assert (metrics.verify_steps, metrics.drafted_tokens, metrics.accepted_tokens) == (4, drafted, 6)


def test_tokens_and_verifications_are_those_of_the_engine(server, engine):
    records = driven(engine, [item("é" * 4, tokens, SLO(tpot_ms=900.0)) for tokens in range(1, 12)])
    assert [r.output_tokens for r in records] == list(range(1, 12)) and engine.token_source == "usage"
    assert [r.verify_steps for r in records] == [-(-tokens // 3) for tokens in range(1, 12)]
    assert {r.prompt_tokens for r in records} == {8} and all(r.slo_met for r in records)
    assert {round(r.queue_s, 6) for r in records if r.queue_s is not None} == {0.001}
    asked = server.engine.submitted[-1]
    assert (asked.cache_salt, asked.slo.tpot_ms, asked.sampling.seed) == ("salt", 900.0, 10)


def test_what_is_cut_off_is_aborted_in_the_engine(server, engine):
    aborted = len(server.engine.aborted)
    (record,) = driven(engine, [item("slow", 400)], drain_s=0.2)
    assert record.status == "unfinished" and record.output_tokens < 400
    wait_until(lambda: len(server.engine.aborted) > aborted)


def test_from_the_command_line_to_a_folder(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setenv("SERVER_KEY", KEY)
    workload = tmp_path / "requests.jsonl"
    workload.write_text("".join(f'{{"prompt": "{"ab" * i}", "max_tokens": {3 + i}, "seed": 1}}\n' for i in range(1, 9)))
    quick = (
        "--workload",
        str(workload),
        "--rates",
        "40",
        "--duration",
        "0.3",
        "--warmup-requests",
        "1",
        "--max-late-ms",
        "5000",
    )
    out = tmp_path / "run"
    with running(ServerSettings(api_key=KEY)) as server:
        assert run_program("bench", "--url", server.url, *quick, "--out", str(out)) == 2
        assert "answered 401; give the API key" in " ".join(capsys.readouterr().err.split())
        with_key = ("--url", server.url, "--api-key-env", "SERVER_KEY", *quick, "--out", str(out))
        assert run_program("bench", *with_key) == 0
        for more, named in (
            (("--header", "X-Team: blue"), "headers was [], is ['x-team']"),
            (("--system", "other"), "system was None, is 'other'"),
            (("--silence-timeout", "9"), "silence_timeout was 120.0, is 9.0"),
            (("--spare-connections", "2"), "spare_connections was 8, is 2"),
        ):
            assert run_program("bench", *with_key, "--resume", *more) == 2
            assert f"cannot resume {out}: {named}; give the options" in " ".join(capsys.readouterr().err.split())
        assert run_program("bench", *with_key, "--policies", "theirs", "--append") == 0
    folder = RunResults.load(out)
    rows = [row for row in folder.rows if row.slo_class == ALL_CLASSES]
    assert [(row.policy, row.system, row.token_source) for row in rows] == [
        ("scripted", "adaserve_jax", "usage"), ("theirs", "adaserve_jax", "usage"),
    ]  # fmt: skip
    for records in folder.records.values():
        assert {r.status for r in records} == {"finished"} and len(records) > 3
        assert all(r.output_tokens == 3 + r.prompt_tokens // 2 for r in records)
    assert all(KEY not in path.read_text() for path in out.iterdir())
