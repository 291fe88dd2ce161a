"""Checks the PEM files of a server before its port opens, and those of a client before it calls, so that a wrong file
is one clear error."""

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
    _load_own(context, "tls_cert and tls_key", tls_cert, tls_key)
    if tls_client_ca is not None:
        _load_authority(context, "tls_client_ca", tls_client_ca)


def check_client_certificates(drafter_ca: str, drafter_cert: str | None, drafter_key: str | None) -> None:
    """Load the CA of a draft service once, and the target's certificate and key if it has them. Raises ConfigError as
    `check_certificates` does."""
    for name, path in (("drafter_ca", drafter_ca), ("drafter_cert", drafter_cert), ("drafter_key", drafter_key)):
        if path is not None:
            read_file(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_authority(context, "drafter_ca", drafter_ca)
    if drafter_cert is not None and drafter_key is not None:
        _load_own(context, "drafter_cert and drafter_key", drafter_cert, drafter_key)


def _load_own(context: ssl.SSLContext, names: str, certificate: str, key: str) -> None:
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{names} must be PEM files of a certificate and its own private key, without a passphrase, "
            f"got {certificate} and {key}: {_reason(error)}"
        ) from error


def _load_authority(context: ssl.SSLContext, name: str, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{name} must be a PEM file of certificates, got {path}: {_reason(error)}") from error


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
