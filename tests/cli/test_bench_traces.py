"""Traces without text from their files to rows, through `adaserve bench` on a scripted engine that counts tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adaserve_jax.bench.local_client import ClientEngine
from adaserve_jax.cli import bench as bench_module
from adaserve_jax.config import EngineConfig
from adaserve_jax.results.run_folder import RunResults
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow
from adaserve_jax.workloads.items import WorkloadItem
from adaserve_jax.workloads.prompt_text import PromptWriter
from tests.bench.conftest import Script, ScriptedEngine
from tests.program import run_program

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,4
2023-11-16 18:15:46.7305900,396,9
2023-11-16 18:15:46.8005900,879,5
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 3]},
    {"timestamp": 40, "input_length": 1200, "output_length": 2, "hash_ids": [1, 2, 4]},
    {"timestamp": 90, "input_length": 700, "output_length": 4, "hash_ids": [9, 2]},
]


def of_bytes(item: WorkloadItem, seed: int) -> list[int]:
    """A token for each byte, of made texts too."""
    if item.by_length and item.lengths is not None:
        return list(PromptWriter(lambda text: len(text.encode())).write(item.lengths, seed).encode())
    return list("".join([item.prompt or "", *(f"<{m.role}>{m.content}" for m in item.messages)]).encode())


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., ScriptedEngine | None]]:
    """bench(*arguments): the engine after `adaserve bench` in a folder of its own, which must end with `status`."""
    engines: list[ScriptedEngine] = []

    def open_bench_engine(config: EngineConfig, *, record: bool = False) -> ClientEngine:
        engines.append(ScriptedEngine(Script(tpot_s=0.0005)))
        return ClientEngine(engines[-1], of_bytes, engines[-1].set_policy)

    def run(*arguments: str, status: int = 0) -> ScriptedEngine | None:
        assert run_program("bench", *arguments) == status
        return engines[-1] if engines else None

    monkeypatch.setattr(bench_module, "open_bench_engine", open_bench_engine)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "azure.csv").write_text(AZURE)
    (tmp_path / "mooncake.jsonl").write_text("".join(json.dumps(line) + "\n" for line in MOONCAKE))
    yield run
    for engine in engines:
        engine.close()


QUICK = ("--policies", "ar", "--warmup-requests", "0", "--max-late-ms", "5000", "--duration", "0.3")


def overall(folder: str) -> list[ResultRow]:
    return [row for row in RunResults.load(Path(folder)).rows if row.slo_class == ALL_CLASSES]


def test_azures_lengths_reach_the_engine_at_their_own_times(bench):
    engine = bench(*QUICK, "--workload", "azure.csv", "--rates", "trace", "--slos", "*:tpot=5000", "--out", "o")
    sent = [(len(r.prompt_ids), r.sampling.max_tokens, r.sampling.ignore_eos) for r in engine.submitted]
    assert sent == [(374, 4, True), (396, 9, True), (879, 5, True)]
    (records,) = RunResults.load(Path("o")).records.values()
    assert [record.due_s for record in records] == pytest.approx([0.0, 0.05, 0.12])
    (row,) = overall("o")
    assert (row.arrival_process, row.requests, row.output_tokens, row.attainment) == ("trace", 3, 18, 1.0)


def test_prompts_of_mooncake_share_what_the_trace_says_they_do(bench):
    engine = bench(
        *QUICK, "--workload", "mooncake.jsonl", "--rates", "trace", "--lengths", "scale=0.25,output=3", "--out", "o"
    )
    first, second, third = (request.prompt_ids for request in engine.submitted)
    assert [len(ids) for ids in (first, second, third)] == [275, 300, 175]  # blocks of 512 are 128 tokens
    assert [request.sampling.max_tokens for request in engine.submitted] == [3, 2, 3]
    assert first[:256] == second[:256] and first[256:270] != second[256:270]
    assert first[:10] != third[:10]


def test_rows_say_how_a_workload_was_changed_and_what_varied(bench):
    bench(*QUICK, "--rates", "40", "--urgent-shares", "0.3", "--slo-scales", "0.9", "--arrivals", "gamma:cv=2",
          "--out", "o")  # fmt: skip
    (row,) = overall("o")
    assert row.workload == "packaged urgent code=0.3 scale 0.9"
    assert (row.urgent_share, row.slo_scale, row.burstiness) == (0.3, 0.9, 2.0)
    assert row.arrival_process == "gamma:cv=2"


def test_prompts_as_chats(bench):
    engine = bench(*QUICK, "--rates", "20", "--as-chat", "--out", "o")
    assert all(bytes(request.prompt_ids).startswith(b"<user>") for request in engine.submitted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "scale=0.5"), "workload packaged has texts, and no request that is known by length only"),
        (("--lengths", "half"), "lengths: expected scale (a number above 0), output and context (tokens)"),
        (("--workload", "azure.csv", "--format", "azur"), "no workload format 'azur'; give auto or one of jsonl"),
        (("--workload", "azure.csv", "--format", "mooncake"), "azure.csv"),
        (("--workload", "azure.csv", "--urgent-shares", "0.5"), "must have one class that is the most urgent"),
        (("--workload", "azure.csv", "--slos", "code:tpot=5"), "has no class 'code'; it has default"),
        (("--arrivals", "gamma"), "arrivals: gamma needs cv, such as gamma:cv=2"),
        (("--arrivals", "trace"), "workload packaged says no times of arrival"),
    ],
)
def test_what_cannot_be_is_said_before_an_engine_is_opened(bench, capsys, arguments: tuple[str, ...], message: str):
    assert bench(*QUICK, "--rates", "20", *arguments, "--out", "o", status=2) is None
    assert message in " ".join(capsys.readouterr().err.split())
