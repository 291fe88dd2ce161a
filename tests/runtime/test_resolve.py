"""What is left to "auto" becomes numbers that fit each other, or an error that says which to change."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.placement import Placement
from adaserve_jax.runtime.sizing import choose_attention, dtype_of, resolve

TARGET = ModelConfig(2048, 256, 704, 5, 4, 2, 64, 1e4, 1e-5, True, 2048)
DRAFT = ModelConfig(2048, 128, 352, 2, 2, 1, 64, 1e4, 1e-5, True, 1024)


def test_auto_on_a_cpu() -> None:
    resolved = resolve(EngineConfig(), TARGET, DRAFT)
    limits = resolved.limits
    assert resolved.config.max_context == limits.max_context == 1024  # the draft's, which is less
    assert resolved.dtype == dtype_of(EngineConfig()) == "float32"
    assert dtype_of(EngineConfig(dtype="bf16")) == "bfloat16" and dtype_of(EngineConfig(dtype="f32")) == "float32"
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


SHORT = EngineConfig(max_requests=4, max_context=1024, num_pages=60)
"""4 requests of 16 pages each do not fit."""
NEEDS = 4 * 16


def test_the_extension_is_what_the_draft_takes() -> None:
    """The draft: an embedding of 2048 x 128, 2 layers, and a norm of 128."""
    layer = 128 + (2 + 1 + 1) * 64 * 128 + 128 * 128 + 128 + 2 * 352 * 128 + 128 * 352
    weights = (2048 * 128 + 2 * layer + 128) * 4
    draft_page, target_page = 2 * 2 * 1 * 64 * 64 * 4, 2 * 5 * 2 * 64 * 64 * 4
    found = resolve(replace(SHORT, elastic="on"), TARGET, DRAFT).limits
    assert found.extension_pages == (weights + 60 * draft_page) // target_page
    assert found.num_pages == 60


@pytest.mark.parametrize(
    ("elastic", "num_pages", "swaps", "extended"),
    [
        ("auto", NEEDS - 1, True, True),
        ("auto", NEEDS, True, False),  # every request fits at its longest: pages never run short
        ("auto", NEEDS - 1, False, False),  # the policy never swaps
        ("off", NEEDS - 1, True, False),
        ("on", NEEDS, False, True),
    ],
)
def test_when_pools_can_be_extended(elastic: str, num_pages: int, swaps: bool, extended: bool) -> None:
    config = replace(SHORT, elastic=elastic, num_pages=num_pages)
    assert (resolve(config, TARGET, DRAFT, elastic=swaps).limits.extension_pages > 0) == extended


@pytest.mark.parametrize(
    ("options", "draft", "reason"),
    [
        ({}, None, "there is no draft"),
        ({"tp": 2}, DRAFT, r"the target is divided over 2 devices \(tp\)"),
        ({"num_processes": 2, "tp": 1, "coordinator": "host:1"}, DRAFT, "the target lies in 2 processes"),
        ({"attention": "plain"}, DRAFT, "attention by 'plain' reads one pool of pages; use attention xla"),
    ],
)
def test_where_pools_cannot_be_extended_is_said(
    options: dict, draft: ModelConfig | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices() * options.get("tp", 1))
    monkeypatch.setattr("adaserve_jax.runtime.sizing.Placement.over", lambda *_: Placement.on_one())
    config = replace(SHORT, **options)
    assert resolve(config, TARGET, draft, elastic=True).limits.extension_pages == 0
    with pytest.raises(ConfigError, match=f"elastic must be off or auto here, got 'on': {reason}"):
        resolve(replace(config, elastic="on"), TARGET, draft)


def test_several_processes_give_all_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices() * 4)
    with pytest.raises(ConfigError, match="tp must be 4, all devices of the 2 processes, got 2"):
        resolve(EngineConfig(num_processes=2, tp=2, coordinator="host:1"), TARGET, DRAFT)


def test_a_draft_of_less_than_a_page_makes_no_page() -> None:
    huge = replace(TARGET, head_dim=TARGET.head_dim * 20_000)
    config = replace(SHORT, elastic="on", num_pages=16, max_requests=1)
    with pytest.raises(ConfigError, match="the draft's memory is less than one page of the target"):
        resolve(config, huge, DRAFT)


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
