"""Runs of the real engine, one policy under one load after another, kept in a folder so that a stopped run goes on.

No run is begun that would not end in the time that is left, by the longest one so far.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from adaserve_jax.bench.engine import BenchEngine
from adaserve_jax.bench.plan import BenchPlan
from adaserve_jax.bench.runner import run_bench
from adaserve_jax.cli.terminal import notes
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import read_rows
from adaserve_jax.results.provenance import machine_name, settings_hash, source_commit
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow
from adaserve_jax.workloads.items import Workload
from benchmarks.nightjar.requests import Sizes
from benchmarks.nightjar.views import FIGURES
from benchmarks.program import is_clean


@dataclass
class Rounds:
    """out: folder of all runs. minutes: that all of them may take. settings: engine and trace, as JSON holds them. Runs
    of another commit, sizes or settings are measured again."""

    out: Path
    minutes: float
    sizes: Sizes
    settings: Mapping[str, Any]
    commit: str = field(default_factory=source_commit)
    rows: dict[tuple[int, str, str], ResultRow] = field(default_factory=dict)
    swaps: dict[tuple[int, str, str], dict[str, int]] = field(default_factory=dict)
    """Of each run, the warm-up among it: how often the draft's memory changed its use, by kind."""

    def conditions(self, engine: BenchEngine) -> dict[str, Any]:
        """Where and with what all runs are made."""
        about = engine.about
        return {
            "commit": self.commit,
            "machine": machine_name(),
            "device": about.device,
            "jax_version": about.jax_version,
            "target_params": about.target_params,
            "draft_params": about.draft_params,
            "max_requests": about.max_requests,
            "span_s": self.sizes.span_s,
        }

    def __post_init__(self) -> None:
        self._until_s = time.monotonic() + 60 * self.minutes
        self._longest_s = 0.0
        self._key = settings_hash({"commit": self.commit, "sizes": asdict(self.sizes), **self.settings})

    @property
    def has_time(self) -> bool:
        return time.monotonic() + self._longest_s < self._until_s

    def measure(
        self, number: int, load: str, name: str, policy: str, make: Callable[[], Workload], engine: BenchEngine
    ) -> ResultRow | None:
        """One run, unless it is there; None when there is no time for it. name: what it is called in the results.

        Raises ConfigError: the run is not valid.
        """
        folder = self.out / "runs" / f"{number}-{load}-{name.replace(':', '')}"
        noted = folder / "swaps.json"
        if (moves := self._known(noted)) is not None:
            row = _overall(read_rows(folder / "results.jsonl", ResultRow))
        else:
            if not self.has_time:
                return None
            shutil.rmtree(folder, ignore_errors=True)
            row = self._run(number, policy, make(), engine, folder)
            stats = engine.stats()
            moves = {} if stats is None else dict(stats.elastic_moves)
            self._note(noted, moves)
            notes().print(
                f"round {number + 1}, {load} load, {name}: {row.throughput_tps:.1f} tokens/s, "
                f"{row.e2e_mean_s or 0:.2f} s, {row.running_mean or 0:.1f} running; "
                f"{(self._until_s - time.monotonic()) / 60:.0f} min left at most",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        self.rows[number, load, name] = row
        self.swaps[number, load, name] = moves
        return row

    def _note(self, path: Path, value: Any) -> None:
        path.write_text(json.dumps({"key": self._key, "value": value}) + "\n")

    def _known(self, path: Path) -> Any:
        """Return what `_note` wrote; None: nothing, or with other settings."""
        found = json.loads(path.read_text()) if path.exists() else {}
        return found["value"] if found.get("key") == self._key and is_clean(self.commit) else None

    def _run(self, number: int, policy: str, workload: Workload, engine: BenchEngine, folder: Path) -> ResultRow:
        begin_s = time.monotonic()
        sizes = self.sizes
        duration_s = 2 * (workload.items[-1].arrival_s or 0.0) + 1.0  # all arrive, and the mean gap after them counts
        plan = BenchPlan(
            (policy,), (None,), duration_s, seed=number, drain_s=sizes.drain_s, warmup_requests=sizes.warm_up,
            max_late_s=0.25,
        )  # fmt: skip
        rows = run_bench(plan, workload, lambda: engine, folder)
        self._longest_s = max(self._longest_s, time.monotonic() - begin_s)
        row = _overall(rows)
        if not row.valid:
            raise ConfigError(f"{policy} of round {number + 1} is not valid: {row.invalid_reason}; run it again")
        return row

    def figures(self, load: str, name: str, rounds: Sequence[int]) -> list[dict[str, float | int | None]]:
        """FIGURES of each of those rounds."""
        return [{each: getattr(self.rows[r, load, name], each) for each in FIGURES} for r in rounds]

    def rate_rps(self, load: str, name: str, rounds: Sequence[int]) -> float:
        """Return the mean rate of those rounds."""
        return fmean(self.rows[r, load, name].rate_rps for r in rounds)

    def whole_rounds(self, load: str, names: Sequence[str], rounds: int) -> list[int]:
        """Rounds in which every one of `names` was measured."""
        return [r for r in range(rounds) if all((r, load, name) in self.rows for name in names)]

    def capacity_rps(self, policy: str, make: Callable[[], Workload], engine: BenchEngine) -> float:
        """Requests per second that `policy` completes of those that come at once, with three digits; measured once."""
        chosen = self.out / "capacity.json"
        if (known := self._known(chosen)) is not None:
            return known
        workload, sizes = make(), self.sizes
        plan = BenchPlan((policy,), (None,), 1.0, drain_s=4 * sizes.drain_s, warmup_requests=sizes.warm_up)
        folder = self.out / "runs" / "capacity"
        shutil.rmtree(folder, ignore_errors=True)
        row = _overall(run_bench(plan, workload, lambda: engine, folder))
        if row.finished < len(workload.items):
            raise ConfigError(
                f"{row.finished} of {len(workload.items)} requests finished while the capacity was measured"
            )
        found = float(f"{row.finished / row.wall_s:.3g}")
        self._note(chosen, found)
        return found


def _overall(rows: Sequence[ResultRow]) -> ResultRow:
    return next(row for row in rows if row.slo_class == ALL_CLASSES)
