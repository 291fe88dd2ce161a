"""What is left to "auto" becomes numbers that fit each other, or an error that says which to change."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.runtime.resolve import choose_attention, resolve

TARGET = ModelConfig(2048, 256, 704, 5, 4, 2, 64, 1e4, 1e-5, True, 2048)
DRAFT = ModelConfig(2048, 128, 352, 2, 2, 1, 64, 1e4, 1e-5, True, 1024)


def test_auto_on_a_cpu() -> None:
    resolved = resolve(EngineConfig(), TARGET, DRAFT)
    limits = resolved.limits
    assert resolved.config.max_context == limits.max_context == 1024  # the draft's, which is less
    assert resolved.dtype == "float32"
    assert limits.token_edges[-1] == resolved.config.max_batch_tokens
    assert resolved.verify_buckets.row_edges[-1] == limits.max_requests
    assert resolved.catchup_buckets.token_edges[-1] == limits.max_tokens
    assert limits.num_pages >= limits.max_pages_per_request
    assert resolve(resolved.config, TARGET, DRAFT).limits == limits  # resolving again changes nothing


def test_without_a_draft_nothing_is_kept_for_one() -> None:
    limits = resolve(EngineConfig(draft=None), TARGET, None).limits
    assert (limits.max_depth, limits.max_width, limits.max_context) == (0, 0, 2048)


def test_deterministic_mode_has_one_bucket() -> None:
    resolved = resolve(EngineConfig(deterministic=True, max_requests=8), TARGET, DRAFT)
    (bucket,) = resolved.verify_buckets.all()
    assert (bucket.rows, bucket.tokens, bucket.sampled) == (8, 64, 64)


def test_row_edges_say_how_many_requests_run() -> None:
    assert resolve(EngineConfig(row_edges=(1, 4)), TARGET, DRAFT).limits.max_requests == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_context": 4096}, "max_context must be at most 1024, which the models support, got 4096"),
        ({"max_requests": 200}, r"max_tree_tokens \(128\) must be at least max_requests \(200\)"),
        (
            {"token_edges": (4, 16), "max_batch_tokens": 32},
            r"max_batch_tokens \(32\) must equal the last of token_edges",
        ),
        ({"deterministic": True, "token_edges": (16, 64)}, "one bucket: leave out token_edges and row_edges"),
        ({"attention": "plain", "deterministic": True}, "attention must be auto or xla in deterministic mode"),
        ({"row_edges": (1, 4), "max_requests": 8}, r"the last of row_edges \(1, 4\) must equal max_requests \(8\)"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(**options), TARGET, DRAFT)


@pytest.mark.parametrize(
    ("platform", "head_dim", "found"),
    [
        ("gpu", 64, "mosaic_gpu"),
        ("tpu", 128, "mosaic_tpu"),
        ("tpu", 64, "multiples of 128, not 64: XLA would copy the pools"),
        ("gpu", 96, "by 'mosaic_gpu' supports head dimensions 64 and 128, not 96"),
        ("cpu", 128, "needs a GPU or a TPU, and jax sees 'cpu'"),
    ],
)
def test_mosaic_is_the_kernel_of_the_platform_where_it_can_run(platform: str, head_dim: int, found: str) -> None:
    models = [replace(TARGET, head_dim=head_dim)]
    arguments = (EngineConfig(attention="mosaic"), models, jnp.dtype(jnp.bfloat16), platform)
    if found.startswith("mosaic"):
        assert choose_attention(*arguments) == found
    else:
        with pytest.raises(ConfigError, match=found):
            choose_attention(*arguments)
