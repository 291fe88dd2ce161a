"""The requests of benchmarks/nightjar/engine.py and offload.py: lengths and swing of a trace, prompts of code.

Knows tokenizers and files, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adaserve_jax.errors import ConfigError
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.workloads.items import Workload, WorkloadItem
from adaserve_jax.workloads.traces import Trace
from benchmarks.engine.throughput_prompts import Prompts
from benchmarks.nightjar.points import CLASSES, POISSON, PROFILE, SETUPS, made_segment, segment_of
from benchmarks.nightjar.segments import at_once, poisson_arrivals, shortened, thinned, with_lengths

MAX_CONTEXT = 1024
LOADS = tuple(CLASSES)
QUICK_OUTPUT = 8
"""Most output tokens of a quick run."""


@dataclass(frozen=True)
class Sizes:
    """span_s: in which the requests of a run arrive. saturating: requests at once that the capacity is measured with.
    most_output: tokens of a request; 0: those of the simulated setup."""

    span_s: float = 45.0
    drain_s: float = 120.0
    saturating: int = 64
    warm_up: int = 16
    most_output: int = 0


QUICK = Sizes(span_s=1.5, drain_s=30.0, saturating=4, warm_up=1, most_output=QUICK_OUTPUT)


class Requests:
    """Workloads of a trace's segment, fitted to the target that the profile is of. Texts differ from seed to seed."""

    def __init__(self, azure: Path | None, target: Path, sizes: Sizes, sources: Sequence[str] | None = None):
        """azure: None for a made segment. sources: that prompts are cut from; None: those of Python's library that the
        demo pair never saw. Raises ConfigError: there are none."""
        self.segment = made_segment() if azure is None else segment_of(azure)
        setup = next(setup for setup in SETUPS if setup.machine == PROFILE)
        self._lengths = with_lengths(
            self.segment, prompt_parts=setup.prompt_parts, most_output=sizes.most_output or setup.most_output,
            max_context=MAX_CONTEXT,
        )  # fmt: skip
        self._sizes = sizes
        self._tokenizer = Tokenizer.from_folder(target)
        sources = held_out_code() if sources is None else sources
        if not sources:
            raise ConfigError("prompts are cut from Python's own sources, which this Python does not have")
        self._prompts = Prompts(sources, self._tokenizer.encode)

    def saturating(self) -> Workload:
        """All at once, to measure the capacity with."""
        count = min(self._sizes.saturating, len(self._lengths.requests))
        return self._workload(at_once(self._lengths, count=count, seed=0), (0,))

    def workload(self, load: str, capacity_rps: float, seed: int) -> Workload:
        """Of one of LOADS, in `span_s` seconds: Poisson, or the whole segment so much faster, at the load's share of
        the capacity."""
        kind, share = CLASSES[load]
        return self.at_share(kind, share, capacity_rps, seed)

    def at_share(self, kind: str, share: float, capacity_rps: float, seed: int) -> Workload:
        """kind: Poisson or dynamic."""
        span_s, rate = self._sizes.span_s, share * capacity_rps
        if kind == POISSON:
            count = min(max(1, round(rate * span_s)), len(self._lengths.requests))
            trace = poisson_arrivals(self._lengths, rate_rps=rate, count=count, seed=seed)
        else:
            fast = shortened(self._lengths, max(self._lengths.duration_s / span_s, rate / self._lengths.rate_rps))
            trace = thinned(fast, min(rate, fast.rate_rps))
        return self._workload(trace, (seed, *kind.encode()))

    def _workload(self, trace: Trace, seed: Sequence[int]) -> Workload:
        prompts = self._prompts.cut_to([request.prompt_tokens for request in trace.requests], seed)
        items = (
            WorkloadItem(
                self._tokenizer.decode(ids) or " ", (), request.output_tokens, request.slo_class, request.slo, 0.0,
                None, request.due_s,
            )
            for ids, request in zip(prompts, trace.requests, strict=True)
        )  # fmt: skip
        return Workload(trace.name, trace.sha256, tuple(items))
