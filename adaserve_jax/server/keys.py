"""API keys as an operator configures them: the secret, or where it is, and what requests that carry it may do.

Plain data, checked; the secret is in no text that is shown. Knows no request and no HTTP.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from adaserve_jax.checked import Checked
from adaserve_jax.errors import ConfigError

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
