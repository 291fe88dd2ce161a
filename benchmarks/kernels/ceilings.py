"""The device's own best, which figures are held against: copy bandwidth and the rate of a large matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

REPEATS = 5
BATCH_S = 0.05  # calls are timed in batches of about this long, so that dispatch does not count


@dataclass(frozen=True)
class Ceilings:
    """copy counts bytes read and written."""

    dtype: str
    copy_bytes: int
    copy_bytes_per_s: float
    matmul_size: int
    matmul_flops_per_s: float

    def floor_s(self, num_bytes: float, flops: float) -> float:
        """The least seconds for so many bytes read or written and so many operations."""
        return max(num_bytes / self.copy_bytes_per_s, flops / self.matmul_flops_per_s)


def best_seconds(call: Callable[[], Any]) -> float:
    """Least mean seconds of a call over REPEATS batches; the first call, which compiles, is left out.

    A device runs calls in order, so waiting for the last one waits for all.
    """
    jax.block_until_ready(call())
    started = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, int(BATCH_S / max(1e-9, time.perf_counter() - started)))
    means = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(calls - 1):
            call()
        jax.block_until_ready(call())
        means.append((time.perf_counter() - started) / calls)
    return min(means)


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int = 3) -> dict[str, float]:
    """`best_seconds` of each, taking turns, so that what else runs on the machine meets all alike."""
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            times[name] = min(times[name], best_seconds(call))
    return times


def measure_ceilings(dtype: Any) -> Ceilings:
    """Copy bandwidth on an array far above any cache, and the rate of a large square matmul."""
    on_cpu = jax.default_backend() == "cpu"
    size = 2048 if on_cpu else 8192
    elements = (1 << 28) // jnp.dtype(dtype).itemsize
    copied = 2 * elements * jnp.dtype(dtype).itemsize
    copy_s = best_seconds(repeated(lambda x: x + 1, jnp.ones(elements, dtype)))
    square = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
    matmul = jax.jit(lambda a: a @ a)
    matmul_s = best_seconds(lambda: matmul(square))
    return Ceilings(jnp.dtype(dtype).name, copied, copied / copy_s, size, 2 * size**3 / matmul_s)


def repeated(function: Callable[..., jax.Array], start: jax.Array, *others: jax.Array) -> Callable[[], jax.Array]:
    """A call that applies `function` to its own last result in place, so that no call pays for fresh memory."""
    compiled = jax.jit(function, donate_argnums=0)
    state = [start]

    def call() -> jax.Array:
        state[0] = compiled(state[0], *others)
        return state[0]

    return call
