"""https: the files are checked before the port opens, so that what is wrong with them is one clear error."""

from __future__ import annotations

import ssl
from typing import Any

from adaserve_jax.certificates import check_certificates
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
    check_certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
