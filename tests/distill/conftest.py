"""Programs that train a tiny draft, compiled once for all tests of training."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.learn_config import LearnConfig
from tests.distill.made import SIZE, SMALL, TOP

LEARN = LearnConfig(learn_rate=3e-3, learn_top_k=TOP)


@pytest.fixture(scope="session")
def programs() -> TrainPrograms:
    programs = TrainPrograms(SMALL, LEARN, SIZE, jnp.float32)
    programs.compile()
    return programs


@pytest.fixture(scope="session")
def low_rank_programs() -> TrainPrograms:
    """In bf16, with low-rank updates."""
    programs = TrainPrograms(
        SMALL, LearnConfig(learn_rate=1e-5, learn_top_k=TOP, learn_lora_rank=2), SIZE, jnp.bfloat16
    )
    programs.compile()
    return programs
