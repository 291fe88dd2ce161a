"""benchmarks/adaserve/validation.py: the same requests as a workload and as a trace, and how its results are judged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import append_rows
from adaserve_jax.results.profile import ServingFactors
from adaserve_jax.scheduler.cost_model import ServedTimes, TimesOfKind
from tests.bench.scripts import imported
from tests.report.made import request, rows_of


@pytest.fixture(scope="module")
def validation():
    with imported("adaserve.validation") as found:
        yield found["validation"]


def write(path: Path, lines: list[dict]) -> None:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def asked(validation, tmp_path: Path):
    """Two requests out of three: code at 1.2 times the baseline, and a chat at 50 ms where a token takes 30."""
    about = {"output_length": 256}
    lines = [
        {"t_ms": 6000.0, "prompt_id": "chat-1", "slo_ratio": -50.0, "input_length": 26, **about},
        {"t_ms": 0.0, "prompt_id": "code-1", "slo_ratio": 1.2, "input_length": 130, **about},
        {"t_ms": 9000.0, "prompt_id": "code-1", "slo_ratio": 1.2, "input_length": 130, **about},
    ]
    write(tmp_path / "t.jsonl.gz", lines)
    with pytest.raises(ConfigError, match=r"has no prompts_\*.jsonl.gz"):
        validation.asked_requests(tmp_path, "t", count=2, new_tokens=48, baseline_s=0.015, temperature=0.0)
    write(tmp_path / "prompts_code.jsonl.gz", [{"id": "code-1", "prompt": "def add(a, b):\n    return a + b\n" * 9}])
    write(tmp_path / "prompts_chat.jsonl.gz", [{"id": "chat-1", "prompt": "How many apples are left?"}])
    return validation.asked_requests(tmp_path, "t", count=2, new_tokens=48, baseline_s=0.015, temperature=0.0)


def test_requests_are_scaled_to_the_machine(validation, asked):
    """Half of the paper's baseline latency: half of every target; a thirteenth of every prompt."""
    assert [each.item.slo_class for each in asked] == ["code", "chat"]
    assert [each.prompt_tokens for each in asked] == [10, 2]
    assert [each.item.slo.tpot_ms for each in asked] == pytest.approx([18.0, 25.0])
    assert {each.item.slo.ttft_ms for each in asked} == {2000.0}
    workload = validation.as_workload(asked, 2.0)
    assert [item.arrival_s for item in workload.items] == [0.0, 1.0]
    assert workload.items[0].prompt.startswith("def add(a, b):")
    trace = validation.as_trace([each.measured(range(7)) for each in asked])
    assert [(r.due_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(0.0, 7, 48), (6.0, 7, 48)]


class Idle(LocalEngine):
    served = ServedTimes({(4, 8): TimesOfKind(3, 0.06, 0.03)}, overhead={(False, 8): TimesOfKind(3, 0.006)})


def test_runs_of_other_settings_are_made_again(validation, asked, tmp_path: Path, monkeypatch) -> None:
    engine, ran = SimpleNamespace(client=object.__new__(Idle)), []

    def run_bench(plan, workload, start, folder: Path) -> None:
        ran.append(plan.policies)
        folder.mkdir()
        append_rows(folder / "results.jsonl", rows_of([request()], wall_s=1.0))

    monkeypatch.setattr(validation, "run_bench", run_bench)
    for key in ("a", "a", "b", "b"):
        found = validation.measure_real(engine, asked, ("ar",), (2.0,), 1, tmp_path, key)
        assert (found["ar", 2.0][0].served.verify, found["ar", 2.0][0].served.overhead_s) == pytest.approx((2.0, 0.002))
    assert ran == [("ar",)] * 2


def point(validation, policy: str, real: float, simulated: float):
    sides = [{"attainment_tpot": x, "attainment": x, "goodput_tps": 100 * x} for x in (real, simulated, real)]
    return validation.Compared(policy, 1.0, *sides, [ServingFactors(1.0, 1.0)], [sides[0]])


def test_differences_and_orders(validation):
    one, two = point(validation, "one", 0.8, 0.84), point(validation, "two", 0.5, 0.83)
    assert one.difference("attainment") == pytest.approx(0.04)
    assert one.difference("goodput_tps") == pytest.approx(0.05)
    assert one.difference("goodput_tps", "as_served") == 0.0
    assert validation.order([two, one], "real") == ["one", "two"]
    assert validation.same_order([one, two])
    three = point(validation, "three", 0.5, 0.9)
    assert not validation.same_order([one, three])
    assert validation.same_order([one, three], "as_served")
    assert validation.same_order([one, point(validation, "four", 0.79, 0.9)]), "hardly apart in one of them"
