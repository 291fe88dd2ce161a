"""The executor that runs real models on this host's device. Decides nothing: a plan in, an outcome out."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.folders import resolve_folder
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.tokenizer import Tokenizer, check_same_vocabulary
from adaserve_jax.runtime.compiling import CompileCounter, compile_all, default_cache_folder, use_compile_cache
from adaserve_jax.runtime.drafter import LocalDrafter
from adaserve_jax.runtime.model import DeviceModel, Role
from adaserve_jax.runtime.packing import pack_verify
from adaserve_jax.runtime.programs import ModelPrograms, outcome_size
from adaserve_jax.runtime.resolve import Resolved, resolve
from adaserve_jax.runtime.timing import measure
from adaserve_jax.tree.acceptance import load_acceptance_table
from adaserve_jax.types import CandidateTrees, CostSamples, Drafter, DraftTrees, Limits, Progress, StepOutcome, StepPlan

CALIBRATION_FILE = "calibration.json"


class ModelExecutor:
    """Implements `types.Executor` with one target and at most one drafter. One step at a time."""

    def __init__(
        self, resolved: Resolved, target_folder: Path, target: DeviceModel, drafter: LocalDrafter | None
    ) -> None:
        self.resolved = resolved
        self.target_folder = target_folder
        self.target = target
        self.local_drafter = drafter
        self.drafter: Drafter | None = drafter
        self._counter = CompileCounter()
        self._draft_s = self._draft_wait_s = 0.0

    @property
    def limits(self) -> Limits:
        return self.resolved.limits

    @property
    def compiles_after_ready(self) -> int:
        return self._counter.count

    def warm_up(self, progress: Progress | None = None) -> CostSamples:
        """Compile everything, then run and time each program."""
        verify = partial(self.target.programs.verify, max_depth=self.limits.max_depth)
        declared = self.target.declare_forward(verify)
        if self.local_drafter is not None:
            declared += self.local_drafter.declare()
        compiled = compile_all(declared, progress)
        self.target.compiled = compiled
        if self.local_drafter is not None:
            self.local_drafter.model.compiled = compiled
        return measure(self, progress)

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        if self.drafter is None:
            raise ConfigError("this engine was built without a draft; plan steps with draft=None")
        started = time.perf_counter()
        with self._counter:
            candidates = self.drafter.propose(plan)
        self._draft_s = time.perf_counter() - started
        if self.local_drafter is not None and self.drafter is self.local_drafter:
            self._draft_wait_s = self.local_drafter.wait_s
        return candidates

    def verify(self, plan: StepPlan, trees: DraftTrees) -> StepOutcome:
        started = time.perf_counter()
        total = trees.num_nodes + plan.num_prefill_tokens
        bucket = self.target.buckets.pick(total, plan.num_rows)
        with self._counter:
            result = self.target.run(pack_verify(bucket, self.target.programs.max_pages, plan, trees))
            result.copy_to_host_async()
            dispatched = time.perf_counter()
            host = np.asarray(result)
        done = time.perf_counter()
        depth = self.limits.max_depth
        draft_s, draft_wait_s = self._draft_s, self._draft_wait_s
        self._draft_s = self._draft_wait_s = 0.0
        emitted, rows, _ = outcome_size(bucket, depth)
        return StepOutcome(
            tokens=host[:emitted].reshape(bucket.rows, depth + 1)[: plan.num_rows],
            counts=host[emitted : emitted + rows][: plan.num_rows],
            accepted=host[emitted + rows :][: trees.num_nodes] != 0,
            draft_s=draft_s,
            verify_s=done - started,
            wait_s=draft_wait_s + done - dispatched,
            bucket=bucket.tokens,
        )

    def close(self) -> None:
        self._counter.close()
        self.target.close()
        if self.local_drafter is not None:
            self.local_drafter.model.close()


def load_executor(config: EngineConfig, progress: Progress | None = None) -> ModelExecutor:
    """Load the models and size everything; nothing is compiled yet. Raises CheckpointError, ConfigError."""
    use_compile_cache(Path(config.compile_cache) if config.compile_cache else default_cache_folder())
    target_folder = resolve_folder(config.target, "target")
    target_config = ModelConfig.from_folder(target_folder)
    tokenizer = Tokenizer.from_folder(target_folder)
    if tokenizer.vocab_size > target_config.vocab_size:
        raise CheckpointError(
            f"{target_folder}: the tokenizer has {tokenizer.vocab_size} tokens but the model only "
            f"{target_config.vocab_size}; use the tokenizer that belongs to the model"
        )
    if config.draft is None:
        resolved = resolve(config, target_config, None)
        return ModelExecutor(
            resolved, target_folder, _device_model("target", target_folder, target_config, resolved, progress), None
        )
    draft_folder = resolve_folder(config.draft, "draft")
    draft_config = ModelConfig.from_folder(draft_folder)
    check_same_vocabulary(tokenizer, Tokenizer.from_folder(draft_folder))
    resolved = resolve(config, target_config, draft_config)
    target = _device_model("target", target_folder, target_config, resolved, progress)
    drafter = LocalDrafter(
        _device_model("draft", draft_folder, draft_config, resolved, progress),
        load_acceptance_table(_calibration_file(draft_folder)),
        max_depth=resolved.limits.max_depth,
        widths=resolved.search_widths,
    )
    return ModelExecutor(resolved, target_folder, target, drafter)


def _device_model(
    role: Role, folder: Path, config: ModelConfig, resolved: Resolved, progress: Progress | None
) -> DeviceModel:
    limits = resolved.limits
    is_target = role == "target"
    return DeviceModel(
        role,
        config,
        load_params(
            folder, config, resolved.dtype, progress, quantize=resolved.config.quantize if is_target else "none"
        ),
        ModelPrograms(config, limits.max_pages_per_request, canonical=is_target and resolved.config.deterministic),
        resolved.verify_buckets if is_target else resolved.catchup_buckets,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        dtype=resolved.dtype,
    )


def _calibration_file(draft_folder: Path) -> Path:
    """The pair's own table, or the embedded pair's, which is a fair start for any pair."""
    own = draft_folder / CALIBRATION_FILE
    return own if own.exists() else resolve_folder("demo", "draft").parent / CALIBRATION_FILE
