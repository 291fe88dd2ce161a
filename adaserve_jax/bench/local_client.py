"""The engine of this machine as a bench run sees it. The only file of `bench` that loads models, and so jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from adaserve_jax.bench.engine import Ask, Due, EngineAbout, LoopResult, OnFlight, drive
from adaserve_jax.config import MTP, EngineConfig
from adaserve_jax.engine.client import EngineClient, GenerateRequest
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import count_parameters
from adaserve_jax.results.schema import OWN_SYSTEM
from adaserve_jax.sim.acceptance import AcceptanceRecorder, RecordingExecutor
from adaserve_jax.stats import StepStats
from adaserve_jax.types import Progress
from adaserve_jax.workloads.items import WorkloadItem
from adaserve_jax.workloads.prompt_text import PromptWriter

INFO_COLUMNS = (
    "device", "jax_version", "target", "draft", "deterministic", "max_requests", "max_context", "baseline_s",
    "synthetic_acceptance",
)  # fmt: skip
"""Facts for the rows that a client's `info` has under the same names."""


class ClientEngine:
    """Implements `BenchEngine` by a started client. encode: token ids of an item's prompt; the seed is for items whose
    text must be made. set_policy: makes its engine serve by another policy, while idle.
    parameters: of target and draft. max_prefill_tokens: the engine's option, for the rows."""

    token_source = "engine"
    notes = ()

    def __init__(
        self, client: EngineClient, encode: Callable[[WorkloadItem, int], list[int]],
        set_policy: Callable[[str], None], *,
        parameters: tuple[int | None, int | None] = (None, None), max_prefill_tokens: int = 0,
    ):  # fmt: skip
        self.client = client
        self._encode = encode
        self.set_policy = set_policy
        self._parameters = parameters
        self._max_prefill_tokens = max_prefill_tokens

    @property
    def about(self) -> EngineAbout:
        info = self.client.info
        return EngineAbout(
            system=OWN_SYSTEM,
            target_params=self._parameters[0],
            draft_params=self._parameters[1],
            max_prefill_tokens=self._max_prefill_tokens,
            **{name: getattr(info, name) for name in INFO_COLUMNS},
        )

    def prepare(self, ask: Ask) -> GenerateRequest:
        """Return the request with its prompt tokenised. Requests take the loaded adapters in turn."""
        adapters = self.client.info.adapters
        sampling = replace(ask.item.sampling(), seed=ask.seed, max_tokens=ask.max_tokens)
        return GenerateRequest(
            request_id=ask.request_id,
            prompt_ids=self._encode(ask.item, ask.seed),
            sampling=sampling,
            slo=ask.slo,
            slo_class=ask.item.slo_class,
            cache_salt=ask.cache_salt,
            adapter=adapters[ask.number % len(adapters)] if adapters else "",
        )

    def drive(self, due: Sequence[Due], *, drain_s: float, on_progress: OnFlight | None = None) -> LoopResult:
        return drive(self.client, due, drain_s=drain_s, on_progress=on_progress)

    def stats(self) -> StepStats:
        return self.client.stats().scheduler

    def compiles_after_ready(self) -> int:
        return self.client.stats().compiles_after_ready

    def close(self) -> None:
        self.client.close()


class LocalBenchEngine(ClientEngine):
    """Implements `BenchEngine` with the engine in this process, ready when the constructor returns.

    Raises what loading raises: CheckpointError, ConfigError.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None, *, record: bool = False):
        """Load the engine and start it. record: note every verification in `recorder`."""
        self.config = config
        self.recorder = AcceptanceRecorder()
        self.tokenizer = Tokenizer.from_folder(resolve_folder(config.target, "target"))
        observed = (lambda executor: RecordingExecutor(executor, self.recorder)) if record else None
        engine = LocalEngine(config, progress, observed)
        engine.start()
        draft_params = None
        if config.draft is not None:
            folder = resolve_folder(config.draft, "draft", config.target)
            mtp = ModelConfig.from_folder(folder).mtp if config.draft == MTP else None
            draft_params = count_parameters(folder, "" if mtp is None else mtp.layers[:1])
        target_params = count_parameters(resolve_folder(config.target, "target"))
        super().__init__(
            engine, self.encode, engine.set_policy, parameters=(target_params, draft_params),
            max_prefill_tokens=config.max_prefill_tokens,
        )  # fmt: skip

    def encode(self, item: WorkloadItem, seed: int = 0) -> list[int]:
        """Return the token ids of the item's prompt. seed: for one that is known by its length only, whose text is
        made."""
        if item.by_length and item.lengths is not None:
            return self.tokenizer.encode(self._writer.write(item.lengths, seed))
        return encode_item(self.tokenizer, item)

    @cached_property
    def _writer(self) -> PromptWriter:
        return PromptWriter(lambda text: len(self.tokenizer.encode(text)))


def encode_item(tokenizer: Tokenizer, item: WorkloadItem) -> list[int]:
    """Return the token ids of the item's prompt, or of its messages through the model's chat template."""
    if item.prompt is not None:
        return tokenizer.encode(item.prompt)
    return tokenizer.apply_chat_template([{"role": m.role, "content": m.content} for m in item.messages])
