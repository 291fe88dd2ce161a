"""How many tokens one micro-step takes: the most that this machine trains on within the delay a step may suffer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.runtime.compiling import CompileCounter
from adaserve_jax.types import Progress

LENGTHS = (32, 64, 128, 256, 512)
"""Tokens of a micro-step."""
_FIRST = (32, 128)


def choose_length(
    config: ModelConfig, learn: LearnConfig, dtype: Any, device: Any = None, counter: CompileCounter | None = None,
    progress: Progress | None = None,
) -> TrainPrograms:  # fmt: skip
    """Compiled programs of the longest of LENGTHS whose micro-step, measured here, takes learn_delay_ms at most.

    Two lengths are measured first, and only those between that their line allows. Raises ConfigError: not even the
    shortest does.
    """
    tried: dict[int, TrainPrograms] = {}
    seconds: dict[int, float] = {}
    first = TrainPrograms(config, learn, LENGTHS[0], dtype, device, counter)
    first.compile(progress, only=("begin",))

    def measured(length: int) -> float:
        if length not in seconds:
            tried[length] = first.with_length(length)
            tried[length].compile(progress, only=("begin", "accumulate"))
            seconds[length] = tried[length].time_micro_step()
        return seconds[length]

    length = longest_within(learn.learn_delay_ms / 1e3, measured)
    chosen = tried[length]
    chosen.compile(progress)
    return chosen


def longest_within(limit_s: float, measured: Callable[[int], float]) -> int:
    """The largest of LENGTHS of which measured(length), in seconds, is limit_s at most; few of them are asked for.
    Raises ConfigError: there is none."""
    short, long = _FIRST
    if measured(short) > limit_s:
        raise ConfigError(
            f"learn_delay_ms must be at least {math.ceil(1e3 * measured(short))}, which training on {short} tokens "
            f"takes on this machine, got {1e3 * limit_s:g}; raise it, or take a smaller draft"
        )
    slope = max(0.0, (measured(long) - measured(short)) / (long - short))
    likely = [length for length in LENGTHS if measured(short) + slope * (length - short) <= limit_s]
    return next(length for length in reversed(likely) if measured(length) <= limit_s)
