"""Settings of the HTTP server, its named SLO classes and its API keys. Raises ConfigError for wrong values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Literal

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.schema import ALL_CLASSES
from adaserve_jax.settings import Panel, PathText, Settings, check_tls, setting, settings

DEFAULT_CLASS = "default"
USUAL_TIERS = {
    "auto": DEFAULT_CLASS, "default": DEFAULT_CLASS, "scale": DEFAULT_CLASS, "priority": "interactive", "flex": "batch"
}  # fmt: skip
"""OpenAI's service tiers and the classes that they stand for where no class claims them."""
MAX_PRIORITY = 2**31
SOURCES = ("key", "key_env", "key_sha256")
MAX_TIMEOUT_S = 86_400.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.:\[\]-]+")


@settings
class SloClass(Settings):
    """Targets, priority and service tiers of requests that name this class and say nothing themselves."""

    name: str = setting(..., "what `slo_class` of a request says; `default` is the class of requests that name none")
    tpot_ms: float | None = setting(None, "TPOT target, milliseconds per token; none: no such target", gt=0)
    ttft_ms: float | None = setting(None, "TTFT target, milliseconds; none: no such target", gt=0)
    thinking_tpot_ms: float | None = setting(
        None, "TPOT target of what a model thinks, milliseconds per token; tpot_ms is then that of the answer; none: "
        "tpot_ms is that of both", gt=0,
    )  # fmt: skip
    e2e_ms: float | None = setting(None, "deadline of the last token, milliseconds after arrival; none: none", gt=0)
    max_queue_ms: float | None = setting(
        None,
        "longest wait to begin, milliseconds, after which a request is answered with 504; none: the server's",
        gt=0,
    )
    priority: int = setting(
        0, "of requests that bring none; lower is sooner",
        expected="an integer of less than 32 bits", gt=-MAX_PRIORITY, lt=MAX_PRIORITY,
    )  # fmt: skip
    service_tiers: tuple[str, ...] = setting(
        (), "values of `service_tier` that stand for this class; unless some class has them, auto and default stand "
        "for default, priority for interactive, flex for batch",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"name must be letters, digits and _, not beginning with a digit, got {self.name!r}")
        if self.name == ALL_CLASSES:
            raise ConfigError(f"name must not be {ALL_CLASSES!r}: reports call all classes together so")

    @classmethod
    def from_text(cls, text: str) -> SloClass:
        """Parse the short form name=tpot_ms[:ttft_ms] of `--slo-classes`. Raises ConfigError."""
        name, found, targets = text.partition("=")
        tpot, _, ttft = targets.partition(":")
        try:
            if not found:
                raise ValueError(text)
            tpot_ms, ttft_ms = (float(target) if target else None for target in (tpot, ttft))
        except ValueError as error:
            raise ConfigError(
                "slo_classes must be like name=tpot_ms or name=tpot_ms:ttft_ms, with nothing where there is no "
                f"target, got {text!r} (--slos of `adaserve bench` has another form)"
            ) from error
        try:
            return cls(name, tpot_ms, ttft_ms)
        except ConfigError as error:
            raise ConfigError(f"slo_classes: {text!r}: {error}") from error


def digest_of(secret: str | bytes) -> bytes:
    """Return the SHA-256 of a secret, which is all that is kept of it and compared."""
    return sha256(secret if isinstance(secret, bytes) else secret.encode()).digest()


@settings
class KeySettings(Settings):
    """One API key, as the secret or where it is, and its limits; 0 and empty mean no limit."""

    name: str = setting(..., "what records and observers call it; never sent to a client")
    key: str | None = setting(
        None, "the secret itself; then only the server's user should be able to read the file", secret=True
    )
    key_env: str | None = setting(None, "environment variable that holds the secret")
    key_sha256: str | None = setting(
        None, "SHA-256 of the secret in hexadecimal, so that the secret is nowhere here",
        secret=True, expected="64 digits from 0-9a-f, as `printf %s KEY | sha256sum` prints them",
    )  # fmt: skip
    max_inflight: int = setting(0, "most choices queued or running at once; 0: as many as the server takes", ge=0)
    requests_per_minute: float = setting(0.0, "POST requests, as a token bucket; 0: no limit", ge=0)
    tokens_per_minute: float = setting(
        0.0, "prompt tokens and the tokens that may be generated, as a token bucket; what is not generated is given "
        "back; 0: no limit", ge=0,
    )  # fmt: skip
    burst_s: float = setting(60.0, "seconds of its rates that an unused key saves up", gt=0, unit="seconds")
    min_slo_tpot_ms: float = setting(
        0.0, "tightest TPOT target, milliseconds per token; tighter ones are raised to it; 0: the server's", ge=0
    )
    min_slo_ttft_ms: float = setting(
        0.0, "tightest TTFT target, milliseconds; tighter ones are raised to it; 0: the server's", ge=0
    )
    slo_classes: tuple[str, ...] = setting(
        (), "classes that it may use; requests that name no class get the first; empty: all"
    )
    min_priority: int | None = setting(
        None, "least priority value (lower is sooner); lower ones are raised to it; none: any"
    )
    operator: bool = setting(False, "may see what all clients do (/metrics, /dashboard), and load and unload adapters")
    learn: bool = setting(
        True, "whether drafts may learn from its requests, and texts are kept to draft from, unless the request says no"
    )

    def __post_init__(self) -> None:
        self._require(bool(_NAME.fullmatch(self.name)), "name", "1 to 64 letters, digits, '.', '_' or '-'")
        given = [source for source in SOURCES if getattr(self, source) is not None]
        if len(given) != 1:
            raise ConfigError(f"one of {', '.join(SOURCES)} must be given, got {' and '.join(given) or 'none'}")
        if self.key is not None and (not self.key or self.key != self.key.strip()):
            raise ConfigError("key must be a text that is not empty and neither begins nor ends with a space")
        if self.key_sha256 is not None and not _SHA256.fullmatch(self.key_sha256):
            raise ConfigError("key_sha256 must be 64 digits from 0-9a-f, as `printf %s KEY | sha256sum` prints them")

    def digest(self, environ: Mapping[str, str] = os.environ) -> bytes:
        """Return the SHA-256 of the key. Raises ConfigError when it should be in the environment and is not."""
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


@settings
class HttpSettings(Settings):
    """Settings that every HTTP front has: a server's and a router's."""

    host: str = setting(
        "127.0.0.1", "address to listen on; 0.0.0.0 opens the server to the network, then set an API key", Panel.ADDRESS
    )
    port: int = setting(8000, "TCP port; 0: any free one, which is printed", Panel.ADDRESS, ge=0, le=65535)
    api_key: str | None = setting(
        None, "clients must send it as 'Authorization: Bearer KEY' on every route but /, /health and /ping; several "
        "with commas; none: open, unless a configuration file has keys", Panel.ADDRESS, secret=True,
    )  # fmt: skip
    max_body_bytes: int = setting(
        4 * 2**20, "largest request body, bytes; a larger one is refused with 413", Panel.LIMITS, ge=1
    )
    shutdown_timeout: float = setting(
        30.0, "seconds that requests in flight get to finish after SIGTERM", Panel.FAILURES, ge=0, unit="seconds"
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = setting(
        "warning", "what the HTTP server logs: critical, error, warning, info, debug", Panel.MONITORING
    )
    tls_cert: PathText | None = setting(
        None, "file of the certificate chain, PEM; with tls_key the server speaks https only", Panel.ADDRESS
    )
    tls_key: PathText | None = setting(
        None, "file of the certificate's private key, PEM, without a passphrase", Panel.ADDRESS
    )
    tls_client_ca: PathText | None = setting(
        None, "file of certificates, PEM; clients must have one that these signed; none: any client", Panel.ADDRESS
    )
    keep_alive_timeout: float = setting(
        5.0, "seconds that an idle connection is kept for its next request",
        Panel.LIMITS, gt=0, le=MAX_TIMEOUT_S, unit="seconds",
    )  # fmt: skip
    receive_timeout: float = setting(
        60.0,
        "seconds that a client gets to send a request's headers, again for its body, and to go on reading its answer",
        Panel.LIMITS, gt=0, le=MAX_TIMEOUT_S, unit="seconds",
    )  # fmt: skip
    max_header_bytes: int = setting(
        16 * 1024, "most bytes of a request's first line and headers; more are refused with 431 or 400",
        Panel.LIMITS, ge=1024, le=2**20,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.api_key is not None and not _parts(self.api_key):  # the value may be a secret
            raise ConfigError("api_key must be not empty, got an empty one")
        check_tls(self.tls_cert, self.tls_key, self.tls_client_ca)


@settings
class ServerSettings(HttpSettings):
    """Settings of the HTTP server."""

    served_model_name: str | None = setting(
        None, "the model's name in the API; none: the target folder's name", Panel.ADDRESS
    )
    lora_folder: PathText | None = setting(
        None, "folder of adapters: those in it may be loaded while the server runs, by POST /v1/load_lora_adapter; "
        "none: no client can load or unload one", Panel.MODELS,
    )  # fmt: skip
    max_inflight: int = setting(
        1024, "most choices queued or running at once; more are refused with 429", Panel.LIMITS, ge=1
    )
    max_choices: int = setting(128, "most choices of one HTTP request, prompts times n", Panel.LIMITS, ge=1)
    min_slo_tpot_ms: float = setting(
        0.1, "tightest TPOT target, milliseconds per token; tighter ones are raised to it", Panel.TARGETS, gt=0
    )
    max_slo_tpot_ms: float = setting(
        60_000.0, "loosest TPOT target, milliseconds per token; looser ones are lowered to it", Panel.TARGETS, gt=0
    )
    min_slo_ttft_ms: float = setting(
        1.0, "tightest TTFT target, milliseconds; tighter ones are raised to it", Panel.TARGETS, gt=0
    )
    max_slo_ttft_ms: float = setting(
        600_000.0, "loosest TTFT target, milliseconds; looser ones are lowered to it", Panel.TARGETS, gt=0
    )
    slo_classes: tuple[str, ...] = setting(
        ("interactive=50", "chat=100", "batch="), "named targets, name=tpot_ms[:ttft_ms] (chat=50:500 is "
        "chat:tpot=50,ttft=500 in --slos of adaserve bench); a request picks one by slo_class or "
        "service_tier", Panel.TARGETS,
    )  # fmt: skip
    use_generation_config: bool = setting(
        True, "sampling that a request leaves out is that of the target's generation_config.json", Panel.LIMITS
    )
    tool_call_parser: Literal[
        "auto", "hermes", "llama3_json", "mistral", "glm45", "qwen3_coder", "minimax_m2", "mistral_v11"
    ] = setting("auto", "format in which the model writes tool calls; auto: that of its chat template", Panel.LIMITS)
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3", "mistral", "seed_oss"] = setting(
        "auto", "marks between which the model thinks; auto: those that its chat template writes; none: thinking is "
        "part of the text", Panel.LIMITS,
    )  # fmt: skip
    records: PathText | None = setting(
        None, "SQLite file that gets a record of every choice that ends, without its text; none: no records",
        Panel.MONITORING,
    )  # fmt: skip
    records_days: float = setting(30.0, "days after which a record is removed", Panel.MONITORING, gt=0, unit="days")
    records_max_mib: int = setting(1024, "MiB of records after which the oldest are removed", Panel.MONITORING, ge=1)
    record_text: bool = setting(
        False, "keep prompts and outputs in the records too; whoever can read the file can read them", Panel.MONITORING
    )
    otlp_endpoint: str | None = setting(
        None, "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span per choice; none: no traces",
        Panel.MONITORING,
    )  # fmt: skip
    dashboard: bool = setting(False, "serve a live page at /dashboard, and watch the server for it", Panel.MONITORING)
    cors_origins: tuple[str, ...] = setting(
        (), "origins whose pages may call the server from a browser, with commas; *: any; empty: none", Panel.ADDRESS
    )
    trust_gateway: bool = setting(
        False, "take targets that the body leaves out from a gateway's headers, x-llm-d-slo-tpot-ms and others",
        Panel.ADDRESS,
    )  # fmt: skip
    trust_request_chat_template: bool = setting(
        False, "take a chat template from a request's chat_template; it is rendered in a process with limits",
        Panel.LIMITS,
    )  # fmt: skip
    classes: tuple[SloClass, ...] = setting(
        (), "named targets with priorities and service tiers: tables [[classes]] of a configuration file"
    )
    keys: tuple[KeySettings, ...] = setting((), "API keys with limits: tables [[keys]] of a configuration file")
    watchdog: float = setting(
        60.0, "seconds without a step while requests wait after which /health is 503; 0: never",
        Panel.FAILURES, ge=0, unit="seconds",
    )  # fmt: skip
    max_restarts: int = setting(
        3,
        "most times in a row that an engine process that ended without a finished request is started again; 0: none is",
        Panel.FAILURES,
        ge=0,
    )
    restart_window: float = setting(
        600.0,
        "seconds of service after which earlier ends of the engine are forgotten",
        Panel.FAILURES,
        ge=0,
        unit="seconds",
    )
    restart_backoff: float = setting(
        1.0, "seconds before the second restart within restart_window; each later one waits twice as long, at most a "
        "minute", Panel.FAILURES, ge=0, unit="seconds",
    )  # fmt: skip
    max_queue_wait: float = setting(
        5.0, "longest wait for a turn, seconds: a request that has waited so long, or is predicted to wait much longer "
        "or longer than its TTFT target allows, is answered with 429; 0: never", Panel.LIMITS, ge=0, unit="seconds",
    )  # fmt: skip
    exit_when_dead: bool = setting(
        False, "end the server, with status 70, when its engine ended and is not started again", Panel.FAILURES
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in ("tpot", "ttft"):
            low, high = f"min_slo_{kind}_ms", f"max_slo_{kind}_ms"
            self._require(getattr(self, low) <= getattr(self, high), high, f"a finite number >= {low}")
        self._require(self.records != "", "records", "a path, or none")
        self._require(not self.record_text or self.records is not None, "record_text", "off where records is none")
        is_url = self.otlp_endpoint is None or self.otlp_endpoint.startswith(("http://", "https://"))
        self._require(is_url, "otlp_endpoint", "a URL that begins with http:// or https://")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins must be origins like https://example.org or http://localhost:3000, without a path, "
                    f"or the one *, got {origin!r}"
                )
        self._check_tables()

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
        """Return every class by name; those of `slo_classes` replace those of the file, "default" is always there.

        Raises ConfigError.
        """
        names = [one.name for one in self.classes]
        if len(set(names)) < len(names):
            raise ConfigError(f"classes must have different names, got {', '.join(names)}")
        found = [SloClass(DEFAULT_CLASS), *self.classes, *map(SloClass.from_text, self.slo_classes)]
        return {one.name: one for one in found}

    def tiers(self) -> dict[str, str]:
        """Return the class that each service tier stands for. Raises ConfigError when two classes claim one tier."""
        tiers: dict[str, str] = {}
        for one in self.classes:
            for tier in one.service_tiers:
                if tiers.setdefault(tier, one.name) != one.name:
                    raise ConfigError(
                        f"service_tiers: {tier!r} must belong to one class, got {tiers[tier]} and {one.name}"
                    )
        return USUAL_TIERS | tiers

    def all_keys(self) -> tuple[KeySettings, ...]:
        """Return the keys of `api_key`, which are operators' and have no limits, then those of the file.

        Without any the server asks for no key.
        """
        plain = _parts(self.api_key or "")
        names = ["api-key"] if len(plain) == 1 else [f"api-key-{number}" for number in range(1, len(plain) + 1)]
        return (*(KeySettings(name, key, operator=True) for name, key in zip(names, plain, strict=True)), *self.keys)


def _parts(keys: str) -> list[str]:
    return [part for part in (part.strip() for part in keys.split(",")) if part]
