"""Drafts that become others while requests run: no text changes, nothing compiles, and every step can be captured."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.distill.records import wrong_nodes
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.runtime.capture import Pending
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from adaserve_jax.scheduler.acceptance import Calibrator
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.sim.executor import VirtualClock
from adaserve_jax.types import CandidateTrees, SamplingParams, Sequence
from tests.engines import compile_only
from tests.models.checkpoints import write_checkpoint
from tests.scheduler.harness import costs_of

SWAPS, TOP = 20, 8
Texts = dict[str, list[int]]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelExecutor]:
    """In deterministic mode. The first draft is the target itself, so that its tokens are taken; the other is not."""
    folder = tmp_path_factory.mktemp("models")
    target = str(write_checkpoint(folder / "target"))
    other = write_checkpoint(folder / "other", seed=1)
    executor = load_executor(
        EngineConfig(
            target=target, draft=target, drafts=(f"other={other}",), learning=LearnConfig(learn_top_k=TOP),
            deterministic=True, max_requests=8, max_context=96, page_size=8, num_pages=96, max_batch_tokens=64,
            max_tree_tokens=64, max_depth=3, max_width=1, elastic="off", policy="spec:3",
        )
    )  # fmt: skip
    compile_only(executor, lambda key: key[1] != "resample")  # no request asks for it
    yield executor
    assert executor.compiles_after_ready == 0
    executor.close()


def requests(routed: bool) -> list[Sequence]:
    rng = np.random.default_rng(5)
    return [
        Sequence(
            f"r{number}", rng.integers(3, 300, int(rng.integers(4, 30))).astype(np.int32),
            SamplingParams(max_tokens=48, temperature=[0.0, 0.7][number % 2]), seed=number, arrival_s=0.0,
            draft=number // 2 % 2 if routed else 0,
        )
        for number in range(8)
    ]  # fmt: skip


def random_weights(executor: ModelExecutor, rng: np.random.Generator) -> dict[str, jnp.ndarray]:
    old = executor.draft_params()
    return {name: jnp.asarray(rng.normal(0, 0.1, w.shape), w.dtype) for name, w in old.items()}


def serve(executor: ModelExecutor, *, routed: bool, swaps: int) -> tuple[Texts, int, int]:
    """The texts; how often a draft became another while they were made; and how many drafted tokens were taken."""
    clock, rng = VirtualClock(), np.random.default_rng(9)
    config, limits = executor.resolved.config, executor.limits
    assert executor.chances is not None
    calibrator = Calibrator(executor.chances)
    scheduler = Scheduler(config, limits, costs_of(limits), calibrator)
    begun = [executor.draft_params(draft) for draft in range(executor.num_drafts)]
    texts: Texts = {}
    for request in requests(routed):
        scheduler.add(request)
        texts[request.sequence_id] = []
    done, pending = 0, Pending(np.zeros((0, 2 * TOP), np.int32), 0)
    while scheduler.has_work:
        plan = scheduler.plan(clock.now())
        assert plan is not None
        candidates = CandidateTrees.empty(plan.num_decode)
        if plan.draft is not None:
            assert plan.draft.drafts is not None
            wanted = [int(request_id[1:]) // 2 % 2 * routed for request_id in scheduler.sequence_ids(plan)]
            assert plan.draft.drafts.tolist() == wanted
            candidates = executor.speculate(plan)
        trees = scheduler.select(plan, candidates, clock.now())
        outcome = executor.verify(plan, trees)
        wrong = wrong_nodes(plan, trees, candidates, outcome)
        assert outcome.accepted[wrong].all() and (np.diff(trees.row[wrong]) > 0).all()
        assert not len(wrong) or trees.row[wrong[-1]] < plan.num_decode
        for update in scheduler.commit(plan, trees, candidates, outcome, clock.now()):
            texts[update.sequence_id] += update.token_ids
        rows = pending.collect()
        assert np.isfinite(rows.log_p).all() and (np.exp(rows.log_p).sum(axis=1) <= 1 + 1e-5).all()
        pending = executor.capture(np.flatnonzero(outcome.accepted))
        if done < swaps:
            draft = done % executor.num_drafts
            executor.set_draft(random_weights(executor, rng) if done % 3 else begun[draft], draft)
            calibrator.new_version()
            done += 1
        clock.advance(0.01)
    for draft, params in enumerate(begun):
        executor.set_draft(params, draft)
    return texts, done, scheduler.stats.accepted_tokens


@pytest.mark.slow
def test_twenty_swaps_change_no_token_and_compile_nothing(executor: ModelExecutor) -> None:
    """The same seeds with the drafts as they are, and with drafts that become another after every step."""
    expected, _, accepted = serve(executor, routed=False, swaps=0)
    assert [len(text) for text in expected.values()] == [48] * 8
    swapped, done, accepted_then = serve(executor, routed=False, swaps=SWAPS)
    assert done == SWAPS and swapped == expected
    assert accepted > 200 > accepted_then > 0, "random drafts are hardly ever right"
    routed, done, _ = serve(executor, routed=True, swaps=SWAPS)
    assert done == SWAPS and routed == expected
    assert executor.compiles_after_ready == 0
