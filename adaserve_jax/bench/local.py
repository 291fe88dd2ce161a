"""The engine of this machine as a bench run sees it. The only file of `bench` that loads models, and so jax."""

from __future__ import annotations

from functools import cached_property

from adaserve_jax.bench.client_engine import ClientEngine
from adaserve_jax.bench.prompt_text import PromptWriter
from adaserve_jax.bench.recording import AcceptanceRecorder, RecordingExecutor
from adaserve_jax.bench.workload import WorkloadItem
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.local import LocalEngine
from adaserve_jax.models.folders import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import count_parameters
from adaserve_jax.types import Executor, Progress


class LocalBenchEngine(ClientEngine):
    """Implements `BenchEngine` with the engine in this process, ready when the constructor returns.

    Raises what loading raises: CheckpointError, ConfigError.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None, *, record: bool = False):
        """record: whether every verification is noted in `recorder`."""
        self.config = config
        self.recorder = AcceptanceRecorder()
        self.tokenizer = Tokenizer.from_folder(resolve_folder(config.target, "target"))
        engine = LocalEngine(config, progress, self._observed if record else None)
        engine.start()
        super().__init__(
            engine, self.encode, engine.set_policy, parameters=parameters_of(config),
            max_prefill_tokens=config.max_prefill_tokens,
        )  # fmt: skip

    def _observed(self, executor: Executor) -> Executor:
        return RecordingExecutor(executor, self.recorder)

    def encode(self, item: WorkloadItem, seed: int = 0) -> list[int]:
        """Token ids of the item's prompt. seed: for one that is known by its length only, whose text is made."""
        if item.by_length and item.lengths is not None:
            return self.tokenizer.encode(self._writer.write(item.lengths, seed))
        return encode_item(self.tokenizer, item)

    @cached_property
    def _writer(self) -> PromptWriter:
        return PromptWriter(lambda text: len(self.tokenizer.encode(text)))


def parameters_of(config: EngineConfig) -> tuple[int | None, int | None]:
    """Parameters of target and draft; None where unknown or absent."""
    draft = config.draft
    return (
        count_parameters(resolve_folder(config.target, "target")),
        None if draft is None else count_parameters(resolve_folder(draft, "draft")),
    )


def encode_item(tokenizer: Tokenizer, item: WorkloadItem) -> list[int]:
    """Token ids of the item's prompt, or of its messages through the model's chat template."""
    if item.prompt is not None:
        return tokenizer.encode(item.prompt)
    return tokenizer.apply_chat_template([{"role": m.role, "content": m.content} for m in item.messages])
