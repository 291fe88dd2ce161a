"""Computed times: bytes at the memory's rate or products at the device's, whichever takes longer, and exchanges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adaserve_jax.bench.roofline import Assumptions, Roofline
from adaserve_jax.models.config import ExpertConfig, ModelConfig
from adaserve_jax.models.families import MIXTRAL_NAMES
from adaserve_jax.runtime.absent_device import DEVICES

MODEL = ModelConfig(
    vocab_size=1000, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    rope_theta=1e4, rms_norm_eps=1e-5, tie_embeddings=False, max_position=2048,
)  # fmt: skip
SHARES = Assumptions(memory_share=0.5, compute_share=0.25, exchange_s=1e-5)
H100 = replace(DEVICES["h100"], bytes_per_s=2e12, flops_per_s=4e14, link_bytes_per_s=1e11)
ONE = Roofline(H100, MODEL, 1, weights=10**10, products=5 * 10**9, context_bytes=1e5, assumed=SHARES)


def test_a_small_step_takes_what_reading_weights_and_context_takes() -> None:
    assert ONE.forward_s(1, 1, 0, scored=1) == pytest.approx(1e10 / 1e12)
    assert ONE.forward_s(8, 4, 1000, scored=8) == pytest.approx((1e10 + 4 * 1000 * 1e5) / 1e12)


def test_a_large_step_takes_what_its_products_take() -> None:
    attention, head = 4 * 2 * 64 * 1024 * 100, 2 * 16 * 1000 * 64
    expected = (2 * 5e9 * 1024 + attention + head) / 1e14
    assert ONE.forward_s(1024, 16, 100, scored=16) == pytest.approx(expected)


def test_a_mixture_reads_the_experts_that_its_tokens_reach() -> None:
    """Two of eight experts, which are nine tenths of the weights: a quarter of them for one token, 7/16 for two."""
    experts = ExpertConfig(8, 2, 128, normalised=True, names=MIXTRAL_NAMES)
    mixture = replace(ONE, config=replace(MODEL, experts=experts), expert_weights=9 * 10**9, products=10**6)
    for tokens, share in ((1, 1 / 4), (2, 7 / 16), (1000, 1)):
        assert mixture.forward_s(tokens, 1, 0, scored=1) == pytest.approx((1e9 + share * 9e9) / 1e12)


def test_several_devices_exchange_two_sums_a_layer_and_the_scores() -> None:
    divided = replace(ONE, ways=4)
    sums, scores = 5 * 2 * 4 * 8 * 64, 4 * 8 * 1000
    added = divided.forward_s(8, 8, 0, scored=8) - ONE.forward_s(8, 8, 0, scored=8)
    assert added == pytest.approx(6 * 1e-5 + 0.75 * (sums + scores) / 1e11)
