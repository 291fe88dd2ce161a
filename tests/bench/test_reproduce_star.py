"""StarSD's table 1 and figures 4 to 6: what is measured, what is read of it, and one of them run in small."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import sqrt
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import RequestError
from adaserve_jax.results.provenance import machine_name
from adaserve_jax.stats import DrafterStats, StepStats
from tests.bench.scripts import modules_of
from tests.waiting import PATIENCE_S, wait_until

SCRIPTS = (
    "starsd.apart",
    "starsd.engines",
    "starsd.idle",
    "starsd.runs",
    "starsd.service",
    "starsd.targets",
    "starsd.table1",
)
NAMES = ("papers.reproduce", *(f"papers.{name}" for name in ("registry", "running", "star_claims", "star_reading")))
ABOUT = {"commit": "c0ffee", "machine": machine_name(), "draft": "draft-10M", "target": "demo"}
SHAPE = {"depth": 4, "width": 1, "verify_s": 0.015}


modules = modules_of(*SCRIPTS, *NAMES)


def row(n: int, batched: bool, tps: float, rounds_per_s: float, load: float) -> dict[str, Any]:
    return {
        "n": n, "kind": "measured", "batched": batched, "throughput_tps": tps, "per_target_tps": tps / n,
        "wait_s": 0.001 * n, "idle_s": 0.02 / n, "rounds_per_s": rounds_per_s, "load": load,
    }  # fmt: skip


ALONE = [row(1, False, 80.0, 32.0, 0.4), row(2, False, 150.0, 60.0, 0.7), row(3, False, 200.0, 80.0, 0.9),
         row(4, False, 210.0, 84.0, 0.97), row(6, False, 220.0, 88.0, 0.99)]  # fmt: skip
TOGETHER = [row(1, True, 78.0, 31.0, 0.4), row(6, True, 330.0, 130.0, 0.95)]
SIMULATED = [row(1, False, 9.0, 9.0, 0.9) | {"kind": "simulated"}]
TABLE = ABOUT | {
    "shape": SHAPE, "rows": [*ALONE, *TOGETHER, *SIMULATED],
    "colocated": {"throughput_tps": 100.0, "rounds_per_s": 40.0},
    "engines": {
        "target": "110M-f32", "rows": [row(1, False, 50.0, 20.0, 0.4), row(2, False, 60.0, 24.0, 0.6)], "spread": [],
        "verify_s": 0.03, "texts": 8, "same_texts": 8,
        "colocated": {
            "draft": [{"throughput_tps": 70.0}, {"throughput_tps": 74.0}],
            "EAGLE-3 head": [{"throughput_tps": 73.0}, {"throughput_tps": 77.0}],
        },
    },
}  # fmt: skip
WINDOWS = [
    {
        "together": {"throughput_tps": tokens * 1.25, "rounds_per_s": 40.0, "service_s": 0.01},
        "apart": {
            "throughput_tps": tokens, "rounds_per_s": rounds, "service_s": 0.01, "wait_s": 0.0, "message_s": 0.002,
        },
        "others_share": 0.1,
    }
    for tokens, rounds in ((60.0, 30.0), (80.0, 30.0), (100.0, 36.0))
]  # fmt: skip
APART = ABOUT | {"shape": SHAPE, "windows": WINDOWS}
IDLE = ABOUT | {
    "device": "cpu", "depth": 4,
    "rows": [
        {"idle_s": 0.0, "warm": 0, "token_s": [0.001, 0.002, 0.003]},
        {"idle_s": 0.03, "warm": 0, "token_s": [0.002, 0.003, 0.007]},
        {"idle_s": 0.03, "warm": 8, "token_s": [0.002, 0.0024, 0.004]},
    ],
}  # fmt: skip


def read(modules: dict[str, ModuleType], reader: str, result: dict[str, Any], name: str, folder: Path) -> Any:
    (folder / name).write_text(json.dumps(result))
    return getattr(modules["star_reading"], reader)("step")({"step": folder})


def test_the_table_is_read_of_drafts_one_by_one(modules, tmp_path: Path) -> None:
    found = read(modules, "table1", TABLE, "table1.json", tmp_path)
    assert found.values == pytest.approx({
        "tokens: six over one": 2.75, "tokens: three over colocated": 2.0, "of a target: six over one": 220 / 6 / 80,
        "load: six": 0.99, "idle: six": 20 / 6,
    })  # fmt: skip
    (shown,) = found.shown
    assert [series.name for series in shown.panels[0].series] == ["batched", "one by one", "the paper"]
    assert shown.panels[0].series[1].y == (80.0, 150.0, 200.0, 210.0, 220.0)
    fewer = TABLE | {"rows": ALONE[:2]}
    found = read(modules, "table1", fewer, "table1.json", tmp_path)
    assert set(found.values.values()) == {None}, "where targets were left out nothing is made up"


def test_rounds_of_a_target_are_the_draft_s_over_targets(modules, tmp_path: Path) -> None:
    found = read(modules, "rounds", TABLE, "table1.json", tmp_path)
    assert found.values == pytest.approx({
        "draft: three over one": 2.5, "draft: six over four": 88 / 84, "target: two over one": 30 / 32,
        "target: six over three": (88 / 6) / (80 / 3), "load: four": 0.97,
    })  # fmt: skip


def test_whole_engines_are_read_apart_from_paced_targets(modules, tmp_path: Path) -> None:
    found = read(modules, "engines", TABLE, "table1.json", tmp_path)
    assert found.values == {
        "tokens: two over one": 1.2, "same texts": 1.0, "tokens: head over service": 1.5, "tokens: two over head": 0.8
    }  # fmt: skip
    (shown,) = found.shown
    assert "110M-f32, 30.0 ms a verification; in the target's process draft 72.0 tokens/s" in shown.caption
    assert "EAGLE-3 head 75.0 tokens/s" in shown.caption and len(shown.rows) == 2


def test_apart_is_compared_window_by_window(modules, tmp_path: Path) -> None:
    found = read(modules, "apart", APART, "apart.json", tmp_path)
    fluctuation = (sqrt(12.0) / 32) / (20 / 80)
    assert found.values == pytest.approx({
        "tokens: apart over together": 0.8, "rounds: apart over together": 0.8,
        "fluctuation: rounds over tokens": fluctuation,
    })  # fmt: skip
    parts = {series.name: series.y for series in found.shown[0].panels[-1].series}
    assert parts["messages"] == pytest.approx((2.0, 2.0, 2.0)) and parts["the draft"] == pytest.approx((10.0,) * 3)


def test_idle_times_are_compared_by_their_medians(modules, tmp_path: Path) -> None:
    found = read(modules, "idle", IDLE, "idle.json", tmp_path)
    assert found.values == pytest.approx({
        "token: idle over steady": 1.5, "deviation: idle over steady": sqrt(7.0), "token: warm over cold": 0.8,
    })  # fmt: skip
    by_idle, by_warm = found.shown
    assert by_idle.panels[0].series[1].y == pytest.approx((2.0, 3.0))
    assert by_warm.panels[0].series[1].x == (0, 8)
    once = IDLE | {"rows": [each | {"token_s": each["token_s"][:1]} for each in IDLE["rows"]]}
    assert read(modules, "idle", once, "idle.json", tmp_path).values["deviation: idle over steady"] is None


def test_the_paper_s_ratios_are_those_of_its_table(modules) -> None:
    claims = modules["star_claims"]
    paper = {claim.value: claim.paper for name in vars(claims) if name.endswith("_CLAIMS")
             for claim in getattr(claims, name)}  # fmt: skip
    assert paper["tokens: six over one"] == pytest.approx(288.7 / 79.9)
    assert paper["tokens: apart over together"] == pytest.approx(79.9 / 94.3)
    assert paper["target: six over three"] == pytest.approx(14.10 / 23.38)
    assert paper["load: four"] == pytest.approx(0.914) and paper["idle: six"] == 0.0


def test_every_figure_is_run_judged_and_shown(modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With commands that only write what the scripts would; table 1 and figure 5 share theirs."""
    reproduce, running, ran = modules["reproduce"], modules["running"], []
    results = {f"benchmarks.starsd.{name}": r for name, r in (("table1", TABLE), ("apart", APART), ("idle", IDLE))}

    def write(argv: Sequence[str]) -> int:
        ran.append(argv[2])
        Path(argv[-1]).write_text(json.dumps(results[argv[2]]))
        return 0

    monkeypatch.setattr(reproduce, "run_form", partial(running.run_form, run=write))
    monkeypatch.delitem(reproduce.pages.RENDERERS, ".html")
    done = CliRunner().invoke(reproduce.app, ["run", "starsd", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert ran == list(results)
    for name, held in (("starsd-table-1", 4), ("starsd-4", 3), ("starsd-5", 5), ("starsd-6", 3)):
        kept = json.loads((tmp_path / f"{name}-cpu.json").read_text())
        (entry,) = modules["registry"].find([name])
        assert sum(claim.holds(kept["values"][claim.value]) for claim in entry.forms["cpu"].claims) == held
        assert "here / the paper" in (tmp_path / f"{name}-cpu.md").read_text()
    done = CliRunner().invoke(reproduce.app, ["run", "starsd-table-1", "--size", "engine", "--out", str(tmp_path)])
    assert done.exit_code == 0 and "texts that equal what the target writes alone" in done.output


@pytest.mark.slow
def test_an_idle_draft_is_timed_from_end_to_end(modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded draft, a sample of each setting."""
    monkeypatch.delitem(modules["reproduce"].pages.RENDERERS, ".html")
    entries = modules["registry"].ENTRIES
    form = entries["starsd-6"].forms["cpu"]
    (step,) = form.steps
    small = replace(form, steps=(replace(step, argv=(*step.argv, "--draft", "demo", "--samples", "2")),))
    monkeypatch.setitem(entries, "starsd-6", replace(entries["starsd-6"], forms={"cpu": small}))
    done = CliRunner().invoke(modules["reproduce"].app, ["run", "starsd-6", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "star-idle" / "idle.json").read_text())["rows"]
    assert len(rows) == 12 and all(len(row["token_s"]) == 2 and min(row["token_s"]) > 0 for row in rows)
    assert all(value > 0 for value in json.loads((tmp_path / "starsd-6-cpu.json").read_text())["values"].values())


def test_only_the_draft_after_sleep_and_warming_up_is_timed(modules) -> None:
    """A draft of 8 ms that takes 2 ms more for every chain less than two since it slept, and 1 s at its very first."""
    idle = modules["idle"]
    now, cold, drafts = 0.0, 2, 0

    def draft() -> None:
        nonlocal now, cold, drafts
        now += 0.008 + 0.002 * cold + (drafts == 0)
        cold, drafts = max(cold - 1, 0), drafts + 1

    def sleep(seconds: float) -> None:
        nonlocal now, cold
        now, cold = now + seconds, 2

    settings = [idle.Setting(0.0, 0), idle.Setting(0.03, 0), idle.Setting(0.03, 1), idle.Setting(0.03, 8)]
    found = idle.measure(draft, 4, 3, settings, clock=lambda: now, sleep=sleep)
    assert [[round(1e3 * each, 6) for each in seconds] for seconds in found.values()] == [
        [2.0] * 3, [3.0] * 3, [2.5] * 3, [2.0] * 3
    ]  # fmt: skip
    assert list(found) == settings and drafts == 3 * (4 * (idle.STEADY + 1) + 9)
    slept = {setting.idle_s for setting in idle.SETTINGS}
    assert slept == set(idle.IDLE_S) and (idle.Setting(0.03, 8) in idle.SETTINGS)


def test_a_round_apart_is_draft_queue_and_messages(modules) -> None:
    counts = modules["service"].Counts(5.0, 3.0, 2.0, 1.6, 160.0, 160.0, 0.32, 160.0)
    tally = modules["targets"].Tally(160, 400, 240, 162, 2.4, 160, 2.4)
    window = modules["apart"].window_of(modules["runs"].Run(1, False, 0, 5.0, counts, tally, None))
    assert window == pytest.approx({
        "throughput_tps": 80.0, "rounds_per_s": 32.0, "service_s": 0.010, "wait_s": 0.002, "message_s": 0.003
    })  # fmt: skip


class Writer:
    """An LLM that makes of each prompt what a text says, but for those of `wrong`, three tokens at a time."""

    def __init__(self, texts: Sequence[Any], wrong: int) -> None:
        self._texts, self._wrong = {text.seed: text for text in texts}, wrong
        self.asked: list[int] = []
        self.steps = StepStats()

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(scheduler=self.steps, drafter=DrafterStats(rounds=7, round_s=0.7))

    def stream(self, prompt: list[int], sampling: Any) -> Iterator[SimpleNamespace]:
        text = self._texts[sampling.seed]
        assert prompt == list(text.prompt) and sampling.max_tokens == len(text.output) and sampling.ignore_eos
        self.asked.append(sampling.seed)
        output = [0, *text.output[1:]] if sampling.seed == self._wrong else list(text.output)
        for at in range(0, len(output), 3):
            self.steps.generation_tokens += len(output[at : at + 3])
            yield SimpleNamespace(token_ids=output[at : at + 3], error=None)


def test_a_whole_engine_goes_through_the_texts_until_it_is_told_to_pause(modules) -> None:
    targets = modules["targets"]
    texts = [targets.Text((1, 2), tuple(range(5, 5 + 4 * (1 + seed))), seed, 0.7) for seed in range(3)]
    llm = Writer(texts, wrong=1)
    loop = modules["engines"]._Loop(llm, texts, 2)
    assert loop.tally() == modules["engines"].Engines(drafted=7, round_s=0.7) and not llm.asked
    loop.run(True)
    wait_until(lambda: loop.tally().texts >= 30)
    loop.run(False)
    loop.end()
    tally = loop.tally()
    assert llm.asked[:4] == [2, 0, 1, 2], "from the text that it begins with, round and round"
    assert tally.same in (tally.texts * 2 // 3, tally.texts * 2 // 3 + 1)
    assert tally.tokens == llm.steps.generation_tokens
    assert (tally + tally - tally) == tally


def test_a_request_that_fails_ends_the_measurement(modules) -> None:
    text = modules["targets"].Text((1, 2), (3, 4, 5), 0, 0.7)
    llm = Writer([text], wrong=1)
    llm.stream = lambda prompt, sampling: iter([SimpleNamespace(token_ids=[], error="out of pages")])
    loop = modules["engines"]._Loop(llm, [text], 0)
    loop.run(True)
    loop._thread.join(PATIENCE_S)
    for _ in range(2):
        with pytest.raises(RequestError, match="a target's request failed: out of pages"):
            loop.tally()
    loop.end()


def test_an_engine_asks_the_service_or_has_a_draft_of_its_own(modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """`EngineConfig` takes what is asked for; the process answers a tally and ends when it is told to."""
    engines, built = modules["engines"], []

    @contextmanager
    def build(target: str, draft: str | None, policy: str, **options: Any) -> Iterator[Writer]:
        built.append(EngineConfig(**{"target": target, "draft": draft, "policy": policy, **options}))
        yield Writer([text], wrong=1)

    text = modules["targets"].Text((1, 2), (3, 4), 0, 0.7)
    monkeypatch.setattr("adaserve_jax.LLM", build)
    remote = engines.Engine("folder", None, 4)
    for engine, service in ((remote, 7070), (replace(remote, draft="beside"), 0)):
        ours, theirs = Pipe()
        for said in ("tally", "end"):
            ours.send(said)
        engines.run_engine(theirs, service, 0, [text], engine)
        assert ours.recv() == "ready" and ours.recv()[0].texts == 0
    there, here = built
    assert there.drafter is not None and there.drafter.addresses == ("127.0.0.1:7070",) and there.draft is None
    assert here.drafter is None and here.draft == "beside" and here.policy == "spec:4"


def test_the_spread_over_rounds_is_that_of_each_quantity(modules) -> None:
    runs = []
    for number, (rounds, wait_s) in enumerate(((100.0, 0.3), (120.0, 0.1), (90.0, 0.2))):
        counts = modules["service"].Counts(10.0, 4.0, 6.0, 6.0, rounds, rounds, wait_s * rounds, rounds)
        tally = modules["targets"].Tally(tokens=int(3 * rounds))
        runs.append(modules["runs"].Run(2, True, number, 10.0, counts, tally, None))
    ((middle,), (spread,)) = modules["runs"].medians(runs), modules["runs"].spread(runs)
    assert (middle.rounds_per_s, middle.wait_s) == pytest.approx((10.0, 0.2))
    assert (spread["least"]["rounds_per_s"], spread["most"]["rounds_per_s"]) == (9.0, 12.0)
    assert (spread["least"]["wait_s"], spread["most"]["wait_s"]) == pytest.approx((0.1, 0.3))
    assert spread["least"]["n"] == spread["most"]["n"] == 2 and spread["most"]["kind"] == "measured"
    refused = modules["service"].Counts(5.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    plain = modules["runs"].Run(1, False, 0, 5.0, refused, modules["targets"].Tally(tokens=50), None).row()
    assert (plain.throughput_tps, plain.rounds_per_s, plain.wait_s, plain.load) == (10.0, 0.0, 0.0, 0.0)
