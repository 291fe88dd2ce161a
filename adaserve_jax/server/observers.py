"""What the parts of a server that watch requests get to know of each choice when it ends: records, dashboard, traces.

Knows no storage and no HTTP. Nothing of a request's text, except where an observer was configured to keep it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from adaserve_jax.types import RequestMetrics

Ending = Literal["stop", "length", "abort", "error", "rejected"]
"""How a choice ended: finish reasons, and rejected: it got no room, or the engine never began it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChoiceText:
    """What one choice was asked and answered."""

    prompt_ids: Sequence[int]
    output: str


@dataclass(frozen=True)
class EndedChoice:
    """One choice that has ended.

    request_id: what the client knows the HTTP request by (x-request-id). index: of the choice in its answer. key: name
    of the API key it came with; "" without keys. ended_unix_s: wall clock. metrics: None when the engine never began
    it; tpot_slo_s, ttft_slo_s: the targets in force, seconds, also then. operation, traceparent: as of Origin. text:
    None unless the server was told to keep texts.
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
    """Where an HTTP request came from. request_id, key: as of EndedChoice. operation: chat or text_completion.
    traceparent: the header of that name, as it came."""

    request_id: str = ""
    key: str = ""
    operation: str = ""
    traceparent: str = ""

    def ended(
        self, index: int, ending: Ending, error_code: str | None, *, slo_class: str, tpot_slo_s: float | None,
        ttft_slo_s: float | None, metrics: RequestMetrics | None = None, text: ChoiceText | None = None,
    ) -> EndedChoice:  # fmt: skip
        """A choice of this request that ends now."""
        return EndedChoice(
            self.request_id, index, ending, error_code, self.key, slo_class, time.time(), tpot_slo_s, ttft_slo_s,
            metrics, self.operation, self.traceparent, text,
        )  # fmt: skip


Observer = Callable[[EndedChoice], None]
"""Called on the event loop; must return within microseconds."""


def tell(observers: list[Observer], ended: EndedChoice) -> None:
    """Call every observer; one that fails is logged and costs the others nothing."""
    for observer in observers:
        try:
            observer(ended)
        except Exception:
            _log.exception("an observer failed on request %s", ended.request_id)
