"""Sequences of requests that are made when they are asked for: of a million, only those that are open take room.

Simulations use `AsAssigned`; scripts under benchmarks/ that simulate a million requests use `RequestColumns`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

import numpy as np

from adaserve_jax.bench.fleet import Assigned
from adaserve_jax.bench.traces import TraceRequest
from adaserve_jax.types import SLO

Made = TypeVar("Made")


class _MadeWhenAsked(Sequence[Made]):
    @abstractmethod
    def _make(self, index: int) -> Made:
        """index: from 0 on."""

    @overload
    def __getitem__(self, index: int) -> Made: ...
    @overload
    def __getitem__(self, index: slice) -> list[Made]: ...
    def __getitem__(self, index: int | slice) -> Made | list[Made]:
        numbers = range(len(self))[index]
        return self._make(numbers) if isinstance(numbers, int) else [self._make(each) for each in numbers]


class RequestColumns(_MadeWhenAsked[TraceRequest]):
    """Requests of a trace from columns: 24 bytes each. due_s: f64[N], not decreasing. prompts, outputs: tokens,
    i32[N]. kinds: i64[N], indices of `classes`, which are names and targets."""

    def __init__(
        self, due_s: np.ndarray, prompts: np.ndarray, outputs: np.ndarray, kinds: np.ndarray,
        classes: Sequence[tuple[str, SLO]],
    ):  # fmt: skip
        self._due_s, self._prompts, self._outputs, self._kinds = due_s, prompts, outputs, kinds
        self._classes = classes

    def __len__(self) -> int:
        return len(self._due_s)

    def _make(self, index: int) -> TraceRequest:
        name, slo = self._classes[self._kinds[index]]
        return TraceRequest(
            float(self._due_s[index]), int(self._prompts[index]), int(self._outputs[index]), slo, name
        )  # fmt: skip


class AsAssigned(_MadeWhenAsked[Assigned]):
    """What a router learns of each request of a trace at its arrival. baseline_s: of the machine, for relative
    targets."""

    def __init__(self, requests: Sequence[TraceRequest], baseline_s: float):
        self._requests, self._baseline_s = requests, baseline_s

    def __len__(self) -> int:
        return len(self._requests)

    def _make(self, index: int) -> Assigned:
        asked = self._requests[index]
        tpot_s, ttft_s = asked.slo.tpot_s(self._baseline_s), asked.slo.ttft_s
        return Assigned(asked.slo_class, asked.prompt_tokens, asked.due_s, tpot_s, ttft_s)
