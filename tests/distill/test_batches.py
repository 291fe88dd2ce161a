"""Packing: every row once, at the token that predicted, with what stood before it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from adaserve_jax.distill.records import PADDING, PackedBatch, pack
from tests.distill.made import made_record


def rows_of(batch: PackedBatch) -> list[tuple[tuple[int, ...], bytes, bytes]]:
    """(the text up to the row's token as the row sees it, ids, log_p) of each row, read from the arrays alone."""
    found = []
    for row in np.flatnonzero(batch.weight):
        at = batch.at[row]
        own = batch.segment == batch.segment[at]
        before = np.flatnonzero(own & (np.arange(len(own)) <= at))
        assert (np.diff(before) == 1).all()
        assert batch.position[before].tolist() == list(range(len(before)))
        found.append((tuple(batch.tokens[before].tolist()), batch.ids[row].tobytes(), batch.log_p[row].tobytes()))
    return found


def expected_rows(records: list[Any]) -> list[tuple[tuple[int, ...], bytes, bytes]]:
    return [
        (tuple(each.tokens[: t + 1].tolist()), each.ids[i].tobytes(), each.log_p[i].astype(np.float32).tobytes())
        for each in records
        for i, t in enumerate(each.position)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_short_texts_share_batches_and_every_row_comes_once(seed: int):
    rng = np.random.default_rng(seed)
    records = [made_record(rng, length, int(rng.integers(1, length))) for length in rng.integers(2, 33, 20)]
    batches = pack(records, 32, rng)
    found = [row for batch in batches for row in rows_of(batch)]
    assert Counter(found) == Counter(expected_rows(records))
    assert sum(batch.num_rows for batch in batches) == len(found)
    filled = [int((batch.segment != PADDING).sum()) for batch in batches]
    assert sum(count <= 16 for count in filled) <= 1  # first fit: two such would have shared one


@pytest.mark.parametrize("seed", range(5))
def test_long_texts_become_windows_and_rows_keep_a_quarter_of_one_before_them(seed: int):
    rng = np.random.default_rng(seed)
    size = 32
    records = [made_record(rng, int(rng.integers(40, 300)), int(rng.integers(1, 39))) for _ in range(6)]
    found = [row for batch in pack(records, size, rng) for row in rows_of(batch)]
    by_row = {(ids, log_p): text for text, ids, log_p in found}
    assert len(by_row) == len(found)
    for text, ids, log_p in expected_rows(records):
        seen = by_row[ids, log_p]
        assert text[-len(seen) :] == seen
        assert len(seen) == len(text) or len(seen) > size // 4


def test_what_follows_the_last_row_and_texts_without_rows_take_no_room():
    rng = np.random.default_rng(0)
    (batch,) = pack([made_record(rng, 500, [0, 7]), made_record(rng, 500, []), made_record(rng, 90, [20])], 32, rng)
    assert (batch.segment != PADDING).sum() == 8 + 21
    assert pack([], 32, rng) == []


def test_the_order_is_the_generators():
    records = [made_record(np.random.default_rng(seed), 20, 5) for seed in range(12)]

    def packed(seed: int) -> bytes:
        return b"".join(batch.tokens.tobytes() for batch in pack(records, 64, np.random.default_rng(seed)))

    assert packed(1) == packed(1) != packed(2)
