"""https: the files are checked before the port opens, so that what is wrong with them is one clear error."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from adaserve_jax.errors import ConfigError
from adaserve_jax.server.settings import ServerSettings

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2, the oldest version that is spoken: forward secret and authenticated. Those of TLS 1.3 all are."""


def tls_options(settings: ServerSettings) -> dict[str, Any]:
    """What uvicorn needs to speak https; nothing without a certificate. Raises ConfigError."""
    if settings.tls_cert is None:
        return {}
    check_tls(settings)
    options: dict[str, Any] = {
        "ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key, "ssl_ciphers": CIPHERS,
    }  # fmt: skip
    if settings.tls_client_ca is not None:
        options |= {"ssl_ca_certs": settings.tls_client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def check_tls(settings: ServerSettings) -> None:
    """Load certificate, key and CA once. Raises ConfigError naming the setting, the file and what is wrong."""
    assert settings.tls_cert is not None and settings.tls_key is not None
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        path = getattr(settings, name)
        if path is not None:
            _read(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            "tls_cert and tls_key must be PEM files of a certificate and its own private key, without a passphrase, "
            f"got {settings.tls_cert} and {settings.tls_key}: {_reason(error)}"
        ) from error
    if settings.tls_client_ca is not None:
        try:
            context.load_verify_locations(settings.tls_client_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"tls_client_ca must be a PEM file of certificates, got {settings.tls_client_ca}: {_reason(error)}"
            ) from error


def _read(name: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} must be a file that can be read, got {path}: {error.strerror}") from error


def _no_passphrase() -> str:
    """Called for a key under a passphrase; without it OpenSSL would ask the terminal."""
    raise ValueError("the key is under a passphrase")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return reason.lower().replace("_", " ") if reason else str(error)
