"""Size of training: the length of a micro-step that fits the allowed delay, and the device memory that training
takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import jax.numpy as jnp

from adaserve_jax.distill.heads import HeadTarget, num_steps
from adaserve_jax.distill.programs import TO_TIME, TrainPrograms, check_trainable, frozen_of, num_trained
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import HEAD_ROW, param_specs
from adaserve_jax.runtime.compile import CompileCounter
from adaserve_jax.types import Progress

LENGTHS = (32, 64, 128, 256, 512)
"""Tokens of a micro-step."""
_FIRST = (32, 128)
COPIES = 7
"""f32 numbers per trained one: weights and two moments, in training and in the good version, and gradients."""
APPLIED = 2
"""f32 numbers per trained one that an optimiser step takes while it runs."""
SCORES = 4
"""Arrays of f32 scores over the vocabulary that a micro-step holds."""


def choose_length(
    config: ModelConfig, learn: LearnConfig, dtype: Any, counter: CompileCounter | None = None,
    progress: Progress | None = None, target: HeadTarget | None = None,
) -> TrainPrograms:  # fmt: skip
    """Compile the programs for the longest of LENGTHS whose micro-step, measured here, takes at most learn_delay_ms.

    target: of a head, whose micro-step runs it too. Raises ConfigError if not even the shortest does.
    """
    tried: dict[int, TrainPrograms] = {}
    first = TrainPrograms(config, learn, LENGTHS[0], dtype, counter, target)
    first.compile(progress, only=("begin",))

    @cache
    def measured(length: int) -> float:
        tried[length] = first.with_length(length)
        tried[length].compile(progress, only=TO_TIME)
        return tried[length].time_micro_step()

    length = longest_length(learn.learn_delay_ms / 1e3, measured)
    chosen = tried[length]
    chosen.compile(progress)
    return chosen


def longest_length(limit_s: float, measured: Callable[[int], float]) -> int:
    """Return the largest of LENGTHS with measured(length) <= limit_s, in seconds.

    Two lengths are measured first; others only if the line through these allows. Raises ConfigError if there is none.
    """
    short, long = _FIRST
    if measured(short) > limit_s:
        raise ConfigError(
            f"learn_delay_ms must be at least {math.ceil(1e3 * measured(short))}, which training on {short} tokens "
            f"takes on this machine, got {1e3 * limit_s:g}; raise it, or take a smaller draft"
        )
    slope = max(0.0, (measured(long) - measured(short)) / (long - short))
    likely = [length for length in LENGTHS if measured(short) + slope * (length - short) <= limit_s]
    return next(length for length in reversed(likely) if measured(length) <= limit_s)


def training_bytes(
    config: ModelConfig, learn: LearnConfig, dtype: Any, num_drafts: int = 1, target: ModelConfig | None = None
) -> int:
    """Return the bytes of training num_drafts drafts of `config`, beside their serving weights; workspace included.

    target: of heads. Raises UnsupportedModelError: they cannot be trained.
    """
    check_trainable(config)
    return num_drafts * state_bytes(config, learn, dtype) + workspace_bytes(config, learn, dtype, target=target)


def state_bytes(config: ModelConfig, learn: LearnConfig, dtype: Any) -> int:
    """Return the bytes that stay on the device for one draft: trained state, and the base of low-rank updates or a
    head's weights that are not trained."""
    trained = COPIES * 4 * num_trained(config, learn.learn_lora_rank)
    base = param_specs(config) if learn.learn_lora_rank else frozen_of(config)
    return trained + _bytes_of(config, dtype, base)


def workspace_bytes(
    config: ModelConfig, learn: LearnConfig, dtype: Any, num_tokens: int = LENGTHS[-1],
    target: ModelConfig | None = None,
) -> int:  # fmt: skip
    """Estimate the workspace of the largest program, and the weights of a version that is made ready to serve.

    A micro-step of num_tokens holds scores; for each layer the attention weights, their gradients and every activation;
    and for every weight its gradient, the operand of the product, and that in f32, which some devices need. Copies
    between training and the good version are made in place. A head is run `num_steps` times, behind one forward
    of its target.
    """
    attention = 2 * config.num_heads * num_tokens**2
    widths = config.q_size + 2 * config.kv_size + 3 * config.intermediate_size + 4 * config.hidden_size
    micro_step = SCORES * num_tokens * config.vocab_size + config.num_layers * (attention + num_tokens * widths)
    if target is not None:
        widest = target.q_size + 2 * target.kv_size + 2 * target.intermediate_size + 4 * target.hidden_size
        micro_step = num_steps(config) * micro_step + 2 * target.num_heads * num_tokens**2 + num_tokens * widest
    weights = 2 * _whole_bytes(config, jnp.float32) + _whole_bytes(config, dtype)
    apply = APPLIED * 4 * num_trained(config, learn.learn_lora_rank)
    return max(4 * micro_step + weights, apply) + _whole_bytes(config, dtype)


def _whole_bytes(config: ModelConfig, dtype: Any) -> int:
    return _bytes_of(config, dtype, param_specs(config))


def _bytes_of(config: ModelConfig, dtype: Any, names: Iterable[str]) -> int:
    """Return the bytes of some weights as they serve."""
    specs = param_specs(config)
    sizes = {name: math.prod(specs[name][0]) for name in names if name in specs}
    return sum(size * (4 if name == HEAD_ROW else jnp.dtype(dtype).itemsize) for name, size in sizes.items())
