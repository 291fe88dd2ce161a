"""Server settings: frozen, validated, flat. The command line and its help are made from the fields and FIELD_HELP."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from adaserve_jax.checked import Checked, check_tls
from adaserve_jax.errors import ConfigError, RequestError
from adaserve_jax.types import SLO

# Named classes of service: the targets, the priority and the service tiers that a request gets by naming one.
#
# Knows no request and no HTTP.

DEFAULT_CLASS = "default"
USUAL_TIERS = {"auto": DEFAULT_CLASS, "default": DEFAULT_CLASS, "priority": "interactive", "flex": "batch"}
"""OpenAI's service tiers, and the classes that they stand for where no class answers to them."""
MAX_PRIORITY = 2**31


@dataclass(frozen=True)
class SloClass:
    """What requests of one class get, where they say nothing themselves. Each field's text is in CLASS_HELP.

    Raises ConfigError.
    """

    name: str
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    priority: int = 0
    service_tiers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"name must be letters, digits and _, not beginning with a digit, got {self.name!r}")
        try:
            SLO(self.tpot_ms, self.ttft_ms)
        except RequestError as error:
            raise ConfigError(str(error).removeprefix("slo_")) from error
        if abs(self.priority) >= MAX_PRIORITY:
            raise ConfigError(f"priority must be an integer of less than 32 bits, got {self.priority}")

    @classmethod
    def from_text(cls, text: str) -> SloClass:
        """Of the short form name=tpot_ms[:ttft_ms], as `--slo-classes` has it. Raises ConfigError."""
        name, found, targets = text.partition("=")
        tpot, _, ttft = targets.partition(":")
        try:
            if not found:
                raise ValueError(text)
            return cls(name, float(tpot) if tpot else None, float(ttft) if ttft else None)
        except (ConfigError, ValueError) as error:
            raise ConfigError(
                "slo_classes must be like name=tpot_ms or name=tpot_ms:ttft_ms, with nothing where there is no "
                f"target, got {text!r}"
            ) from error


def tiers_of(classes: Iterable[SloClass]) -> dict[str, str]:
    """The class that each service tier stands for. Raises ConfigError when two classes answer to one tier."""
    tiers: dict[str, str] = {}
    for one in classes:
        for tier in one.service_tiers:
            if tiers.setdefault(tier, one.name) != one.name:
                raise ConfigError(f"service_tiers: {tier!r} must belong to one class, got {tiers[tier]} and {one.name}")
    return USUAL_TIERS | tiers


CLASS_HELP: dict[str, str] = {
    "name": "what `slo_class` of a request says; `default` is the class of requests that name none",
    "tpot_ms": "TPOT target, milliseconds per token; none: no such target",
    "ttft_ms": "TTFT target, milliseconds; none: no such target",
    "priority": "of requests that bring none; lower is sooner",
    "service_tiers": "values of `service_tier` that stand for this class; unless some class has them, auto and default "
    "stand for default, priority for interactive, flex for batch",
}

# API keys as an operator configures them: the secret, or where it is, and what requests that carry it may do.
#
# Plain data, checked; the secret is in no text that is shown. Knows no request and no HTTP.

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
SOURCES = ("key", "key_env", "key_sha256")


def digest_of(secret: str | bytes) -> bytes:
    """SHA-256 of a secret: what is kept of it, and compared."""
    return sha256(secret if isinstance(secret, bytes) else secret.encode()).digest()


@dataclass(frozen=True)
class KeySettings(Checked):
    """One API key and its limits; 0 and empty mean no limit. Each field's text is in KEY_HELP. Raises ConfigError."""

    name: str
    key: str | None = field(default=None, repr=False)
    key_env: str | None = None
    key_sha256: str | None = None
    max_inflight: int = 0
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    burst_s: float = 60.0
    min_slo_tpot_ms: float = 0.0
    min_slo_ttft_ms: float = 0.0
    slo_classes: tuple[str, ...] = ()
    min_priority: int | None = None
    operator: bool = False
    learn: bool = True

    def __post_init__(self) -> None:
        self._check(bool(_NAME.fullmatch(self.name)), "name", "1 to 64 letters, digits, '.', '_' or '-'")
        given = [source for source in SOURCES if getattr(self, source) is not None]
        if len(given) != 1:
            raise ConfigError(f"one of {', '.join(SOURCES)} must be given, got {' and '.join(given) or 'none'}")
        if self.key is not None and (not self.key or self.key != self.key.strip()):
            raise ConfigError("key must be a text that is not empty and neither begins nor ends with a space")
        if self.key_sha256 is not None and not _SHA256.fullmatch(self.key_sha256):
            raise ConfigError("key_sha256 must be 64 digits from 0-9a-f, as `printf %s KEY | sha256sum` prints them")
        self._check(self.max_inflight >= 0, "max_inflight", "an integer >= 0")
        for name in ("requests_per_minute", "tokens_per_minute", "min_slo_tpot_ms", "min_slo_ttft_ms"):
            self._check(0 <= getattr(self, name) < math.inf, name, "a finite number >= 0")
        self._check(0 < self.burst_s < math.inf, "burst_s", "a finite number of seconds above 0")

    def digest(self, environ: Mapping[str, str] = os.environ) -> bytes:
        """SHA-256 of the key. Raises ConfigError when it should be in the environment and is not."""
        if self.key_sha256 is not None:
            return bytes.fromhex(self.key_sha256)
        if self.key is not None:
            return digest_of(self.key)
        assert self.key_env is not None
        secret = environ.get(self.key_env, "").strip()
        if not secret:
            raise ConfigError(
                f"the key {self.name!r} must be in the environment variable {self.key_env}, which is not set or empty"
            )
        return digest_of(secret)


KEY_HELP: dict[str, str] = {
    "name": "what records and observers call it; never sent to a client",
    "key": "the secret itself; then only the server's user should be able to read the file",
    "key_env": "environment variable that holds the secret",
    "key_sha256": "SHA-256 of the secret in hexadecimal, so that the secret is nowhere here",
    "max_inflight": "most choices queued or running at once; 0: as many as the server takes",
    "requests_per_minute": "POST requests, as a token bucket; 0: no limit",
    "tokens_per_minute": "prompt tokens and the tokens that may be generated, as a token bucket; what is not "
    "generated is given back; 0: no limit",
    "burst_s": "seconds of its rates that an unused key saves up",
    "min_slo_tpot_ms": "tightest TPOT target, milliseconds per token; tighter ones are raised to it; 0: the server's",
    "min_slo_ttft_ms": "tightest TTFT target, milliseconds; tighter ones are raised to it; 0: the server's",
    "slo_classes": "classes that it may use; the first is that of requests which name none; empty: all",
    "min_priority": "least priority value (lower is sooner); lower ones are raised to it; none: any",
    "operator": "may see what all clients do: /metrics and /dashboard",
    "learn": "whether drafts may learn from its requests, where the server learns and the request does not say no",
}

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
