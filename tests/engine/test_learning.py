"""An engine that learns while it serves: versions rise, texts stay, a restart goes on, and what fails ends learning."""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax import LLM
from adaserve_jax.distill import footprint as lengths
from adaserve_jax.distill import learner as keeping
from adaserve_jax.distill import learner as learning
from adaserve_jax.distill import records as records_module
from adaserve_jax.distill.learner import Learner
from adaserve_jax.distill.pieces import PieceTimes
from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.distill.records import Record, SampledRows
from adaserve_jax.distill.updates import PieceKind
from adaserve_jax.engine.llm import GenerateOutput
from adaserve_jax.errors import CheckpointError, RequestError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.decoder import Params
from adaserve_jax.runtime.capture import TargetRows
from adaserve_jax.stats import LearningStats
from adaserve_jax.types import FinishReason, SamplingParams, Sequence
from tests.clock import Clock
from tests.engines import TINY
from tests.models.checkpoints import write_checkpoint
from tests.oracles.llama import oracle_logits

VOCAB = 320
LEARN: dict[str, Any] = {
    "learn_rate": 0.01, "learn_every": 4, "learn_steps": 4, "learn_top_k": VOCAB, "learn_buffer": 512,
    "learn_held_out": 0.25, "learn_share": 1.0, "learn_tolerance": 0.05,
}  # fmt: skip


@pytest.fixture(autouse=True)
def saved_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "SAVE_EVERY_S", 0.0)


@pytest.fixture(autouse=True)
def every_fifth_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each of a few prompts that come again and again is on either side at some time."""
    count = itertools.count()
    monkeypatch.setattr(records_module, "is_held_out", lambda *_: next(count) % 5 == 4)


class Loaded(NamedTuple):
    """An engine, the weights that its drafts were loaded with, and what trains them."""

    llm: LLM
    weights: list[Params]
    programs: TrainPrograms


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Of a target and two drafts that know nothing of it. Micro-steps are of one length, so that little is compiled."""
    folder = tmp_path_factory.mktemp("models")
    target = write_checkpoint(folder / "target")
    draft, other = (write_checkpoint(folder / str(seed), seed=seed, num_hidden_layers=1) for seed in (1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths, "longest_length", lambda limit_s, measured: 64 if measured(64) else 0)
        llm = LLM(
            target=str(target),
            draft=str(draft),
            drafts=(f"other={other}",),
            learning=LearnConfig(**LEARN),
            policy="spec:2",
            **TINY,
        )
    with llm:
        executor = llm._engine.executor
        programs = learner_of(llm)._drafts[0].trainer.programs
        yield Loaded(llm, [executor.draft_params(index) for index in range(2)], programs)
        assert llm.stats().compiles_after_ready == 0


@pytest.fixture
def llm(engine: Loaded) -> LLM:
    """With drafts as they were loaded, and a learner that knows nothing yet."""
    learns(*engine)
    return engine[0]


def learns(
    llm: LLM, weights: list[Params], programs: TrainPrograms, *, executor: Any = None, **options: Any
) -> Learner:  # fmt: skip
    """Let another learner take over. executor: for the learner, in place of the engine's."""
    local = llm._engine
    for index, params in enumerate(weights):
        local.executor.set_draft(params, index)
    learner = Learner(executor or local.executor, LearnConfig(**LEARN | options), local.assembly.calibrator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "choose_length", lambda *_, **__: programs)
        learner.prepare()
    local.assembly.learner = local._core._learner = learner
    return learner


PIECES: tuple[PieceKind, ...] = get_args(PieceKind)
MOST_ROUNDS = 60
"""Of what is served again and again; what is learned in between depends on which piece of training came when."""


def learner_of(llm: LLM) -> Learner:
    learner = llm._engine.assembly.learner
    assert learner is not None
    return learner


def serve(llm: LLM, seed: int = 0, **options: Any) -> list[GenerateOutput]:
    """Four texts, so few that the machine does not count as loaded."""
    prompts = np.random.default_rng(seed).integers(3, 300, (4, 6)).tolist()
    return llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True), **options)


def rested(llm: LLM) -> LearningStats:
    """Once nothing is left to learn. The engine's thread has the lock whenever it does something of that."""
    pause, engine = threading.Event(), llm._engine
    while True:
        with engine._lock:
            if engine._core.is_idle:
                return llm.stats().learning
        pause.wait(0.002)


def records_of(llm: LLM, draft: int = 0) -> list[Record]:
    rested(llm)
    return list(learner_of(llm)._drafts[draft].buffer)


def accepted_in(outputs: list[GenerateOutput]) -> int:
    return sum(output.metrics.accepted_tokens for output in outputs)


def test_what_is_served_again_is_guessed_better_and_no_text_changes(llm: LLM) -> None:
    first = last = serve(llm)
    versions = [rested(llm).version["default"]]
    while versions[-1] < 3 or accepted_in(last) <= accepted_in(first) + 5:
        assert len(versions) < MOST_ROUNDS
        last, stats = serve(llm), rested(llm)
        versions.append(stats.version["default"])
        assert [output.token_ids for output in last] == [output.token_ids for output in first]
    rounds = len(versions)
    assert versions == sorted(versions) and versions[-1] == stats.updates["default"]
    assert stats.held_out_acceptance["default"] > 0.5
    assert stats.version["other"] == stats.drafted_tokens["other"] == stats.records["other"] == 0
    assert 0 < stats.accepted_tokens["default"] < stats.drafted_tokens["default"]
    assert stats.micro_steps > 0
    assert stats.records["default"] == 4 * rounds > stats.held_out["default"] > 0
    assert stats.target_tokens == 24 * 4 * rounds and not stats.left_out


def test_records_hold_what_the_target_thought(llm: LLM) -> None:
    """Against an oracle that reads the text from its start, with no step, tree or page; also where the draft was right,
    and where a prompt's pages were there already."""
    outputs = [serve(llm, 1)]
    while accepted_in(outputs[-1]) <= 20:
        assert len(outputs) < MOST_ROUNDS
        rested(llm)
        outputs.append(serve(llm, 1))
    records = records_of(llm)
    assert len(records) == 4 * len(outputs)
    texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs[0]]
    assert all(record.tokens.tolist() in texts for record in records)
    log_p = {}
    for text in texts:
        logits = oracle_logits(llm.info.target, text)
        log_p[tuple(text)] = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    for record in records:
        expected = log_p[tuple(record.tokens.tolist())][record.position]
        assert record.position.tolist() == list(range(5, 29))
        np.testing.assert_allclose(record.log_p, -np.sort(-expected, axis=1), atol=1e-3)
        np.testing.assert_allclose(record.log_p, np.take_along_axis(expected, record.ids, 1), atol=1e-3)


def test_only_where_the_target_overruled_the_draft(engine: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a walk down each tree of each step, written out by hand."""
    llm, wrong = engine[0], defaultdict(list)
    learner = learns(*engine, learn_positions="overruled")
    stepped, added, begun = learner.stepped, learner.added, []

    def spied(plan: Any, trees: Any, candidates: Any, outcome: Any, choice_ids: Any, *rest: Any, **how: Any) -> None:
        for row in range(plan.num_decode):
            depth = overruled_at(row, trees, candidates, outcome)
            if depth is not None:
                wrong[choice_ids[row]].append(int(plan.ctx_len[row]) + depth)
        stepped(plan, trees, candidates, outcome, choice_ids, *rest, **how)

    def noted(choice: Sequence, **how: Any) -> None:
        begun.append(choice.sequence_id)
        added(choice, **how)

    monkeypatch.setattr(learner, "stepped", spied)
    monkeypatch.setattr(learner, "added", noted)
    outputs = serve(llm)
    texts = dict(zip(begun, outputs, strict=True))
    records = records_of(llm)
    expected = []
    for choice_id, positions in wrong.items():
        output = texts[choice_id]
        text = [*output.prompt_token_ids, *output.token_ids]
        inside = [position for position in positions if position + 1 < len(text)]
        expected += [(text, inside)] * bool(inside)
    found = [(record.tokens.tolist(), record.position.tolist()) for record in records]
    assert sorted(found) == sorted(expected)
    assert 0 < sum(len(position) for _, position in found) < 24 * 4


def overruled_at(row: int, trees: Any, candidates: Any, outcome: Any) -> int | None:
    """The depth at which the target drew what the draft did not propose, though it proposed something; or None."""
    (node,) = (n for n in range(trees.num_nodes) if trees.row[n] == row and trees.parent[n] < 0)
    for depth in range(int(outcome.counts[row])):
        drawn = int(outcome.tokens[row, depth])
        columns = range(candidates.token.shape[1])
        here = [c for c in columns if candidates.parent[row, c] == trees.candidate[node]]
        proposed = {int(candidates.token[row, c]) for c in here if np.isfinite(candidates.log_f[row, c])}
        if drawn not in proposed:
            return depth if proposed else None
        below = [n for n in range(trees.num_nodes) if trees.parent[n] == node and trees.token[n] == drawn]
        if not below:
            return None
        (node,) = below
    return None


def test_who_opts_out_teaches_nothing(llm: LLM) -> None:
    serve(llm, learn=[False, True, False, False])
    stats = rested(llm)
    assert stats.left_out == {"opt_out": 3}
    assert stats.records["default"] == 1


def test_a_draft_learns_from_its_own_requests(llm: LLM) -> None:
    for _ in range(4):
        serve(llm, draft_tag="other")
    stats = rested(llm)
    assert stats.version["other"] > stats.version["default"] == 0
    assert stats.records == {"default": 0, "other": 16}
    assert stats.drafted_tokens["default"] == 0 < stats.drafted_tokens["other"]
    serve(llm, draft_tag=["default", "other", "", "other"])
    assert rested(llm).records == {"default": 2, "other": 18}


@pytest.mark.parametrize("finish_reason", ["length", "abort"])
def test_an_id_may_be_used_again_at_once(llm: LLM, finish_reason: FinishReason) -> None:
    """The rows that were asked for last, and the end of the text, belong to the one that had the id before."""
    learner = learner_of(llm)
    choice = Sequence("again/0", np.array([5, 6, 7, 8], np.int32), SamplingParams(), seed=0, arrival_s=0.0)
    rows = TargetRows(np.zeros((1, VOCAB), np.int32), np.full((1, VOCAB), -np.log(VOCAB), np.float32))
    watcher = learner._watcher
    with llm._engine._lock:
        learner.added(choice)
        at = np.zeros(1, np.int32)
        watcher._promised = SampledRows(["again/0"], at, at + 1), Broken(rows)
        if finish_reason == "abort":
            learner.dropped(choice.sequence_id, "abort")
        else:
            watcher._ended.append((choice.sequence_id, finish_reason, np.array([9, 10], np.int32)))
        other = replace(choice, prompt_ids=np.array([11, 12, 13], np.int32))
        learner.added(other)
        assert not learner.failed
        watcher._ended.append((choice.sequence_id, "length", np.array([14], np.int32)))
        learner._take_in()
    records = list(learner._drafts[0].buffer)
    kept = [(record.tokens.tolist(), record.position.tolist()) for record in records]
    assert kept == ([([5, 6, 7, 8, 9, 10], [1])] if finish_reason == "length" else [])


def test_an_unknown_draft_is_refused_with_those_there_are(llm: LLM) -> None:
    with pytest.raises(RequestError, match="default, other; got 'maths'") as caught:
        serve(llm, draft_tag="maths")
    assert caught.value.param == "draft_tag"


def test_what_is_cut_short_is_left_out(llm: LLM) -> None:
    for _ in llm.stream([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True)):
        break
    serve(llm)
    stats = rested(llm)
    assert stats.left_out == {"abort": 1}
    assert stats.records["default"] == 4


def test_another_policy_goes_on_learning(llm: LLM) -> None:
    serve(llm)
    rested(llm)
    try:
        llm.set_policy("ar")
        for _ in range(3):
            serve(llm)
        stats = rested(llm)
    finally:
        llm.set_policy("spec:2")
    assert stats.records["default"] == 16  # the target says as much of a text that no draft speculated for
    assert stats.version["default"] > 0


def test_a_loaded_machine_neither_asks_nor_trains(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        serve(llm)
    before = rested(llm)
    monkeypatch.setattr(llm._engine._core.scheduler._slack, "_loaded_s", math.inf)
    monkeypatch.setattr(llm._engine._core.scheduler, "slack_s", lambda now: 0.0)
    for _ in range(3):
        serve(llm)
    stats = rested(llm)
    assert stats.target_tokens == before.target_tokens
    assert stats.left_out == {"no_positions": 12}
    assert stats.delay_s == before.delay_s
    assert stats.drafted_tokens["default"] > before.drafted_tokens["default"]


class DraftAway:
    """An executor that tells the learner that its drafts have left the device."""

    def __init__(self, executor: Any):
        self._executor = executor
        self.draft_resident = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def test_nothing_is_trained_while_the_draft_is_away(engine: Loaded) -> None:
    llm, away = engine.llm, DraftAway(engine.llm._engine.executor)
    learner = learns(*engine, executor=away)
    for _ in range(3):
        serve(llm)
    with llm._engine._lock:
        assert not learner.work(None) and not learner.is_idle
    assert llm.stats().learning.micro_steps == 0
    away.draft_resident = True
    assert rested(llm).version["default"] > 0


def test_pieces_delay_whoever_runs_and_nobody_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds while nothing runs, then 20, 40 and 10 ms, with a second of serving after each."""
    learner, clock = learner_of(llm), Clock()
    rested(llm)

    def run() -> Iterator[PieceKind]:
        for seconds in (3.0, 0.02, 0.04, 0.01):
            yield "check"
            clock.now_s += seconds

    with llm._engine._lock:
        monkeypatch.setattr(learner, "_clock", clock)
        learner._pieces._times = PieceTimes(dict.fromkeys(PIECES, 0.01))
        learner._pieces._run = pieces = run()
        learner._pieces._next = next(pieces)
        assert learner.work(None)
        for _ in range(3):
            assert learner.work(math.inf)
            clock.now_s += 1.0
        assert not learner.work(math.inf)
        stats = learner.stats()
    assert stats.micro_steps == 4
    assert stats.train_s == pytest.approx(3.07)
    assert stats.delay_s == pytest.approx(0.07)
    assert stats.delay_max_s == pytest.approx(0.04)


def test_more_tokens_per_row_than_the_vocabulary_has(engine: Loaded) -> None:
    learner = learns(*engine, learn_top_k=10 * VOCAB)
    for _ in range(3):
        serve(engine.llm)
    assert rested(engine.llm).version["default"] > 0 and not learner.failed
    assert {record.ids.shape[1] for record in records_of(engine.llm)} == {VOCAB}


def test_what_each_kind_of_piece_takes_is_known_from_the_start(engine: Loaded) -> None:
    """And measuring it leaves the draft as it was."""
    learner = learns(*engine)
    assert all(learner._pieces._times.expected_s(kind) > 0 for kind in PIECES)
    assert learner._pieces._times.expected_s("accumulate") <= learner._pieces._longest_s
    served, weights = engine[0]._engine.executor.draft_params(0), learner._drafts[0].trainer.weights()
    assert all(served[name] is engine[1][0][name] for name in served)
    assert all(jnp.array_equal(weights[name], served[name]) for name in served)


def test_training_stops_where_there_is_no_time_for_a_piece(llm: LLM) -> None:
    """Asked as the step loop asks, with requests running."""
    learner = learner_of(llm)
    for _ in range(3):
        serve(llm)
    rested(llm)
    draft = learner._drafts[0]
    with llm._engine._lock:  # the engine's own thread stays away
        draft._confirm()  # so that no verdict on a version comes before the update
        for record in list(draft.buffer)[:4]:
            draft.add(record)
        delay_s = learner._pieces._longest_s
        learner._pieces._times, done = PieceTimes(dict.fromkeys(PIECES, 2 * delay_s)), learner.stats().micro_steps
        assert not learner.work(math.inf)  # a piece longer than the delay waits for a time without requests
        learner._pieces._times = PieceTimes(dict.fromkeys(PIECES, 0.5 * delay_s))
        assert not learner.work(0.0) and not learner.work(0.4 * delay_s)
        assert learner.stats().micro_steps == done and draft.due is False
        assert learner.work(math.inf)
        assert learner.stats().micro_steps == done + 1 and learner.stats().delay_s > 0
        learner._pieces.allowance.spend(1e6)
        assert not learner.work(math.inf)
        assert learner.work(None)
        llm._engine._lock.notify()  # there is something to do again
    assert rested(llm).micro_steps > done + 2


class Broken:
    """Rows that never come, or are no distribution."""

    def __init__(self, rows: TargetRows | None = None):
        self._rows = rows

    def collect(self) -> TargetRows:
        if self._rows is None:
            raise RuntimeError("the device is gone")
        return self._rows


def fail(*_: object, **__: object) -> Any:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("where", ["capture", "collect", "accumulate", "apply", "evaluate", "weights", "set_draft"])
def test_what_fails_ends_learning_and_nothing_else(
    llm: LLM, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner = learner_of(llm)
    texts = [output.token_ids for output in serve(llm)]
    rested(llm)
    version = llm.stats().learning.version
    trainer = learner._drafts[0].trainer
    if where == "capture":
        monkeypatch.setattr(learner._watcher, "_capture", fail)
    elif where == "collect":
        monkeypatch.setattr(learner._watcher, "_capture", lambda at: Broken())
    elif where == "set_draft":
        monkeypatch.setattr(llm._engine.executor, "set_draft", fail)
    else:
        monkeypatch.setattr(trainer, where, fail)
    for _ in range(4):
        assert [output.token_ids for output in serve(llm)] == texts
    stats = rested(llm)
    assert learner.failed and "learning has stopped" in caplog.text
    assert stats.left_out["failed"] >= 4
    assert stats.version == version
    assert [output.token_ids for output in serve(llm)] == texts
    assert llm.stats().compiles_after_ready == 0


@pytest.mark.parametrize("where", ["work", "take_in"])
def test_what_was_learned_before_a_failure_is_kept(
    engine: Loaded, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, options = engine[0], {"learn_folder": str(tmp_path)}
    monkeypatch.setattr(keeping, "SAVE_EVERY_S", 1e9)
    learner = learns(*engine, **options)
    while llm.stats().learning.version["default"] == 0:
        serve(llm)
        rested(llm)
    version = llm.stats().learning.version["default"]
    assert not list((tmp_path / "default").iterdir())
    if where == "work":
        monkeypatch.setattr(learner, "_work", fail)
        serve(llm)
        rested(llm)
        assert learner.failed
    else:
        monkeypatch.setattr(learner._watcher, "take_in", fail)
    learner.close()
    assert learner.failed
    learns(*engine, **options)
    assert llm.stats().learning.version["default"] == version


def test_what_is_new_is_written_while_requests_leave_no_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And while it is copied nothing is trained."""
    learner, saved = learner_of(llm), []
    with llm._engine._lock:
        keeper = SimpleNamespace(save_if_due=lambda: saved.append(0), is_copying=True, idle_for_s=None)
        monkeypatch.setattr(learner, "_keeper", keeper)
        assert not learner.work(0.0) and saved == [0]
        monkeypatch.setattr(type(learner._drafts[0]), "due", True)
        assert not learner.work(None) and saved == [0, 0] and learner._pieces._next is None


@pytest.mark.parametrize("idle_for_s", [None, 7.0])
def test_an_idle_engine_sleeps_until_something_is_to_be_written(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, idle_for_s: float | None
) -> None:
    rested(llm)
    engine, waited = llm._engine, []
    keeper = SimpleNamespace(save_if_due=lambda: None, is_copying=False, idle_for_s=idle_for_s)
    with engine._lock:
        monkeypatch.setattr(learner_of(llm), "_keeper", keeper)
        monkeypatch.setattr(
            engine._lock, "wait", lambda seconds=None: waited.append(seconds) or engine._inbox.append(lambda: None)
        )
        assert engine._core.is_idle
        assert engine._take_inbox()
        keeper.idle_for_s = 0.0
        assert not engine._core.is_idle
    assert waited == [idle_for_s]


def test_rows_that_are_no_distribution_teach_nothing(llm: LLM) -> None:
    learner = learner_of(llm)

    def poisoned(at: np.ndarray) -> Broken:
        shape = (len(at), VOCAB)
        return Broken(TargetRows(np.zeros(shape, np.int32), np.full(shape, np.nan, np.float32)))

    learner._watcher._capture = poisoned
    for _ in range(4):
        serve(llm)
    stats = rested(llm)
    assert not learner.failed
    assert stats.left_out == {"no_positions": 16}
    assert stats.lost == {"no_room": 0, "not_finite": 16 * 24}
    assert stats.version["default"] == stats.target_tokens == stats.micro_steps == 0


def test_a_restart_goes_on_from_what_was_learned(engine: Loaded, tmp_path: Path) -> None:
    llm, weights, _ = engine
    options = {"learn_folder": str(tmp_path), "learn_keep_records": True}
    learner = learns(*engine, **options)
    for _ in range(6):
        serve(llm)
    before, served = rested(llm), llm._engine.executor.draft_params(0)
    assert before.version["default"] > 0
    learner.close()
    learns(*engine, **options)
    stats, again = llm.stats().learning, llm._engine.executor.draft_params(0)
    assert stats.version == before.version
    assert all(jnp.array_equal(again[name], served[name]) for name in served)
    assert not all(jnp.array_equal(again[name], weights[0][name]) for name in served)
    assert (stats.records, stats.held_out) == (before.records, before.held_out)
    for _ in range(3):
        serve(llm)
    assert rested(llm).version["default"] > before.version["default"]
    learner_of(llm).close()


def test_what_was_learned_of_another_target_is_refused(
    engine: tuple[LLM, list[Params]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, options = engine[0], {"learn_folder": str(tmp_path)}
    learner = learns(*engine, **options)
    while not rested(llm).version["default"]:
        serve(llm)
    learner.close()
    monkeypatch.setattr(learning, "model_hash", lambda _: "another target")
    with pytest.raises(CheckpointError, match="learned from another target"):
        learns(*engine, **options)


def test_no_text_reaches_the_disk_unless_asked(engine: Loaded, tmp_path: Path) -> None:
    learner = learns(*engine, learn_folder=str(tmp_path))
    for _ in range(3):
        serve(engine[0])
    rested(engine[0])
    learner.close()
    assert not list(tmp_path.rglob("records*"))
    assert list((tmp_path / "default").iterdir())


def test_a_broken_file_of_records_is_left_alone(
    engine: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "records.npz").write_bytes(b"no archive")
    learns(*engine, learn_folder=str(tmp_path), learn_keep_records=True)
    assert "cannot read the kept records" in caplog.text
    serve(engine[0])
    assert rested(engine[0]).records["default"] == 4
