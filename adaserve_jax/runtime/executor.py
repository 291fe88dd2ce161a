"""The executor that runs real models on this host's devices. The scheduler decides; the executor runs its plans."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.constraints.constraints import edited_rows
from adaserve_jax.errors import ConfigError, IntegrityError
from adaserve_jax.memory.ledger import Ledger, Workspace
from adaserve_jax.models.decoder import Params
from adaserve_jax.models.lora import Matrices
from adaserve_jax.results.profile import Profile, read_profile
from adaserve_jax.runtime import multihost
from adaserve_jax.runtime.capture import LogitCapture, Pending
from adaserve_jax.runtime.compile import CompileCounter, compile_all, use_compile_cache
from adaserve_jax.runtime.drafter import LocalDrafter
from adaserve_jax.runtime.elastic import Elastic
from adaserve_jax.runtime.loading import (
    adapter_bank,
    declare_all,
    find_chances,
    find_pair,
    identify,
    load_drafter,
    load_target,
    resolve_pair,
)
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.programs import outcome_sizes
from adaserve_jax.runtime.resample import Resampler, prompt_logprobs, step_logprobs, unpack_report
from adaserve_jax.runtime.sizing import Resolved, workspace_of
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

_log = logging.getLogger(__name__)


class ModelExecutor:
    """Implements `types.Executor` with one target and at most one drafter. Runs one step at a time.

    `drafter` proposes trees; it is the local drafter unless the engine puts a remote one in its place.
    """

    def __init__(
        self, resolved: Resolved, target_folder: Path, target: DeviceModel, drafter: LocalDrafter | None,
        followers: multihost.Followers | None = None, chances: ChanceTable | None = None,
        profile: Profile | None = None,
    ) -> None:  # fmt: skip
        """Take loaded models; nothing is compiled yet.

        drafter: None without a draft. followers: connections to the other processes that hold the target; None with
        one process. chances: the acceptance table that the drafter starts with. profile: measured times, which warm-up
        then takes instead of measuring.
        """
        self.resolved = resolved
        self.target_folder = target_folder
        self.target = target
        self.local_drafter = drafter
        self.drafter: Drafter | None = drafter
        self.chances = chances
        self.draft_names = resolved.config.draft_names
        self.compile_counter = CompileCounter()
        self.resampler: Resampler | None = None
        """Second draw from edited logits; None with several processes, of which the others run the forward alone."""
        if resolved.config.num_processes == 1:
            self.resampler = Resampler(target, resolved.limits)
        self.adapters = adapter_bank(target, resolved.config)
        """Room for LoRA adapters; None where the programs know none."""
        learning = resolved.config.learning
        self.logit_capture = None
        if learning is not None:
            assert drafter is not None, "a LearnConfig comes with a draft"
            self.logit_capture = LogitCapture(target, learning, drafter.model.config.vocab_size)
        self.elastic: Elastic | None = None
        """Exchanges the draft for KV pages, where the policy may do so."""
        if resolved.limits.extension_pages:
            assert drafter is not None
            self.elastic = Elastic(target, drafter.model, resolved.limits.extension_pages, self.compile_counter)
        self._followers = followers
        self._profile = profile
        self._workspace: Workspace | None = None
        self._draft_s = self._draft_wait_s = 0.0

    @property
    def limits(self) -> Limits:
        return self.resolved.limits

    @property
    def compiles_after_ready(self) -> int:
        return self.compile_counter.count

    @property
    def num_drafts(self) -> int:
        return len(self.draft_names)

    @property
    def leaves_host_free(self) -> bool:
        """True if the host has nothing to do while the device works; a CPU's cores do both."""
        return self.target.placement.devices[0].platform != "cpu"

    @property
    def draft_resident(self) -> bool:
        """True while the drafts' weights are on their device."""
        return self.elastic is None or self.elastic.resident

    @property
    def ledger(self) -> Ledger:
        """Planned bytes on the first device and on the host; after `compile` with the programs' workspace."""
        return self.resolved.ledger(self._workspace)

    def warm_up(self, progress: Progress | None = None, samples: CostSamples | None = None) -> CostSamples:
        """Compile every program, then run and time each one. With a profile, or with the `samples` of an earlier start,
        run each once and return those times.

        Where pools can be extended, rehearse one expansion. The times are of pools that are not extended.
        """
        self.compile(progress)
        if samples is None and self._profile is not None:
            samples = self._profile.timings.samples()
        if samples is None:
            samples = measure(self, progress=progress).samples()
        else:
            run_once(self, progress)
        if self.logit_capture is not None:
            self.logit_capture.run_once()
        if self.elastic is not None:
            rehearse_expansion(self, self.elastic, progress)
        return samples

    def compile(self, progress: Progress | None = None) -> None:
        """Compile every program; the first half of `warm_up`. Raises ConfigError: the programs do not fit in memory."""
        declared = declare_all(
            self.target, self.limits, self.resampler, self.logit_capture, self.local_drafter, self.adapters
        )
        compiled = compile_all(declared, progress)
        self._workspace = workspace_of(compiled, None if self.resampler is None else self.resampler.shapes.bytes)
        self.resolved.check_memory(self._workspace)
        self.target.compiled = compiled
        if self.resampler is not None:
            self.resampler.prepare()
        if self.local_drafter is not None:
            self.local_drafter.model.compiled = compiled

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        """Implement `types.Executor.speculate`. Raises ConfigError, IntegrityError: no draft is there to run."""
        if self.drafter is None:
            raise ConfigError("this engine has no drafter; plan steps with draft=None")
        if self.elastic is not None and not self.elastic.resident:
            raise IntegrityError(f"step {plan.step} has a draft, which is not on the device")
        if self.logit_capture is not None:
            self.logit_capture.drop_logits()
        started = time.perf_counter()
        with self.compile_counter:
            candidates = self.drafter.propose(plan)
        self._draft_s = time.perf_counter() - started
        self._draft_wait_s = self.drafter.wait_s
        return candidates

    def verify(
        self, plan: StepPlan, trees: DraftTrees, edits: LogitEdits | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepOutcome:  # fmt: skip
        """Implement `types.Executor.verify`.

        With edits, a second program draws again from the edited logits, in the bucket that its programs are compiled
        for. Both run before the host waits, so a step waits for the device once.
        """
        started = time.perf_counter()
        bucket = self.target.buckets.pick(trees.num_nodes + plan.num_prefill_tokens, plan.num_rows)
        programs = self.target.programs
        pack = partial(pack_verify, max_pages=programs.max_pages, adapted=programs.max_adapters > 0)
        with self.compile_counter:
            step, after_forward, drawn_in = pack(bucket, plan=plan, trees=trees), None, bucket
            if edits is not None:
                if self.resampler is None:
                    raise IntegrityError("with several processes no step can edit logits or return logprobs")
                drawn_in = self.resampler.bucket(bucket)
                again = step if drawn_in == bucket else pack(drawn_in, plan=plan, trees=trees)
                after_forward = self.resampler.redraw(again, edits, plan.scored)
            if self.logit_capture is not None:
                num_sampled = trees.num_nodes + int(np.count_nonzero(plan.prefill_final))
                after_forward = self.logit_capture.hold_logits(after_forward, num_sampled)
            result = self.target.run(step, after_forward).outcome
            result.copy_to_host_async()
            if meanwhile is not None:
                meanwhile()
            dispatched = time.perf_counter()
            host = np.asarray(result)
        done = time.perf_counter()
        draft_s, draft_wait_s = self._draft_s, self._draft_wait_s
        self._draft_s = self._draft_wait_s = 0.0
        depth = self.limits.max_tree_depth
        counts_at, accepted_at, logprobs_at = itertools.accumulate(outcome_sizes(drawn_in, depth))
        accepted = host[accepted_at : accepted_at + trees.num_nodes] != 0
        logprobs = prompt = None
        if edits is not None:
            found = unpack_report(host[logprobs_at:], drawn_in.sampled)
            logprobs = step_logprobs(found, plan, trees, accepted, edits, depth)
            prompt = prompt_logprobs(found, plan, trees)
        return StepOutcome(
            tokens=host[:counts_at].reshape(drawn_in.rows, depth + 1)[: plan.num_rows],
            counts=host[counts_at : counts_at + plan.num_rows],
            accepted=accepted,
            draft_s=draft_s,
            verify_s=done - started,
            wait_s=draft_wait_s + done - dispatched,
            bucket=bucket.tokens,
            logprobs=logprobs,
            edited=None if edits is None else edited_rows(edits, plan, trees),
            prompt_logprobs=prompt,
        )

    def capture(self, sampled: np.ndarray) -> Pending:
        """Begin to gather the target's likeliest tokens at sampled positions of the last verified step; never waits.

        sampled: i32[M], indices of tree nodes in packed order, then of prompt ends in row order.
        Raises IntegrityError: the engine was built without learning, or the next step has begun.
        """
        if self.logit_capture is None:
            raise IntegrityError("this engine captures nothing: it was built without learning")
        with self.compile_counter:
            return self.logit_capture.gather(sampled)

    def draft_params(self, draft: int = 0) -> Params:
        """Return a draft's weights. They stay the executor's: an expansion may delete them at the next step.

        Raises IntegrityError: there is no such draft, or it is not on the device.
        """
        model = self._draft_model(draft)
        if not self.draft_resident:
            raise IntegrityError(f"draft {draft} is not on the device; its weights can be had once it is back")
        return model.params_of(draft)

    def draft_embedding(self, draft: int = 0) -> np.ndarray:
        """Return a draft's embedding of the target's tokens, [V, d]; rows that the draft lacks are left out at the end.

        Raises IntegrityError as `draft_params` does.
        """
        embedding = np.asarray(self.draft_params(draft)["embed"])
        assert self.local_drafter is not None
        vocabularies = self.local_drafter.vocabularies
        moved = vocabularies and vocabularies[draft].kind == "intersection"
        return embedding[vocabularies[draft].to_draft] if moved else embedding

    def set_draft(self, params: Params, draft: int = 0) -> None:
        """Draft with these weights from the next step on, and take ownership of them. Call it between steps.

        Compiles nothing and changes no text: draft KV of the older weights costs acceptance only. While the draft is
        away from the device, the new weights are those that come back.
        Raises IntegrityError, with nothing changed: there is no such draft, or names, shapes, types or devices differ.
        """
        model = self._draft_model(draft)
        model.check_weights(params, f"draft {draft}")
        params = model.owned(params)
        if self.elastic is None:
            model.weights[draft] = params
        else:
            self.elastic.set_weights(draft, params)

    def put_adapter(self, slot: int, matrices: Matrices) -> None:
        """Replace what a slot of `adapters` holds, from the next step on. Call it between steps. Compiles nothing."""
        assert self.adapters is not None
        with self.compile_counter:
            self.adapters.put(slot, matrices)

    def _draft_model(self, draft: int) -> DeviceModel:
        if self.local_drafter is None or not 0 <= draft < self.num_drafts:
            raise IntegrityError(f"draft must be one of the {self.num_drafts} that are loaded, by index, got {draft}")
        return self.local_drafter.model

    def expand(self) -> None:
        self._require_elastic().expand()

    def move_pages(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        self._require_elastic().move_pages(from_pages, to_pages)

    def contract(self) -> None:
        self._require_elastic().contract()

    def draft_ready(self) -> bool:
        return self._require_elastic().draft_ready()

    def _require_elastic(self) -> Elastic:
        if self.elastic is None:
            raise IntegrityError("this engine has no extension: limits.extension_pages is 0, so its pool cannot expand")
        return self.elastic

    def close(self) -> None:
        if self.elastic is not None:
            self.elastic.close()
        self.compile_counter.close()
        if self.resampler is not None:
            self.resampler.close()
        if self.logit_capture is not None:
            self.logit_capture.drop_logits()
        self.target.close()
        if self.local_drafter is not None:
            self.local_drafter.model.close()
        if self._followers is not None:
            self._followers.close()
            multihost.leave()


def load_executor(
    config: EngineConfig, progress: Progress | None = None, *, elastic: bool = False, training_bytes: int = 0
) -> ModelExecutor:
    """Load the models and size everything; nothing is compiled yet. With several processes, wait for the others.

    elastic: True where the policy exchanges the draft for pages and config.elastic is "auto". training_bytes: memory to
    leave to learning beside serving.
    Raises CheckpointError: a folder is not a checkpoint that can be served; ConfigError: the parts do not fit each
    other, or weights and pages exceed memory; found before any is read.
    """
    if config.process_id:
        raise ConfigError(f"process {config.process_id} has no engine of its own; run `adaserve follow` there")
    use_compile_cache(config.compile_cache)
    followers = None
    with contextlib.ExitStack() as on_error:
        if config.num_processes > 1:
            followers = multihost.Followers(config)
            on_error.callback(multihost.leave)
            on_error.callback(followers.close)
            multihost.join(config)
        pair = find_pair(config)
        chances = find_chances(config, pair)
        resolved = resolve_pair(config, pair, elastic=elastic, training_bytes=training_bytes)
        if config.quantize == "auto" and resolved.config.quantize != "none":
            _log.warning("weights in full do not fit the memory: %s", resolved.weight_format)
        if resolved.draft_vocabulary:
            level = logging.INFO if all(each.share == 1 for each in pair.vocabularies) else logging.WARNING
            _log.log(level, "draft of another vocabulary: %s", resolved.draft_vocabulary)
        resolved.check_memory()
        if followers is not None:
            followers.send_config(resolved.config)
        profile = None
        if config.profile is not None:
            profile = read_profile(Path(config.profile))
            profile.check(identify(resolved, pair.target_folder, pair.draft_folder), config.profile)
            # Offsets of eq. 8 and 9 come from the profile where no option sets them.
            eq8_c1, eq9_c2 = config.eq8_c1 or profile.c1 or 0, config.eq9_c2 or profile.c2 or 0
            resolved = replace(resolved, config=replace(resolved.config, eq8_c1=eq8_c1, eq9_c2=eq9_c2))
        target = load_target(pair, resolved, progress, None if followers is None else followers.send_step)
        drafter = load_drafter(pair, resolved, chances, progress, target=target)
        executor = ModelExecutor(resolved, pair.target_folder, target, drafter, followers, chances, profile)
        on_error.pop_all()
    return executor
