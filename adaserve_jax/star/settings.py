"""How a draft service is run: one frozen record, of which the options of `adaserve draft` are made. Without jax."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adaserve_jax.checked import Checked, check_tls
from adaserve_jax.errors import ConfigError


@dataclass(frozen=True)
class DraftServiceSettings(Checked):
    """Each field's help text is in FIELD_HELP. Raises ConfigError."""

    listen: str = "127.0.0.1:7070"
    model: str = "demo"
    max_sessions: int = 64
    max_sessions_per_target: int = 0
    max_targets: int = 64
    max_streams_per_peer: int = 16
    max_messages_per_s: float = 10_000.0
    max_context: int = 0
    max_batch: int = 32
    max_batch_tokens: int = 0
    page_size: int = 64
    num_pages: int = 0
    max_depth: int = 6
    max_width: int = 4
    lease_s: float = 60.0
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    insecure: bool = False
    http: str = "127.0.0.1:7071"
    one_by_one: bool = False
    calibration: str | None = None
    compile_cache: str | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_targets", "max_streams_per_peer", "max_batch", "page_size", "max_depth"):
            self._check(getattr(self, name) >= 1, name, "an integer >= 1")
        self._check(1 <= self.max_width <= 64, "max_width", "an integer from 1 to 64")
        self._check(self.max_depth <= 64, "max_depth", "an integer from 1 to 64")
        for name in ("max_sessions_per_target", "max_context", "max_batch_tokens", "num_pages"):
            self._check(getattr(self, name) >= 0, name, "an integer >= 0")
        for name in ("lease_s", "max_messages_per_s"):
            self._check(0 < getattr(self, name) < math.inf, name, "a finite number above 0")
        self._check(self.dtype in ("auto", "f32", "bf16"), "dtype", "one of auto, f32, bf16")
        host_port("listen", self.listen)
        if self.http:
            host_port("http", self.http)
        check_tls(self.tls_cert, self.tls_key, self.tls_client_ca)


def host_port(name: str, address: str) -> tuple[str, int]:
    """The parts of host:port or [host]:port. name: of the setting. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or not port.isdecimal() or int(port) > 65535 or (":" in bare and bare == host):
        raise ConfigError(f"{name} must be host:port, like 127.0.0.1:7070 or [::1]:7070, got {address!r}")
    return bare, int(port)


FIELD_HELP = {
    "listen": "host:port for targets; without a token or client certificates only on this machine's loopback",
    "model": "checkpoint folder of the draft, or 'demo'",
    "max_sessions": "requests of all targets together that the service drafts for at once",
    "max_sessions_per_target": "the same for one target; 0: all",
    "max_targets": "targets that are connected at once",
    "max_streams_per_peer": "connections at once from one address, whoever they are",
    "max_messages_per_s": "messages of one connection in a second, after a burst of as many; more are refused",
    "max_context": "longest text of a request, its tree included; 0: what the draft supports, at most 2048 on a CPU "
    "and 8192 elsewhere",
    "max_batch": "requests that are drafted for together",
    "max_batch_tokens": "tokens that are fed together; 0: 256 on a CPU and 1024 elsewhere",
    "page_size": "KV slots per page",
    "num_pages": "KV pages; 0: for max_sessions of max_context, as far as memory goes",
    "max_depth": "deepest beam search",
    "max_width": "widest beam search",
    "lease_s": "seconds after which a request that nobody asks about is forgotten",
    "token_file": "file with the tokens that targets must have one of, a line each; none: no token",
    "tls_cert": "PEM file of the certificate chain; needs tls_key",
    "tls_key": "PEM file of the private key, without a passphrase",
    "tls_client_ca": "PEM file of the authorities whose certificates targets must have; none: they need none",
    "insecure": "listen beyond loopback without a token and without client certificates: whoever reaches the port may "
    "use the draft",
    "http": "host:port for /metrics and /health, without TLS or a password, on any address; '': off",
    "one_by_one": "draft for one request at a time, for measurements",
    "calibration": "file of the acceptance table; none: the calibration.json beside the draft",
    "compile_cache": "folder of the persistent compilation cache; none: $JAX_COMPILATION_CACHE_DIR, else "
    "adaserve_jax/compile in the user's cache folder",
    "dtype": "weights and KV: f32, bf16, or auto (f32 on CPU, bf16 on GPU and TPU)",
}
