"""An engine in this process as a bench run sees it: the client of an engine, driven in open loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from adaserve_jax.bench.engine import Ask, EngineAbout, OnFlight
from adaserve_jax.bench.open_loop import Due, LoopResult, drive
from adaserve_jax.bench.workload import WorkloadItem
from adaserve_jax.engine.client import EngineClient, GenerateRequest
from adaserve_jax.results.schema import OWN_SYSTEM
from adaserve_jax.stats import StepStats


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
        self._set_policy = set_policy
        self._parameters = parameters
        self._max_prefill_tokens = max_prefill_tokens

    @property
    def about(self) -> EngineAbout:
        info = self.client.info
        return EngineAbout(
            system=OWN_SYSTEM,
            device=info.device,
            jax_version=info.jax_version,
            target=info.target,
            draft=info.draft,
            target_params=self._parameters[0],
            draft_params=self._parameters[1],
            deterministic=info.deterministic,
            max_requests=info.max_requests,
            max_context=info.max_context,
            baseline_s=info.baseline_s,
            max_prefill_tokens=self._max_prefill_tokens,
        )

    def set_policy(self, name: str) -> None:
        """Serve by `name` from now on, without compiling; only while idle."""
        self._set_policy(name)

    def prepare(self, ask: Ask) -> GenerateRequest:
        """The request, tokenised."""
        sampling = replace(ask.item.sampling(ask.seed), seed=ask.seed, max_tokens=ask.max_tokens)
        return GenerateRequest(
            request_id=ask.request_id,
            prompt_ids=self._encode(ask.item, ask.seed),
            sampling=sampling,
            slo=ask.slo,
            slo_class=ask.item.slo_class,
            cache_salt=ask.cache_salt,
        )

    def drive(self, due: Sequence[Due], *, drain_s: float, on_progress: OnFlight | None = None) -> LoopResult:
        return drive(self.client, due, drain_s=drain_s, on_progress=on_progress)

    def stats(self) -> StepStats:
        return self.client.stats().scheduler

    def compiles_after_ready(self) -> int:
        return self.client.stats().compiles_after_ready

    def close(self) -> None:
        self.client.close()
