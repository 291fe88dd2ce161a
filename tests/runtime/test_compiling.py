"""Compilations are counted where they matter: inside serving steps, on the step's thread."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp

from adaserve_jax.runtime.compiling import CompileCounter


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
