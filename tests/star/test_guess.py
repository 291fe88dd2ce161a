"""What a target will say next: the likeliest path of its tree, cut where its rounds end."""

from __future__ import annotations

import numpy as np
import pytest

from adaserve_jax.star.guess import MEMORY, PRIOR, Ends, Found, Path
from tests.star.toys import VOCABULARY


def random_tree(rng: np.random.Generator, width: int, depth: int) -> Found:
    """Nodes under nodes, with holes."""
    index, parent, log_f = [], [], []
    for level in range(depth):
        above = [at for at in index if at // width == level - 1]
        for rank in range(width):
            if (
                (level and not above)
                or (rank and rng.random() < 0.4)
                or (level and level == depth - 1 and rng.random() < 0.2)
            ):
                continue
            at = int(rng.choice(above)) if level else -1
            index.append(level * width + rank)
            parent.append(at)
            log_f.append((log_f[index.index(at)] if level else 0.0) - float(rng.random()))
    token = rng.integers(0, VOCABULARY, len(index))
    columns = (*(np.array(part, np.int32) for part in (index, token, parent, token)), np.zeros(len(index), np.float32))
    return Found(columns, np.array(log_f, np.float32))  # type: ignore[arg-type]


def test_the_path_is_the_likeliest_of_the_deepest_by_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(300):
        width, depth = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        found = random_tree(rng, width, depth)
        cut = int(rng.integers(1, depth + 1))
        index, token, parent, *_ = (part.tolist() for part in found.columns)
        paths = {}
        for at, column in enumerate(index):
            if column < cut * width:
                before = paths[parent[at]] if parent[at] >= 0 else ()
                paths[column] = (*before, (token[at], float(np.exp(np.float64(found.log_f[at])))))
        deepest = max(len(path) for path in paths.values())
        best = max((path for path in paths.values() if len(path) == deepest), key=lambda path: path[-1][1])
        path = found.best_path(width, cut)
        assert path.tokens.tolist() == [token for token, _ in best]
        np.testing.assert_allclose(path.chance, [chance for _, chance in best])
        assert len(found.cut(width, cut)[0]) == len(paths)


def test_an_empty_tree_has_no_path():
    none = np.zeros(0, np.int32)
    path = Found((none, none, none, none, none.astype(np.float32)), none.astype(np.float32)).best_path(2, 2)
    assert path.depth == 0 and Ends().likeliest(path) == (0, 0.0)


def test_ends_are_learned():
    """By hand: at first the whole path with an own token; a target that cuts after one token shows it soon."""
    ends, path = Ends(), Path(np.array([5, 6], np.int32), np.array([0.8, 0.5]))
    assert ends.likeliest(path) == (3, 0.5)
    ends.saw(path, np.array([5, 6, 9]))
    count, chance = ends.likeliest(path)
    assert count == 3 and chance == pytest.approx(0.5 * (1 + PRIOR) / (0.5 + PRIOR))
    for _ in range(20):
        ends.saw(path, np.array([5]))
    assert ends.likeliest(path)[0] == 1
    happened, expected = 0.0, 0.0
    for hit in [0] + [1] * 20:
        happened, expected = happened * MEMORY + hit, expected * MEMORY + 0.8
    assert ends.likeliest(path)[1] == pytest.approx(0.8 * happened / (expected + PRIOR))
    for said in ([], [6], [5, 7], [5, 6, 7, 8]):
        before = ends._happened.sum() * MEMORY
        ends.saw(path, np.array(said, np.int32))
        assert ends._happened.sum() == pytest.approx(before), "none of its ends"
