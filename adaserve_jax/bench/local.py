"""The engine of this machine as a bench run sees it. The only file of `bench` that loads models, and so jax."""

from __future__ import annotations

from adaserve_jax.bench.recording import AcceptanceRecorder, RecordingExecutor
from adaserve_jax.bench.workload import WorkloadItem
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.local import LocalEngine
from adaserve_jax.models.folders import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import count_parameters
from adaserve_jax.types import Executor, Progress


class LocalBenchEngine:
    """Implements `BenchEngine` with the engine in this process, ready when the constructor returns.

    Raises what loading raises: CheckpointError, ConfigError.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None, *, record: bool = False):
        """record: whether every verification is noted in `recorder`."""
        self.config = config
        self.recorder = AcceptanceRecorder()
        self.tokenizer = Tokenizer.from_folder(resolve_folder(config.target, "target"))
        self.client = LocalEngine(config, progress, self._observed if record else None)
        self.client.start()

    def _observed(self, executor: Executor) -> Executor:
        return RecordingExecutor(executor, self.recorder)

    def encode(self, item: WorkloadItem) -> list[int]:
        """Token ids of the item's prompt, or of its messages through the model's chat template."""
        return encode_item(self.tokenizer, item)

    def set_policy(self, name: str) -> None:
        """Serve by `name` from now on, without compiling; only while idle."""
        self.client.set_policy(name)

    def num_parameters(self) -> tuple[int | None, int | None]:
        """Parameters of target and draft."""
        draft = self.config.draft
        return (
            count_parameters(resolve_folder(self.config.target, "target")),
            None if draft is None else count_parameters(resolve_folder(draft, "draft")),
        )


def encode_item(tokenizer: Tokenizer, item: WorkloadItem) -> list[int]:
    """Token ids of the item's prompt, or of its messages through the model's chat template."""
    if item.prompt is not None:
        return tokenizer.encode(item.prompt)
    return tokenizer.apply_chat_template([{"role": m.role, "content": m.content} for m in item.messages])
