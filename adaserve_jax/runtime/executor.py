"""The executor that runs real models on this host's device. Decides nothing: a plan in, an outcome out."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.constraints.constraints import edited_rows
from adaserve_jax.errors import ConfigError, IntegrityError
from adaserve_jax.memory.ledger import Ledger, Workspace
from adaserve_jax.models.decoder import Params
from adaserve_jax.results.profile import Profile, read_profile
from adaserve_jax.runtime import multihost as hosts
from adaserve_jax.runtime.capture import Pending
from adaserve_jax.runtime.compile import CompileCounter, compile_all, use_compile_cache
from adaserve_jax.runtime.drafter import LocalDrafter
from adaserve_jax.runtime.elastic import Elastic
from adaserve_jax.runtime.loading import (
    capture_of,
    declare_all,
    find_chances,
    find_pair,
    identify,
    load_drafter,
    load_target,
    resampler_of,
)
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.programs import outcome_size
from adaserve_jax.runtime.resample import Resampler, logprobs_of
from adaserve_jax.runtime.sizing import Resolved, resolve, workspace_of
from adaserve_jax.runtime.step_layout import pack_verify
from adaserve_jax.runtime.warmup import measure, rehearse_expansion, run_once
from adaserve_jax.tree.acceptance_table import ChanceTable
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


class ModelExecutor:
    """Implements `types.Executor` with one target and at most one drafter, which may be set once it is there. One step
    at a time.

    draft_names: of the drafts between which that drafter chooses, the first of them first.
    """

    def __init__(
        self, resolved: Resolved, target_folder: Path, target: DeviceModel, drafter: LocalDrafter | None,
        followers: hosts.Followers | None = None, chances: ChanceTable | None = None,
        profile: Profile | None = None, draft_names: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """chances: what the drafter begins with."""
        self.resolved = resolved
        self.target_folder = target_folder
        self.target = target
        self.local_drafter = drafter
        self.drafter: Drafter | None = drafter
        self.chances = chances
        self.draft_names = draft_names
        self._followers = followers
        self._profile = profile
        self._workspace: Workspace | None = None
        self._counter = CompileCounter()
        self.resampler = resampler_of(resolved, target)
        self._capture = capture_of(resolved, target)
        self.elastic: Elastic | None = None
        """What elastic, where the draft's memory may become pages."""
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

    @property
    def compile_counter(self) -> CompileCounter:
        """What counts them, for others that must not compile while they run."""
        return self._counter

    def warm_up(self, progress: Progress | None = None) -> CostSamples:
        """Compile everything, then run and time each program; with a profile, run each once and take its times. Where
        pools can be extended, swap there and back once: times are of pools that are not."""
        self.compile(progress)
        if self._profile is not None:
            run_once(self, progress)
            samples = self._profile.timings.samples()
        else:
            samples = measure(self, progress=progress).samples()
        if self._capture is not None:
            self._capture.run_once()
        if self.elastic is not None:
            rehearse_expansion(self, self.elastic, progress)
        return samples

    @property
    def ledger(self) -> Ledger:
        """What the engine takes of the first device's memory, and of the host's; with the workspace once compiled."""
        return self.resolved.ledger(self._workspace)

    def compile(self, progress: Progress | None = None) -> None:
        """Compile every program; the first half of `warm_up`. Raises ConfigError when the programs need more memory
        than there is."""
        declared = declare_all(self.target, self.limits, self.resampler, self._capture, self.local_drafter)
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
            raise ConfigError("this engine has no drafter; plan steps with draft=None")
        if self.elastic is not None and not self.elastic.resident:
            raise IntegrityError(f"step {plan.step} has a draft, which is not on the device")
        if self._capture is not None:
            self._capture.forget()
        started = time.perf_counter()
        with self._counter:
            candidates = self.drafter.propose(plan)
        self._draft_s = time.perf_counter() - started
        self._draft_wait_s = self.drafter.wait_s
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
            if self._capture is not None:
                num_sampled = trees.num_nodes + int(np.count_nonzero(plan.prefill_final))
                amend = self._capture.keeping(amend, num_sampled)
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

    def capture(self, sampled: np.ndarray) -> Pending:
        """Begin to gather the target's likeliest tokens at sampled positions of the last verified step, i32[M]: indices
        of tree nodes in packed order, then of the ends of prompts in row order. Returns at once. Only until the next
        step begins, and where config.learning is set: raises IntegrityError."""
        if self._capture is None:
            raise IntegrityError("this engine captures nothing: it was built without learning")
        with self._counter:
            return self._capture.take(sampled)

    @property
    def num_drafts(self) -> int:
        return len(self.draft_names)

    @property
    def draft_resident(self) -> bool:
        """Whether the drafts' weights are on their device."""
        return self.elastic is None or self.elastic.resident

    def draft_params(self, draft: int = 0) -> Params:
        """The weights in force, which are the executor's: they may go with the next step where a draft's memory may
        become pages. Raises IntegrityError: there is no such draft, or it is away."""
        model = self._draft_model(draft)
        if not self.draft_resident:
            raise IntegrityError(f"draft {draft} is not on the device; its weights can be had once it is back")
        return model.weights[draft]

    def set_draft(self, params: Params, draft: int = 0) -> None:
        """From the next step on draft with these weights, which are the executor's from now on. Between steps; compiles
        nothing, and no text changes by it: what the draft's KV holds of its older weights costs acceptance only. Where
        the draft is away, they are what comes back. Raises IntegrityError, with nothing changed: there is no such
        draft, or names, shapes, types or devices are not those of its weights."""
        model = self._draft_model(draft)
        model.check_weights(params, f"draft {draft}")
        if self.elastic is None:
            model.weights[draft] = params
        else:
            self.elastic.set_weights(draft, params)

    def _draft_model(self, draft: int) -> DeviceModel:
        if self.local_drafter is None or not 0 <= draft < self.num_drafts:
            raise IntegrityError(f"draft must be one of the {self.num_drafts} that are loaded, by index, got {draft}")
        return self.local_drafter.model

    def expand(self) -> None:
        self._elastic_memory().expand()

    def move_pages(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        self._elastic_memory().move_pages(from_pages, to_pages)

    def contract(self) -> None:
        self._elastic_memory().contract()

    def draft_ready(self) -> bool:
        return self._elastic_memory().draft_ready()

    def _elastic_memory(self) -> Elastic:
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


def load_executor(
    config: EngineConfig, progress: Progress | None = None, *, elastic: bool = False, training_bytes: int = 0
) -> ModelExecutor:
    """Load the models and size everything; nothing is compiled yet. With several processes, waits for the others.

    elastic: whether the policy has the draft give its memory to pages, where config.elastic is "auto". training_bytes:
    what is left to learning, beside what serves.
    Raises CheckpointError, ConfigError; where weights and pages need more memory than there is, before one is read.
    """
    if config.process_id:
        raise ConfigError(f"process {config.process_id} has no engine of its own; run `adaserve follow` there")
    use_compile_cache(config.compile_cache)
    if config.num_processes == 1:
        return _load(config, progress, None, elastic, training_bytes)
    followers = hosts.Followers(config)
    try:
        hosts.join(config)
        return _load(config, progress, followers, elastic, training_bytes)
    except BaseException:
        followers.close()
        hosts.leave()
        raise


def _load(
    config: EngineConfig,
    progress: Progress | None,
    followers: hosts.Followers | None,
    elastic: bool,
    training_bytes: int,
) -> ModelExecutor:
    pair = find_pair(config)
    chances = find_chances(config, pair)
    resolved = resolve(config, pair.target, pair.draft, elastic=elastic, training_bytes=training_bytes)
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
    return ModelExecutor(resolved, pair.target_folder, target, drafter, followers, chances, profile, pair.draft_names)


def _with_offsets(config: EngineConfig, profile: Profile) -> EngineConfig:
    """c1 and c2 of eq. 8 and 9 as the profile has them, where the options do not say."""
    return replace(config, eq8_c1=config.eq8_c1 or profile.c1 or 0, eq9_c2=config.eq9_c2 or profile.c2 or 0)
