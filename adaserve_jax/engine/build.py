"""Assembly of an engine: load, compile and measure its parts once, then build an `EngineCore` for each policy."""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.constraints.constraints import Constraints
from adaserve_jax.constraints.grammar import Grammars
from adaserve_jax.distill.footprint import training_bytes
from adaserve_jax.distill.learner import Learner
from adaserve_jax.distill.routing import DraftRouter, make_router
from adaserve_jax.engine import remote_draft
from adaserve_jax.engine.adapters import AdapterTable
from adaserve_jax.engine.client import EngineInfo, GenerateRequest
from adaserve_jax.engine.core import EngineCore, EngineTokenizer
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import GenerationDefaults, ModelConfig, resolve_folder
from adaserve_jax.models.lora import Matrices, read_adapter
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.whole_file import PRIVATE, write_whole
from adaserve_jax.runtime.executor import load_executor
from adaserve_jax.runtime.loading import device_name
from adaserve_jax.runtime.sizing import dtype_of
from adaserve_jax.scheduler.acceptance import Calibrator
from adaserve_jax.scheduler.policies import find_policy, longest_chain, policy_of
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.synthetic_acceptance import rates_text
from adaserve_jax.tree.acceptance_table import write_chances
from adaserve_jax.types import CostSamples, Executor, Limits, Progress, SamplingParams

BASELINE_TOKENS = 33
SAVE_EVERY_S = 180.0
REMOTE = "remote"
"""Value of `EngineInfo.draft` with draft services."""
Observe = Callable[[Executor], Executor]
_log = logging.getLogger(__name__)


def measure_baseline(
    executor: Executor, config: EngineConfig, samples: CostSamples, tokenizer: EngineTokenizer
) -> float:  # fmt: skip
    """Measure the baseline latency, which relative SLOs multiply: the median seconds per token of one request alone,
    without speculation, through the whole step. Every "auto" in `config` is resolved."""
    scheduler = Scheduler(replace(config, policy="ar", prefix_cache=False), executor.limits, samples)
    core = EngineCore(executor, scheduler, tokenizer, eos_ids=(), baseline_s=1.0)
    max_tokens = min(BASELINE_TOKENS, config.max_context - 1, config.num_pages * config.page_size - 1)
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    core.add(GenerateRequest("baseline", [0], sampling), core.clock())
    times = []
    while core.has_work:
        core.step()
        times.append(core.clock())
    return statistics.median(after - before for before, after in itertools.pairwise(times))


class CalibrationFile:
    """File of learned acceptance chances, so that a restart continues from them. A failing write is only logged."""

    def __init__(self, path: Path, calibrator: Calibrator, clock: Callable[[], float] = time.monotonic):
        self._path = path
        self._calibrator = calibrator
        self._clock = clock
        self._saved_s = clock()

    @classmethod
    def of(cls, config: EngineConfig, calibrator: Calibrator | None) -> CalibrationFile | None:
        """Return the configured file; None if none is configured or nothing is learned."""
        if config.calibration is None or calibrator is None or not config.calibrate:
            return None
        return cls(Path(config.calibration), calibrator)

    def save_if_due(self) -> None:
        """Write if SAVE_EVERY_S have passed since the last write."""
        if self._clock() - self._saved_s >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Fold in the latest observations and write."""
        self._calibrator.take_in()
        try:
            write_chances(self._path, self._calibrator.table)
        except OSError as error:
            _log.error("what was learned of acceptance could not be written to %s: %s", self._path, error)
        self._saved_s = self._clock()


@dataclass(frozen=True)
class StartTimes:
    """Times that a start measured. samples: of steps. baseline_s: seconds per token that relative SLOs multiply."""

    samples: CostSamples
    baseline_s: float


class WarmFolder:
    """Private folder that keeps the times of an engine's first start for its restarts."""

    def __init__(self, folder: str | Path):
        self._file = Path(folder) / "times.json"

    def load(self, config: EngineConfig, limits: Limits) -> StartTimes | None:
        """Return the times of an earlier start; None if there was none, or if it resolved an "auto" otherwise."""
        try:
            found = json.loads(self._file.read_text())
        except FileNotFoundError:
            return None
        if found["engine"] != repr((config, limits)):
            return None
        tables = {
            name: {tuple(key) if isinstance(key, list) else key: seconds for key, seconds in pairs}
            for name, pairs in found["tables"].items()
        }
        return StartTimes(CostSamples(**tables, **found["sizes"]), found["baseline_s"])

    def save(self, config: EngineConfig, limits: Limits, times: StartTimes) -> None:
        """Keep the times. A failing write is only logged: restarts then take longer."""
        samples = vars(times.samples)
        tables = {name: value for name, value in samples.items() if isinstance(value, dict)}
        found = {
            "engine": repr((config, limits)),
            "tables": {name: list(table.items()) for name, table in tables.items()},  # their keys are tuples
            "sizes": {name: value for name, value in samples.items() if name not in tables},
            "baseline_s": times.baseline_s,
        }
        try:
            write_whole(self._file, json.dumps(found), mode=PRIVATE)
        except OSError as error:
            _log.warning("the times of this start could not be kept for a restart: %s", error)


def _target_of(config: EngineConfig) -> ModelConfig:
    return ModelConfig.from_folder(resolve_folder(config.target, "target"))


def _learning_bytes(config: EngineConfig) -> int:
    """Plan the device memory of learning before anything is loaded; 0 without learning."""
    if config.learning is None:
        return 0
    target, path = _target_of(config), next(iter(config.draft_folders.values()))
    draft = ModelConfig.of_draft(path, resolve_folder(path, "draft", config.target))
    return training_bytes(
        draft, config.learning, dtype_of(config), len(config.draft_names), target if draft.is_head else None
    )


def _read_adapters(config: EngineConfig) -> dict[str, Matrices]:
    """Read the adapters that are loaded first, before anything else is. Raises CheckpointError."""
    if not config.lora:
        return {}
    target = _target_of(config)
    return {name: read_adapter(folder, target, config.max_lora_rank) for name, folder in config.lora_folders.items()}


class Assembly:
    """Parts of one engine. Call `get_ready` once before anything else, and `release` in any case.

    Attributes:
        executor: loaded models and compiled programs.
        samples: measured step times that the scheduler plans with.
        calibrator: learns acceptance chances; None without a draft.
        router: chooses between drafts; None without a draft.
        learner: trains drafts; None without learning.
        drafting: drafter that asks draft services; None without any.
        adapters: adapters that are loaded.
    """

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, observe: Observe | None = None,
        warm_folder: str | None = None,
    ):  # fmt: skip
        """Load the executor; `observe` wraps the one that cores run on. warm_folder: see `WarmFolder`; None: nothing is
        kept. Raises AdaServeError if an option or a checkpoint cannot be used."""
        policy = policy_of(config)  # an unknown policy is refused before minutes of compiling
        if config.drafter is not None:
            remote_draft.check_packages()
            remote_draft.check_files(config.drafter)
        self._progress = progress
        self._observe = observe
        self._warm_folder = None if warm_folder is None else WarmFolder(warm_folder)
        self._first_adapters = _read_adapters(config)
        self.executor = load_executor(config, progress, elastic=policy.elastic, training_bytes=_learning_bytes(config))
        self.drafting: remote_draft.Drafting | None = None
        self.learner: Learner | None = None
        self.adapters = AdapterTable(config.lora_slots)

    @property
    def config(self) -> EngineConfig:
        """Configuration in force, with every "auto" resolved."""
        return self.executor.resolved.config

    def get_ready(self) -> None:
        """Compile, measure, connect to draft services and load what was learned before. Raises AdaServeError."""
        self.tokenizer = Tokenizer.from_folder(self.executor.target_folder)
        self._defaults = GenerationDefaults.from_folder(self.executor.target_folder)  # read before minutes of compiling
        config, limits = self.config, self.executor.limits
        # Medusa heads may be fewer than max_depth, and trees smaller than suffix_depth
        find_policy(config.policy, longest_chain(config, limits.max_depth, limits.suffix_depth))
        earlier = None if self._warm_folder is None else self._warm_folder.load(config, limits)
        samples = self.executor.warm_up(self._progress, None if earlier is None else earlier.samples)
        self.samples = samples
        for name, matrices in self._first_adapters.items():
            self.put_adapter(name, matrices, set(), replace=False)
        self._first_adapters.clear()
        chances = self.executor.chances
        self.calibrator = None if chances is None else Calibrator(chances, learn=config.calibrate)
        self.calibration_file = CalibrationFile.of(config, self.calibrator)
        if config.drafter is not None and chances is not None:
            self.drafting = found = remote_draft.connect_drafter(
                config.drafter, chances, self.tokenizer, samples, limits,
                self.executor.target.config.vocab_size,
            )  # fmt: skip
            self.executor.drafter, self.samples = found.drafter, found.samples
        if earlier is None:
            self._baseline_s = measure_baseline(self.executor, config, self.samples, self.tokenizer)
        else:  # relative targets mean the same before and after a restart
            self._baseline_s = earlier.baseline_s
        if self._warm_folder is not None and earlier is None:
            self._warm_folder.save(config, limits, StartTimes(samples, self._baseline_s))
        self._eos_ids = (*self.executor.target.config.eos_token_ids, *self.tokenizer.eos_token_ids)
        self._grammars, self._no_grammars = None, ""
        try:
            vocab_size = self.executor.target.config.vocab_size
            self._grammars = Grammars(self.tokenizer.backend_json(vocab_size), vocab_size, self._eos_ids)
        except (CheckpointError, ConfigError) as error:  # this tokenizer cannot serve structured output
            self._no_grammars = str(error)
        self.router = self._build_router()
        if config.learning is not None:
            self.learner = Learner(
                self.executor, config.learning, self.calibrator, seed=config.seed, topics=self.router
            )
            self.learner.prepare(self._progress)

    def _build_router(self) -> DraftRouter | None:
        config = self.config
        if config.draft is None:
            return None
        folders = {
            name: resolve_folder(folder, "draft", config.target) for name, folder in config.draft_folders.items()
        }
        return make_router(
            config.route, folders, encode=self.tokenizer.encode,
            embedding=lambda: self.executor.draft_embedding(0).astype(np.float32),
        )  # fmt: skip

    def read_adapter(self, name: str, folder: str, *, replace: bool) -> Matrices:
        """Read an adapter from its folder; safe in any thread. Raises CheckpointError, RequestError."""
        self.adapters.check_new(name, replace=replace)
        assert self.executor.adapters is not None
        return self.executor.adapters.read(folder)

    def put_adapter(self, name: str, matrices: Matrices, used: set[int], *, replace: bool) -> int:
        """Load an adapter between two steps and return its slot.

        used: slots that sequences need. Raises as `AdapterTable.free_slot`.
        """
        slot = self.adapters.free_slot(name, used, replace=replace)
        self.executor.put_adapter(slot, matrices)
        self.adapters.bind(name, slot)
        return slot

    def build_core(self, config: EngineConfig) -> EngineCore:
        """Build a core for the policy of `config`, which otherwise equals the configuration in force."""
        sessions = None if self.drafting is None else self.drafting.drafter
        scheduler = Scheduler(config, self.executor.limits, self.samples, self.calibrator, draft_sessions=sessions)
        executor = self.executor if self._observe is None else self._observe(self.executor)
        return EngineCore(
            executor, scheduler, self.tokenizer,
            eos_ids=self._eos_ids, baseline_s=self._baseline_s, seed=config.seed, constraints=self.constraints(config),
            learner=self.learner, adapters=self.adapters,
        )  # fmt: skip

    def constraints(self, config: EngineConfig) -> Constraints:
        """Build the constraints that requests may ask for."""
        refusal = ""
        if config.num_processes > 1:
            refusal = "an engine of several processes (num_processes) does not edit logits"
        vocab_size = self.executor.target.config.vocab_size
        return Constraints(vocab_size, self.tokenizer, self._grammars, self._no_grammars, refusal=refusal)

    def describe(self, config: EngineConfig) -> EngineInfo:
        """Return the facts about an engine with the policy of `config`."""
        synthetic = self.executor.resolved.synthetic
        return EngineInfo(
            target=config.target,
            draft=config.draft if config.drafter is None else REMOTE,
            policy=config.policy,
            device=device_name(config.tp),
            jax_version=jax.__version__,
            max_context=config.max_context,
            max_requests=config.max_requests,
            vocab_size=self.executor.target.config.vocab_size,
            baseline_s=self._baseline_s,
            deterministic=config.deterministic,
            defaults=self._defaults,
            drafts=config.draft_names,
            draft_vocabulary=self.executor.resolved.draft_vocabulary,
            kv_tokens=self.executor.limits.kv_tokens,
            adapters=self.adapters.names,
            lora_slots=self.adapters.slots,
            synthetic_acceptance=None if synthetic is None else rates_text(synthetic),
        )

    def new_draft_times(self) -> CostSamples | None:
        """Return `samples` with a service's own times once the first service answers an engine that started on guessed
        times; None otherwise."""
        if self.drafting is None or not self.drafting.guessed:
            return None
        found = remote_draft.retime(self.drafting, self.executor.limits)
        if found is None:
            return None
        self.drafting, self.samples = found, found.samples
        return found.samples

    def save(self) -> None:
        """Save what was learned. No step may run."""
        if self.calibration_file is not None:
            self.calibration_file.save()
        if self.learner is not None:
            self.learner.close()

    def release(self) -> None:
        """Free the device and the learner's folder, and close connections."""
        if self.learner is not None:
            self.learner.release()
        if self.drafting is not None:
            self.drafting.drafter.close()
        self.executor.close()
