"""`adaserve follow`: lends the devices of this process to an engine that another process serves."""

from __future__ import annotations

from adaserve_jax.cli.options import takes
from adaserve_jax.cli.terminal import progress_bar, say
from adaserve_jax.config import EngineConfig


@takes("config", EngineConfig)
def follow(config: EngineConfig) -> None:
    """Hold a part of the target for another process, where several hosts serve one model. Give it the options of
    that `adaserve serve`, and --process-id 1, 2, ...; it ends when that does."""
    with progress_bar() as progress:
        from adaserve_jax.runtime.multihost import follow as run

        steps = run(config, progress)
    say(f"process 0 stopped after {steps} steps", style="dim")
