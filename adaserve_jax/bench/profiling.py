"""Measures a profile: loads the models of a configuration, times every program at length, tries the predictions out."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import jax

import adaserve_jax
from adaserve_jax.bench.offset_search import generated_traces, search_offsets
from adaserve_jax.bench.profiled_machine import ProfiledMachine
from adaserve_jax.bench.proposal import propose
from adaserve_jax.bench.traces import Trace
from adaserve_jax.bench.trial import Trial, run_trial
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.baseline import measure_baseline
from adaserve_jax.models.folders import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.profile import Profile
from adaserve_jax.results.provenance import source_commit
from adaserve_jax.runtime.executor import load_executor
from adaserve_jax.runtime.identity import identify
from adaserve_jax.runtime.switch_timing import measure_switching
from adaserve_jax.runtime.timing import THOROUGH, Effort, measure
from adaserve_jax.scheduler.policy_names import policy_of
from adaserve_jax.types import Progress


def measure_profile(
    config: EngineConfig, *, name: str = "", check_s: float = 0.0, acceptance: float | None = None,
    effort: Effort = THOROUGH, progress: Progress | None = None,
) -> Profile:  # fmt: skip
    """The profile of this machine with the models of `config`. name: "" for the target's. check_s: seconds of a mixed
    load that the predictions are held against; 0: none. acceptance: of the draft's first choice; None: as the mixed
    load shows. Raises CheckpointError, ConfigError."""
    policy_of(config)  # an unknown one is refused before anything is measured
    executor = load_executor(replace(config, profile=None))
    try:
        executor.compile(progress)
        timings = measure(executor, effort, progress)
        timings.switching.update(measure_switching(executor, effort.passes, progress))
        samples, used = timings.samples(), executor.resolved.config
        tokenizer = Tokenizer.from_folder(executor.target_folder)
        baseline_s = measure_baseline(executor, used, samples, tokenizer)
        trial = Trial(None, None)
        if check_s > 0:
            trial = run_trial(executor, samples, baseline_s, check_s, seed=used.seed, progress=progress)
        acceptance = trial.acceptance if acceptance is None else acceptance
        draft_folder = None if used.draft is None else resolve_folder(used.draft, "draft")
        return Profile(
            name=name or Path(used.target).name,
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=source_commit(),
            package_version=adaserve_jax.__version__,
            jax_version=jax.__version__,
            identity=identify(executor.resolved, executor.target_folder, draft_folder),
            timings=timings,
            baseline_s=baseline_s,
            acceptance=acceptance,
            errors=None if trial.errors is None else {kind: asdict(each) for kind, each in trial.errors.items()},
            proposal=asdict(propose(samples, executor.limits, acceptance)),
            serving=None if trial.serving is None else asdict(trial.serving),
        )
    finally:
        executor.close()


def with_offsets(profile: Profile, where: Path, traces: list[Trace], progress: Progress | None = None) -> Profile:
    """The profile with the c1 and c2 that serve the traces best; none: workloads that are generated for it."""
    machine = ProfiledMachine.of(profile, str(where))
    assert profile.proposal is not None
    best = max(each["tokens_per_s"] for each in profile.proposal["by_rows"])
    found = search_offsets(machine, traces or generated_traces(machine, best), progress)
    return replace(profile, c1=found.c1, c2=found.c2)
