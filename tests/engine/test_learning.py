"""An engine that learns while it serves: versions rise, texts stay, a restart goes on, and what fails ends learning."""

from __future__ import annotations

import gc
import math
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax import LLM
from adaserve_jax.config import EngineConfig
from adaserve_jax.distill.checkpoint import RecordFormat
from adaserve_jax.distill.learner import RECORDS, SAVE_EVERY_S, Learner
from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.distill.records import Record
from adaserve_jax.engine.client import GenerateRequest, OutputChunk
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import CheckpointError, RequestError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.decoder import Params
from adaserve_jax.results.provenance import weights_hash
from adaserve_jax.runtime.capture import TargetRows
from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.scheduler.acceptance import Calibrator
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.stats import LearningStats
from adaserve_jax.types import SamplingParams, Sequence
from tests.clock import Clock
from tests.engine.simulated import Spelling
from tests.engines import TINY
from tests.models.checkpoints import write_checkpoint
from tests.oracles.llama import oracle_logits
from tests.scheduler.harness import costs_of
from tests.slow import slow_after
from tests.waiting import wait_until

VOCAB, TOKENS, STEP_S = 320, 24, 0.01
LEARN: dict[str, Any] = {
    "learn_rate": 0.01, "learn_every": 4, "learn_steps": 4, "learn_top_k": VOCAB, "learn_buffer": 512,
    "learn_held_out": 0.25, "learn_share": 1.0, "learn_tolerance": 0.05,
}  # fmt: skip
PROMPTS: list[list[int]] = np.random.default_rng(0).integers(3, 300, (4, 6)).tolist()
"""So few that the machine does not count as loaded."""
MOST_ROUNDS = 60


class Loaded(NamedTuple):
    """An engine, the weights that its drafts were loaded with, and what trains them in short micro-steps."""

    engine: LocalEngine
    weights: list[Params]
    programs: TrainPrograms


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Start an engine of a target and two drafts that know nothing of it, with micro-steps of 64 tokens."""
    folder = tmp_path_factory.mktemp("models")
    target = write_checkpoint(folder / "target")
    draft, other = (write_checkpoint(folder / str(seed), seed=seed, num_hidden_layers=1) for seed in (1, 2))
    learning = LearnConfig(**LEARN)
    engine = LocalEngine(
        EngineConfig(
            target=str(target), draft=str(draft), drafts=(f"other={other}",), learning=learning, policy="spec:2", **TINY
        )
    )

    def of_64(config, learn, dtype, counter=None, progress=None, target=None) -> TrainPrograms:
        programs = TrainPrograms(config, learn, 64, dtype, counter, target)
        programs.compile(progress)
        return programs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adaserve_jax.distill.learner.choose_length", of_64)
        engine.start()
    learner, executor = engine.assembly.learner, engine.executor
    assert learner is not None
    yield Loaded(engine, [executor.draft_params(index) for index in range(2)], learner.programs)
    assert executor.compiles_after_ready == 0
    engine.close()


class Broken:
    """Rows that never come, or are no distribution."""

    def __init__(self, rows: TargetRows | None = None):
        self._rows = rows

    def collect(self) -> TargetRows:
        if self._rows is None:
            raise RuntimeError("the device is gone")
        return self._rows


class Device:
    """The executor of a learner, whose draft may be away. failing: what of it does not work."""

    def __init__(self, executor: ModelExecutor):
        self._executor = executor
        self.draft_resident = True
        self.target_folder = executor.target_folder
        self.failing = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def capture(self, at: np.ndarray) -> Any:
        if self.failing == "capture":
            raise RuntimeError("out of memory")
        if self.failing == "collect":
            return Broken()
        if self.failing == "rows":
            shape = (len(at), VOCAB)
            return Broken(TargetRows(np.zeros(shape, np.int32), np.full(shape, np.nan, np.float32)))
        return self._executor.capture(at)

    def set_draft(self, params: Params, draft: int = 0) -> None:
        if self.failing == "set_draft":
            raise RuntimeError("out of memory")
        self._executor.set_draft(params, draft)


@dataclass(frozen=True, eq=False)
class Held:
    """An array of which no copy comes to the host before `let_go`."""

    array: jax.Array
    let_go: threading.Event

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.let_go.wait()
        return np.asarray(self.array, dtype)


class Programs:
    """Training programs that take `seconds`, by name, on a clock. failing: one that does not run. let_go: holds the
    good weights on the device until it is set."""

    def __init__(self, programs: TrainPrograms, clock: Clock, seconds: dict[str, float]):
        self._programs = programs
        self._clock = clock
        self.seconds = seconds
        self.failing = ""
        self.let_go: threading.Event | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def run(self, name: str, *arguments: Any) -> Any:
        if name == self.failing:
            raise RuntimeError("out of memory")
        if self.let_go is not None:
            arguments = jax.tree.map(lambda leaf: leaf.array if isinstance(leaf, Held) else leaf, arguments)
        found = self._programs.run(name, *arguments)
        self._clock.now_s += self.seconds.get(name, 0.0)
        if name == "copy" and self.let_go is not None:
            let_go = self.let_go
            found = jax.tree.map(lambda leaf: Held(leaf, let_go), found)
        return found


@dataclass
class Text:
    """What one request got. accepted: drafted tokens among it."""

    prompt: list[int]
    token_ids: list[int]
    accepted: int = 0


class Observed:
    """A learner, and where a draft was wrong by a walk down each tree that is written out by hand: the
    positions by choice id."""

    def __init__(self, learner: Learner):
        self._learner = learner
        self.wrong: dict[str, list[int]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def stepped(self, plan: Any, trees: Any, candidates: Any, outcome: Any, choice_ids: Any, *rest: Any, **how: Any):
        for row in range(plan.num_decode):
            depth = wrong_at(row, trees, candidates, outcome)
            if depth is not None:
                self.wrong[choice_ids[row]].append(int(plan.ctx_len[row]) + depth)
        self._learner.stepped(plan, trees, candidates, outcome, choice_ids, *rest, **how)


def wrong_at(row: int, trees: Any, candidates: Any, outcome: Any) -> int | None:
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


class Serving:
    """A core and a learner of its own on the loaded engine's device, on a clock that only steps move."""

    def __init__(self, loaded: Loaded, *, seconds: dict[str, float] | None = None, target: Path | None = None, **learn):
        executor = loaded.engine.executor
        for index, params in enumerate(loaded.weights):
            executor.set_draft(params, index)
        self.clock = Clock()
        self.device = Device(executor)
        self.device.target_folder = target or executor.target_folder
        self.programs: Any = Programs(loaded.programs, self.clock, seconds or {})
        assert executor.chances is not None
        calibrator, limits = Calibrator(executor.chances), executor.limits
        device: Any = self.device
        self.learner = Learner(device, LearnConfig(**LEARN | learn), calibrator, self.clock)
        self.learner.prepare(programs=self.programs)
        self.observed: Any = Observed(self.learner)
        self.core = EngineCore(
            executor, Scheduler(executor.resolved.config, limits, costs_of(limits), calibrator), Spelling(),
            eos_ids=(), baseline_s=STEP_S, clock=self.clock, learner=self.observed,
        )  # fmt: skip
        self._rounds = self._added = 0
        self._first: list[Text] = []

    @property
    def stats(self) -> LearningStats:
        return self.learner.stats()

    @property
    def version(self) -> int:
        return self.stats.version["default"]

    def add(
        self, prompt: list[int], tokens: int = TOKENS, *, name: str = "", draft: int = 0, learn: bool = True
    ) -> str:
        self._added += 1
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(name or f"r{self._added}", prompt, sampling)
        self.core.add(request, self.clock())
        return request.request_id

    def step(self) -> list[OutputChunk]:
        chunks = self.core.step()
        self.clock.now_s += STEP_S
        return chunks

    def serve(self, prompts: list[list[int]] = PROMPTS, tokens: int = TOKENS) -> list[Text]:
        """Serve some requests to their end, as the engine's thread does, and learn what there is to learn."""
        texts = {self.add(prompt, tokens): Text(prompt, []) for prompt in prompts}
        while self.core.has_work:
            for chunk in self.step():
                text = texts[chunk.request_id]
                text.token_ids += chunk.token_ids
                text.accepted += chunk.metrics.accepted_tokens if chunk.metrics is not None else 0
            self.core.learn()
        self.rest()
        return list(texts.values())

    def serve_again(self) -> list[Text]:
        """Serve the same texts, which begin up to five tokens later, so that each is held out at times."""
        if not self._first:
            self._first = self.serve()
            return self._first
        self._rounds += 1
        cut = self._rounds % 6
        found = self.serve([text.prompt + text.token_ids[:cut] for text in self._first], TOKENS - cut)
        assert [text.token_ids for text in found] == [text.token_ids[cut:] for text in self._first]
        return found

    def learn_versions(self, count: int = 1) -> None:
        """Serve until the default draft has so many versions more."""
        wanted = self.version + count
        for _ in range(MOST_ROUNDS):
            self.serve_again()
            if self.version >= wanted:
                return
        raise AssertionError(f"{MOST_ROUNDS} rounds brought version {self.version}, not {wanted}")

    def rest(self) -> None:
        """Do what is left without requests, for training while the draft is there."""
        self.core.work_while_idle()
        if self.device.draft_resident:
            wait_until(lambda: not self.core.work_while_idle() and self.core.is_idle, every_s=0)

    def records(self, folder: Path) -> list[Record]:
        """What was learned from, from the file that is written at the end."""
        self.learner.close()
        target = weights_hash(self.device.target_folder)
        return RecordFormat(VOCAB, VOCAB, target, 1.0).load(folder / "default" / RECORDS)


def kept_in(folder: Path) -> dict[str, Any]:
    return {"learn_folder": str(folder), "learn_keep_records": True}


@pytest.fixture
def serving(loaded: Loaded) -> Serving:
    return Serving(loaded)


def test_an_engine_learns_from_all_but_who_opts_out_or_is_cut_short(loaded: Loaded) -> None:
    """With a thread of its own, in what time the machine leaves; by drafts of which each learns from its requests."""
    llm, learner = LLM.over(loaded.engine), loaded.engine.assembly.learner
    assert learner is not None
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    prompts = np.random.default_rng(6).integers(3, 300, (12, 6)).tolist()
    expected, tags = [], ("other", "default", "", "default")
    for policy in ("spec:2", "ar"):  # the target says as much of a text that no draft speculated for
        llm.set_policy(policy)
        for first in range(0, 12, 4):
            texts = llm.generate(prompts[first : first + 4], sampling, draft_tag=tags)
            expected.append([text.token_ids for text in texts])
    assert expected[:3] == expected[3:]
    llm.generate(prompts[:4], sampling, learn=[False, True, False, False])
    with pytest.raises(RequestError, match="default, other; got 'maths'"):
        llm.generate(prompts[:1], sampling, draft_tag="maths")
    for _ in llm.stream(prompts[0], SamplingParams(max_tokens=50, ignore_eos=True)):
        break
    wait_until(lambda: llm.stats().learning.left_out.get("abort"))
    wait_until(lambda: learner.is_idle)
    llm.set_policy("spec:2")
    stats = llm.stats().learning
    assert stats.left_out == {"opt_out": 3, "abort": 1}
    assert stats.records == {"default": 19, "other": 6} and not learner.failed
    assert stats.updates["default"] + stats.refused["default"] > 0 and stats.micro_steps > 0
    assert 0 < stats.drafted_tokens["other"] < stats.drafted_tokens["default"]


def test_tokens_that_only_text_proposed_count_for_no_draft(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trees of both sources, those nodes count whose path is among the draft's candidates."""
    llm, learner = LLM.over(loaded.engine), loaded.engine.assembly.learner
    assert learner is not None
    stepped, by_draft, by_text = learner.stepped, 0, 0

    def observed(plan: Any, trees: Any, candidates: Any, *rest: Any, **how: Any) -> None:
        nonlocal by_draft, by_text
        found = sum(is_drafted(node, trees, candidates) for node in range(trees.num_nodes) if trees.parent[node] >= 0)
        by_draft, by_text = by_draft + found, by_text + trees.num_nodes - plan.num_decode - found
        stepped(plan, trees, candidates, *rest, **how)

    monkeypatch.setattr(learner, "stepped", observed)
    before = sum(llm.stats().learning.drafted_tokens.values())
    for policy in ("spec:2@suffix+model", "spec:2@suffix"):
        llm.set_policy(policy)
        llm.generate(
            [[5, 6, 7, 8] * 4, *PROMPTS[:3]], SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        )
    llm.set_policy("spec:2")
    assert by_draft and by_text
    assert sum(llm.stats().learning.drafted_tokens.values()) - before == by_draft


def is_drafted(node: int, trees: Any, candidates: Any) -> bool:
    """Whether the path to a node is one of the draft's candidates."""
    path = []
    while trees.parent[node] >= 0:
        path.append(trees.token[node])
        node = trees.parent[node]
    column = -1
    for token in path[::-1]:
        row = trees.row[node]
        same = (candidates.parent[row] == column) & (candidates.token[row] == token)
        here = np.flatnonzero(same & np.isfinite(candidates.log_f[row]))
        if not len(here):
            return False
        column = here[0]
    return True


def test_what_is_served_again_is_guessed_better_and_no_text_changes(serving: Serving) -> None:
    before = sum(text.accepted for text in serving.serve_again())
    versions = [serving.version]
    for _ in range(11):
        last = serving.serve_again()
        versions.append(serving.version)
    stats = serving.stats
    assert sum(text.accepted for text in last) > before + 20
    assert versions == sorted(versions) and versions[-1] == stats.updates["default"] >= 3
    assert stats.held_out_acceptance["default"] > 0.5
    assert stats.version["other"] == stats.drafted_tokens["other"] == stats.records["other"] == 0
    assert 0 < stats.accepted_tokens["default"] < stats.drafted_tokens["default"]
    assert stats.micro_steps > 0
    assert stats.records["default"] == 4 * 12 > stats.held_out["default"] > 0
    assert stats.target_tokens == 4 * sum(TOKENS - number % 6 for number in range(12)) and not stats.left_out


@pytest.mark.slow
def test_records_hold_what_the_target_thought(loaded: Loaded, tmp_path: Path) -> None:
    """Against an oracle that reads the text from its start, with no step, tree or page; also where the draft was right,
    where a prompt's pages were there already, and where more tokens are asked for than the vocabulary has."""
    serving = Serving(loaded, **kept_in(tmp_path), learn_top_k=10 * VOCAB)
    outputs = [serving.serve()]
    while sum(text.accepted for text in outputs[-1]) <= 20:
        assert len(outputs) < MOST_ROUNDS
        serving.serve_again()
        outputs.append(serving.serve())
    records = serving.records(tmp_path)
    log_p = {}
    for text in outputs[0]:
        tokens = [*text.prompt, *text.token_ids]
        logits = oracle_logits(serving.device.target_folder, tokens)
        log_p[tuple(tokens)] = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    assert len(records) == serving.stats.records["default"]
    begins = set()
    for record in records:
        expected = log_p[tuple(record.tokens.tolist())][record.position]
        begins.add(int(record.position[0]))
        assert record.position.tolist() == list(range(record.position[0], 29))
        assert record.ids.shape[1] == VOCAB
        np.testing.assert_allclose(record.log_p, -np.sort(-expected, axis=1), atol=1e-3)
        np.testing.assert_allclose(record.log_p, np.take_along_axis(expected, record.ids, 1), atol=1e-3)
    assert {5, 6} <= begins <= set(range(5, 11))


@pytest.mark.slow
def test_a_draft_with_more_rows_than_its_target_learns_all_that_its_target_says(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target")
    draft = write_checkpoint(tmp_path / "draft", seed=1, num_hidden_layers=1, vocab_size=VOCAB + 8)
    learning = LearnConfig(**LEARN | {"learn_top_k": 10 * VOCAB, "learn_delay_ms": 1000.0})
    sampling, rng = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True), np.random.default_rng(6)
    with LLM(target=str(target), draft=str(draft), learning=learning, policy="spec:2", **TINY) as llm:
        for _ in range(MOST_ROUNDS):
            llm.generate(rng.integers(3, 300, (4, 6)).tolist(), sampling)
            stats = llm.stats().learning
            if stats.updates["default"] + stats.refused["default"]:
                break
        assert stats.updates["default"] + stats.refused["default"] and not stats.left_out


def test_only_where_the_draft_was_wrong(loaded: Loaded, tmp_path: Path) -> None:
    serving = Serving(loaded, learn_positions="wrong", **kept_in(tmp_path))
    texts = {f"r{number}/0": text for number, text in enumerate(serving.serve(), 1)}
    expected = []
    for choice_id, positions in serving.observed.wrong.items():
        text = [*texts[choice_id].prompt, *texts[choice_id].token_ids]
        inside = [position for position in positions if position + 1 < len(text)]
        expected += [(text, inside)] * bool(inside)
    found = [(record.tokens.tolist(), record.position.tolist()) for record in serving.records(tmp_path)]
    assert sorted(found) == sorted(expected)
    assert 0 < sum(len(position) for _, position in found) < TOKENS * 4


@pytest.mark.parametrize("ends", ["length", "abort"])
def test_an_id_may_be_used_again_at_once(loaded: Loaded, tmp_path: Path, ends: str) -> None:
    """The rows that were asked for last, and the end of the text, belong to the one that had the id before."""
    serving = Serving(loaded, **kept_in(tmp_path))
    serving.add(PROMPTS[0], 6, name="again")
    chunks = serving.step() + serving.step()
    if ends == "abort":
        serving.core.abort("again")
    while serving.core.has_work:
        chunks += serving.step()
    serving.add(PROMPTS[1], 4, name="again")
    second = []
    while serving.core.has_work:
        second += serving.step()
    texts = [
        prompt + [token for chunk in each for token in chunk.token_ids]
        for prompt, each in zip(PROMPTS, (chunks, second), strict=False)
    ]
    kept = {tuple(record.tokens.tolist()): len(record.position) for record in serving.records(tmp_path)}
    assert not serving.learner.failed
    assert kept == {tuple(texts[1]): 4} | ({tuple(texts[0]): 6} if ends == "length" else {})


def test_a_loaded_machine_neither_asks_nor_trains(serving: Serving) -> None:
    """Twelve requests for eight places; what is due is trained once they have ended."""
    prompts = np.random.default_rng(2).integers(3, 300, (12, 6)).tolist()
    serving.device.draft_resident = False  # so that training is due
    serving.serve()
    serving.serve_again()
    serving.device.draft_resident = True
    before = serving.stats
    for prompt in prompts:
        serving.add(prompt, 12)
    while serving.core.has_work:
        serving.step()
        serving.core.learn()
    stats = serving.stats
    assert (stats.target_tokens, stats.micro_steps) == (before.target_tokens, before.micro_steps)
    assert stats.drafted_tokens["default"] > before.drafted_tokens["default"]
    serving.rest()
    assert serving.stats.left_out == {"no_positions": 12}
    assert serving.stats.micro_steps > before.micro_steps


def test_nothing_is_trained_while_the_draft_is_away(serving: Serving) -> None:
    serving.device.draft_resident = False
    for _ in range(3):
        serving.serve_again()
    assert not serving.learner.work(None) and not serving.learner.is_idle
    assert serving.stats.micro_steps == 0
    serving.device.draft_resident = True
    serving.rest()
    assert serving.stats.micro_steps > 0


def due(loaded: Loaded, seconds: dict[str, float] | None = None, **learn: Any) -> Serving:
    """A learner whose next piece is the first micro-step of an update."""
    serving = Serving(loaded, seconds=seconds, learn_delay_ms=50.0, **learn)
    serving.device.draft_resident = False
    for _ in range(2):
        serving.serve_again()
    serving.device.draft_resident = True
    assert serving.learner.work(None) and serving.stats.micro_steps == 1
    return serving


def test_pieces_delay_whoever_runs_and_nobody_else(loaded: Loaded) -> None:
    """Three seconds while nothing runs, then 20, 40 and 10 ms, with a second of serving after each."""
    serving = due(loaded)

    def take(seconds: float) -> None:
        serving.programs.seconds = dict.fromkeys(("accumulate", "apply"), seconds)

    take(3.0)
    assert serving.learner.work(None)
    for seconds in (0.02, 0.04, 0.01):
        take(seconds)
        before = serving.stats.train_s
        while serving.stats.train_s == before:  # packing takes no time
            assert serving.learner.work(math.inf)
        serving.clock.now_s += 1.0
    stats = serving.stats
    assert stats.train_s == pytest.approx(3.07)
    assert stats.delay_s == pytest.approx(0.07)
    assert stats.delay_max_s == pytest.approx(0.04)


def test_training_stops_where_there_is_no_time_for_a_piece(loaded: Loaded, caplog: pytest.LogCaptureFixture) -> None:
    """A micro-step was measured as 40 ms, an optimiser step as 60, which is more than a piece may delay a step. What is
    measured is no version of the draft."""
    serving = due(loaded, {"accumulate": 0.04, "apply": 0.06}, learn_share=0.5)
    assert "some of it takes longer than learn_delay_ms (50): apply 60 ms" in caplog.text
    served = loaded.engine.executor.draft_params(0)
    assert all(served[name] is weight for name, weight in loaded.weights[0].items())
    work = serving.learner.work
    assert not work(0.0) and not work(0.039) and serving.stats.micro_steps == 1
    assert work(0.041) and serving.stats.delay_s == pytest.approx(0.04)
    assert not work(math.inf)  # until requests have run twice as long as that
    serving.clock.now_s += 0.05
    while work(math.inf):
        serving.clock.now_s += 0.05
    count = serving.stats.micro_steps
    serving.clock.now_s += 1.0
    assert not work(math.inf) and serving.stats.micro_steps == count
    assert work(None) and serving.stats.micro_steps == count + 1
    serving.rest()
    assert serving.stats.delay_max_s == pytest.approx(0.04)


@pytest.mark.parametrize(
    "where", slow_after(2, ["collect", "apply", "set_draft", "capture", "accumulate", "evaluate", "export"])
)
def test_what_fails_ends_learning_and_nothing_else(
    serving: Serving, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    serving.serve_again()
    version = serving.version
    serving.device.failing = serving.programs.failing = where
    for _ in range(4):
        serving.serve_again()
    stats = serving.stats
    assert serving.learner.failed and "learning has stopped" in caplog.text
    assert stats.left_out["failed"] >= 4
    assert stats.version["default"] == version


@pytest.mark.parametrize("where", ["accumulate", "collect"])
@pytest.mark.slow
def test_what_was_learned_before_a_failure_is_kept(loaded: Loaded, where: str, tmp_path: Path) -> None:
    """Where training fails, and where the last rows do not come when the engine is closed; and no text is kept."""
    serving = Serving(loaded, learn_folder=str(tmp_path))
    serving.learn_versions()
    version = serving.version
    assert not list((tmp_path / "default").iterdir())
    serving.device.failing = serving.programs.failing = where
    if where == "accumulate":
        serving.serve_again()
        serving.serve_again()
        assert serving.learner.failed
    else:
        serving.add(PROMPTS[0])
        serving.step()
        serving.step()
    serving.learner.close()
    assert serving.learner.failed
    again = Serving(loaded, learn_folder=str(tmp_path))
    assert again.version == version
    again.learner.close()
    assert list((tmp_path / "default").iterdir()) and not list(tmp_path.rglob("records*"))


def test_what_is_new_is_written_while_requests_leave_no_time_and_nothing_is_trained_meanwhile(
    loaded: Loaded, tmp_path: Path
) -> None:
    serving = Serving(loaded, learn_folder=str(tmp_path))
    let_go = serving.programs.let_go = threading.Event()
    serving.learn_versions(2)
    assert serving.core.is_idle and 0 < (serving.core.idle_for_s or 0.0) < SAVE_EVERY_S
    serving.device.draft_resident = False
    serving.serve_again()  # so that training is due
    serving.device.draft_resident = True
    count = serving.stats.micro_steps
    serving.clock.now_s += SAVE_EVERY_S
    assert serving.core.idle_for_s == 0.0 and not serving.core.is_idle
    assert not serving.learner.work(0.0)
    assert not serving.learner.work(None) and not serving.learner.work(math.inf)
    assert serving.stats.micro_steps == count and not list((tmp_path / "default").iterdir())
    let_go.set()
    serving.rest()
    assert serving.stats.micro_steps > count and list((tmp_path / "default").iterdir())
    serving.learner.close()


def test_rows_that_are_no_distribution_teach_nothing(serving: Serving) -> None:
    serving.device.failing = "rows"
    for _ in range(2):
        serving.serve()
    stats = serving.stats
    assert not serving.learner.failed
    assert stats.left_out == {"no_positions": 8}
    assert stats.lost == {"no_room": 0, "not_finite": 8 * TOKENS}
    assert stats.version["default"] == stats.target_tokens == stats.micro_steps == 0


def test_a_closed_learner_holds_no_memory_of_the_device(loaded: Loaded) -> None:
    gc.collect()
    before = len(jax.live_arrays())
    serving = Serving(loaded)
    assert len(jax.live_arrays()) > before
    serving.learner.close()
    assert len(jax.live_arrays()) == before


def test_a_restart_goes_on_from_what_was_learned(loaded: Loaded, tmp_path: Path) -> None:
    """But not with another target."""
    serving = Serving(loaded, **kept_in(tmp_path))
    serving.learn_versions(2)
    before, served = serving.stats, loaded.engine.executor.draft_params(0)
    serving.learner.close()
    again = Serving(loaded, **kept_in(tmp_path))
    stats, params = again.stats, loaded.engine.executor.draft_params(0)
    assert stats.version == before.version
    assert all(jnp.array_equal(params[name], served[name]) for name in served)
    assert not all(jnp.array_equal(params[name], loaded.weights[0][name]) for name in served)
    assert (stats.records, stats.held_out) == (before.records, before.held_out)
    again.learn_versions()
    again.learner.close()
    other = write_checkpoint(tmp_path / "target", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match="learned from another target"):
        Serving(loaded, target=other, learn_folder=str(tmp_path))


def test_a_broken_file_of_records_is_left_alone(
    loaded: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / RECORDS).write_bytes(b"no archive")
    serving = Serving(loaded, **kept_in(tmp_path))
    assert "cannot read the kept records" in caplog.text
    serving.serve()
    assert serving.stats.records["default"] == 4
    serving.learner.close()


def test_a_learner_that_is_released_writes_nothing_and_leaves_its_folder_to_others(
    loaded: Loaded, tmp_path: Path
) -> None:
    serving = Serving(loaded, **kept_in(tmp_path))
    serving.learn_versions()
    serving.learner.release()
    serving.learner.release()
    again = Serving(loaded, **kept_in(tmp_path))
    assert again.stats.version["default"] == 0
    again.learner.close()
    again.learner.release()


class ScriptedLearner:
    """Is idle for a moment, and then has work for three times."""

    def __init__(self) -> None:
        self.works = 0
        self.is_idle = True
        self.closed = False

    @property
    def idle_for_s(self) -> float | None:
        self.is_idle = self.works == 3
        return None if self.is_idle else 1e-3

    def work(self, slack_s: float | None) -> bool:
        if slack_s is not None:
            return False
        self.works += 1
        self.is_idle = self.works == 3
        return not self.is_idle

    def added(self, choice: Sequence, **how: Any) -> None:
        self.added_with = how

    def release(self) -> None:
        assert self.closed

    def stepped(self, *_: Any, **__: Any) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_an_idle_engine_sleeps_until_its_learner_has_something_to_do(engine: LocalEngine) -> None:
    scripted: Any = ScriptedLearner()
    engine.assembly.learner = scripted
    engine.set_policy("ar")
    engine.submit(GenerateRequest("r", [5], SamplingParams(max_tokens=2), tenant="t"), lambda chunk: None)
    wait_until(lambda: scripted.works == 3)
    assert scripted.added_with == {"learn": True, "tenant": "t"}
    engine.close()
    assert scripted.works == 3 and scripted.closed
