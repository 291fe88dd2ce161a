"""The bytes that training takes, before anything is compiled: what the ledger of memory is told."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from adaserve_jax.distill.lengths import LENGTHS
from adaserve_jax.distill.trainable import num_trained
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import param_specs

COPIES = 7
"""f32 numbers per trained one: weights and two moments, in training and as remembered, and gradients."""
APPLIED = 2
"""The same for an optimiser step, while it runs."""
SCORES = 4
"""How often a micro-step holds f32 scores over the vocabulary."""


def training_bytes(config: ModelConfig, learn: LearnConfig, dtype: Any, num_drafts: int = 1) -> int:
    """What training num_drafts drafts of `config` takes beside those that serve, the programs' workspace included."""
    return num_drafts * state_bytes(config, learn, dtype) + workspace_bytes(config, learn, dtype)


def state_bytes(config: ModelConfig, learn: LearnConfig, dtype: Any) -> int:
    """What stays on the device for one draft: what is trained, and for low-rank updates what they stand on."""
    trained = COPIES * 4 * num_trained(config, learn.learn_lora_rank)
    return trained + (_whole_bytes(config, dtype) if learn.learn_lora_rank else 0)


def workspace_bytes(config: ModelConfig, learn: LearnConfig, dtype: Any, num_tokens: int = LENGTHS[-1]) -> int:
    """An estimate of what one program takes at most, and the weights of a version that is made ready to serve.

    num_tokens: of a micro-step. Copies between what is trained and what is remembered lie in the place of what they
    replace. A micro-step holds scores, for each layer the weights of attention and their gradients and every
    activation, and of every weight its gradient, what is multiplied, and that in f32, which some devices need.
    """
    attention = 2 * config.num_heads * num_tokens**2
    widths = config.q_size + 2 * config.kv_size + 3 * config.intermediate_size + 4 * config.hidden_size
    micro_step = SCORES * num_tokens * config.vocab_size + config.num_layers * (attention + num_tokens * widths)
    weights = 2 * _whole_bytes(config, jnp.float32) + _whole_bytes(config, dtype)
    apply = APPLIED * 4 * num_trained(config, learn.learn_lora_rank)
    return max(4 * micro_step + weights, apply) + _whole_bytes(config, dtype)


def _whole_bytes(config: ModelConfig, dtype: Any) -> int:
    return sum(math.prod(shape) for shape, _ in param_specs(config).values()) * jnp.dtype(dtype).itemsize
