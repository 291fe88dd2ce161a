"""What an engine with several drafts, or with drafts that learn, has beside another one."""

from __future__ import annotations

import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.distill.footprint import training_bytes
from adaserve_jax.distill.learner import Learner
from adaserve_jax.distill.routing import Router, make_router
from adaserve_jax.models.folders import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.runtime.pair import find_pair
from adaserve_jax.runtime.resolve import dtype_of
from adaserve_jax.scheduler.calibration import Calibrator
from adaserve_jax.types import Progress


def learning_bytes(config: EngineConfig) -> int:
    """Device memory that learning will take, before anything is loaded; 0 without it. Raises CheckpointError,
    ConfigError."""
    if config.learning is None:
        return 0
    pair = find_pair(config)
    assert pair.draft is not None, "a LearnConfig comes with a draft"
    return training_bytes(pair.draft, config.learning, dtype_of(config), len(pair.draft_names))


def build_router(config: EngineConfig, executor: ModelExecutor, tokenizer: Tokenizer) -> Router | None:
    """Between the configured drafts; None without one. Raises ConfigError."""
    if config.draft is None:
        return None
    folders = {name: resolve_folder(folder, "draft") for name, folder in config.draft_folders.items()}
    return make_router(
        config.route, folders, embedding=lambda: np.asarray(executor.draft_params(0)["embed"], np.float32),
        encode=tokenizer.encode,
    )  # fmt: skip


def build_learner(
    executor: ModelExecutor, config: EngineConfig, calibrator: Calibrator | None, router: Router | None,
    progress: Progress | None,
) -> Learner | None:  # fmt: skip
    """Of the configured engine, ready: what it knew before serves from now on. None where nothing is to be learned.
    Raises CheckpointError, ConfigError."""
    if config.learning is None:
        return None
    learner = Learner(executor, config.learning, calibrator, seed=config.seed, beside=router)
    learner.prepare(progress)
    return learner
