"""Compilations are counted where they matter: inside serving steps, on the step's thread."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.runtime.compile import CompileCounter, use_compile_cache


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
