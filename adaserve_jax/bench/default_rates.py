"""Rates to compare policies at when none are given: around what this machine can serve."""

from __future__ import annotations

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.workload import Workload

LOADS = (0.5, 1.5)
"""Offered output tokens, over those of one request served alone without speculation in the same time."""


def default_rates(workload: Workload, baseline_s: float) -> tuple[float, ...]:
    """Return requests per second at each of LOADS, with two digits. baseline_s: seconds of one token, alone. Raises
    ConfigError when it is not known."""
    if baseline_s <= 0:
        raise ConfigError("the time of one token alone is not known, and so no rate that fits; give --rates")
    mean_tokens = sum(item.max_tokens for item in workload.items) / len(workload.items)
    return tuple(float(f"{load / (baseline_s * mean_tokens):.2g}") for load in LOADS)
