"""Several drafts in one step: each speculates for its own rows, as it would alone; and which may be loaded together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from adaserve_jax.runtime.loading import find_pair
from adaserve_jax.runtime.sizing import resolve
from adaserve_jax.sampling import RowSampling
from adaserve_jax.types import CandidateTrees, DraftPlan, StepPlan
from tests.engines import compile_only
from tests.models.checkpoints import metaspace_tokenizer, write_checkpoint
from tests.plans import step_plan

DEPTH, WIDTH = 3, 2
SMALL: dict[str, Any] = {
    "max_requests": 8, "max_context": 64, "page_size": 8, "num_pages": 64, "max_depth": DEPTH, "max_width": WIDTH,
    "max_tree_tokens": 32, "row_edges": (8,), "token_edges": (64,), "elastic": "off",
}  # fmt: skip
DRAFTS = np.array([1, 0, 2, 1, 1, 0], np.int32)  # of four decode rows and two that prefill
DECODE = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    target = write_checkpoint(folder / "target")
    for number, name in enumerate(("first", "code", "maths")):
        write_checkpoint(folder / name, seed=1 + number, num_hidden_layers=1)
    drafts = (f"code={folder / 'code'}", f"maths={folder / 'maths'}")
    return EngineConfig(target=str(target), draft=str(folder / "first"), drafts=drafts, **SMALL)


@pytest.fixture(scope="module")
def executor(config: EngineConfig) -> Iterator[ModelExecutor]:
    executor = load_executor(config)
    compile_only(executor, lambda key: key[0] == "draft" and key[1:] != ("search", 8, 1))  # no more is run here
    yield executor
    assert executor.compiles_after_ready == 0
    executor.close()


@pytest.fixture(scope="module")
def alone(config: EngineConfig, executor: ModelExecutor) -> Iterator[list[ModelExecutor]]:
    """An executor for each draft, loaded with that one only; it runs the same programs."""
    assert executor.local_drafter is not None
    folders = [config.draft, *(each.partition("=")[2] for each in config.drafts)]
    executors = [load_executor(replace(config, draft=folder, drafts=())) for folder in folders]
    for each in executors:
        assert each.local_drafter is not None
        each.local_drafter.model.compiled = dict(executor.local_drafter.model.compiled)
    yield executors
    for each in executors:
        each.close()


def texts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 300, length).astype(np.int32) for length in (12, 9, 17, 5, 11, 6)]


def plan_of(
    rows: np.ndarray, known: np.ndarray, fed: list[np.ndarray], speculates: np.ndarray, drafts: np.ndarray | None
) -> StepPlan:
    """Some rows, each fed some tokens behind so many that its draft knows; with pages and seeds of their own."""
    table = np.arange(len(DRAFTS) * 8, dtype=np.int32).reshape(-1, 8)
    temperature = np.linspace(0, 1, len(DRAFTS), dtype=np.float32)[rows]
    sampling = RowSampling.greedy(len(rows))._replace(seed=rows.astype(np.uint64) + 7, temperature=temperature)
    counts = np.array([len(each) for each in fed], np.int32)
    draft = DraftPlan(DEPTH, WIDTH, np.concatenate(fed), counts, known, speculates, drafts=drafts)
    return step_plan(
        len(speculates), [[]] * (len(rows) - len(speculates)), slots=rows, ctx_len=known + counts,
        page_table=table[rows], sampling=sampling, draft=draft, tree_token_cap=32,
    )  # fmt: skip


def steps_of(drafts: np.ndarray | None, rows: np.ndarray) -> list[StepPlan]:
    """Three steps of these rows: most of each text, then the rest, where one row does not speculate and is not fed;
    then a step that only catches up."""
    first, second, third = ([text[part] for text in texts()] for part in (slice(-3), slice(-3, None), slice(-1, None)))
    second[3] = second[3][:0]
    plans, known = [], np.zeros(len(DRAFTS), np.int32)
    for fed, speculates in ((first, [1, 1, 1, 1]), (second, [1, 1, 1, 0]), (third, [0] * DECODE)):
        active = np.array(speculates, bool)[rows[rows < DECODE]]
        own = None if drafts is None else drafts[rows]
        plans.append(plan_of(rows, known[rows], [fed[row] for row in rows], active, own))
        known = known + np.array([len(each) for each in fed], np.int32)
    return plans


def check_row(found: CandidateTrees, row: int, expected: CandidateTrees, at: int) -> None:
    there = expected.log_f[at] > -np.inf
    np.testing.assert_array_equal(found.log_f[row] > -np.inf, there)
    for name in ("token", "parent", "cell"):
        np.testing.assert_array_equal(getattr(found, name)[row][there], getattr(expected, name)[at][there], name)
    for name in ("log_f", "log_q"):
        ours, theirs = getattr(found, name)[row], getattr(expected, name)[at]
        np.testing.assert_allclose(ours[there], theirs[there], atol=1e-5)


@pytest.mark.slow
def test_each_row_has_the_candidates_of_its_own_draft(executor: ModelExecutor, alone: list[ModelExecutor]) -> None:
    everything = np.arange(len(DRAFTS))
    mixed = [executor.speculate(plan) for plan in steps_of(DRAFTS, everything)]
    different = 0
    for number, single in enumerate(alone):
        rows = np.flatnonzero(number == DRAFTS)
        expected = [single.speculate(plan) for plan in steps_of(None, rows)]
        for found, own in zip(mixed[:2], expected[:2], strict=True):
            np.testing.assert_array_equal(found.depth, np.repeat([1, 2, 3], WIDTH))
            for at, row in enumerate(rows[rows < DECODE].tolist()):
                if own.log_f.shape[1]:
                    check_row(found, row, own, at)
                    different += bool((found.token[row] != found.token[(row + 1) % DECODE]).any())
                else:
                    assert (found.log_f[row] == -np.inf).all(), "nobody of that draft speculated"
        assert expected[2].token.shape == (int((rows < DECODE).sum()), 0)
    assert different > 4
    assert (mixed[0].log_f[:, 0] > -np.inf).all() and (mixed[1].log_f[3] == -np.inf).all()
    assert mixed[2].token.shape == (DECODE, 0), "a step that only catches up"


def test_rows_of_one_draft_are_one_step(
    executor: ModelExecutor, alone: list[ModelExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs that ran are those of an engine with that draft alone, on all rows at once."""
    assert executor.local_drafter is not None
    ran = []
    run = executor.local_drafter.model.run
    monkeypatch.setattr(
        executor.local_drafter.model, "run", lambda *args, **more: (ran.append(more), run(*args, **more))[1]
    )
    everything = np.arange(len(DRAFTS))
    for number in (0, 2):
        ours = [executor.speculate(plan) for plan in steps_of(np.full_like(DRAFTS, number), everything)]
        theirs = [alone[number].speculate(plan) for plan in steps_of(None, everything)]
        assert [each["weights"] for each in ran] == [number] * 3
        ran.clear()
        for found, expected in zip(ours, theirs, strict=True):
            for name in ("token", "parent", "log_f", "depth"):
                np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    executor.speculate(steps_of(DRAFTS, everything)[0])
    assert [each["weights"] for each in ran] == [0, 1, 2]


def test_drafts_are_exchanged_one_by_one(executor: ModelExecutor) -> None:
    assert executor.draft_names == ("default", "code", "maths") and executor.num_drafts == 3
    first, code, maths = (executor.draft_params(number) for number in range(3))
    plan = steps_of(DRAFTS, np.arange(len(DRAFTS)))[0]
    before = executor.speculate(plan)
    executor.set_draft(dict(maths), 1)
    after = executor.speculate(plan)
    for row, draft in enumerate(DRAFTS[:DECODE].tolist()):
        assert (before.token[row] == after.token[row]).all() == (draft != 1)
    assert executor.draft_params(0) is first and executor.draft_params(2) is maths
    executor.set_draft(code, 1)
    np.testing.assert_array_equal(executor.speculate(plan).token, before.token)


def test_the_ledger_counts_every_draft_and_training(config: EngineConfig, executor: ModelExecutor) -> None:
    def held(*trees: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(trees))

    parts = {part.name: part.device_bytes for part in executor.ledger.parts()}
    assert parts["draft weights"] == held([executor.draft_params(number) for number in range(3)])
    assert "draft training" not in parts
    pair = find_pair(config)
    learning = resolve(config, pair.target, pair.draft, training_bytes=12345).ledger()
    assert {part.name: part.device_bytes for part in learning.parts()}["draft training"] == 12345
    assert learning.needed == executor.resolved.ledger().needed + 12345
    swaps = resolve(replace(config, elastic="on"), pair.target, pair.draft, training_bytes=12345)
    sizes, limits = swaps.sizes, swaps.limits
    freed = parts["draft weights"] + limits.num_pages * sizes.draft_page
    assert limits.extension_pages == freed // sizes.target_page
    away = {part.name: (part.device_bytes, part.host_bytes) for part in swaps.ledger().parts(expanded=True)}
    assert away["draft training"] == (12345, 0) and away["draft weights (away)"] == (0, parts["draft weights"])
    with pytest.raises(ConfigError, match=r"draft training [\d.,]+ MiB.* change one of: .*learning none"):
        load_executor(config, training_bytes=executor.ledger.limit.bytes)


def test_drafts_that_do_not_belong_together_are_refused(config: EngineConfig, tmp_path: Path) -> None:
    def with_draft(name: str, **changes: Any) -> EngineConfig:
        folder = tmp_path / name
        if not folder.exists():
            write_checkpoint(folder, num_hidden_layers=1, **changes)
        return replace(config, drafts=(*config.drafts, f"{name}={folder}"))

    with pytest.raises(ConfigError, match=r"draft 'wide' must be of the shape .* intermediate_size is 48, got 96"):
        find_pair(with_draft("wide", intermediate_size=96))
    assert len(find_pair(with_draft("tuned", eos_token_id=[0, 2])).draft_folders) == 4
    learning = replace(with_draft("other", tokenizer=metaspace_tokenizer()), learning=LearnConfig())
    with pytest.raises(CheckpointError, match="a draft that learns must have the same vocabulary as the target"):
        find_pair(learning)
    for again in ("code", "default"):
        with pytest.raises(ConfigError, match="drafts must be of different names, none of them default"):
            with_draft(again)
    with pytest.raises(CheckpointError, match=r"draft checkpoint .* found nothing"):
        find_pair(replace(config, drafts=(f"none={tmp_path / 'nothing'}",)))
