"""The draft model on its device: weights, KV pages and programs.

It searches with the code and the programs of a local draft (`runtime.drafter`), so its trees are the same. Called from
one thread at a time.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError, OutOfPagesError
from adaserve_jax.memory.page_pool import PagePool
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.pallas_kernels.paged_tree_attention.reference import CPU_BLOCKS
from adaserve_jax.results.provenance import weights_hash
from adaserve_jax.runtime.compile import CompileCounter, compile_all, use_compile_cache
from adaserve_jax.runtime.drafter import LocalDrafter
from adaserve_jax.runtime.loading import CALIBRATION_FILE
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.programs import ModelPrograms
from adaserve_jax.runtime.sizing import (
    CPU_KV_BYTES,
    RESERVE_SHARE,
    draft_buckets,
    dtype_of,
    memory_limit,
    page_bytes,
    weight_bytes,
)
from adaserve_jax.runtime.warmup import WARM_UP, Effort, measure_draft
from adaserve_jax.sampling import RowSampling
from adaserve_jax.star.service.dispatch import DraftBatch
from adaserve_jax.star.settings import DraftServiceSettings
from adaserve_jax.tree.acceptance_table import ChanceTable, read_chances
from adaserve_jax.tree.beam import AcceptanceTable
from adaserve_jax.types import CandidateTrees, CostSamples, DraftPlan, Limits, Progress, StepPlan


class DraftModel:
    """One draft on the first device; implements `kv_manager.KvAllocator` and `worker.Device`. Made by `load`."""

    def __init__(
        self, limits: Limits, drafter: LocalDrafter, *, version: str, vocabulary_hash: str, table: ChanceTable
    ) -> None:
        """Wrap a drafter. In `limits`, max_requests are the rows of a batch, token_edges the sizes of its feed."""
        self.limits = limits
        self.drafter = drafter
        self.version = version
        self.vocabulary_hash = vocabulary_hash
        self.table = table
        """Chances by cell: searches use them, and trees refer to the cells."""
        self.samples = CostSamples({}, {}, {})
        """Measured times of levels and of catch-up, after `warm_up`."""
        self.pool = PagePool(limits.num_pages, limits.page_size)
        self._pages: dict[int, np.ndarray] = {}
        self._counter = CompileCounter()

    @property
    def compiles_after_ready(self) -> int:
        return self._counter.count

    @property
    def vocabulary(self) -> int:
        """Size of the model's vocabulary."""
        return self.drafter.model.config.vocab_size

    def warm_up(self, progress: Progress | None = None, effort: Effort = WARM_UP) -> None:
        """Compile, run and time every program; afterwards nothing compiles."""
        self.drafter.model.compiled = compile_all(self.drafter.declare(), progress)
        on_cpu = jax.local_devices()[0].platform == "cpu"
        together = CPU_BLOCKS if on_cpu else self.limits.max_requests
        self.samples = measure_draft(self.limits, self.drafter, together, effort, progress).samples()

    # ---- KV (`KvAllocator`) ----

    @property
    def capacity(self) -> int:
        """Most tokens of one session when no other session has pages."""
        return self.pool.pages_in_force * self.pool.page_size

    def reserve(self, key: int, tokens: int) -> bool:
        """Extend the session's pages to `tokens` tokens; return False, without a change, if there are too few."""
        held = self._pages.get(key)
        lacking = self.pool.pages_for(tokens) - (0 if held is None else len(held))
        if lacking <= 0:
            return True
        try:
            new = self.pool.alloc(lacking)
        except OutOfPagesError:
            return False
        self._pages[key] = new if held is None else np.concatenate([held, new])
        return True

    def release(self, key: int) -> None:
        """Free the session's pages; a session without any is ignored."""
        pages = self._pages.pop(key, None)
        if pages is not None:
            self.pool.free(pages)

    # ---- batches ----

    def run(self, batch: DraftBatch) -> CandidateTrees | None:
        """Feed every row and search those with a depth, all to the depth of the batch; block until the device is done.

        Returns None if no row has a depth. Rows that are only fed have no candidates.
        """
        plan = self._plan(batch)
        with self._counter:
            found = self.drafter.propose(plan)
            if not batch.depth:
                jax.block_until_ready(self.drafter.model.pools)
        return found if batch.depth else None

    def _plan(self, batch: DraftBatch) -> StepPlan:
        """Return the batch as a step plan; fields that a drafter does not use are empty."""
        rows = batch.rows
        count, zeros = len(rows), np.zeros(len(rows), np.int32)
        start = np.array([row.start for row in rows], np.int32)
        counts = np.array([len(row.tokens) for row in rows], np.int32)
        searched = np.array([row.depth > 0 for row in rows])
        table = np.zeros((count, self.limits.max_pages_per_request), np.int32)
        for at, row in enumerate(rows):
            pages = self._pages[row.key]
            table[at, : len(pages)] = pages
        sampling = RowSampling.of(row.sampling for row in rows)
        fed = np.concatenate([row.tokens for row in rows])
        draft = DraftPlan(batch.depth, batch.width, fed, counts, start, searched, batch.calibrated)
        none, no_flags = np.zeros(0, np.int32), np.zeros(0, bool)
        return StepPlan(0, zeros, count, zeros, start + counts, table, sampling, none, none, no_flags, draft, 0)

    def close(self) -> None:
        """Free the device's memory."""
        self._counter.close()
        self.drafter.model.close()


def load(settings: DraftServiceSettings, progress: Progress | None = None, effort: Effort = WARM_UP) -> DraftModel:
    """Load, compile and time the draft.

    Raises CheckpointError when it cannot be read, and ConfigError when a setting does not fit it or the memory.
    """
    use_compile_cache(settings.compile_cache)
    folder = resolve_folder(settings.model, "draft")
    config = ModelConfig.from_folder(folder).for_context(settings.max_context)
    tokenizer = Tokenizer.from_folder(folder)
    table = read_chances(_table_file(settings, folder))
    dtype = dtype_of(EngineConfig(dtype=settings.dtype))
    limits = limits_of(settings, config, dtype)
    model = DeviceModel(
        "draft", config, load_params(folder, config, dtype, progress),
        ModelPrograms(config, limits.max_pages_per_request), draft_buckets(limits.max_tokens, limits.max_requests),
        num_pages=limits.num_pages, page_size=limits.page_size, dtype=dtype,
    )  # fmt: skip
    widths = tuple(sorted({1, limits.max_width}))
    drafter = LocalDrafter(model, AcceptanceTable.of(table), max_depth=limits.max_depth, widths=widths)
    vocabulary_hash = tokenizer.vocabulary_hash(config.vocab_size)
    ready = DraftModel(limits, drafter, version=weights_hash(folder), vocabulary_hash=vocabulary_hash, table=table)
    ready.warm_up(progress, effort)
    return ready


def _table_file(settings: DraftServiceSettings, folder: Path) -> Path:
    """Return the configured table file, else the draft's own, else the embedded pair's, as an engine does."""
    if settings.calibration is not None:
        return Path(settings.calibration)
    own = folder / CALIBRATION_FILE
    return own if own.exists() else resolve_folder("demo", "draft").parent / CALIBRATION_FILE


def limits_of(settings: DraftServiceSettings, config: ModelConfig, dtype: jnp.dtype) -> Limits:
    """Return the limits for which the draft is compiled.

    Raises ConfigError when the model's context is too short, or there is too little memory.
    """
    platform = jax.local_devices()[0].platform
    on_cpu = platform == "cpu"
    if settings.max_context > config.max_position:
        raise ConfigError(
            f"max_context must be at most {config.max_position}, which the draft supports, got {settings.max_context}"
        )
    context = settings.max_context or min(config.usual_context, 2048 if on_cpu else 8192)
    rows = min(settings.max_batch, settings.max_sessions)
    tokens = settings.max_batch_tokens or (256 if on_cpu else 1024)
    if tokens < rows:
        raise ConfigError(
            f"max_batch_tokens ({tokens}) must be at least the smaller one of max_batch and max_sessions ({rows}): "
            "each request of a batch is fed one token"
        )
    return Limits(
        max_requests=rows, token_edges=draft_buckets(tokens, rows).token_edges, max_tree_tokens=rows,
        max_context=context, page_size=settings.page_size,
        num_pages=_num_pages(settings, config, dtype, -(-context // settings.page_size), platform),
        max_depth=settings.max_depth, max_width=settings.max_width,
    )  # fmt: skip


def _num_pages(
    settings: DraftServiceSettings, config: ModelConfig, dtype: jnp.dtype, per_session: int, platform: str
) -> int:
    limit = memory_limit(EngineConfig(dtype=settings.dtype)).bytes
    free_bytes = int(limit * (1 - RESERVE_SHARE)) - weight_bytes(config, dtype)
    page = page_bytes(config, settings.page_size, dtype, platform)
    pages = settings.num_pages
    if not pages:
        affordable = min(free_bytes, CPU_KV_BYTES) if platform == "cpu" else free_bytes
        pages = max(per_session, min(settings.max_sessions * per_session, affordable // page))
    if pages < per_session:
        raise ConfigError(
            f"num_pages must be at least {per_session}, which one request of max_context needs, got {pages}; lower "
            "max_context, or give more pages"
        )
    if pages * page > free_bytes:
        raise ConfigError(
            f"{pages} KV pages take {pages * page >> 20} MiB, and beside the draft's weights there are "
            f"{max(free_bytes, 0) >> 20}; lower num_pages, max_context or max_sessions"
        )
    return pages
