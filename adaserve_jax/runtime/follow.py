"""What every process but the first runs: its part of the target, step by step as process 0 announces them."""

from __future__ import annotations

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.runtime import hosts
from adaserve_jax.runtime.compiling import compile_all, use_compile_cache
from adaserve_jax.runtime.footprint import workspace_of
from adaserve_jax.runtime.pair import find_pair
from adaserve_jax.runtime.parts import declare_target, load_target
from adaserve_jax.runtime.resolve import resolve
from adaserve_jax.types import Progress


def follow(config: EngineConfig, progress: Progress | None = None) -> int:
    """Run the steps of process 0 until it stops; returns how many. It says what "auto" means, so that all agree.

    Raises ConfigError: this is process 0, or its options differ. CheckpointError. EngineDeadError: process 0 is gone.
    """
    if not config.process_id:
        raise ConfigError("process 0 serves; `adaserve follow` is for the others: give --process-id 1, 2, ...")
    use_compile_cache(config.compile_cache)
    leader = hosts.Leader(config)
    steps = 0
    try:
        hosts.join(config)
        pair = find_pair(config)
        resolved = resolve(leader.config(), pair.target, pair.draft).without_draft()
        resolved.check_memory()
        target = load_target(pair, resolved, progress)
        target.compiled = compile_all(declare_target(target, resolved.limits), progress)
        resolved.check_memory(workspace_of(target.compiled))
        while (step := leader.next_step()) is not None:
            target.run(step)
            steps += 1
        target.close()
    finally:
        leader.close()
        hosts.leave()
    return steps
