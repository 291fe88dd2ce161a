"""Observers of a server (records, traces, dashboard) and the description of a choice that they get when it ends.

It holds no text of the request unless the server was told to record texts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from adaserve_jax.types import RequestMetrics

Ending = Literal["stop", "length", "abort", "error", "rejected"]
"""End of a choice: a finish reason, or rejected, where it got no room or the engine never began it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChoiceText:
    """Prompt and output of one choice."""

    prompt_ids: Sequence[int]
    output: str


@dataclass(frozen=True)
class EndedChoice:
    """One choice that has ended.

    Attributes:
        request_id: Id of the HTTP request (x-request-id).
        index: Index of the choice in the response.
        key: Name of the API key; empty without keys.
        ended_unix_s: Wall clock.
        tpot_slo_s: Target in force, seconds, also when the engine never began the choice.
        ttft_slo_s: The same for the first token.
        metrics: None when the engine never began the choice.
        operation: See `Origin`.
        traceparent: See `Origin`.
        text: None unless the server records texts.
    """

    request_id: str
    index: int
    ending: Ending
    error_code: str | None
    key: str
    slo_class: str
    ended_unix_s: float
    tpot_slo_s: float | None
    ttft_slo_s: float | None
    metrics: RequestMetrics | None
    operation: str = ""
    traceparent: str = ""
    text: ChoiceText | None = None


@dataclass(frozen=True)
class Origin:
    """HTTP request that choices belong to.

    operation: chat or text_completion. traceparent: header of that name. request_id, key: see `EndedChoice`.
    """

    request_id: str = ""
    key: str = ""
    operation: str = ""
    traceparent: str = ""

    def ended(
        self, index: int, ending: Ending, error_code: str | None, *, slo_class: str, tpot_slo_s: float | None,
        ttft_slo_s: float | None, metrics: RequestMetrics | None = None, text: ChoiceText | None = None,
    ) -> EndedChoice:  # fmt: skip
        """Return the description of a choice of this request that ends now."""
        return EndedChoice(
            self.request_id, index, ending, error_code, self.key, slo_class, time.time(), tpot_slo_s, ttft_slo_s,
            metrics, self.operation, self.traceparent, text,
        )  # fmt: skip


Observer = Callable[[EndedChoice], None]
"""Function called on the event loop for each ended choice; it must return within microseconds."""


def notify(observers: list[Observer], ended: EndedChoice) -> None:
    """Call every observer; an exception in one is logged and does not reach the others."""
    for observer in observers:
        try:
            observer(ended)
        except Exception:
            _log.exception("an observer failed on request %s", ended.request_id)
