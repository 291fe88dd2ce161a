"""What an engine that learns has beside another: room for training, and a learner."""

from __future__ import annotations

from adaserve_jax.config import EngineConfig
from adaserve_jax.distill.learner import Learner
from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.scheduler.calibration import Calibrator
from adaserve_jax.types import Progress


def build_learner(
    executor: ModelExecutor, config: EngineConfig, calibrator: Calibrator | None, progress: Progress | None
) -> Learner | None:
    """Of the configured engine, ready: what it knew before serves from now on. None where nothing is to be learned.
    Raises CheckpointError, ConfigError."""
    if config.learning is None:
        return None
    learner = Learner(executor, config.learning, calibrator, seed=config.seed)
    learner.prepare(progress)
    return learner
