"""Errors that a caller can see. A message says what was expected, what came, and what to do."""

from __future__ import annotations

SLO_INFEASIBLE = "slo_infeasible"
"""Code of the error about a target that this machine cannot reach."""
ERROR_PREFIX = "adaserve: error: "
"""Beginning of the line with which a command says why it ends."""


class AdaServeError(Exception):
    """Base of every error that this package raises for its callers.

    code: a stable short name for programs, listed in docs/http.md. param: the request field at fault, as the API spells
    it, or None. retry_after_s: when it is worth coming again, seconds, where that is known.
    """

    code = "engine_error"
    param: str | None = None
    retry_after_s: float | None = None


class ConfigError(AdaServeError):
    """A configuration value is wrong, or two of them cannot go together."""


class CheckpointError(AdaServeError):
    """A checkpoint folder is incomplete, unreadable, or does not fit its own config.json."""


class UnsupportedModelError(CheckpointError):
    """A checkpoint asks for something that this engine does not implement; the setting is named."""


class RequestError(AdaServeError):
    """One request cannot be served as asked; the engine goes on."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request"):
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(AdaServeError):
    """The waiting queue has no room; retry later."""

    code = "queue_full"


class OverloadedError(QueueFullError):
    """A request waited, or would wait, longer for its turn than it may; nothing of it has run."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BudgetError(AdaServeError):
    """A verification budget is smaller than the number of requests: every request verifies its root."""


class OutOfPagesError(AdaServeError):
    """The page pool has fewer free pages than were asked for; nothing was taken."""


class ElasticError(AdaServeError):
    """Draft and KV pages could not change places; what was there before is there still."""


class IntegrityError(AdaServeError):
    """An allocator's own invariants do not hold: a bug in this package, never the caller's fault."""


class EngineDeadError(AdaServeError):
    """The engine stopped (crash or shutdown); requests in flight are lost and may be retried."""

    code = "engine_dead"


class EngineRestartingError(EngineDeadError):
    """The engine ended and is started again; requests in flight are lost and may be retried when it is back."""

    code = "engine_restarting"
