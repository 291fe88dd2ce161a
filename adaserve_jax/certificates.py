"""Checks PEM files of a server before its port opens, so that a wrong file is one clear error."""

from __future__ import annotations

import ssl
from pathlib import Path

from adaserve_jax.errors import ConfigError


def check_certificates(tls_cert: str, tls_key: str, tls_client_ca: str | None) -> None:
    """Load certificate, key and CA once. Raises ConfigError naming the setting, the file and what is wrong."""
    for name, path in (("tls_cert", tls_cert), ("tls_key", tls_key), ("tls_client_ca", tls_client_ca)):
        if path is not None:
            read_file(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls_cert, tls_key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            "tls_cert and tls_key must be PEM files of a certificate and its own private key, without a passphrase, "
            f"got {tls_cert} and {tls_key}: {_reason(error)}"
        ) from error
    if tls_client_ca is not None:
        try:
            context.load_verify_locations(tls_client_ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"tls_client_ca must be a PEM file of certificates, got {tls_client_ca}: {_reason(error)}"
            ) from error


def read_file(name: str, path: str) -> bytes:
    """Return the bytes of a file that a setting names. name: of the setting. Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} must be a file that can be read, got {path}: {error.strerror}") from error


def _no_passphrase() -> str:
    """Refuse a key under a passphrase; without this OpenSSL would ask the terminal."""
    raise ValueError("the key is under a passphrase")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return reason.lower().replace("_", " ") if reason else str(error)
