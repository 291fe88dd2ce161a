"""Settings of a draft service: the options of `adaserve draft`. Imports no jax."""

from __future__ import annotations

from adaserve_jax.errors import ConfigError
from adaserve_jax.settings import Dtype, Panel, PathText, Settings, check_tls, setting, settings


@settings
class DraftServiceSettings(Settings):
    """Settings of a draft service. Raises ConfigError."""

    listen: str = setting(
        "127.0.0.1:7070", "host:port for targets; without a token or client certificates only on this machine's "
        "loopback",
    )  # fmt: skip
    model: PathText = setting("demo", "checkpoint folder of the draft, or 'demo'")
    max_sessions: int = setting(64, "requests of all targets together that the service drafts for at once", ge=1)
    max_sessions_per_target: int = setting(0, "the same for one target; 0: all", ge=0)
    max_targets: int = setting(64, "targets that are connected at once", ge=1)
    max_streams_per_peer: int = setting(16, "connections at once from one address, whoever they are", ge=1)
    max_messages_per_s: float = setting(
        10_000.0,
        "messages of one connection in a second, after a burst of as many, a frame of n KiB as n at least; more "
        "are refused",
        gt=0,
    )
    max_context: int = setting(
        0, "longest text of a request, its tree included; 0: what the draft supports, at most 2048 on a CPU and 8192 "
        "elsewhere", Panel.SIZE, ge=0,
    )  # fmt: skip
    max_batch: int = setting(32, "requests that are drafted for together", ge=1)
    max_batch_tokens: int = setting(
        0, "tokens that are fed together; 0: 256 on a CPU and 1024 elsewhere", Panel.SIZE, ge=0
    )
    page_size: int = setting(64, "KV slots per page", Panel.SIZE, ge=1)
    num_pages: int = setting(0, "KV pages; 0: for max_sessions of max_context, as far as memory goes", Panel.SIZE, ge=0)
    max_depth: int = setting(6, "deepest beam search", Panel.POLICY, ge=1, le=64)
    max_width: int = setting(4, "widest beam search", Panel.POLICY, ge=1, le=64)
    lease_s: float = setting(60.0, "seconds after which a request that nobody asks about is forgotten", gt=0)
    token_file: PathText | None = setting(
        None, "file with the tokens that targets must have one of, a line each; none: no token"
    )
    tls_cert: PathText | None = setting(None, "PEM file of the certificate chain; needs tls_key", Panel.ADDRESS)
    tls_key: PathText | None = setting(None, "PEM file of the private key, without a passphrase", Panel.ADDRESS)
    tls_client_ca: PathText | None = setting(
        None, "PEM file of the authorities whose certificates targets must have; none: they need none", Panel.ADDRESS
    )
    insecure: bool = setting(
        False, "listen beyond loopback without a token and without client certificates: whoever reaches the port may "
        "use the draft",
    )  # fmt: skip
    http: str = setting(
        "127.0.0.1:7071", "host:port for /metrics and /health, without TLS or a password, on any address; '': off"
    )
    one_by_one: bool = setting(False, "draft for one request at a time, for measurements")
    calibration: PathText | None = setting(
        None,
        "file of the acceptance table; none: the calibration.json beside the draft, else the embedded pair's",
        Panel.POLICY,
    )
    compile_cache: PathText | None = setting(
        None, "folder of the persistent compilation cache; none: $JAX_COMPILATION_CACHE_DIR, else "
        "adaserve_jax/compile in the user's cache folder", Panel.DEVICES,
    )  # fmt: skip
    dtype: Dtype = setting("auto", "weights and KV: f32, bf16, or auto (f32 on CPU, bf16 on GPU and TPU)", Panel.MODELS)

    def __post_init__(self) -> None:
        host_port("listen", self.listen)
        if self.http:
            host_port("http", self.http)
        check_tls(self.tls_cert, self.tls_key, self.tls_client_ca)


def host_port(name: str, address: str) -> tuple[str, int]:
    """Split host:port or [host]:port. name: of the setting, for the error. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_port = port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not colon or not bare or not is_port or (":" in bare and bare == host):
        raise ConfigError(f"{name} must be host:port, like 127.0.0.1:7070 or [::1]:7070, got {address!r}")
    return bare, int(port)
