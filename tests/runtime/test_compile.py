"""Buckets hold every step that the limits allow, and compilations of serving steps are counted."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.runtime.compile import BucketSet, CompileCounter, use_compile_cache

BUCKETS = BucketSet((1, 4, 8, 16, 32, 64), (1, 8, 32), max_sampled=32)


def test_pick_holds_the_step_and_is_declared_and_is_the_smallest() -> None:
    declared = BUCKETS.all()
    for tokens in range(1, 65):
        for rows in range(1, min(tokens, 32) + 1):
            bucket = BUCKETS.pick(tokens, rows)
            assert bucket in declared
            assert bucket.tokens >= tokens
            assert bucket.rows >= rows
            smaller = [b for b in declared if b.tokens >= tokens and b.rows >= rows and b.tokens < bucket.tokens]
            assert smaller == []


def test_what_fits_no_bucket_is_an_error() -> None:
    with pytest.raises(ValueError, match="no bucket holds 65 tokens in 1 rows"):
        BUCKETS.pick(65, 1)
    with pytest.raises(ValueError, match="no bucket holds 64 tokens in 33 rows"):
        BUCKETS.pick(64, 33)


def test_blocks_suffice_for_every_split() -> None:
    rng = np.random.default_rng(0)
    for bucket in BUCKETS.all():
        for _ in range(50):
            rows = int(rng.integers(1, min(bucket.rows, bucket.tokens) + 1))
            cuts = np.sort(rng.choice(np.arange(1, bucket.tokens), rows - 1, replace=False))
            counts = np.diff(np.concatenate([[0], cuts, [bucket.tokens]]))
            needed = sum(-(-int(count) // bucket.block_size) for count in counts)
            assert needed <= bucket.num_blocks


def test_sampled_positions_are_capped_or_one_per_row() -> None:
    assert {bucket.sampled for bucket in BUCKETS.all()} == {1, 4, 8, 16, 32}
    per_row = BucketSet((16,), (1, 8), max_sampled=None)
    assert [(bucket.rows, bucket.sampled) for bucket in per_row.all()] == [(1, 1), (8, 8)]


def compile_something(size: int) -> None:
    jax.jit(lambda x: x * 2 + size)(jnp.zeros(size)).block_until_ready()


def test_counts_inside_the_block_only_and_on_this_thread_only() -> None:
    counter = CompileCounter()
    compile_something(101)
    assert counter.count == 0
    with counter:
        other = threading.Thread(target=compile_something, args=(102,))
        other.start()
        other.join()
        assert counter.count == 0
        compile_something(103)
    assert counter.count > 0
    seen = counter.count
    counter.close()
    with counter:
        compile_something(104)
    assert counter.count == seen


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    expected = r"cannot create folder .*/file/cache \(Not a directory\); choose another by compile_cache"
    with pytest.raises(ConfigError, match=expected):
        use_compile_cache(tmp_path / "file" / "cache")
