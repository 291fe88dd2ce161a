"""What benchmarks/papers and scripts/results_learning.py read of drafts that learn, by hand, from made-up results."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import results_learning
from scripts.results_table import POLICY_PARTS
from tests.bench.scripts import modules_of

NAMES = ("papers.learning_reading", "papers.data", "papers.entry", "papers.running", "papers.online", "osd.views",
         "osd.prompts")  # fmt: skip
WHERE = {"commit": "c0ffee", "machine": "m", "policy": "spec:4", "max_tokens": 64, "temperature": 1.0}


modules = modules_of(*NAMES)


def run(name: str, points: dict[int, dict[str, float]]) -> dict[str, Any]:
    return {
        "name": name, "learn": {}, "serve_s": 61.0, "train_s": 30.4, "compiles_after_ready": 0,
        "learning": {"updates": {"default": 7, "code": 2}},
        "points": [{"requests": at, "acceptance": found, "version": {}} for at, found in points.items()],
    }  # fmt: skip


def written(path: Path, **result: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(WHERE | result))
    return path.parent


def narrow_result(folder: Path, domain: str, start: float, offline: float, *served: float) -> Path:
    """Points at 0, 504, 1000 and so on."""
    points = {at: {domain: value} for at, value in zip((0, 504, 1000, 2000), (start, *served), strict=False)}
    other = run(f"{domain}/lora", {0: {domain: start}, 504: {domain: start + 0.01}})
    acceptance = {"shipped": {domain: 0.6}, "start": {domain: start}, "offline": {domain: offline}}
    return written(
        folder / f"narrow-{domain}.json", acceptance=acceptance, runs=[run(f"{domain}/online", points), other]
    )


def shift_result(folder: Path) -> Path:
    """A point behind each boundary of 4 and 8 requests, as waves of three requests have it; none at 9."""
    acceptance = {"start": {"code": 0.2, "maths": 0.3}, "shipped": {"code": 0.6, "maths": 0.7}}
    points = {
        0: {"code": 0.2, "maths": 0.3}, 3: {"code": 0.45, "maths": 0.33}, 6: {"code": 0.44, "maths": 0.5},
        12: {"code": 0.55, "maths": 0.49},
    }  # fmt: skip
    order = ["code"] * 4 + ["maths"] * 3 + ["code"] * 5
    return written(folder / "shift.json", acceptance=acceptance, runs=[run("shift/one", points)], order=order)


def mixed_result(folder: Path, *ways: str) -> Path:
    ends = {
        "one": {"code": 0.4, "maths": 0.5}, "tag": {"code": 0.46, "maths": 0.48}, "topic": {"code": 0.45, "maths": 0.7}
    }  # fmt: skip
    start = {"code": 0.2, "maths": 0.3}
    runs = [run(f"mixed/{way}", {0: start, 8: ends[way]}) for way in ways]
    acceptance = {"start": start, "shipped": {"code": 0.6, "maths": 0.7}}
    return written(folder / "mixed.json", acceptance=acceptance, runs=runs, order=["maths", "code"] * 4)


def latency_rows() -> list[dict[str, Any]]:
    def row(draft: str, policy: str, tpot_ms: float, times: float) -> dict[str, Any]:
        return {
            "draft": draft, "policy": policy, "kept": 1.25, "acceptance": 0.5, "draft_share": 0.04, "tpot_ms": tpot_ms,
            "times": times, "times_low": times - 0.1, "times_high": times + 0.1, "formula_times": 1.6,
        }  # fmt: skip

    return [
        row("start", "spec:2", 20.0, 1.0), row("start", "spec:4", 24.0, 0.9), row("online", "spec:2", 15.0, 1.5),
        row("online", "spec:4", 16.0, 1.4),
    ]  # fmt: skip


def test_offline_ways_are_judged_by_what_each_gained(modules, tmp_path: Path) -> None:
    ends = {"teacher": 0.5, "student": 0.4, "mixed": 0.52, "reverse_kl": 0.45, "jsd": 0.49}
    for way, end in ends.items():
        evaluations = [{"epoch": at, "acceptance": value} for at, value in enumerate((0.2, 0.3, end))]
        written(tmp_path / way / "distilled.json", evaluations=evaluations)
    folders = {f"distilled-{way}": tmp_path / way for way in ends}
    found = modules["learning_reading"].offline({way: f"distilled-{way}" for way in ends})(folders)
    assert found.values["teacher: gain"] == pytest.approx(0.3) and found.values["jsd: gain"] == pytest.approx(0.29)
    assert found.values["teacher above other samplings"] == pytest.approx(-0.02)
    assert found.values["kl above other losses"] == pytest.approx(0.01)
    assert found.about == {"commit": "c0ffee", "machine": "m"}
    (drawn,) = found.shown
    assert drawn.panels[0].series[2].name == "mixed" and drawn.panels[0].series[2].y == (0.2, 0.3, 0.52)
    code = [claim.paper for claim in modules["learning_reading"].OFFLINE_CLAIMS]
    assert code[:4] == pytest.approx([0.27, 0.13, 0.23, 0.04]) and code[4] is None


def test_time_per_token_is_of_the_best_chain_and_between_drafts_of_the_longest(modules, tmp_path: Path) -> None:
    rows = latency_rows()
    written(tmp_path / "latency.json", rows=rows, target="110M", domain="code")
    values = modules["learning_reading"].latency("s")({"s": tmp_path}).values
    assert values["online: times plain"] == 1.5 and values["start over online"] == 1.5
    assert values["offline: times plain"] is None and values["start over offline"] is None


def test_table_3_times_the_drafts_that_learning_from_one_kind_leaves(modules, tmp_path: Path) -> None:
    from benchmarks.osd.online_learning import offline_of, start_of
    from benchmarks.osd.prompts import Domain

    count = int(modules["online"].FEW[modules["online"].FEW.index("--requests") + 1])
    domain = Domain("code", ["prompt"] * count, [])
    for name in ("start", f"offline-start-code-{count}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")  # it is there already
    made = start_of(tmp_path), offline_of(tmp_path, start_of(tmp_path), domain)
    argv = modules["online"].LATENCY.argv
    named = dict(each.split("=") for each in argv[argv.index("--drafts") + 1].split(","))
    assert [Path(named[kind]).name for kind in ("start", "offline")] == [Path(each).name for each in made]


def test_heads_and_a_draft_that_learned_are_compared_kind_by_kind(modules, tmp_path: Path) -> None:
    def latency(name: str, **times: float) -> Path:
        rows = [{"draft": draft, "times": each - less} for draft, each in times.items() for less in (0.25, 0.0, 0.5)]
        return written(tmp_path / name / "latency.json", rows=rows)

    folders = {
        "heads code": latency("hc", start=1.25, online=2.0), "heads maths": latency("hm", start=2.0, online=2.5),
        "draft code": latency("dc", start=1.0, offline=3.0, online=3.0), "draft maths": latency("dm", online=1.5),
    }  # fmt: skip
    runs = [run(f"{kind}/{what}", {0: {"code": 0.2, "maths": 0.4}, 9: {"code": 0.3, "maths": end}})
            for what, end in (("heads", 0.5), ("draft", 0.7)) for kind in ("code", "maths")]  # fmt: skip
    folders["learned"] = written(tmp_path / "l" / "medusa.json", runs=runs)
    steps = {(what, kind): f"{what} {kind}" for kind in ("code", "maths") for what in ("heads", "draft")}
    found = modules["learning_reading"].medusa(steps, "learned")(folders)
    assert found.values == pytest.approx({
        "code: Medusa": 1.25, "code: Medusa, online": 2.0, "code: draft, online": 3.0, "maths: Medusa": 2.0,
        "maths: Medusa, online": 2.5, "maths: draft, online": 1.5, "code: learned over first": 1.6,
        "maths: learned over first": 1.25, "code: draft over learned heads": 1.5, "code: draft over first heads": 2.4,
        "maths: draft over learned heads": 0.6, "maths: draft over first heads": 0.75,
    })  # fmt: skip
    maths = found.shown[1].panels[1]
    assert (maths.title, *(each.y for each in maths.series)) == ("maths", (0.4, 0.5), (0.4, 0.7))


def test_learning_from_one_kind_is_judged_by_the_kind_that_gains_least(modules, tmp_path: Path) -> None:
    narrow_result(tmp_path / "c", "code", 0.2, 0.5, 0.4, 0.48, 0.45)
    narrow_result(tmp_path / "m", "maths", 0.3, 0.4, 0.5)
    steps = {"code": "narrow-code", "maths": "narrow-maths"}
    found = modules["learning_reading"].narrow(steps)({"narrow-code": tmp_path / "c", "narrow-maths": tmp_path / "m"})
    assert found.values == {
        "least gain": pytest.approx(0.2), "most gain": pytest.approx(0.25),
        "most start over offline": pytest.approx(0.75), "least online over offline": pytest.approx(0.9),
    }  # fmt: skip
    code, maths = found.shown[0].panels
    assert code.series[0].x == (0, 504, 1000, 2000) and code.series[1].y == (0.5,) * 4
    assert maths.series[0].y == (0.3, 0.5)


def test_a_dip_is_what_the_next_kind_has_less_at_the_change(modules, tmp_path: Path) -> None:
    shift_result(tmp_path)
    first, second, third = modules["views"].phases(json.loads((tmp_path / "shift.json").read_text()))
    assert (first.first, first.stop, first.before, first.after, first.last) == (0, 4, 0.2, 0.45, 0.55)
    assert (second.domain, second.first, second.stop, second.before, second.after) == ("maths", 4, 7, 0.33, 0.5)
    assert (third.before, third.after) == (0.44, 0.55)
    found = modules["learning_reading"].shift("s")({"s": tmp_path})
    assert found.values == {
        "most dip": pytest.approx(0.45 - 0.33), "least regained": pytest.approx(0.11),
        "regained over the most dip": pytest.approx(0.17 / 0.12),
    }  # fmt: skip


def test_a_draft_for_each_kind_is_compared_with_one_kind_by_kind(modules, tmp_path: Path) -> None:
    mixed_result(tmp_path, "one", "tag", "topic")
    read = modules["learning_reading"]
    assert read.routed("s")({"s": tmp_path}).values == {
        "tag: least lead": pytest.approx(-0.02), "tag: most lead": pytest.approx(0.06),
        "topic: least lead": pytest.approx(0.05), "topic: most lead": pytest.approx(0.2),
    }  # fmt: skip
    assert read.topics("s")({"s": tmp_path}).values == {
        "least gain": pytest.approx(0.25), "least acceptance": pytest.approx(0.45)
    }  # fmt: skip
    mixed_result(tmp_path, "one", "tag")
    assert read.routed("s")({"s": tmp_path}).values["topic: least lead"] is None


def test_every_claim_names_a_number_that_its_reader_finds(modules, tmp_path: Path) -> None:
    narrow_result(tmp_path, "code", 0.2, 0.5, 0.4)
    narrow_result(tmp_path, "maths", 0.3, 0.4, 0.5)
    shift_result(tmp_path)
    mixed_result(tmp_path, "one", "tag", "topic")
    written(tmp_path / "latency.json", rows=latency_rows(), target="110M", domain="code")
    written(tmp_path / "distilled.json", evaluations=[{"epoch": 0, "acceptance": 0.2}])
    learned = {0: {"code": 0.2, "maths": 0.3}}
    runs = [run(f"{kind}/{what}", learned) for kind in ("code", "maths") for what in ("heads", "draft")]
    written(tmp_path / "medusa.json", runs=runs)
    for entry in modules["online"].ENTRIES:
        form = entry.forms.get("engine")
        if form is not None:
            values = form.read({step.name: tmp_path for step in form.steps}).values
            assert {claim.value for claim in form.claims} <= values.keys(), entry.name


def test_placeholders_are_filled_wherever_they_stand(modules, tmp_path: Path) -> None:
    ran: list[list[str]] = []
    step = modules["entry"].Step("x", ("python", "a=b c", "old={narrow}/a,new={narrow}/b", "{here}/f", "{gsm8k}"), 1)
    assert modules["running"].command(step) == "python 'a=b c' old={narrow}/a,new={narrow}/b {here}/f {gsm8k}"
    form = modules["entry"].Form((step,), lambda _: None, (), "w", "f")
    modules["running"].run_form(form, tmp_path, None, run=lambda argv: ran.append(argv[1:]) or 0, note=lambda _: None)
    made = tmp_path / "made-workloads" / "gsm8k" / "train.jsonl.gz"
    assert ran == [["a=b c", f"old={tmp_path}/narrow/a,new={tmp_path}/narrow/b", f"{tmp_path}/x/f", str(made)]]
    assert modules["running"].data_of(form, None) == "made in place of GSM8K's questions"
    assert modules["running"].data_of(form, tmp_path) == "GSM8K's questions"


def test_made_questions_are_what_learning_asks_and_their_answers_are_right(modules, tmp_path: Path) -> None:
    modules["data"].make_data("gsm8k", tmp_path)
    path = modules["data"].find_data("gsm8k", tmp_path)
    with gzip.open(path, "rt") as lines:
        asked = [json.loads(each) for each in lines]
    assert len({each["question"] for each in asked}) == len(asked) == 4000
    numbers = {each["question"]: each["answer"].removeprefix("#### ") for each in asked}
    saved = next(question for question in numbers if " and saves $" in question)
    first, more = (int(part.split()[0]) for part in saved.split("$")[1:3])
    times = int(saved.split(" after ")[1].split()[0])
    assert int(numbers[saved]) == first + more * times
    assert all(int(answer) > 0 for answer in numbers.values())
    (found,) = modules["prompts"].domains(("maths",), path, 3, 64)
    assert len(found.served) == 3 and len(found.judged) == 64
    assert found.served[0].startswith("Question: ") and not set(found.served) & set(found.judged)
    again = tmp_path / "again"
    modules["data"].make_data("gsm8k", again)
    assert modules["data"].find_data("gsm8k", again).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_prompts_are_written_as_distill_reads_them(modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = list(modules["prompts"].library_files())  # the standard library is read once
    monkeypatch.setattr(modules["prompts"], "library_files", lambda: iter(files))
    path = tmp_path / "new" / "code.jsonl"
    modules["prompts"].write("code", 3, path)
    prompts = [json.loads(each)["prompt"] for each in path.read_text().splitlines()]
    assert prompts == modules["prompts"].domains(("code",), None, 3, 0)[0].served and len(prompts) == 3


def test_tables_of_learning_show_what_there_is(tmp_path: Path) -> None:
    assert results_learning.online_tables(tmp_path / "none") == []
    narrow_result(tmp_path, "code", 0.2, 0.5, 0.4, 0.48, 0.45)
    shift_result(tmp_path)
    narrow, shift = results_learning.online_tables(tmp_path)
    assert "| code | online | 0.200 | 0.400 | 0.480 | 0.450 | +0.250 | 0.500 | 90% | 0.600 | 9 | 30 | 61 |" in narrow
    assert "| code | lora | 0.200 | 0.210 | - | - | +0.010 | 0.500 | 42% |" in narrow
    assert "| maths | 5 to 7 | 0.330 | 0.500 | +0.170 | 0.490 | 0.300 | 0.700 |" in shift
    mixed_result(tmp_path, "one", "tag")
    mixed = results_learning.online_tables(tmp_path)[2]
    assert "| code | 0.200 | 0.400 | 0.460 | +0.060 | - | - |" in mixed
    assert "| maths | 0.300 | 0.500 | 0.480 | -0.020 | - | - |" in mixed
    for table in (narrow, shift, mixed):
        assert table.endswith("m. Commit c0ffee.")
        rows = [row.count("|") for row in table.splitlines() if row.startswith("|")]
        assert len(set(rows)) == 1


def test_tables_of_time_and_cost() -> None:
    result = WHERE | {
        "target": "110M", "domain": "code", "prompts": 16, "plain_tpot_ms": 25.0, "compiles_after_ready": 0,
        "rows": latency_rows(),
    }  # fmt: skip
    assert (
        "| online | `spec:2` | 1.25 | 0.500 | 0.040 | 15.0 | 1.50 (1.40 to 1.60) | 1.60 | 1.50 | 1.00 |"
        in results_learning.latency_table(result)
    )
    load = {
        "load": 0.5, "pairs": 4, "attainment": {"plain": 0.99, "learning": 0.97}, "attainment_cost": 0.02,
        "throughput_tps": {"plain": 80.0, "learning": 79.5}, "delayed_s": 1.5, "idle_s": 40.0, "versions": 9,
    }  # fmt: skip
    cost = WHERE | {
        "capacity_rps": 2.5, "learn": {"learn_delay_ms": 50.0}, "compiles_after_ready": 0, "delay_max_s": 0.052,
        "loads": [load, {"load": 1.2, "pairs": 0}],
    }  # fmt: skip
    table = results_learning.cost_table(cost)
    assert (
        "| 0.5 | 4 | 99.0% | 97.0% | 2.0 | 80.0 | 79.5 | 1.50 | 40.0 | 9 |" in table
        and "the longest that requests waited for 52 ms" in table
        and "| 1.2 |" not in table
    )
    assert (
        POLICY_PARTS["learning-latency"] is results_learning.latency_table
        and POLICY_PARTS["learning-cost"] is results_learning.cost_table
    )
