"""Beam search against an enumeration of all paths, with a draft that is a table of logits."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.tree.beam import AcceptanceTable, Beam, beam_search
from adaserve_jax.tree.sampling import DeviceSampling, gumbel_noise

VOCAB, DEPTH, ROWS = 6, 3, 2
ROOT = 10


def acceptance_table() -> AcceptanceTable:
    """Chances that grow with the feature and differ by mode, depth and rank; edges from -4 to 4."""
    edges = np.tile(np.linspace(-4, 4, 15, dtype=np.float32), (2, 1))
    chance = np.linspace(0.05, 0.95, 16)[None, None, None] * np.array([0.9, 1.0])[:, None, None, None]
    chance = chance * np.array([1.0, 0.8])[None, :, None, None] * np.array([1.0, 0.7, 0.5])[None, None, :, None]
    return AcceptanceTable(jnp.asarray(np.log(chance), jnp.float32), jnp.asarray(edges))


def model_logits() -> np.ndarray:
    """Logits after each token; the model sees its last token only."""
    return np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.5


def table_forward(logits, carry, level, token, position, visible):
    """A draft whose logits depend on the last token alone."""
    return jnp.asarray(logits)[token], carry


WIDEST = 3
SEARCH = jax.jit(partial(beam_search, forward=partial(table_forward, model_logits()), max_depth=DEPTH, width=WIDEST))
NOISE = jax.jit(gumbel_noise, static_argnums=3)


class Candidate(NamedTuple):
    """A path of tokens with what the beam says of its last one."""

    path: tuple[int, ...]
    log_f: float
    cell: int = -1
    log_q: float = 0.0


def oracle_level(
    parents: list[Candidate], width: int, seed: int, temperature: float, level: int, calibrated: bool
) -> list[Candidate]:
    """All extensions of the paths above by their `width` best children, f falling; f by the table's chances, or by the
    draft's probabilities in float64."""
    table = acceptance_table()
    chance, edges = np.asarray(table.log_chance), np.asarray(table.edges)
    words = jnp.asarray([[seed, 0]], jnp.uint32)
    zero = jnp.zeros(1, jnp.int32)
    noise = np.asarray(NOISE(words, zero, jnp.asarray([ROOT + level]), VOCAB))[0]
    logits = model_logits()
    extensions = []
    for path, log_f, _, _ in parents:
        row = logits[path[-1] if path else 0]
        mode = int(temperature > 0)
        scores = row / temperature + noise if mode else row
        order = np.argsort(-scores, kind="stable")
        log_q = row - np.log(np.exp(row.astype(np.float64)).sum())
        for rank, token in enumerate(order[:width]):
            gap = scores[order[0]] - scores[order[1]] if rank == 0 else scores[token] - scores[order[0]]
            feature = gap if mode else log_q[token]
            column = int((feature >= edges[mode]).sum())
            cell = (min(level - 1, 1), min(rank, 2), column)
            scaled = row.astype(np.float64) / (temperature if mode else 1.0)
            own = scaled[token] - np.log(np.exp(scaled).sum())
            worth = chance[(mode, *cell)] if calibrated else own
            index = int(np.ravel_multi_index(cell, chance.shape[1:]))
            extensions.append(Candidate((*path, int(token)), log_f + worth, index, own))
    return sorted(extensions, key=lambda item: -item.log_f)


def paths_of(beam: Beam, row: int, depth: int, width: int) -> list[list[Candidate]]:
    tokens, parents, log_f, cell, log_q = (np.asarray(x[row]) for x in beam)
    assert ((cell >= 0) == np.isfinite(log_f)).all()
    levels: list[list[Candidate]] = []
    for level in range(depth):
        current = []
        for rank in range(width):
            if np.isfinite(log_f[level, rank]):
                parent = parents[level, rank]
                above = () if parent < 0 else levels[parent // width][parent % width].path
                here = (level, rank)
                path = (*above, int(tokens[here]))
                current.append(Candidate(path, float(log_f[here]), int(cell[here]), float(log_q[here])))
        levels.append(current)
    return levels


@pytest.mark.parametrize("width", [WIDEST, pytest.param(1, marks=pytest.mark.slow)])
def test_equals_the_enumeration(width: int) -> None:
    """Calibrated, and with f the product of the draft's own probabilities, in one compiled program."""
    search = SEARCH
    if width != WIDEST:
        search = jax.jit(
            partial(beam_search, forward=partial(table_forward, model_logits()), max_depth=DEPTH, width=width)
        )
    seeds, temperatures = np.array([11, 12]), np.array([0.0, 0.9], np.float32)
    sampler = DeviceSampling(
        jnp.asarray(np.stack([seeds, 0 * seeds], -1), jnp.uint32), jnp.zeros(2, jnp.int32), jnp.asarray(temperatures),
        jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.zeros(2),
    )  # fmt: skip
    root_logits = np.tile(model_logits()[0], (ROWS, 1))
    for depth, limit, calibrated in ((DEPTH, width, True), (DEPTH, 2, False), (1, 1, True), (DEPTH, 2, True)):
        beam = search(
            root_logits, sampler, jnp.full(ROWS, ROOT), jnp.ones(ROWS, bool), acceptance_table(),
            carry=jnp.int32(0), depth=jnp.int32(depth), width_limit=jnp.int32(limit),
            calibrated=jnp.bool_(calibrated),
        )  # fmt: skip
        assert np.isneginf(np.asarray(beam.log_f)[:, depth:]).all()
        for row in range(ROWS):
            expected = [Candidate((), 0.0)]
            for level, found in enumerate(paths_of(beam, row, depth, width), 1):
                seed, temperature = int(seeds[row]), float(temperatures[row])
                expected = oracle_level(expected, width, seed, temperature, level, calibrated)[:limit]
                assert [(node.path, node.cell) for node in found] == [(node.path, node.cell) for node in expected]
                for name in ("log_f", "log_q"):
                    values = ([getattr(node, name) for node in nodes] for nodes in (found, expected))
                    np.testing.assert_allclose(*values, atol=1e-5)
    assert search._cache_size() == 1


def test_rows_that_do_not_speculate_get_no_candidates() -> None:
    sampler = DeviceSampling(
        jnp.zeros((2, 2), jnp.uint32), jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.zeros(2, jnp.int32), jnp.ones(2),
        jnp.zeros(2),
    )  # fmt: skip
    beam = SEARCH(
        np.tile(model_logits()[0], (2, 1)), sampler, jnp.full(2, ROOT), jnp.array([True, False]), acceptance_table(),
        carry=jnp.int32(0), depth=jnp.int32(2), width_limit=jnp.int32(2),
        calibrated=jnp.bool_(True),
    )  # fmt: skip
    assert np.isfinite(np.asarray(beam.log_f)[0, :2, :2]).all()
    assert np.isneginf(np.asarray(beam.log_f)[1]).all()
