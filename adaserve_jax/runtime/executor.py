"""The executor that runs real models on this host's device. Decides nothing: a plan in, an outcome out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.constraints.positions import edited_rows
from adaserve_jax.errors import CheckpointError, ConfigError, IntegrityError
from adaserve_jax.memory.ledger import Ledger, Workspace
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params
from adaserve_jax.models.folders import resolve_folder
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.placement import Placement
from adaserve_jax.models.tokenizer import Tokenizer, check_same_vocabulary
from adaserve_jax.results.profile import Profile, read_profile
from adaserve_jax.runtime import hosts
from adaserve_jax.runtime.compiling import (
    CompileCounter,
    Declared,
    compile_all,
    default_cache_folder,
    use_compile_cache,
)
from adaserve_jax.runtime.drafter import LocalDrafter
from adaserve_jax.runtime.elastic import Elastic
from adaserve_jax.runtime.footprint import workspace_of
from adaserve_jax.runtime.identity import identify
from adaserve_jax.runtime.logprobs import logprobs_of
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.packing import PackedStep, pack_verify
from adaserve_jax.runtime.programs import ModelPrograms, outcome_size
from adaserve_jax.runtime.resample import Resampler
from adaserve_jax.runtime.resolve import Resolved, resolve
from adaserve_jax.runtime.timing import measure, rehearse_swap, run_once
from adaserve_jax.tree.acceptance import AcceptanceTable
from adaserve_jax.tree.chances import ChanceTable, read_chances
from adaserve_jax.types import (
    CandidateTrees,
    CostSamples,
    Drafter,
    DraftTrees,
    Limits,
    LogitEdits,
    Progress,
    StepOutcome,
    StepPlan,
)

CALIBRATION_FILE = "calibration.json"


class ModelExecutor:
    """Implements `types.Executor` with one target and at most one drafter. One step at a time."""

    def __init__(
        self, resolved: Resolved, target_folder: Path, target: DeviceModel, drafter: LocalDrafter | None,
        followers: hosts.Followers | None = None, chances: ChanceTable | None = None,
        profile: Profile | None = None,
    ) -> None:  # fmt: skip
        """chances: what the drafter begins with."""
        self.resolved = resolved
        self.target_folder = target_folder
        self.target = target
        self.local_drafter = drafter
        self.drafter: Drafter | None = drafter
        self.chances = chances
        self._followers = followers
        self._profile = profile
        self._workspace: Workspace | None = None
        self._counter = CompileCounter()
        self.resampler = resampler_of(resolved, target)
        self.elastic: Elastic | None = None
        """What swaps, where the draft's memory may become pages."""
        if resolved.limits.extension_pages:
            assert drafter is not None
            self.elastic = Elastic(target, drafter.model, resolved.limits.extension_pages, self._counter)
        self._draft_s = self._draft_wait_s = 0.0

    @property
    def limits(self) -> Limits:
        return self.resolved.limits

    @property
    def compiles_after_ready(self) -> int:
        return self._counter.count

    def warm_up(self, progress: Progress | None = None) -> CostSamples:
        """Compile everything, then run and time each program; with a profile, run each once and take its times. Where
        pools can be extended, swap there and back once: times are of pools that are not."""
        self.compile(progress)
        if self._profile is not None:
            run_once(self, progress)
            samples = self._profile.timings.samples()
        else:
            samples = measure(self, progress=progress).samples()
        if self.elastic is not None:
            rehearse_swap(self, self.elastic, progress)
        return samples

    @property
    def ledger(self) -> Ledger:
        """What the engine takes of the first device's memory, and of the host's; with the workspace once compiled."""
        return self.resolved.ledger(self._workspace)

    def compile(self, progress: Progress | None = None) -> None:
        """Compile every program; the first half of `warm_up`. Raises ConfigError when the programs need more memory
        than there is."""
        declared = declare_target(self.target, self.limits)
        if self.resampler is not None:
            declared += self.resampler.declare()
        if self.local_drafter is not None:
            declared += self.local_drafter.declare()
        if self.elastic is not None:
            declared += self.elastic.declare()
        compiled = compile_all(declared, progress)
        self._workspace = workspace_of(compiled, None if self.resampler is None else self.resampler.blank_bytes)
        self.resolved.check_memory(self._workspace)
        self.target.compiled = compiled
        if self.resampler is not None:
            self.resampler.prepare()
        if self.local_drafter is not None:
            self.local_drafter.model.compiled = compiled

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        if self.drafter is None:
            raise ConfigError("this engine was built without a draft; plan steps with draft=None")
        if self.elastic is not None and not self.elastic.resident:
            raise IntegrityError(f"step {plan.step} has a draft, which is not on the device")
        started = time.perf_counter()
        with self._counter:
            candidates = self.drafter.propose(plan)
        self._draft_s = time.perf_counter() - started
        if self.local_drafter is not None and self.drafter is self.local_drafter:
            self._draft_wait_s = self.local_drafter.wait_s
        return candidates

    def verify(self, plan: StepPlan, trees: DraftTrees, edits: LogitEdits | None = None) -> StepOutcome:
        started = time.perf_counter()
        total = trees.num_nodes + plan.num_prefill_tokens
        bucket = self.target.buckets.pick(total, plan.num_rows)
        max_pages = self.target.programs.max_pages
        with self._counter:
            step, amend, walked = pack_verify(bucket, max_pages, plan, trees), None, bucket
            if edits is not None:
                resampler = self._edits_with()
                walked = resampler.bucket(bucket)
                again = step if walked == bucket else pack_verify(walked, max_pages, plan, trees)
                amend = resampler.amendment(again, edits)
            result = self.target.run(step, amend).outcome
            result.copy_to_host_async()
            dispatched = time.perf_counter()
            host = np.asarray(result)
        done = time.perf_counter()
        depth = self.limits.max_depth
        draft_s, draft_wait_s = self._draft_s, self._draft_wait_s
        self._draft_s = self._draft_wait_s = 0.0
        emitted, rows, flags = outcome_size(walked, depth)
        accepted, report = host[emitted + rows :][: trees.num_nodes] != 0, host[emitted + rows + flags :]
        return StepOutcome(
            tokens=host[:emitted].reshape(walked.rows, depth + 1)[: plan.num_rows],
            counts=host[emitted : emitted + rows][: plan.num_rows],
            accepted=accepted,
            draft_s=draft_s,
            verify_s=done - started,
            wait_s=draft_wait_s + done - dispatched,
            bucket=bucket.tokens,
            logprobs=None if edits is None else logprobs_of(report, walked, plan, trees, accepted, edits, depth),
            edited=None if edits is None else edited_rows(edits, plan, trees),
        )

    def _edits_with(self) -> Resampler:
        if self.resampler is None:
            raise IntegrityError("with several processes no step changes logits or tells of them")
        return self.resampler

    def expand(self) -> None:
        self._swaps().expand()

    def move_pages(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        self._swaps().move_pages(from_pages, to_pages)

    def contract(self) -> None:
        self._swaps().contract()

    def draft_ready(self) -> bool:
        return self._swaps().draft_ready()

    def _swaps(self) -> Elastic:
        if self.elastic is None:
            raise IntegrityError("this engine has no extension: limits.extension_pages is 0, so nothing may swap")
        return self.elastic

    def close(self) -> None:
        if self.elastic is not None:
            self.elastic.close()
        self._counter.close()
        if self.resampler is not None:
            self.resampler.close()
        self.target.close()
        if self.local_drafter is not None:
            self.local_drafter.model.close()
        if self._followers is not None:
            self._followers.close()
            hosts.leave()


def load_executor(config: EngineConfig, progress: Progress | None = None, *, swaps: bool = False) -> ModelExecutor:
    """Load the models and size everything; nothing is compiled yet. With several processes, waits for the others.

    swaps: whether the policy has the draft give its memory to pages, where config.elastic is "auto".
    Raises CheckpointError, ConfigError; where weights and pages need more memory than there is, before one is read.
    """
    if config.process_id:
        raise ConfigError(f"process {config.process_id} has no engine of its own; run `adaserve follow` there")
    use_compile_cache(Path(config.compile_cache) if config.compile_cache else default_cache_folder())
    if config.num_processes == 1:
        return _load(config, progress, None, swaps)
    followers = hosts.Followers(config)
    try:
        hosts.join(config)
        return _load(config, progress, followers, swaps)
    except BaseException:
        followers.close()
        hosts.leave()
        raise


def _load(
    config: EngineConfig, progress: Progress | None, followers: hosts.Followers | None, swaps: bool
) -> ModelExecutor:
    pair = find_pair(config)
    chances = find_chances(config, pair)
    resolved = resolve(config, pair.target, pair.draft, swaps=swaps)
    resolved.check_memory()
    if followers is not None:
        followers.tell(resolved.config)
    profile = None
    if config.profile is not None:
        profile = read_profile(Path(config.profile))
        profile.check(identify(resolved, pair.target_folder, pair.draft_folder), config.profile)
        resolved = replace(resolved, config=_with_offsets(resolved.config, profile))
    target = load_target(pair, resolved, progress, None if followers is None else followers.announce)
    drafter = load_drafter(pair, resolved, chances, progress)
    return ModelExecutor(resolved, pair.target_folder, target, drafter, followers, chances, profile)


def _with_offsets(config: EngineConfig, profile: Profile) -> EngineConfig:
    """c1 and c2 of eq. 8 and 9 as the profile has them, where the options do not say."""
    return replace(config, eq8_c1=config.eq8_c1 or profile.c1 or 0, eq9_c2=config.eq9_c2 or profile.c2 or 0)


@dataclass(frozen=True)
class Pair:
    """The checkpoints of an engine, before their weights are read."""

    target_folder: Path
    target: ModelConfig
    draft_folder: Path | None
    draft: ModelConfig | None


def find_pair(config: EngineConfig) -> Pair:
    """Read the configurations, and hold the vocabularies against each other. Raises CheckpointError."""
    target_folder = resolve_folder(config.target, "target")
    target = ModelConfig.from_folder(target_folder)
    tokenizer = Tokenizer.from_folder(target_folder)
    if tokenizer.vocab_size > target.vocab_size:
        raise CheckpointError(
            f"{target_folder}: the tokenizer has {tokenizer.vocab_size} tokens but the model only "
            f"{target.vocab_size}; use the tokenizer that belongs to the model"
        )
    if config.draft is None:
        return Pair(target_folder, target, None, None)
    draft_folder = resolve_folder(config.draft, "draft")
    draft = ModelConfig.from_folder(draft_folder)
    check_same_vocabulary(tokenizer, Tokenizer.from_folder(draft_folder))
    return Pair(target_folder, target, draft_folder, draft)


def load_target(
    pair: Pair, resolved: Resolved, progress: Progress | None, announce: Callable[[PackedStep], None] | None = None,
    read: Callable[..., Params] = load_params,
) -> DeviceModel:  # fmt: skip
    """The target on its devices; in each of several processes, the part that lies on its own. read: called as
    `load_params` is."""
    partition, limits = resolved.placement.partition, resolved.limits
    programs = ModelPrograms(
        partition.local(pair.target), limits.max_pages_per_request, resolved.config.deterministic, partition,
        resolved.attention,
    )  # fmt: skip
    return DeviceModel(
        "target",
        pair.target,
        read(
            pair.target_folder,
            pair.target,
            resolved.dtype,
            progress,
            resolved.placement,
            quantize=resolved.config.quantize,
        ),
        programs,
        resolved.verify_buckets,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        dtype=resolved.dtype,
        placement=resolved.placement,
        announce=announce,
    )


def declare_target(target: DeviceModel, limits: Limits) -> list[Declared]:
    """The verify program for every bucket, and its commits; both for pools that are extended too, where they can be."""
    return target.declare_forward(partial(target.programs.verify, max_depth=limits.max_depth), limits.extension_pages)


def resampler_of(resolved: Resolved, target: DeviceModel) -> Resampler | None:
    """None with several processes: the others mirror the forward alone."""
    return Resampler(target, resolved.limits) if resolved.config.num_processes == 1 else None


def load_drafter(
    pair: Pair, resolved: Resolved, chances: ChanceTable | None, progress: Progress | None,
    read: Callable[..., Params] = load_params, placement: Placement | None = None,
) -> LocalDrafter | None:  # fmt: skip
    """The draft on the first device, wherever the target lies: it is small, and exchanges would cost more than they
    save. read: called as `load_params` is; placement: None for that device."""
    if pair.draft is None or pair.draft_folder is None or chances is None:
        return None
    limits = resolved.limits
    model = DeviceModel(
        "draft",
        pair.draft,
        read(pair.draft_folder, pair.draft, resolved.dtype, progress, placement),
        ModelPrograms(pair.draft, limits.max_pages_per_request, attention=resolved.attention),
        resolved.catchup_buckets,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        dtype=resolved.dtype,
        placement=placement,
    )
    return LocalDrafter(model, AcceptanceTable.of(chances), max_depth=limits.max_depth, widths=resolved.search_widths)


def find_chances(config: EngineConfig, pair: Pair) -> ChanceTable | None:
    """What was learned before, or else the pair's own table, or the embedded pair's, which is a fair start for any
    pair. Raises CheckpointError: the file is not a table. ConfigError: it could not be written."""
    if pair.draft_folder is None:
        if config.calibration is not None:
            raise ConfigError("calibration is about a draft, but there is none; load a draft, or leave it out")
        return None
    if config.calibration is not None:
        learned = Path(config.calibration)
        if config.calibrate and not os.access(learned.absolute().parent, os.W_OK):
            raise ConfigError(f"calibration: cannot write into {learned.absolute().parent}; choose another file")
        if learned.exists():
            return read_chances(learned)
    own = pair.draft_folder / CALIBRATION_FILE
    return read_chances(own if own.exists() else resolve_folder("demo", "draft").parent / CALIBRATION_FILE)
