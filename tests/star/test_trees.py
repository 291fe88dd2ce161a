"""Trees that come by wire become the candidates that a local draft would have given, bit for bit."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.runtime.drafter import unpack_candidates
from adaserve_jax.star.client.trees import CandidateBuilder, TreeRequest
from adaserve_jax.star.messages import Tree, along_paths, cells_hash, log_f_of
from adaserve_jax.tree.acceptance_table import ChanceTable
from adaserve_jax.tree.beam import AcceptanceTable, beam_search
from adaserve_jax.tree.sampling import DeviceSampling
from adaserve_jax.types import CandidateTrees, StepPlan
from tests.star.scripted import DEPTHS, RANKS, VOCABULARY, Row, plan_of, table

MAX_DEPTH, MAX_WIDTH, ROWS = 4, 3, 4
ROWS_OF_PLAN = [Row(row, [1, 2, 3], seed=row, temperature=(row % 2) * 0.8, speculates=row != 2) for row in range(ROWS)]


def forward(logits, carry, level, token, position, visible):
    """A draft whose logits depend on the last token alone."""
    return jnp.asarray(logits)[token], carry


LOGITS = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32) * 2
SEARCH = jax.jit(partial(beam_search, forward=partial(forward, LOGITS), max_depth=MAX_DEPTH, width=MAX_WIDTH))


def searched(plan: StepPlan, by: ChanceTable) -> CandidateTrees:
    """What a local drafter with this table makes of the plan."""
    draft, rows = plan.draft, plan.sampling
    assert draft is not None
    seed = np.stack([rows.seed & 0xFFFFFFFF, rows.seed >> np.uint64(32)], axis=1).astype(np.uint32)
    sampler = DeviceSampling(
        jnp.asarray(seed), *map(jnp.asarray, (rows.choice, rows.temperature, rows.top_k, rows.top_p, rows.min_p))
    )
    beam = SEARCH(
        jnp.asarray(LOGITS[: plan.num_rows]), sampler, jnp.full(plan.num_rows, 9), jnp.asarray(draft.speculates),
        AcceptanceTable.of(by), carry=None, depth=jnp.int32(draft.depth), width_limit=jnp.int32(draft.width),
        calibrated=jnp.asarray(draft.calibrated),
    )  # fmt: skip
    bits = [np.asarray(part) for part in (beam.token, beam.parent, beam.cell, beam.log_f, beam.log_q)]
    packed = np.stack([part.view(np.int32) for part in bits])
    return unpack_candidates(packed, plan)


def sent(found: CandidateTrees, plan: StepPlan) -> list[tuple[TreeRequest, Tree]]:
    """What a service with that drafter answers."""
    draft = plan.draft
    assert draft is not None and found.cell is not None and found.log_q is not None
    answers = []
    for row in np.flatnonzero(draft.speculates)[::-1].tolist():
        at = np.flatnonzero(found.log_f[row] > -np.inf)
        parts = (
            at.astype(np.int32),
            found.token[row, at],
            found.parent[row, at],
            found.cell[row, at],
            found.log_q[row, at],
        )
        asked = TreeRequest(row, 0, row + 1, 1, 1, 3, draft.depth, draft.width)
        answers.append((asked, Tree(row + 1, 1, 1, 3, draft.width, *parts)))
    return answers


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize(("depth", "width"), [(4, 3), (3, 2), (1, 3), (4, 1)])
def test_candidates_are_those_of_a_local_drafter(depth: int, width: int, calibrated: bool) -> None:
    own = table(1)
    plan = plan_of(ROWS_OF_PLAN, depth, width, calibrated=calibrated)
    expected = searched(plan, own)
    builder = CandidateBuilder(table(2), VOCABULARY)
    builder.set_chances(own.chance)
    found, invalid = builder.build(plan, sent(expected, plan))
    assert invalid == []
    there = expected.log_f > -np.inf
    assert there[[0, 1, 3]].any(axis=1).all() and not there[2].any()
    assert found.log_f.dtype == expected.log_f.dtype and np.array_equal(found.log_f, expected.log_f)
    assert found.depth.tolist() == expected.depth.tolist()
    for name in ("token", "parent", "cell", "log_q"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert np.array_equal(mine[there], theirs[there]), name
    assert (found.cell[~there] == -1).all() and (found.parent[~there] == -1).all()  # type: ignore[index]


def test_chances_are_the_targets_own_whatever_the_service_searched_by() -> None:
    """log f against a walk up each path in float64."""
    theirs, mine = table(3), table(4)
    plan = plan_of(ROWS_OF_PLAN, 4, 3)
    searched_by_them = searched(plan, theirs)
    found, _ = CandidateBuilder(mine, VOCABULARY).build(plan, sent(searched_by_them, plan))
    assert found.cell is not None
    flat = mine.chance.astype(np.float64).reshape(2, -1)
    for row, column in np.argwhere(found.log_f > -np.inf).tolist():
        mode, expected, node = int(plan.sampling.temperature[row] > 0), 0.0, column
        while node >= 0:
            expected += np.log(max(flat[mode, found.cell[row, node]], 1e-4))
            node = found.parent[row, node]
        assert found.log_f[row, column] == pytest.approx(expected, abs=1e-5)


def test_a_tree_without_nodes_is_an_answer() -> None:
    plan = plan_of(ROWS_OF_PLAN[:1])
    none = np.zeros(0, np.int32)
    asked = TreeRequest(0, 0, 1, 1, 1, 3, 3, 2)
    found, invalid = CandidateBuilder(table(), VOCABULARY).build(
        plan, [(asked, Tree(1, 1, 1, 3, 2, none, none, none, none, np.zeros(0, np.float32)))]
    )
    assert invalid == [] and not (found.log_f > -np.inf).any() and found.token.shape == (1, 6)


def test_sums_along_paths() -> None:
    gain = np.array([[[-1, -2], [-4, -8], [-16, -np.inf]]], np.float32)
    parent = np.array([[[-1, -1], [1, 0], [2, -1]]], np.int32)
    assert along_paths(gain, parent).tolist() == [[[-1, -2], [-6, -9], [-22, -np.inf]]]
    cell = np.array([[[0, 1], [2, 3], [4, -1]]], np.int32)
    logs = np.array([[-1, -2, -4, -8, -16], [0, 0, 0, 0, 0]], np.float32)
    assert log_f_of(cell, parent, logs, np.array([False])).tolist() == [[[-1, -2], [-6, -9], [-22, -np.inf]]]
    assert log_f_of(cell, parent, logs, np.array([True])).tolist() == [[[0, 0], [0, 0], [0, -np.inf]]]


def test_the_hash_is_of_the_cells_alone() -> None:
    one, other = table(1), table(2)
    assert cells_hash(one) == cells_hash(other) and len(cells_hash(one)) == 16
    edges = one.edges.copy()
    edges[0, 0] -= 0.5
    assert cells_hash(ChanceTable(one.chance, edges)) != cells_hash(one)
    assert cells_hash(ChanceTable(one.chance[:, : DEPTHS - 1], one.edges)) != cells_hash(one)
    assert cells_hash(ChanceTable(one.chance[:, :, : RANKS - 1], one.edges)) != cells_hash(one)
    assert cells_hash(ChanceTable(one.chance, one.edges.astype(np.float64))) == cells_hash(one)
