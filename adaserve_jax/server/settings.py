"""Server settings: frozen, validated, flat. The command line and its help are made from the fields and FIELD_HELP."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO

DEFAULT_CLASS = "default"


@dataclass(frozen=True)
class ServerSettings:
    """How the HTTP front end behaves. Each field's help text is in FIELD_HELP. Raises ConfigError."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    served_model_name: str | None = None
    max_body_bytes: int = 4 * 2**20
    max_inflight: int = 1024
    max_choices: int = 128
    min_slo_tpot_ms: float = 0.1
    max_slo_tpot_ms: float = 60_000.0
    min_slo_ttft_ms: float = 1.0
    max_slo_ttft_ms: float = 600_000.0
    slo_classes: tuple[str, ...] = ("interactive=50", "chat=100", "batch=")
    use_generation_config: bool = True
    shutdown_timeout: float = 30.0
    log_level: str = "warning"
    watchdog: float = 60.0
    max_restarts: int = 1
    restart_window: float = 600.0
    max_queue_wait: float = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "slo_classes", tuple(self.slo_classes))
        self._check(0 <= self.port < 65536, "port", "an integer from 0 to 65535")
        for name in ("max_body_bytes", "max_inflight", "max_choices"):
            self._check(getattr(self, name) >= 1, name, "an integer >= 1")
        for kind in ("tpot", "ttft"):
            low, high = f"min_slo_{kind}_ms", f"max_slo_{kind}_ms"
            self._check(0 < getattr(self, low) < math.inf, low, "a finite number above 0")
            self._check(getattr(self, low) <= getattr(self, high) < math.inf, high, f"a finite number >= {low}")
        self._check(0 <= self.shutdown_timeout < math.inf, "shutdown_timeout", "a finite number of seconds >= 0")
        for name in ("watchdog", "restart_window", "max_queue_wait"):
            self._check(0 <= getattr(self, name) < math.inf, name, "a finite number of seconds >= 0")
        self._check(self.max_restarts >= 0, "max_restarts", "an integer >= 0")
        levels = ("critical", "error", "warning", "info", "debug")
        self._check(self.log_level in levels, "log_level", f"one of {', '.join(levels)}")
        self._check(self.api_key is None or bool(self.api_key), "api_key", "not empty")
        self.classes()

    def _check(self, ok: bool, name: str, expected: str) -> None:
        if not ok:
            shown = "an empty one" if name == "api_key" else repr(getattr(self, name))
            raise ConfigError(f"{name} must be {expected}, got {shown}")

    def classes(self) -> dict[str, SLO]:
        """The targets of each SLO class by name; the class "default" carries none. Raises ConfigError."""
        table = {DEFAULT_CLASS: SLO()}
        for text in self.slo_classes:
            name, found, targets = text.partition("=")
            tpot, _, ttft = targets.partition(":")
            try:
                if not found or not name.isidentifier():
                    raise ValueError(text)
                table[name] = SLO(float(tpot) if tpot else None, float(ttft) if ttft else None)
            except Exception as error:
                raise ConfigError(
                    "slo_classes must be like name=tpot_ms or name=tpot_ms:ttft_ms, with nothing where there is no "
                    f"target, got {text!r}"
                ) from error
        return table

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ServerSettings:
        """Build from plain values. Raises ConfigError naming the first unknown key."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; known options are {', '.join(sorted(known))}")
        return cls(**values)


FIELD_HELP: dict[str, str] = {
    "host": "address to listen on; 0.0.0.0 opens the server to the network, then set an API key",
    "port": "TCP port; 0: any free one, which is printed",
    "api_key": "clients must send it as 'Authorization: Bearer KEY' on every route but /health; none: open",
    "served_model_name": "the model's name in the API; none: the target folder's name",
    "max_body_bytes": "largest request body, bytes; a larger one is refused with 413",
    "max_inflight": "most choices queued or running at once; more are refused with 429",
    "max_choices": "most choices of one HTTP request, prompts times n",
    "min_slo_tpot_ms": "tightest TPOT target, milliseconds per token; tighter ones are raised to it",
    "max_slo_tpot_ms": "loosest TPOT target, milliseconds per token; looser ones are lowered to it",
    "min_slo_ttft_ms": "tightest TTFT target, milliseconds; tighter ones are raised to it",
    "max_slo_ttft_ms": "loosest TTFT target, milliseconds; looser ones are lowered to it",
    "slo_classes": "named targets, name=tpot_ms[:ttft_ms]; a request picks one by slo_class or service_tier",
    "use_generation_config": "sampling that a request leaves out is that of the target's generation_config.json",
    "shutdown_timeout": "seconds that requests in flight get to finish after SIGTERM",
    "log_level": "what the HTTP server logs: critical, error, warning, info, debug",
    "watchdog": "seconds without a step while requests wait after which /health is 503; 0: never",
    "max_restarts": "most times within restart_window that an engine process that ended is started again",
    "restart_window": "seconds in which restarts are counted",
    "max_queue_wait": "longest predicted wait for a turn, seconds; what would wait longer, or longer than its "
    "TTFT target allows, is refused with 429; 0: none is",
}
