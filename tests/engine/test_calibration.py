"""A real engine that starts from a wrong table: it learns, the text stays, and what it learned is kept."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.build import SAVE_EVERY_S, CalibrationFile
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.scheduler.acceptance import Calibrator
from adaserve_jax.tree.acceptance_table import ChanceTable, read_chances, write_chances
from adaserve_jax.types import CandidateTrees, StepPlan
from tests.engines import seeded_texts
from tests.oracles.llama import oracle_logits

SHIPPED = resolve_folder("demo", "draft").parent / "calibration.json"
PROMPTS = ["def add(a, b):\n", "import os\n", "class Node:\n    def", "for i in", "x = [", "# Sort the list"]
CONFIG = EngineConfig(
    deterministic=True, max_requests=6, max_context=128, max_batch_tokens=32, max_depth=2, max_width=2, eq8_eq9=True
)


class Recorder:
    """Stands before an engine's drafter and keeps plans and candidates."""

    def __init__(self, engine: LocalEngine):
        self._executor = engine.executor
        self._inner = self._executor.speculate
        self.seen: list[tuple[StepPlan, CandidateTrees]] = []

    def __enter__(self) -> Recorder:
        self._executor.speculate = self  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.speculate = self._inner  # type: ignore[method-assign]

    def __call__(self, plan: StepPlan) -> CandidateTrees:
        candidates = self._inner(plan)
        self.seen.append((plan, candidates))
        return candidates


def check_f(candidates: CandidateTrees, log_chance: np.ndarray) -> int:
    """log f is that of the parent and the node's own chance; how many nodes there were."""
    rows, columns = np.nonzero(np.isfinite(candidates.log_f))
    parent = candidates.parent[rows, columns]
    above = np.where(parent < 0, 0.0, candidates.log_f[rows, parent])
    np.testing.assert_allclose(candidates.log_f[rows, columns], above + log_chance[rows, columns], atol=1e-4)
    return len(rows)


@pytest.mark.slow
def test_a_wrong_table_is_mended_while_the_text_stays(tmp_path: Path) -> None:
    file = tmp_path / "learned.json"
    shipped = read_chances(SHIPPED)
    write_chances(file, ChanceTable(np.full_like(shipped.chance, 0.9), shipped.edges))
    engine = LocalEngine(replace(CONFIG, calibration=str(file)))
    engine.start()
    try:
        llm, calibrator = LLM.over(engine), engine.assembly.calibrator
        assert calibrator is not None
        check_calibrated(engine, llm)
        check_uncalibrated(engine, llm)
        llm.set_policy("ar")
        plain = {temperature: seeded_texts(llm, PROMPTS, temperature, 24) for temperature in (0.0, 0.8)}
        llm.set_policy("adaserve")
        for temperature, expected in plain.items():
            assert seeded_texts(llm, PROMPTS, temperature, 24) == expected
        for seed in (100, 200):
            seeded_texts(llm, PROMPTS, 0.8, 72, seed=seed)
        calibrator.take_in()
        stats = llm.stats().scheduler
        errors = stats.calibration_error
        assert set(errors) == {"greedy", "coupled"} and stats.calibration_outcomes["coupled"] > 600
        for mode in errors.values():
            assert mode["online"] < mode["loaded"]
        assert errors["coupled"]["online"] < 0.6 * errors["coupled"]["loaded"]
        seeded_texts(llm, PROMPTS, 0.8, 8)  # carries the last fit to the draft
        drafter = engine.executor.local_drafter
        assert drafter is not None
        table = drafter.table.log_chance
        np.testing.assert_allclose(np.exp(np.asarray(table)), np.maximum(calibrator.chance, 1e-4), rtol=1e-5)
        assert llm.stats().compiles_after_ready == 0
    finally:
        engine.close()
    kept = read_chances(file)
    assert kept.learned is not None and np.unique(kept.learned.prior).round(6).tolist() == [0.9]
    np.testing.assert_allclose(kept.chance, calibrator.chance, atol=1e-6)
    np.testing.assert_allclose(Calibrator(kept).table.chance, calibrator.chance, atol=1e-6)


def check_calibrated(engine: LocalEngine, llm: LLM) -> None:
    """f is the product of the table's chances by the cells that the draft names."""
    with Recorder(engine) as recorder:
        seeded_texts(llm, PROMPTS, 0.8, 4)
    (plan, candidates), *_ = [step for step in recorder.seen if step[1].log_f.size]
    assert plan.draft is not None and plan.draft.calibrated and plan.draft.chances is None
    assert candidates.cell is not None
    assert check_f(candidates, np.full(candidates.log_f.shape, np.log(0.9)))  # as the file says of every cell
    assert ((candidates.cell >= 0) == np.isfinite(candidates.log_f)).all()
    assert candidates.cell.max() < 8 * 4 * 24


def check_uncalibrated(engine: LocalEngine, llm: LLM) -> None:
    """f is the product of q, which is the softmax of the draft's logits by an implementation of its own."""
    llm.set_policy("adaserve-paper")
    with Recorder(engine) as recorder:
        (output, *_) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
        seeded_texts(llm, PROMPTS, 0.8, 4)
    folder, nodes = resolve_folder("demo", "draft"), 0
    for plan, candidates in recorder.seen:
        if candidates.log_f.size:
            assert plan.draft is not None and not plan.draft.calibrated and candidates.log_q is not None
            nodes += check_f(candidates, candidates.log_q)
    assert nodes > 20
    plan, candidates = next(step for step in recorder.seen if step[1].log_f.size)
    assert candidates.log_q is not None and plan.num_decode == 1
    context = [*output.prompt_token_ids, *output.token_ids][: plan.ctx_len[0] + 1]
    for column in np.flatnonzero(np.isfinite(candidates.log_f[0])):
        path, node = [], column
        while node >= 0:
            path.append(int(candidates.token[0, node]))
            node = candidates.parent[0, node]
        *above, token = path[::-1]
        scores = oracle_logits(folder, [*context, *above])[-1].astype(np.float64)
        log_q = scores[token] - np.logaddexp.reduce(scores)
        assert candidates.log_q[0, column] == pytest.approx(log_q, abs=1e-3)


def test_the_file_is_written_when_due_and_a_failure_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    file = CalibrationFile(tmp_path / "learned.json", Calibrator(read_chances(SHIPPED)), clock=lambda: now)
    file.save_if_due()
    assert not (tmp_path / "learned.json").exists()
    now = SAVE_EVERY_S
    file.save_if_due()
    assert json.loads((tmp_path / "learned.json").read_text())["version"] == 1
    lost = CalibrationFile(tmp_path / "gone" / "learned.json", Calibrator(read_chances(SHIPPED)))
    with caplog.at_level(logging.ERROR):
        lost.save()
    assert "could not be written" in caplog.text


def test_nothing_is_written_without_a_file_or_without_learning() -> None:
    calibrator = Calibrator(read_chances(SHIPPED))
    assert CalibrationFile.of(EngineConfig(), calibrator) is None
    assert CalibrationFile.of(EngineConfig(calibration="file", calibrate=False), calibrator) is None
    assert CalibrationFile.of(EngineConfig(calibration="file"), None) is None


def test_a_file_that_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    broken = tmp_path / "learned.json"
    broken.write_text("{")
    for options, kind, message in (
        ({"calibration": str(broken)}, CheckpointError, r"learned\.json: cannot read the acceptance table"),
        ({"calibration": str(tmp_path / "none" / "learned.json")}, ConfigError, "calibration: cannot write into"),
        ({"calibration": str(broken), "draft": None, "policy": "ar"}, ConfigError, "about a draft, but there is none"),
    ):
        with pytest.raises(kind, match=message):
            LocalEngine(replace(CONFIG, **options)).start()


def test_what_changed_logits_reject_teaches_nothing_of_other_requests(demo_engine: LocalEngine) -> None:
    """A token is forced upon some; of others only log probabilities are told."""
    llm, calibrator = LLM.over(demo_engine), demo_engine.assembly.calibrator
    assert calibrator is not None

    def judged(*params: SamplingParams) -> int:
        """Nodes that taught anything while these requests ran."""
        calibrator.take_in()
        before = calibrator.outcomes.get("greedy", 0)
        llm.generate(PROMPTS[: len(params)], [*params], slo=SLO(tpot_ms=0.5))
        calibrator.take_in()
        return calibrator.outcomes.get("greedy", 0) - before

    plain = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    forced = replace(plain, logit_bias={300: 100.0})
    drafted = demo_engine.stats().scheduler.draft_tokens
    assert judged(forced, forced, forced) == 0
    assert demo_engine.stats().scheduler.draft_tokens > drafted
    assert judged(replace(plain, logprobs=2), forced) > 0
