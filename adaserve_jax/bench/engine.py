"""What a bench run needs of an engine: a client, a tokenizer, and a change of policy without a new compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from adaserve_jax.bench.recording import AcceptanceRecorder
from adaserve_jax.bench.workload import WorkloadItem
from adaserve_jax.engine.client import EngineClient


class BenchEngine(Protocol):
    """One ready engine that serves every policy of a run in turn."""

    @property
    def client(self) -> EngineClient: ...

    @property
    def recorder(self) -> AcceptanceRecorder:
        """What verifications revealed since it was last taken; nothing unless the engine was opened to record."""
        ...

    def encode(self, item: WorkloadItem) -> list[int]:
        """Token ids of the item's prompt, or of its messages through the model's chat template."""
        ...

    def set_policy(self, name: str) -> None:
        """Serve by `name` from now on; called only while no request is in flight."""
        ...

    def num_parameters(self) -> tuple[int | None, int | None]:
        """Parameters of target and draft; None where unknown or absent."""
        ...


OpenEngine = Callable[[str], BenchEngine]
"""open_engine(policy): a started engine that serves by `policy`."""
