"""Draft and KV pages change places on the device: the same tokens, nothing compiled, and failures leave what was."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ElasticError, EngineDeadError, IntegrityError
from adaserve_jax.runtime.absent_engine import copies_of
from adaserve_jax.runtime.compile import CompileCounter
from adaserve_jax.runtime.elastic import Elastic
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from adaserve_jax.runtime.loading import plan_memory
from adaserve_jax.runtime.pools import Pools
from adaserve_jax.types import LogitEdits
from tests.engine.driven_texts import (
    BASE_PAGES,
    PAGE,
    PROMPTS,
    ROW_PAGES,
    Texts,
    begun,
    drafted_to_the_end,
    extended,
    moved,
    plain,
)
from tests.models.checkpoints import write_checkpoint
from tests.plans import packed_trees
from tests.slow import slow_after
from tests.waiting import wait_until

SMALL = {
    "max_requests": 4, "max_context": ROW_PAGES * PAGE, "page_size": PAGE, "num_pages": BASE_PAGES, "max_depth": 2,
    "max_width": 1, "max_tree_tokens": 32, "row_edges": (4,), "token_edges": (32,), "elastic": "on",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    draft = write_checkpoint(folder / "draft", seed=1, num_hidden_layers=1)
    return {"target": str(write_checkpoint(folder / "target")), "draft": str(draft)}


@pytest.fixture(scope="module")
def executor(pair: dict[str, str]) -> Iterator[ModelExecutor]:
    executor = load_executor(EngineConfig(**pair, **SMALL))
    executor.warm_up()
    yield executor
    assert executor.compiles_after_ready == 0
    executor.close()


def swaps_of(executor: ModelExecutor) -> Elastic:
    assert executor.elastic is not None
    return executor.elastic


def failing(*_: object) -> None:
    raise RuntimeError("RESOURCE_EXHAUSTED: injected")


def test_swaps_change_no_token(executor: ModelExecutor) -> None:
    """Drafting, without the draft on pages of both slabs, after the move, while the draft loads, drafting again."""
    expected = plain(executor)
    texts = begun(executor)
    executor.expand()
    with pytest.raises(IntegrityError, match="has a draft, which is not on the device"):
        texts.decode(draft=True)
    moved(texts, extended(texts))
    executor.contract()
    texts.decode(draft=False)
    swaps_of(executor).wait()
    assert executor.draft_ready()
    assert drafted_to_the_end(texts) == expected


def test_steps_go_on_while_the_draft_loads(executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    elastic, may_load = swaps_of(executor), threading.Event()
    load = elastic._load_weights
    monkeypatch.setattr(elastic, "_load_weights", lambda: (may_load.wait(60), load())[1])
    texts = begun(executor)
    executor.expand()
    executor.contract()
    assert not executor.draft_ready()
    texts.decode(draft=False)
    assert not executor.draft_ready()
    may_load.set()
    elastic.wait()
    assert executor.draft_ready()
    assert drafted_to_the_end(texts) == plain(executor)


def test_an_expansion_without_room_brings_the_draft_back(
    executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic, texts = swaps_of(executor), begun(executor)
    with monkeypatch.context() as patch:
        patch.setattr(elastic, "_new_extension", failing)
        pages = executor.limits.extension_pages
        with pytest.raises(ElasticError, match=f"no room for {pages} more KV pages .*injected; the draft is back"):
            executor.expand()
        assert executor.draft_ready()
        patch.setattr(elastic, "_load_weights", failing)
        with pytest.raises(EngineDeadError, match=r"neither .*injected\) nor the draft .* finds room where the draft"):
            executor.expand()
    assert not executor.draft_resident
    wait_until(executor.draft_ready)  # which begins to load it
    assert drafted_to_the_end(texts) == plain(executor)


def test_pages_that_cannot_be_copied_stay_where_they_are(
    executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic, texts = swaps_of(executor), begun(executor)
    executor.expand()
    moves = extended(texts)
    with monkeypatch.context() as patch:
        patch.setattr(elastic, "_copy_pages", failing)
        with pytest.raises(ElasticError, match=r"3 KV pages could not be copied: .*injected; they are where they were"):
            moved(texts, moves)
    texts.decode(draft=False)
    with pytest.raises(ValueError, match=f"must move to pages below {BASE_PAGES}, got"):
        executor.move_pages(np.array([BASE_PAGES]), np.array([BASE_PAGES + 1]))
    with pytest.raises(ValueError, match="moves read pages that the source does not have: -1"):
        executor.move_pages(np.array([BASE_PAGES - 1]), np.array([0]))
    executor.move_pages(np.zeros(0, np.int32), np.zeros(0, np.int32))
    moved(texts, moves)
    executor.contract()
    elastic.wait()
    assert drafted_to_the_end(texts) == plain(executor)


def test_pools_lost_in_a_copy_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy writes in place; where it was begun and failed, there is nothing to go back to."""
    base, extension = (Pools(jnp.ones((1, pages, 1, 8, 4)), jnp.ones((1, pages, 1, 8, 4))) for pages in (3, 2))
    target: Any = SimpleNamespace(pools=base._replace(extension=extension))
    counter = CompileCounter()
    elastic = Elastic(target, SimpleNamespace(weights=[{"norm": jnp.ones(3)}]), 2, counter)  # type: ignore[arg-type]

    def lost(base: Pools, *_: object) -> None:
        base.k.delete()
        failing()

    monkeypatch.setattr(elastic, "_copy_pages", lost)
    with pytest.raises(EngineDeadError, match=r"the KV cache was lost while pages moved: .*injected; restart"):
        elastic.move_pages(np.array([3]), np.array([0]))
    elastic.close()
    counter.close()


@pytest.mark.parametrize("step", slow_after(1, ["_load_weights", "_free_extension", "_new_draft_pools"]))
def test_a_draft_that_could_not_be_loaded_is_loaded_again(
    executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    elastic, texts = swaps_of(executor), begun(executor)
    executor.expand()
    with monkeypatch.context() as patch:
        patch.setattr(elastic, step, failing)
        executor.contract()
        with pytest.raises(ElasticError, match=r"the draft could not be loaded: .*injected; it is tried again"):
            elastic.wait()
        texts.decode(draft=False)
        with pytest.raises(ElasticError, match="injected"):
            wait_until(executor.draft_ready)  # which begins to load it
    assert not executor.draft_resident
    wait_until(executor.draft_ready)
    assert drafted_to_the_end(texts) == plain(executor)


def test_a_draft_that_becomes_another_comes_back_as_that(
    executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are exchanged while it is here, while it is away, and while it is on its way back."""
    elastic, texts = swaps_of(executor), begun(executor)
    own = {name: np.array(weight) for name, weight in executor.draft_params().items()}

    def version(factor: float) -> dict[str, jax.Array]:
        return {name: jnp.asarray(weight * factor) for name, weight in own.items()}

    def check(factor: float) -> None:
        for name, weight in executor.draft_params().items():
            np.testing.assert_array_equal(weight, own[name] * factor)

    executor.set_draft(version(2.0))
    check(2.0)
    texts.decode(draft=True)
    executor.expand()
    assert not executor.draft_resident
    with pytest.raises(IntegrityError, match="draft 0 is not on the device"):
        executor.draft_params()
    executor.contract()
    elastic.wait()
    check(2.0)
    executor.expand()
    gone = version(3.0)
    executor.set_draft(gone)
    assert all(weight.is_deleted() for weight in gone.values()), "its memory is pages now"
    executor.contract()
    elastic.wait()
    check(3.0)
    may_load, load = threading.Event(), elastic._load_weights
    monkeypatch.setattr(elastic, "_load_weights", lambda: (load(), may_load.wait(60))[0])
    executor.expand()
    executor.contract()
    executor.set_draft(version(4.0))
    executor.set_draft(version(1.0))
    assert not executor.draft_ready() and not executor.draft_resident
    may_load.set()
    elastic.wait()
    check(1.0)
    executor.expand()
    executor.contract()
    elastic.wait()
    check(1.0)
    assert drafted_to_the_end(texts) == plain(executor)


def test_the_memory_of_one_becomes_the_memory_of_the_other(executor: ModelExecutor) -> None:
    assert executor.local_drafter is not None
    target, draft, elastic = executor.target, executor.local_drafter.model, swaps_of(executor)
    pages = executor.limits.extension_pages
    draft_bytes = size((draft.params, draft.pools))
    page_bytes = size(target.pools) // executor.limits.num_pages
    assert pages == draft_bytes // page_bytes > 0
    assert size([copy.arrays for copy in elastic.host_copies]) == size(draft.params)
    gc.collect()
    before = live_bytes()
    executor.expand()
    assert live_bytes() == before - draft_bytes + pages * page_bytes
    executor.contract()
    elastic.wait()
    assert live_bytes() == before
    for name, held in elastic.host_copies[0].arrays.items():
        assert not np.shares_memory(np.asarray(draft.params[name]), np.asarray(held))


def size(arrays: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def live_bytes() -> int:
    return size(jax.live_arrays())


def test_no_program_of_a_swap_copies_a_pool(executor: ModelExecutor) -> None:
    base = executor.target.pools.k
    extension = (base.shape[0], executor.limits.extension_pages, *base.shape[2:])
    extension_bytes = base.nbytes // base.shape[1] * extension[1]
    programs = {key: program for key, program in executor.target.compiled.items() if key[-1] in ("extended", "move")}
    assert len(programs) == 2 * len(executor.target.buckets.all()) + 1
    for key, program in programs.items():
        for shape in (base.shape, extension):
            assert copies_of(program.as_text(), shape) == [], key
        if key[1] == "commit":
            assert program.memory_analysis().alias_size_in_bytes == 2 * (base.nbytes + extension_bytes)
        if key[1] == "move":
            assert program.memory_analysis().alias_size_in_bytes == 2 * base.nbytes


def test_the_ledger_knows_both_layouts(executor: ModelExecutor, pair: dict[str, str]) -> None:
    """To the byte: what is resident, what takes its place, and the copy on the host; planned without weights too."""

    def held(*trees: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(trees))

    assert executor.local_drafter is not None
    draft, target, ledger = executor.local_drafter.model, executor.target, executor.ledger
    copy = size([each.arrays for each in swaps_of(executor).host_copies])
    resident = {part.name: (part.device_bytes, part.host_bytes) for part in ledger.parts()}
    away = {part.name: (part.device_bytes, part.host_bytes) for part in ledger.parts(expanded=True)}
    assert resident["draft weights"] == (held(draft.params), copy) and copy == held(draft.params)
    assert resident["draft KV pages"] == (held(draft.pools), 0)
    freed = held(draft.params, draft.pools)
    executor.expand()
    assert away["extension pages"] == (held(target.pools.extension), 0) and away["draft weights (away)"] == (0, copy)
    assert held(target.pools.extension) <= freed < held(target.pools.extension) + ledger.sizes.target_page
    executor.contract()
    while not executor.draft_ready():
        time.sleep(0.001)

    resolved, workspace = plan_memory(EngineConfig(**pair, **SMALL))
    assert resolved.ledger(workspace) == ledger


def test_logits_are_edited_on_extended_pools_too(executor: ModelExecutor) -> None:
    """The second program knows no pools; the commit behind it is that of the layout."""
    rows = len(PROMPTS)
    tables = np.arange(rows * ROW_PAGES, dtype=np.int32).reshape(rows, ROW_PAGES) % BASE_PAGES
    nothing = np.zeros(rows, np.float32)
    zeros, token = np.zeros(rows, np.int32), np.array([77, 78, 79], np.int32)
    edits = LogitEdits(
        nothing, nothing, nothing + 1, np.arange(rows), token, zeros, zeros > 0, nothing + 100.0, None,
        np.ones(rows, bool), zeros + 2,
    )  # fmt: skip
    found = []
    for is_extended in (False, True):
        if is_extended:
            executor.expand()
        texts = Texts(executor, tables)
        plan = texts._plan(zeros, prompts=True)
        found.append(executor.verify(plan, packed_trees([]), edits))
    executor.contract()
    swaps_of(executor).wait()
    for outcome in found:
        assert outcome.tokens[:, 0].tolist() == token.tolist()
        assert outcome.logprobs is not None and (outcome.logprobs.own[:, 0] < 0).all()
    np.testing.assert_array_equal(found[0].logprobs.top, found[1].logprobs.top)
