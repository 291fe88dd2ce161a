"""The simulated machine's KV: shared pages are legal where contents are the same, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from adaserve_jax.errors import IntegrityError
from adaserve_jax.sampling import RowSampling
from adaserve_jax.sim.text import token_at
from adaserve_jax.types import DraftPlan, Limits, StepPlan
from tests.plans import i32, step_plan
from tests.sim_kv import SimKV, kv_terms

LIMITS = Limits(4, (64,), 16, 32, 4, 6, 2, 2, extension_pages=3)
PROMPT = [5, 6, 7, 8, 9, 1, 2, 3, 4, 5]


def prefill(rows: list[tuple[int, int, list[int], list[int]]], draft_ctx: list[int] | None = None) -> StepPlan:
    """rows: seed, tokens computed before, pages, the tokens of the chunk. draft_ctx: the same tokens for the draft."""
    sampling = RowSampling.greedy(len(rows))._replace(seed=np.array([row[0] for row in rows], np.uint64))
    table = np.zeros((len(rows), 8), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row[2])] = row[2]
    chunks = [row[3] for row in rows]
    draft = None
    if draft_ctx is not None:
        fed = i32(token for chunk in chunks for token in chunk)
        draft = DraftPlan(0, 1, fed, i32(map(len, chunks)), i32(draft_ctx), np.zeros(0, bool))
    context = i32(row[1] for row in rows)
    return step_plan(0, chunks, ctx_len=context, page_table=table, sampling=sampling, draft=draft, tree_token_cap=0)


def run(kv: SimKV, *rows: tuple[int, int, list[int], list[int]]) -> None:
    plan = prefill(list(rows))
    kv.extend_target(plan, np.zeros((len(rows), 3), np.int32), np.zeros(len(rows), np.int32))


def test_names_are_unique():
    tokens, position = token_at(np.arange(200)[:, None], 0, np.arange(300)[None, :], 97), np.arange(300)[None, :]
    names = kv_terms(tokens, position).cumsum(axis=1)
    assert len(np.unique(names)) == len({tuple(row[:end]) for row in tokens.tolist() for end in range(1, 301)})


@pytest.fixture
def kv() -> SimKV:
    """Request 1 has computed 8 tokens into pages 2 and 3; request 2 begins with the same 4."""
    made = SimKV(LIMITS, 100)
    made.know(np.array(PROMPT), 1, 0)
    made.know(np.array([*PROMPT[:4], 70, 71]), 2, 0)
    run(made, (1, 0, [2, 3], PROMPT[:8]))
    return made


def test_a_page_with_the_same_tokens_may_be_read_by_all(kv: SimKV):
    run(kv, (2, 4, [2, 4], [70, 71]), (1, 8, [2, 3, 5], [4]))


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ((2, 8, [2, 3, 4], [70]), "reads KV of tokens that are not its own"),
        ((2, 4, [3, 4], [70]), "reads KV that it did not write"),
        ((1, 8, [3, 2, 4], [4]), "reads KV that it did not write"),
        ((1, 8, [2, 4, 5], [4]), "reads KV that it did not write"),
        ((2, 4, [2, 4], [7]), "is fed tokens that are not its own"),
        ((2, 4, [2, 6], [70]), "page 6 is none of the 6"),
    ],
    ids=["other tokens", "other place", "swapped", "never written", "wrong token", "no page"],
)
def test_everything_else_is_seen(kv: SimKV, row, text: str):
    with pytest.raises(IntegrityError, match=text):
        run(kv, row)


def test_the_target_writes_pages_of_its_own_only(kv: SimKV):
    with pytest.raises(IntegrityError, match="one of them writes it"):
        run(kv, (1, 4, [2, 3], PROMPT[4:6]), (2, 4, [2, 3], [70]))


def test_the_draft_may_feed_a_shared_page_again(kv: SimKV):
    plan = prefill([(1, 0, [2], PROMPT[:4]), (2, 0, [2], PROMPT[:4])], [0, 0])
    kv.extend_draft(plan)
    kv.extend_draft(prefill([(2, 4, [2, 4], [70])], [4]))
    with pytest.raises(IntegrityError, match="KV of another row"):
        kv.extend_draft(prefill([(1, 4, [2, 5], [9]), (2, 4, [2, 5], [70])], [4, 4]))
    kv.drop_draft()
    with pytest.raises(IntegrityError, match="did not write"):
        kv.extend_draft(prefill([(2, 4, [2, 4], [70])], [4]))
    with pytest.raises(IntegrityError, match="page 6 is none of the 6"):
        kv.extend_draft(prefill([(1, 0, [6], PROMPT[:4])], [0]))


def test_contents_move_with_their_pages_and_go_with_the_extension(kv: SimKV):
    kv.add_extension()
    run(kv, (1, 8, [2, 3, 7], [4]))
    with pytest.raises(IntegrityError, match="page 9 is none of the 9"):
        run(kv, (2, 4, [2, 9], [70]))
    kv.move_pages(np.array([7]), np.array([5]))
    kv.drop_extension()
    run(kv, (1, 9, [2, 3, 5], [5]))
    with pytest.raises(IntegrityError, match="page 7 is none of the 6"):
        run(kv, (1, 9, [2, 3, 7], [5]))
    kv.add_extension()
    with pytest.raises(IntegrityError, match="did not write"):
        run(kv, (1, 9, [2, 3, 7], [5]))


def test_a_request_that_is_not_known_may_have_any_text_but_reads_one(kv: SimKV):
    run(kv, (3, 4, [2, 4], [8]))
    with pytest.raises(IntegrityError, match="did not write"):
        run(kv, (3, 5, [3, 4], [8]))
