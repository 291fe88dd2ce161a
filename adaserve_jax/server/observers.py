"""Observers of a server (records, traces, dashboard) and the description of a choice that they get when it ends.

It holds no text of the request unless the server was told to record texts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.records import unstarted_metrics

Ending = Literal["stop", "length", "abort", "cancelled", "error", "rejected"]
"""End of a choice: a finish reason, where an abort is the server's own; cancelled, where its client closed the
connection; or rejected, where the engine left no times of it: it got no room, never began, or was lost with its
engine."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChoiceText:
    """Prompt and output of one choice."""

    prompt_ids: Sequence[int]
    output: str


@dataclass(frozen=True)
class Origin:
    """HTTP request that choices belong to.

    request_id: x-request-id. key: name of the API key; empty without keys. operation: chat or text_completion.
    traceparent: header of that name. model: the API's name of the model, or of the adapter, that serves it.
    """

    request_id: str = ""
    key: str = ""
    operation: str = ""
    traceparent: str = ""
    model: str = ""


@dataclass(frozen=True)
class EndedChoice:
    """One choice that has ended.

    index: of the choice in the response. tpot_slo_s, ttft_slo_s, thinking_tpot_slo_s, e2e_slo_s: targets in force, also
    when the engine never began the choice; metrics is None then. text: None unless the server records texts.
    """

    origin: Origin
    index: int
    ending: Ending
    error_code: str | None
    slo_class: str
    tpot_slo_s: float | None
    ttft_slo_s: float | None
    metrics: RequestMetrics | None = None
    text: ChoiceText | None = None
    ended_unix_s: float = field(default_factory=time.time)
    thinking_tpot_slo_s: float | None = None
    e2e_slo_s: float | None = None

    @property
    def measured(self) -> RequestMetrics:
        """Metrics of the choice; its targets alone where the engine left no times of it."""
        if self.metrics is not None:
            return self.metrics
        return unstarted_metrics(
            self.tpot_slo_s, self.ttft_slo_s, self.slo_class, self.error_code, self.thinking_tpot_slo_s, self.e2e_slo_s
        )


Observer = Callable[[EndedChoice], None]
"""Function called on the event loop for each ended choice; it must return within microseconds."""


def notify(observers: list[Observer], ended: EndedChoice) -> None:
    """Call every observer; an exception in one is logged and does not reach the others."""
    for observer in observers:
        try:
            observer(ended)
        except Exception:
            _log.exception("an observer failed on request %s", ended.origin.request_id)
