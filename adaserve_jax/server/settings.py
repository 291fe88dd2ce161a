"""Server settings: frozen, validated, flat. The command line and its help are made from the fields and FIELD_HELP."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from adaserve_jax.checked import Checked, check_tls
from adaserve_jax.errors import ConfigError
from adaserve_jax.server.classes import DEFAULT_CLASS, SloClass, tiers_of
from adaserve_jax.server.keys import KeySettings

FILE_ONLY = {"file_only": True}
"""Marks fields that only a configuration file can give: tables, not options."""
MAX_TIMEOUT_S = 86_400.0
_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.:\[\]-]+")


@dataclass(frozen=True)
class ServerSettings(Checked):
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
    records: str | None = None
    records_days: float = 30.0
    records_max_mib: int = 1024
    record_text: bool = False
    otlp_endpoint: str | None = None
    dashboard: bool = False
    cors_origins: tuple[str, ...] = ()
    trust_gateway: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    keep_alive_timeout: float = 5.0
    receive_timeout: float = 60.0
    max_header_bytes: int = 16 * 1024
    classes: tuple[SloClass, ...] = field(default=(), metadata=FILE_ONLY)
    keys: tuple[KeySettings, ...] = field(default=(), metadata=FILE_ONLY)
    watchdog: float = 60.0
    max_restarts: int = 1
    restart_window: float = 600.0
    max_queue_wait: float = 5.0
    exit_when_dead: bool = False

    def __post_init__(self) -> None:
        for name in ("slo_classes", "cors_origins", "classes", "keys"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
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
        if self.api_key is not None and not _parts(self.api_key):  # what came may be a secret
            raise ConfigError("api_key must be not empty, got an empty one")
        self._check_connections()
        self._check_watchers()
        self._check_tables()

    def _check_watchers(self) -> None:
        self._check(0 < self.records_days < math.inf, "records_days", "a finite number of days above 0")
        self._check(self.records_max_mib >= 1, "records_max_mib", "an integer >= 1")
        self._check(self.records != "", "records", "a path, or none")
        self._check(not self.record_text or self.records is not None, "record_text", "off where records is none")
        is_url = self.otlp_endpoint is None or self.otlp_endpoint.startswith(("http://", "https://"))
        self._check(is_url, "otlp_endpoint", "a URL that begins with http:// or https://")

    def _check_connections(self) -> None:
        for name in ("keep_alive_timeout", "receive_timeout"):
            ok = 0 < getattr(self, name) <= MAX_TIMEOUT_S
            self._check(ok, name, f"a number of seconds above 0 and up to {MAX_TIMEOUT_S:g}")
        self._check(1024 <= self.max_header_bytes <= 2**20, "max_header_bytes", "an integer from 1024 to 1048576")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins must be origins like https://example.org or http://localhost:3000, without a path, "
                    f"or the one *, got {origin!r}"
                )
        check_tls(self.tls_cert, self.tls_key, self.tls_client_ca)

    def _check_tables(self) -> None:
        classes = self.class_table()
        self.tiers()
        names: set[str] = set()
        for key in self.all_keys():
            if key.name in names:
                raise ConfigError(f"keys must have different names, got two of the name {key.name!r}")
            names.add(key.name)
            for name in key.slo_classes:
                if name not in classes:
                    raise ConfigError(
                        f"slo_classes of the key {key.name!r} must be of {', '.join(sorted(classes))}, got {name!r}"
                    )

    def class_table(self) -> dict[str, SloClass]:
        """Every class by name: those of the file, then those of `slo_classes`, which win; "default" is always there.

        Raises ConfigError.
        """
        names = [one.name for one in self.classes]
        if len(set(names)) < len(names):
            raise ConfigError(f"classes must have different names, got {', '.join(names)}")
        found = [SloClass(DEFAULT_CLASS), *self.classes, *map(SloClass.from_text, self.slo_classes)]
        return {one.name: one for one in found}

    def tiers(self) -> dict[str, str]:
        """The class that each service tier stands for. Raises ConfigError."""
        return tiers_of(self.classes)

    def all_keys(self) -> tuple[KeySettings, ...]:
        """The keys of `api_key`, operators' and without limits, and those of the file. None: the server asks for no
        key."""
        plain = _parts(self.api_key or "")
        names = ["api-key"] if len(plain) == 1 else [f"api-key-{number}" for number in range(1, len(plain) + 1)]
        return (*(KeySettings(name, key, operator=True) for name, key in zip(names, plain, strict=True)), *self.keys)


def _parts(keys: str) -> list[str]:
    return [part for part in (part.strip() for part in keys.split(",")) if part]


FIELD_HELP: dict[str, str] = {
    "host": "address to listen on; 0.0.0.0 opens the server to the network, then set an API key",
    "port": "TCP port; 0: any free one, which is printed",
    "api_key": "clients must send it as 'Authorization: Bearer KEY' on every route but /health; several with commas; "
    "none: open, unless a configuration file has keys",
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
    "records": "SQLite file that gets a record of every choice that ends, without its text; none: no records",
    "records_days": "days after which a record is removed",
    "records_max_mib": "MiB of records after which the oldest are removed",
    "record_text": "keep prompts and outputs in the records too; whoever can read the file can read them",
    "otlp_endpoint": "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span per choice; none: no traces",
    "dashboard": "serve a live page at /dashboard, and watch the server for it",
    "cors_origins": "origins whose pages may call the server from a browser, with commas; *: any; empty: none",
    "trust_gateway": "take targets that the body leaves out from a gateway's headers, x-llm-d-slo-tpot-ms and others",
    "tls_cert": "file of the certificate chain, PEM; with tls_key the server speaks https only",
    "tls_key": "file of the certificate's private key, PEM, without a passphrase",
    "tls_client_ca": "file of certificates, PEM; clients must have one that these signed; none: any client",
    "keep_alive_timeout": "seconds that an idle connection is kept for its next request",
    "receive_timeout": "seconds that a client gets to send a request's headers, and again for its body",
    "max_header_bytes": "most bytes of a request's first line and headers; more are refused with 431 or 400",
    "classes": "named targets with priorities and service tiers: tables [[classes]] of a configuration file",
    "keys": "API keys with limits: tables [[keys]] of a configuration file",
    "watchdog": "seconds without a step while requests wait after which /health is 503; 0: never",
    "max_restarts": "most times within restart_window that an engine process that ended is started again",
    "restart_window": "seconds in which restarts are counted",
    "max_queue_wait": "longest predicted wait for a turn, seconds; what would wait longer, or longer than its "
    "TTFT target allows, is refused with 429; 0: none is",
    "exit_when_dead": "end the server, with status 70, when its engine ended and is not started again",
}
